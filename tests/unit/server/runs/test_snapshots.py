"""Snapshots of runs on a real server: what counts, what is pruned, and what a crash at any point leaves."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec
import pytest
from support.durable import (
    OFTEN,
    Training,
    begun,
    crash,
    model_row,
    payloads,
    snapshot_directories,
    snapshot_settled,
)
from support.in_process import BreakableStore, Client, Recorder, create_model, optim_step, run, serving, settled, until

from tinsmith.engine.protocol import (
    AnyJob,
    Created,
    CreateModel,
    Done,
    EngineDownError,
    JobFailedError,
    OptimStep,
    SaveState,
    Status,
)
from tinsmith.server.ops.metrics import Metrics
from tinsmith.server.runs import replay

TOKENS = (1, 2, 3, 4, 5, 6)


@pytest.fixture(autouse=True)
def _no_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replay, "RETRY_S", (0.0, 0.0, 0.001))


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> tuple[list[Any], str]:
    """Results and final digest of the run that the tests disturb."""
    found: list[Any] = []

    async def scenario() -> None:
        async with serving(tmp_path_factory.mktemp("undisturbed")) as server:
            ann, _, model = await begun(server)
            training = Training(ann, model)
            for token in TOKENS:
                await training.step(token)
            assert snapshot_directories(server) == []
            found.extend([training.results, await training.end()])

    run(scenario())
    return found[0], found[1]


def replays(backend: Recorder) -> list[str]:
    """Kinds of what was replayed since the last creation."""
    kinds: list[str] = []
    for job in backend.submitted:
        if isinstance(job, CreateModel):
            kinds = []
        elif job.job_id.startswith("replay-"):
            kinds.append(str(job.__struct_config__.tag))
    return kinds


def test_a_run_goes_on_from_its_snapshot(tmp_path: Path, undisturbed: tuple[list[Any], str]) -> None:
    async def scenario() -> None:
        async with serving(tmp_path, **OFTEN) as server:
            ann, _, model = await begun(server)
            training = Training(ann, model)
            for token in TOKENS:
                await training.step(token)
                await snapshot_settled(server, model)
                server.backend.lose()
                row = await model_row(server, model)
                assert row.snapshot_seq == training.seq
                assert [str(path) for path in snapshot_directories(server)] == [row.snapshot_directory]
            assert (training.results, await training.end()) == undisturbed
            assert replays(server.backend) == []  # the last loss was right behind a snapshot
            assert (await model_row(server, model)).fault is None
            text = (await ann.get("/metrics")).body.decode()
            assert 'tinsmith_snapshots_total{end="kept"} 6.0' in text

    run(scenario())


def test_only_what_is_behind_the_snapshot_is_replayed(tmp_path: Path, undisturbed: tuple[list[Any], str]) -> None:
    async def scenario() -> None:
        async with serving(tmp_path, **OFTEN) as server:
            ann, _, model = await begun(server)
            training = Training(ann, model)
            for token in TOKENS[:3]:
                await training.step(token)
                await snapshot_settled(server, model)
            server.services.runs.known(model)._snapshots.cost.not_before_s = 1e9  # type: ignore[union-attr]
            for token in TOKENS[3:]:
                await training.step(token)
            server.backend.lose()
            assert (training.results, await training.end()) == undisturbed
            assert replays(server.backend) == ["forward_backward", "optim_step"] * 3
            assert "tinsmith_replayed_operations_total 6.0" in (await ann.get("/metrics")).body.decode()

    run(scenario())


def test_payloads_behind_a_snapshot_are_dropped_and_everything_else_stays(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with serving(tmp_path, **OFTEN) as server:
            ann, _, model = await begun(server)
            training = Training(ann, model)
            await training.step(1)
            await snapshot_settled(server, model)
            promises = await training.ask(2)
            first = (await ann.result(promises[0])).json
            await ann.result(promises[1])
            await snapshot_settled(server, model)
            waits = await ann.post("optim_step", optim_step(model, 9))
            sizes = await payloads(server, model)
            assert (await model_row(server, model)).snapshot_seq == 4
            assert {seq: size > 0 for seq, size in sizes.items()} == {1: False, 2: False, 3: False, 4: False, 9: True}
            assert (await ann.result(promises[0])).json == first
            assert (await ann.post("optim_step", optim_step(model, 4))).json == promises[1].json
            other = await ann.post("optim_step", optim_step(model, 4, learning_rate=7.0))
            assert other.status == 400
            assert waits.status == 200

    run(scenario())


def test_a_restarted_server_goes_on_from_the_snapshot(tmp_path: Path, undisturbed: tuple[list[Any], str]) -> None:
    async def scenario() -> None:
        store = BreakableStore()
        await store.open()
        results: list[Any] = []
        seq, ann, model = 0, None, ""
        for token in TOKENS:
            async with serving(tmp_path, store=store, **OFTEN) as server:
                if ann is None:
                    ann, _, model = await begun(server)
                ann = Client(server, ann.key)
                training = Training(ann, model, seq)
                await training.step(token)
                await snapshot_settled(server, model)
                results += training.results
                seq = training.seq
                assert replays(server.backend) == []
        async with serving(tmp_path, store=store, **OFTEN) as server:
            assert ann is not None
            assert (results, await Training(Client(server, ann.key), model, seq).end()) == undisturbed
        await store.close()

    run(scenario())


@pytest.mark.parametrize("gate", ["insert_result", "set_model_snapshot", "delete_payload"])
def test_a_crash_at_any_point_of_a_snapshot_changes_nothing(
    tmp_path: Path, gate: str, undisturbed: tuple[list[Any], str]
) -> None:
    async def scenario() -> None:
        store = BreakableStore()
        await store.open()
        async with serving(tmp_path, store=store, **OFTEN) as server:
            ann, _, model = await begun(server)
            training = Training(ann, model)
            for token in TOKENS[:3]:
                await training.step(token)
                await snapshot_settled(server, model)
            store.gates[gate] = asyncio.Event()
            promises = await training.ask(TOKENS[3])
            await until(lambda: gate in store.reached and len(snapshot_directories(server)) == 2)  # old and new
            crash(server)
        store.gates.clear()
        async with serving(tmp_path, store=store, **OFTEN) as server:
            assert len(snapshot_directories(server)) == 1
            row = await model_row(server, model)
            assert row.snapshot_seq == (8 if gate == "delete_payload" else 6)
            after = Training(Client(server, ann.key), model, training.seq)
            after.results = [*training.results, *[(await after.client.result(promise)).json for promise in promises]]
            for token in TOKENS[4:]:
                await after.step(token)
            assert (after.results, await after.end()) == undisturbed
        await store.close()

    run(scenario())


def test_a_loss_while_a_snapshot_is_made_to_count_waits_for_it(
    tmp_path: Path, undisturbed: tuple[list[Any], str]
) -> None:
    async def scenario() -> None:
        store = BreakableStore()
        await store.open()
        async with serving(tmp_path, store=store, **OFTEN) as server:
            ann, _, model = await begun(server)
            training = Training(ann, model)
            for token in TOKENS[:-1]:
                await training.step(token)
                await snapshot_settled(server, model)
            store.gates["set_model_snapshot"] = asyncio.Event()
            await training.step(TOKENS[-1])
            await until(lambda: store.reached)
            server.backend.lose()
            ending = asyncio.create_task(training.end())
            await settled()
            store.gates.pop("set_model_snapshot").set()
            assert (training.results, await ending) == undisturbed
            assert replays(server.backend) == []
        await store.close()

    run(scenario())


class Stubborn(Recorder):
    """Fails some jobs by their kind, as long as it is told to."""

    fails: tuple[type, ...] = ()
    error: JobFailedError = JobFailedError("the disk is full")

    def submit(self, job: AnyJob, on_tokens: Any = None) -> Any:
        if isinstance(job, self.fails):
            self.submitted.append(job)
            future: asyncio.Future[Done] = asyncio.get_running_loop().create_future()
            future.set_exception(self.error)
            return future
        return super().submit(job, on_tokens)


def test_a_failed_step_keeps_its_gradients_also_behind_a_snapshot(tmp_path: Path) -> None:
    async def scenario() -> None:
        norms = []
        for number, is_lost in enumerate((False, True)):
            backend = Stubborn()
            async with serving(tmp_path / str(number), backend=backend, **OFTEN) as server:
                ann, _, model = await begun(server)
                training = Training(ann, model)
                await training.step(1)
                await snapshot_settled(server, model)
                backend.fails = (OptimStep,)
                passed, stepped = await training.ask(2)
                await ann.result(passed)
                assert (await ann.poll(stepped)).json["error"] == "the disk is full"
                await snapshot_settled(server, model)
                backend.fails = ()
                assert (await model_row(server, model)).snapshot_seq == 2
                assert len(snapshot_directories(server)) == 1
                if is_lost:
                    backend.lose()
                step = await ann.result(await ann.post("optim_step", optim_step(model, 5)))
                norms.append(step.json["metrics"]["optim/grad_norm"])
        assert norms[0] == norms[1] > 0

    run(scenario())


def test_a_disk_that_is_full_costs_snapshots_and_nothing_else(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, undisturbed: tuple[list[Any], str]
) -> None:
    async def scenario() -> None:
        backend = Stubborn()
        async with serving(tmp_path, backend=backend, **OFTEN) as server:
            ann, _, model = await begun(server)
            training = Training(ann, model)
            backend.fails = (SaveState,)
            for token in TOKENS[:4]:
                await training.step(token)
                await snapshot_settled(server, model)
            assert "could not take a snapshot of" in caplog.text
            tries = [job for job in backend.submitted if isinstance(job, SaveState)]
            assert 0 < len(tries) < 4  # each failure doubles what must be at stake for the next
            assert (await model_row(server, model)).snapshot_directory is None
            assert all((await payloads(server, model)).values())
            backend.fails = ()
            for token in TOKENS[4:]:
                await training.step(token)
                await snapshot_settled(server, model)
            backend.lose()
            assert (training.results, await training.end()) == undisturbed

    run(scenario())


def test_no_room_is_taken_from_results(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with serving(tmp_path, **OFTEN) as server:
            ann, _, model = await begun(server)
            training = Training(ann, model)
            promises = await training.ask(1)
            server.services.files._min_free_bytes = 2**62
            server.services.files._has_room_until = 0.0
            for promise in promises:
                await ann.result(promise)
            server.services.files._has_room_until = float("inf")
            await snapshot_settled(server, model)

    run(scenario())


def test_the_end_of_a_session_takes_its_snapshots_along(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with serving(tmp_path, **OFTEN) as server:
            ann, session, model = await begun(server)
            training = Training(ann, model)
            await training.step(1)
            await snapshot_settled(server, model)
            assert len(snapshot_directories(server)) == 1
            await ann.post(f"sessions/{session}/finish", {"reason": {"type": "success"}, "detail": None})
            server.clock.advance(100_000)
            await server.sweep()
            assert snapshot_directories(server) == []

    run(scenario())


def test_a_session_that_comes_back_begins_at_its_newest_snapshot(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with serving(tmp_path, **OFTEN) as server:
            ann, _, model = await begun(server)
            training = Training(ann, model)
            for token in TOKENS[:2]:
                await training.step(token)
                await snapshot_settled(server, model)
            server.clock.advance(1000)
            await server.sweep()
            assert server.services.runs.all() == []
            await training.step(3)
            assert [result["metrics"]["optim/step"] for result in training.results[1::2]] == [1.0, 2.0, 3.0]
            assert replays(server.backend) == []

    run(scenario())


def test_waiting_clients_see_how_far_a_restore_is(tmp_path: Path) -> None:
    async def scenario() -> None:
        release = asyncio.Event()
        release.set()

        async def hold(job: AnyJob) -> None:
            if job.job_id.startswith("replay-") and isinstance(job, OptimStep):
                await release.wait()

        backend = Recorder(hold=hold)
        async with serving(tmp_path, backend=backend, poll_s=0.001) as server:
            ann, _, model = await begun(server)
            training = Training(ann, model)
            for token in TOKENS[:2]:
                await training.step(token)
            release.clear()
            backend.lose()
            step = await ann.post("optim_step", optim_step(model, 5))
            reason = "restoring run after restart: 1 of 4 operations replayed"
            await until(lambda: server.services.runs.known(model).reason == reason)  # type: ignore[union-attr]
            assert (await ann.poll(step)).json["queue_state_reason"] == reason
            status = (await ann.get("/tinsmith/v1/status")).json
            assert status["runs"][0]["waits_for"] == reason
            release.set()
            await ann.result(step)

    run(scenario())


class Elsewhere(Recorder):
    """Says what it computes on."""

    machine: Mapping[str, str] = {"cpu": "first", "threads": "2"}

    def submit(self, job: AnyJob, on_tokens: Any = None) -> Any:
        future = super().submit(job, on_tokens)
        if not isinstance(job, CreateModel):
            return future
        told: asyncio.Future[Done] = asyncio.get_running_loop().create_future()
        body = msgspec.json.encode(Created(fingerprint=dict(self.machine)))
        future.add_done_callback(lambda made: told.set_result(msgspec.structs.replace(made.result(), body=body)))
        return told


def test_another_machine_is_said_and_the_run_goes_on(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, undisturbed: tuple[list[Any], str]
) -> None:
    async def scenario() -> None:
        backend = Elsewhere()
        async with serving(tmp_path, backend=backend) as server:
            ann, _, model = await begun(server)
            training = Training(ann, model)
            for token in TOKENS[:3]:
                await training.step(token)
            backend.lose()
            for token in TOKENS[3:]:
                await training.step(token)
            shown = (await ann.get(f"training_runs/{model}")).json["tinsmith"]
            told = {"fault": None, "notice": None, "snapshot_seq": None, "machine": backend.machine}
            assert shown == {"status": "active", **told}
            backend.machine = {"cpu": "second", "threads": "2"}
            backend.lose()
            assert (training.results, await training.end()) == undisturbed
            notice = (await ann.get(f"training_runs/{model}")).json["tinsmith"]["notice"]
            assert notice.endswith("results may differ in the last bits: cpu first -> second")
            assert notice in caplog.text
            assert (await ann.get(f"training_runs/{model}")).json["corrupted"] is False
            await server.sweep()
            assert "tinsmith_moved_runs 1.0" in (await ann.get("/metrics")).body.decode()

    run(scenario())


def test_an_engine_that_cannot_start_delays_a_run_and_says_why(
    tmp_path: Path, undisturbed: tuple[list[Any], str]
) -> None:
    async def scenario() -> None:
        backend = Stubborn()
        backend.error = EngineDownError("the engine of x cannot start: no memory")
        async with serving(tmp_path, backend=backend, poll_s=0.001) as server:
            ann, session, model = await begun(server)
            training = Training(ann, model)
            for token in TOKENS[:3]:
                await training.step(token)
            backend.fails = (CreateModel,)
            backend.lose()
            promises = await training.ask(TOKENS[3])
            await until(lambda: len([job for job in backend.submitted if isinstance(job, CreateModel)]) > 12)
            waiting = (await ann.poll(promises[0])).json["queue_state_reason"]
            assert "the engine of x cannot start: no memory" in waiting
            new = await ann.post("create_model", create_model(session, 1))
            await until(lambda: server.services.broker.recent(new.json["request_id"]))
            assert "cannot start: no memory" in (await ann.poll(new)).json["error"]  # a new one is not held
            backend.fails = ()
            training.results += [(await ann.result(promise)).json for promise in promises]
            for token in TOKENS[4:]:
                await training.step(token)
            assert (training.results, await training.end()) == undisturbed

    run(scenario())


def test_work_that_was_at_an_engine_which_does_not_come_back_waits(tmp_path: Path) -> None:
    async def scenario() -> None:
        backend = Stubborn()
        backend.error = EngineDownError("the engine of x cannot start: no memory")
        async with serving(tmp_path, backend=backend) as server:
            ann, _, model = await begun(server)
            training = Training(ann, model)
            backend.fails = (OptimStep,)  # the engine goes and does not come back
            passed, stepped = await training.ask(1)
            await ann.result(passed)
            backend.fails = ()
            backend.lose()
            assert (await ann.result(stepped)).json["metrics"]["optim/grad_norm"] > 0

    run(scenario())


def test_a_run_that_cannot_be_restored_says_so_and_what_is_left_of_it(tmp_path: Path) -> None:
    async def scenario() -> None:
        backend = Recorder()
        async with serving(tmp_path, backend=backend, **OFTEN) as server:
            ann, session, model = await begun(server)
            training = Training(ann, model)
            await training.step(1)
            await snapshot_settled(server, model)
            await training.end("safe")
            [directory] = snapshot_directories(server)
            (directory / "adapter_model.safetensors").write_bytes(b"damaged")
            backend.lose()
            failed = (await ann.poll(await ann.post("optim_step", optim_step(model, training.seq + 1)))).json
            assert f"{model} could not be restored" in failed["error"]
            assert f"intact checkpoint of that run is tinker://{model}/weights/safe" in failed["error"]
            other = await ann.model(session, 1)  # everyone else's go on
            await Training(ann, other).step(1)

    run(scenario())


def test_a_backend_that_comes_up_is_waited_for(tmp_path: Path) -> None:
    async def scenario() -> None:
        backend = Recorder()
        async with serving(tmp_path, backend=backend) as server:
            ann, _, model = await begun(server)
            backend.lose()
            backend._status = Status(state="restarting", reason="was killed")
            step = await ann.post("optim_step", optim_step(model, 1))
            await settled()
            assert (await ann.get("/readyz")).status == 503
            backend._status = Status(state="ready")
            await ann.result(step)

    run(scenario())


def test_the_time_that_snapshots_take_is_counted() -> None:
    metrics = Metrics()
    metrics.snapshot("kept", 0.25)
    metrics.snapshot("failed", 0.0)
    metrics.snapshot("kept", 0.5)
    text = metrics.text().decode()
    assert "tinsmith_snapshot_seconds_total 0.75\n" in text
    assert 'tinsmith_snapshots_total{end="failed"} 1.0' in text

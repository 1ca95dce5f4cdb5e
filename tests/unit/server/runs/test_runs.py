"""Training runs: their state is rebuilt when the backend has lost it, or the server was restarted."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import msgspec
import pytest
from support.in_process import (
    BreakableStore,
    Client,
    Gate,
    Recorder,
    Server,
    begun,
    create_model,
    datum,
    forward_backward,
    optim_step,
    run,
    serving,
    settled,
    until,
)

from tinsmith.engine.protocol import (
    AnyJob,
    Done,
    ForwardBackward,
    JobCancelledError,
    JobFailedError,
    OptimStep,
    SaveState,
)
from tinsmith.server.runs import replay
from tinsmith.store.rows import CheckpointRow, JobRow, ModelRow
from tinsmith.wire.codecs.proto_outputs import encode_output
from tinsmith.wire.messages.training import ForwardBackwardOutput
from tinsmith.wire.rules.optim_metrics import OPTIM_METRICS, body_with_former_names


@pytest.fixture(autouse=True)
def _no_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replay, "RETRY_S", (0.0, 0.0, 0.001))


async def digest_of(server: Server, path: str) -> str:
    [row] = await server.rows(CheckpointRow, "checkpoint", path=path)
    return str(row.digest)


async def trained(server: Server, tmp_path: Path, *, lose_after: tuple[int, ...] = ()) -> str:
    """A short run with losses of the backend in between; the digest of what it ends with."""
    ann, _, model = await begun(server)
    seq = 0
    for step in range(4):
        for route, message in (
            ("forward_backward", forward_backward(model, seq + 1, datum(5, 9, 2 + step))),
            ("optim_step", optim_step(model, seq + 2)),
        ):
            await ann.result(await ann.post(route, message))
        seq += 2
        if step in lose_after:
            server.backend.lose()
    return await digest_of(server, await ann.save(model, seq + 1, "end"))


def test_a_lost_state_is_rebuilt_bit_for_bit(tmp_path: Path) -> None:
    async def scenario() -> None:
        digests = []
        for number, losses in enumerate([(), (1,), (0, 1, 2, 3)]):
            async with serving(tmp_path / str(number)) as server:
                digests.append(await trained(server, tmp_path, lose_after=losses))
                [row] = await server.rows(ModelRow, "models_live")
                assert row.fault is None
        assert len(set(digests)) == 1

    run(scenario())


def test_what_was_under_way_when_the_state_was_lost_is_done_once_more(tmp_path: Path) -> None:
    async def scenario() -> None:
        gate = Gate("optim_step")
        backend = Recorder(hold=gate)
        async with serving(tmp_path, backend=backend) as server:
            ann, _, model = await begun(server)
            first = await ann.post("forward_backward", forward_backward(model, 1))
            await ann.result(first)
            second = await ann.post("optim_step", optim_step(model, 2))
            third = await ann.post("forward_backward", forward_backward(model, 3))
            await settled()
            backend.lose()
            gate.opened.set()
            assert (await ann.result(second)).json["metrics"]["optim/step"] == 1.0
            await ann.result(third)
            ids = [job.job_id for job in backend.submitted if not job.job_id.startswith("replay-")]
            assert ids.count(first.json["request_id"]) == 1  # it was finished: replayed under another id
            assert f"replay-{first.json['request_id']}" in [job.job_id for job in backend.submitted]

    run(scenario())


def test_what_was_under_way_is_handed_over_in_its_order(tmp_path: Path) -> None:
    async def scenario() -> None:
        gate = Gate("forward_backward", "optim_step")
        backend = Recorder(hold=gate)
        async with serving(tmp_path, backend=backend) as server:
            ann, _, model = await begun(server)
            ids = []
            for seq in range(1, 7, 2):
                ids.append(await ann.post("forward_backward", forward_backward(model, seq, datum(5, 9, 2 + seq))))
                ids.append(await ann.post("optim_step", optim_step(model, seq + 1)))
            await settled()
            backend.submitted.clear()
            backend.lose()
            gate.opened.set()
            steps = [(await ann.result(promise)).json for promise in ids]
            assert [result["metrics"]["optim/step"] for result in steps[1::2]] == [1.0, 2.0, 3.0]
            again = [job.job_id for job in backend.submitted if not job.job_id.startswith("replay-")]
            assert again == [promise.json["request_id"] for promise in ids]

    run(scenario())


def test_a_load_is_replayed(tmp_path: Path) -> None:
    async def scenario(loses: bool) -> str:
        async with serving(tmp_path / str(loses)) as server:
            ann, _, model = await begun(server)
            await _step(ann, model, 1)
            path = await ann.save(model, 3, "first")
            await _step(ann, model, 4)
            await ann.result(await ann.post("load_weights", {"model_id": model, "seq_id": 6, "path": path}))
            if loses:
                server.backend.lose()
            await _step(ann, model, 7)
            return await digest_of(server, await ann.save(model, 9, "end"))

    digests = [asyncio.run(scenario(loses)) for loses in (False, True)]
    assert digests[0] == digests[1]


class Refusing(Recorder):
    """Fails the passes that it is told to, once each, as an engine does: the model is as it was."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.errors: dict[str, Exception] = {}

    def submit(self, job: AnyJob, on_tokens: Any = None) -> Any:
        error = self.errors.pop(str(job.__struct_config__.tag), None)
        if error is None:
            return super().submit(job, on_tokens)
        self.submitted.append(job)
        future: asyncio.Future[Done] = asyncio.get_running_loop().create_future()
        future.set_exception(error)
        return future


@pytest.mark.parametrize("kind", ["forward_backward", "optim_step"])
@pytest.mark.parametrize(
    ("error", "state"),
    [(JobFailedError("over its budget", "user"), "failed"), (JobCancelledError("cancelled"), "cancelled")],
    ids=["failed", "cancelled"],
)
def test_what_failed_or_was_cancelled_is_not_replayed(tmp_path: Path, kind: str, error: Exception, state: str) -> None:
    async def scenario() -> None:
        digests = []
        for loses in (False, True):
            backend = Refusing()
            async with serving(tmp_path / str(loses), backend=backend) as server:
                ann, _, model = await begun(server)
                await _step(ann, model, 1)
                backend.errors[kind] = error
                asked = [
                    await ann.post("forward_backward", forward_backward(model, 3, datum(5, 7, 9))),
                    await ann.post("optim_step", optim_step(model, 4)),
                ]
                outcomes = [await ann.outcome(promise) for promise in asked]
                refused = asked[["forward_backward", "optim_step"].index(kind)].json["request_id"]
                assert ["error" in outcome for outcome in outcomes].count(True) == 1
                [row] = await server.rows(JobRow, "job", request_id=refused)
                assert row.state == state
                if loses:
                    backend.submitted.clear()
                    backend.lose()
                await _step(ann, model, 5)
                if loses:
                    assert f"replay-{refused}" not in [job.job_id for job in backend.submitted]
                digests.append(await digest_of(server, await ann.save(model, 7, "end")))
        assert digests[0] == digests[1]

    run(scenario())


def test_what_was_done_is_replayed_even_if_its_client_was_told_of_an_error(tmp_path: Path) -> None:
    async def scenario() -> None:
        digests = []
        for loses in (False, True):
            async with serving(tmp_path / str(loses)) as server:
                ann, _, model = await begun(server)
                finishers: Any = server.services.jobs._finishers

                async def fails(work: Any, done: Done) -> Any:
                    raise ValueError("cannot be told")

                known, finishers["forward_backward"] = finishers["forward_backward"], fails
                told = await ann.outcome(await ann.post("forward_backward", forward_backward(model, 1)))
                assert told["error"] == "internal error while handling this request: ValueError: cannot be told"
                finishers["forward_backward"] = known
                if loses:
                    server.backend.lose()
                await ann.result(await ann.post("optim_step", optim_step(model, 2)))
                digests.append(await digest_of(server, await ann.save(model, 3, "end")))
                [row] = await server.rows(ModelRow, "models_live")
                assert row.fault is None
        assert digests[0] == digests[1]

    run(scenario())


async def _step(client: Client, model: str, seq: int) -> None:
    await client.result(await client.post("forward_backward", forward_backward(model, seq, datum(5, 9, 2 + seq))))
    await client.result(await client.post("optim_step", optim_step(model, seq + 1)))


@pytest.mark.parametrize("query", ["journal_length", "journal"])
@pytest.mark.parametrize("finished", [0, 2])
def test_an_engine_that_is_lost_again_while_the_journal_is_read(tmp_path: Path, query: str, finished: int) -> None:
    """Nothing of the run is at the backend then, so no job tells of the loss: only the epoch does."""

    async def scenario() -> None:
        store = BreakableStore()
        await store.open()
        backend = Recorder()
        async with serving(tmp_path, store=store, backend=backend) as server:
            ann, _, model = await begun(server)
            if finished:
                await _step(ann, model, 1)
            gate = store.gates[query] = asyncio.Event()
            backend.lose()
            promises = [
                await ann.post("forward_backward", forward_backward(model, finished + 1)),
                await ann.post("optim_step", optim_step(model, finished + 2)),
            ]
            await until(lambda: query in store.reached)
            backend.lose()
            gate.set()
            for promise in promises:
                last = await ann.result(promise)
            assert last.json["metrics"]["optim/step"] == (2.0 if finished else 1.0)
            [row] = await server.rows(ModelRow, "models_live")
            assert row.fault is None
        await store.close()

    run(scenario())


class Losing(BreakableStore):
    """The engine is lost each time that the journal is read, for a while."""

    backend: Recorder
    times = 0

    async def read(self, row_type: Any, name: str, /, **parameters: Any) -> list[Any]:
        rows = await super().read(row_type, name, **parameters)
        if name == "journal" and self.times:
            self.times -= 1
            self.backend.lose()
        return rows


def test_however_often_an_engine_is_lost_while_a_run_is_restored_the_run_is_not(tmp_path: Path) -> None:
    """An operation that is replayed on an engine without its model fails; that is the loss's fault, not the run's."""

    async def scenario() -> None:
        store, backend = Losing(), Recorder()
        await store.open()
        async with serving(tmp_path, store=store, backend=backend) as server:
            ann, _, model = await begun(server)
            await _step(ann, model, 1)
            store.backend, store.times = backend, 3 * len(replay.RETRY_S) + 3
            backend.lose()
            await _step(ann, model, 3)
            assert store.times == 0
        await store.close()

    run(scenario())


@pytest.mark.parametrize("finished", [0, 1])
def test_an_engine_that_is_lost_again_with_work_under_way(tmp_path: Path, finished: int) -> None:
    """What was at the engine at the first loss is not handed to one that does not have the model."""

    async def scenario() -> None:
        store = BreakableStore()
        await store.open()
        hold = Gate("optim_step" if finished else "forward_backward")
        backend = Recorder(hold=hold)
        async with serving(tmp_path, store=store, backend=backend) as server:
            ann, _, model = await begun(server)
            await ann.post("forward_backward", forward_backward(model, 1))
            step = await ann.post("optim_step", optim_step(model, 2))
            await settled()
            gate = store.gates["journal_length"] = asyncio.Event()
            backend.lose()
            await until(lambda: "journal_length" in store.reached)
            backend.lose()
            gate.set()
            hold.opened.set()
            assert (await ann.result(step)).json["metrics"]["optim/grad_norm"] > 0
        await store.close()

    run(scenario())


def test_a_result_that_is_still_being_written_is_replayed_too(tmp_path: Path) -> None:
    async def scenario() -> None:
        store = BreakableStore()
        await store.open()
        async with serving(tmp_path, store=store) as server:
            ann, _, model = await begun(server)
            store.gates["insert_result"] = asyncio.Event()
            await ann.post("forward_backward", forward_backward(model, 1))
            await settled()
            assert server.backend.kinds() == ["create_model", "forward_backward"]
            server.backend.lose()
            step = await ann.post("optim_step", optim_step(model, 2))
            await settled()
            store.gates.pop("insert_result").set()
            # Without the gradient of request 1 this would be 0.
            assert (await ann.result(step)).json["metrics"]["optim/grad_norm"] > 0
        await store.close()

    run(scenario())


class Forgetful(Recorder):
    """Its replays of a pass give something else than the pass did."""

    def submit(self, job: AnyJob, on_tokens: Any = None) -> Any:
        if isinstance(job, ForwardBackward) and job.job_id.startswith("replay-"):
            body = msgspec.json.encode(forward_backward(job.model_id, 1, datum(1, 2, 3)))
            job = msgspec.structs.replace(job, body=body)
        return super().submit(job, on_tokens)


def test_a_replay_that_gives_something_else_marks_the_run(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    async def scenario() -> None:
        backend = Forgetful()
        async with serving(tmp_path, backend=backend) as server:
            ann, _, model = await begun(server)
            await ann.result(await ann.post("forward_backward", forward_backward(model, 1)))
            assert (await ann.get(f"training_runs/{model}")).json["corrupted"] is False
            backend.lose()
            await ann.result(await ann.post("optim_step", optim_step(model, 2)))
            assert "request 1 gave a different result when it was replayed" in caplog.text
            [row] = await server.rows(ModelRow, "models_live")
            assert row.fault == "request 1 gave a different result when it was replayed"
            assert (await ann.get(f"training_runs/{model}")).json["corrupted"] is True
            assert (await ann.get("training_runs")).json["training_runs"][0]["corrupted"] is True
            assert (await ann.get("/tinsmith/v1/status")).json["runs"][0]["fault"] == row.fault
            await server.sweep()
            assert "tinsmith_marked_runs 1.0" in (await ann.get("/metrics")).body.decode()

    run(scenario())


class Former(Recorder):
    """Returns results as earlier versions did, but for replays: as if it was upgraded since.

    Steps name their metrics without a prefix; replayed passes have a metric that earlier ones did not have.
    """

    def submit(self, job: AnyJob, on_tokens: Any = None) -> Any:
        future = super().submit(job, on_tokens)
        is_replay = job.job_id.startswith("replay-")

        async def changed() -> Done:
            done: Done = await future
            if isinstance(job, OptimStep) and not is_replay:
                return msgspec.structs.replace(done, body=body_with_former_names(done.body))
            if isinstance(job, ForwardBackward) and is_replay:
                return msgspec.structs.replace(done, body=with_metric(done.body, "weights:min", 0.5))
            return done

        return asyncio.ensure_future(changed())


def with_metric(body: bytes, name: str, value: float) -> bytes:
    """Return a result with one more metric."""
    empty, metric = (encode_output(ForwardBackwardOutput("", [], metrics)) for metrics in ({}, {name: value}))
    return body + metric.removeprefix(empty)


def test_a_journal_of_an_earlier_version_is_replayed_without_a_fault(tmp_path: Path) -> None:
    async def scenario() -> None:
        backend = Former()
        async with serving(tmp_path, backend=backend) as server:
            ann, _, model = await begun(server)
            await ann.result(await ann.post("forward_backward", forward_backward(model, 1)))
            former = await ann.result(await ann.post("optim_step", optim_step(model, 2)))
            assert former.json["metrics"]["step"] == 1.0
            backend.lose()
            await ann.result(await ann.post("forward_backward", forward_backward(model, 3)))
            replayed = [job for job in backend.submitted if job.job_id.startswith("replay-")]
            assert {type(job) for job in replayed} >= {OptimStep, ForwardBackward}
            [row] = await server.rows(ModelRow, "models_live")
            assert row.fault is None
            [point] = (await ann.get(f"/tinsmith/v1/training_runs/{model}/metrics")).json["points"]
            assert set(OPTIM_METRICS) <= set(point["metrics"])
            assert "step" not in point["metrics"]

    run(scenario())


def test_a_store_that_is_away_delays_a_restore(tmp_path: Path) -> None:
    async def scenario() -> None:
        store = BreakableStore()
        await store.open()
        async with serving(tmp_path, store=store) as server:
            ann, _, model = await begun(server)
            await ann.result(await ann.post("forward_backward", forward_backward(model, 1)))
            store.gates["journal_length"] = asyncio.Event()
            server.backend.lose()
            step = await ann.post("optim_step", optim_step(model, 2))
            await settled()
            store.is_down = True
            store.gates["journal_length"].set()
            await settled()
            store.is_down = False
            assert (await ann.result(step)).json["metrics"]["optim/grad_norm"] > 0
        await store.close()

    run(scenario())


def test_a_model_that_cannot_be_made_says_why_and_so_does_all_that_follows(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with serving(tmp_path) as server:
            ann, session, model = await begun(server)
            path = await ann.save(model, 1, "one")
            [row] = await server.rows(CheckpointRow, "checkpoint", path=path)
            (Path(row.directory) / "adapter_model.safetensors").write_bytes(b"damaged")
            made = await ann.post("load_weights", {"path": path, "session_id": session, "model_seq_id": 1})
            failed = await ann.poll(made)
            assert "is damaged" in failed.json["error"]
            other = made.json["model_id"]
            after = await ann.poll(await ann.post("forward_backward", forward_backward(other, 1)))
            assert f"{other} could not be created" in after.json["error"]
            assert "is damaged" in after.json["error"]
            await ann.result(await ann.post("forward_backward", forward_backward(model, 2)))

    run(scenario())


def test_the_end_of_a_session_while_its_model_is_being_restored(tmp_path: Path) -> None:
    async def scenario() -> None:
        gate = Gate("forward_backward")
        gate.opened.set()
        backend = Recorder(hold=gate)
        async with serving(tmp_path, backend=backend) as server:
            ann, session, model = await begun(server)
            await ann.result(await ann.post("forward_backward", forward_backward(model, 1)))
            gate.opened.clear()
            under_way = await ann.post("forward_backward", forward_backward(model, 2))
            await settled()
            backend.lose()
            await until(lambda: backend.submitted[-1].job_id.startswith("replay-"))
            found = server.services.runs.all()[0]
            ended = asyncio.create_task(ann.post(f"sessions/{session}/finish", {"reason": {"type": "success"}}))
            await until(lambda: found.is_closed)
            gate.opened.set()
            assert (await ended).status == 200
            assert (await ann.poll(under_way)).json["error"] == "cancelled"
            assert server.services.broker.count() == 0

    run(scenario())


def test_a_session_that_fell_silent_goes_on_where_it_was(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with serving(tmp_path) as server:
            ann, _, model = await begun(server)
            await ann.result(await ann.post("forward_backward", forward_backward(model, 1)))
            server.clock.advance(1000)
            await server.sweep()
            assert server.services.runs.all() == []
            step = await ann.result(await ann.post("optim_step", optim_step(model, 2)))
            assert step.json["metrics"]["optim/grad_norm"] > 0

    run(scenario())


def test_a_restart_goes_on_with_what_was_accepted(tmp_path: Path) -> None:
    async def scenario() -> None:
        store = BreakableStore()
        await store.open()
        async with serving(tmp_path, store=store, backend=Recorder(hold=Gate("optim_step"))) as server:
            ann, session, model = await begun(server)
            first = await ann.post("forward_backward", forward_backward(model, 1))
            done = await ann.result(first)
            held = await ann.post("optim_step", optim_step(model, 2))
            waits = await ann.post("optim_step", optim_step(model, 4))
            making = await ann.post("create_model", create_model(session, 1))
        async with serving(tmp_path, store=store) as server:
            again = Client(server, ann.key)
            assert (await again.result(first)).json == done.json
            assert (await again.result(held)).json["metrics"]["optim/grad_norm"] > 0
            await again.result(making)
            assert (await again.post("optim_step", optim_step(model, 2))).json == held.json
            await again.result(await again.post("optim_step", optim_step(model, 3)))
            await again.result(waits)
        await store.close()

    run(scenario())


def test_a_save_whose_result_was_lost_is_made_again(tmp_path: Path) -> None:
    async def scenario() -> None:
        store = BreakableStore()
        await store.open()
        async with serving(tmp_path, store=store) as server:
            ann, session, model = await begun(server)
            store.gates["insert_result"] = asyncio.Event()
            saving = await ann.post("save_weights", {"model_id": model, "seq_id": 1, "path": "one"})
            temporary = await ann.post(
                "save_weights_for_sampler", {"model_id": model, "seq_id": 2, "sampling_session_seq_id": 5}
            )
            await settled()
            saves = [job for job in server.backend.submitted if isinstance(job, SaveState)]
            assert all(Path(job.directory).is_dir() for job in saves)
            assert len(saves) == 2
            for task in list(server.services.jobs._tasks):
                task.cancel()  # the process is killed here
        store.gates.clear()
        async with serving(tmp_path, store=store) as server:
            again = Client(server, ann.key)
            assert (await again.result(saving)).json["path"].endswith("/weights/one")
            assert (await again.result(temporary)).json["sampling_session_id"] == f"{session}:sample:5"
        await store.close()

    run(scenario())


def test_a_request_that_was_journalled_while_the_server_went_down_waits_for_the_next_start(tmp_path: Path) -> None:
    async def scenario() -> None:
        store = BreakableStore()
        await store.open()
        async with serving(tmp_path, store=store) as server:
            ann, _, model = await begun(server)
            await server.services.runs.stop()
            late = await ann.post("optim_step", optim_step(model, 1))
        async with serving(tmp_path, store=store) as server:
            await Client(server, ann.key).result(late)
        await store.close()

    run(scenario())

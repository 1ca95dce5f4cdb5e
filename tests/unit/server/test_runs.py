"""Training runs: a state that is rebuilt when the backend lost it, or the server was away."""

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

from tinsmith.engine.base import AnyJob, ForwardBackward, SaveState
from tinsmith.server import replaying
from tinsmith.store.rows import CheckpointRow, ModelRow


@pytest.fixture(autouse=True)
def _no_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replaying, "RETRY_S", (0.0, 0.0, 0.001))


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
            assert (await ann.result(second)).json["metrics"]["step"] == 1.0
            await ann.result(third)
            ids = [job.job_id for job in backend.submitted if not job.job_id.startswith("replay-")]
            assert ids.count(first.json["request_id"]) == 1  # it was finished: replayed under another id
            assert f"replay-{first.json['request_id']}" in [job.job_id for job in backend.submitted]

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
            assert (await ann.result(step)).json["metrics"]["grad_norm"] > 0
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
            assert "request 1 gave another result when it was replayed" in caplog.text
            [row] = await server.rows(ModelRow, "models_live")
            assert row.fault == "request 1 gave another result when it was replayed"
            assert (await ann.get(f"training_runs/{model}")).json["corrupted"] is True
            assert (await ann.get("training_runs")).json["training_runs"][0]["corrupted"] is True
            assert (await ann.get("/tinsmith/v1/status")).json["runs"][0]["fault"] == row.fault
            await server.sweep()
            assert "tinsmith_marked_runs 1.0" in (await ann.get("/metrics")).body.decode()

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
            assert (await ann.result(step)).json["metrics"]["grad_norm"] > 0
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
            assert f"{other} could not be made" in after.json["error"]
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
            assert step.json["metrics"]["grad_norm"] > 0

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
            assert (await again.result(held)).json["metrics"]["grad_norm"] > 0
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

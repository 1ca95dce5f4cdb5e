"""Training runs: the order of their requests, how they end, and what is saved."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from support.in_process import (
    BASE,
    BreakableStore,
    Client,
    Gate,
    Recorder,
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

from tinsmith.errors import StoreError
from tinsmith.store.base import Statement
from tinsmith.store.rows import CheckpointRow, JobRow


def test_requests_reach_the_backend_in_the_order_of_their_numbers(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with serving(tmp_path, poll_s=0.001) as server:
            ann, _, model = await begun(server)
            third = await ann.post("optim_step", optim_step(model, 3))
            first = await ann.post("forward_backward", forward_backward(model, 1))
            waiting = await ann.poll(third)
            assert waiting.status == 408
            assert "waiting for request number 2 of" in waiting.json["queue_state_reason"]
            second = await ann.post("forward_backward", forward_backward(model, 2, datum(7, 8)))
            for promise in (third, first, second):
                await ann.result(promise)
            assert server.backend.kinds() == ["create_model", "forward_backward", "forward_backward", "optim_step"]
            assert [job.job_id for job in server.backend.submitted[1:]] == [
                promise.json["request_id"] for promise in (first, second, third)
            ]

    run(scenario())


def test_requests_without_a_number_run_as_they_come_also_behind_one_that_was_too_much(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with serving(tmp_path, max_queued=1) as server:
            ann, _, model = await begun(server)
            await ann.result(await ann.post("forward_backward", forward_backward(model, None)))
            server.services.jobs.queued_by_org["acme"] = 1
            assert (await ann.post("optim_step", optim_step(model, None))).status == 429
            server.services.jobs.queued_by_org["acme"] = 0
            refused = await ann.post("optim_step", optim_step(model, None, beta1=2.0))
            assert refused.status == 400
            await ann.result(await ann.post("optim_step", optim_step(model, None)))
            await ann.result(await ann.post("optim_step", optim_step(model, 0)))  # 0 is "no number" of protobuf

    run(scenario())


def test_a_number_that_was_given_out_and_could_not_be_written_holds_nobody_up(tmp_path: Path) -> None:
    async def scenario() -> None:
        store = BreakableStore()
        await store.open()
        async with serving(tmp_path, store=store) as server:
            ann, _, model = await begun(server)
            await server.services.runs.get(server.services.access.models[model])
            store.is_down = True
            assert (await ann.post("optim_step", optim_step(model, None))).status == 503
            store.is_down = False
            await ann.result(await ann.post("optim_step", optim_step(model, None)))
            await server.services.jobs.drain()
        backend = Recorder()
        async with serving(tmp_path, store=store, backend=backend) as server:
            again = Client(server, ann.key)
            await again.result(await again.post("optim_step", optim_step(model, None)))
        await store.close()

    run(scenario())


def test_cancelling(tmp_path: Path) -> None:
    async def scenario() -> None:
        gate = Gate("optim_step")
        async with serving(tmp_path, backend=Recorder(hold=gate), poll_s=0.001) as server:
            ann, _, model = await begun(server)
            waits = await ann.post("forward_backward", forward_backward(model, 3))
            answer = await ann.post("cancel_future", {"request_id": waits.json["request_id"]})
            assert answer.json == {"cancelled": True}
            await server.services.jobs.drain()
            assert (await ann.poll(waits)).json == {"error": "cancelled", "category": "user"}
            runs_now = await ann.post("optim_step", optim_step(model, 1))
            behind = await ann.post("optim_step", optim_step(model, 2))
            await settled()
            assert (await ann.post("cancel_future", {"request_id": behind.json["request_id"]})).status == 200
            gate.opened.set()
            await ann.result(runs_now)
            await server.services.jobs.drain()
            assert (await ann.poll(behind)).json["error"] == "cancelled"
            late = await ann.post("cancel_future", {"request_id": runs_now.json["request_id"]})
            assert late.json["cancelled"] is False
            await ann.result(await ann.post("forward_backward", forward_backward(model, 4)))

    run(scenario())


def test_the_end_of_a_session_answers_everyone(tmp_path: Path) -> None:
    async def scenario() -> None:
        gate = Gate("optim_step")
        async with serving(tmp_path, backend=Recorder(hold=gate)) as server:
            ann, session, model = await begun(server)
            at_backend = [await ann.post("optim_step", optim_step(model, seq)) for seq in (1, 2)]
            waiting = await ann.post("optim_step", optim_step(model, 9))
            ended = asyncio.create_task(
                ann.post(f"sessions/{session}/finish", {"reason": {"type": "success"}, "detail": None})
            )
            await settled()
            gate.opened.set()
            assert (await ended).status == 200
            for promise in (*at_backend, waiting):
                assert (await ann.poll(promise)).status == 200
            assert server.backend.kinds()[-1] == "unload"
            assert (await ann.post("optim_step", optim_step(model, 10))).status == 410
            assert server.services.broker.count() == 0

    run(scenario())


def test_the_end_of_a_session_while_its_model_is_being_made(tmp_path: Path) -> None:
    async def scenario() -> None:
        gate = Gate("create_model")
        async with serving(tmp_path, backend=Recorder(hold=gate)) as server:
            ann = await server.client()
            session = await ann.session()
            made = await ann.post("create_model", create_model(session))
            behind = await ann.post("optim_step", optim_step(made.json["model_id"], 1))
            found = server.services.runs.all()[0]
            ended = asyncio.create_task(ann.post(f"sessions/{session}/finish", {"reason": {"type": "success"}}))
            await until(lambda: found.is_closed)
            gate.opened.set()
            assert (await ended).status == 200
            for promise in (made, behind):
                assert (await ann.poll(promise)).json == {"error": "cancelled", "category": "user"}
            assert server.services.broker.count() == 0
            assert await server.rows(JobRow, "jobs_queued") == []

    run(scenario())


def test_a_request_that_slips_in_behind_the_end_is_answered(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with serving(tmp_path) as server:
            ann, _, model = await begun(server)
            found = server.services.runs.known(model)
            assert found is not None
            await found.close()
            late = await ann.post("optim_step", optim_step(model, 1))
            assert (await ann.poll(late)).json["error"] == "cancelled"

    run(scenario())


def test_an_unloaded_model_takes_no_more_work_and_stays_unloaded_when_its_session_comes_back(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with serving(tmp_path) as server:
            ann, session, model = await begun(server)
            other = await ann.model(session, 1)
            await ann.result(await ann.post("unload_model", {"model_id": model}))
            assert (await ann.post("optim_step", optim_step(model, 5))).status == 410
            server.clock.advance(1000)
            await server.sweep()
            assert (await ann.get(f"sessions/{session}")).status == 200
            assert (await ann.post("session_heartbeat", {"session_id": session})).status == 200
            assert (await ann.post("optim_step", optim_step(model, 5))).status == 410
            await ann.result(await ann.post("optim_step", optim_step(other, 1)))

    run(scenario())


def test_nothing_is_left_running_when_a_server_stops_with_work_under_way(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with serving(tmp_path, backend=Recorder(hold=Gate("optim_step"))) as server:
            ann, _, model = await begun(server)
            await ann.post("optim_step", optim_step(model, 1))
            await settled()
        assert asyncio.all_tasks() == {asyncio.current_task()}

    asyncio.run(scenario())


def test_a_model_that_is_being_forgotten_when_a_server_stops_is_waited_for(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with serving(tmp_path) as server:
            ann, _, model = await begun(server)
            await ann.result(await ann.post("unload_model", {"model_id": model, "seq_id": 1}))
        assert server.services.runs.known(model) is None
        assert asyncio.all_tasks() == {asyncio.current_task()}

    asyncio.run(scenario())


def test_two_models_of_one_server_do_not_wait_for_one_another(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with serving(tmp_path) as server:
            ann, session, model = await begun(server)
            other = await ann.model(session, 1)
            await ann.post("optim_step", optim_step(model, 2))  # waits for number 1
            await ann.result(await ann.post("forward_backward", forward_backward(other, 1)))
            assert server.backend.epoch_of(BASE) == 1

    run(scenario())


def test_a_save_that_is_sent_twice_at_once_is_made_once(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with serving(tmp_path) as server:
            ann, _, model = await begun(server)
            message = {"model_id": model, "seq_id": 1, "path": "one"}
            answers = await asyncio.gather(*(ann.post("save_weights", message) for _ in range(4)))
            assert {answer.status for answer in answers} == {200}
            assert len({answer.json["request_id"] for answer in answers}) == 1
            await ann.result(answers[0])
            assert server.backend.kinds() == ["create_model", "save_state"]

    run(scenario())


def test_what_was_prepared_for_a_repetition_is_taken_back(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with serving(tmp_path) as server:
            ann, _, model = await begun(server)
            message = {"model_id": model, "seq_id": 1, "path": "one", "overwrite": True}
            saves = await asyncio.gather(*(ann.post("save_weights", message) for _ in range(4)))
            assert len({answer.json["request_id"] for answer in saves}) == 1
            path = (await ann.result(saves[0])).json["path"]
            await server.services.jobs.drain()
            assert len(server.services.saves) == 0
            load = {"model_id": model, "seq_id": 2, "path": path}
            loads = await asyncio.gather(*(ann.post("load_weights", load) for _ in range(4)))
            assert len({answer.json["request_id"] for answer in loads}) == 1
            await ann.result(loads[0])
            assert len(list(server.services.files.loads(model).iterdir())) == 1

    run(scenario())


@pytest.mark.parametrize("how", ["cut off", "in doubt"])
def test_a_load_that_was_journalled_although_its_client_was_not_told_keeps_its_files(tmp_path: Path, how: str) -> None:
    """The connection or the store's broke behind the commit; the client sends it again."""

    async def scenario() -> None:
        store = Doubtful()
        await store.open()
        async with serving(tmp_path, store=store) as server:
            ann, _, model = await begun(server)
            path = await ann.save(model, 1, "first")
            message = {"model_id": model, "seq_id": 2, "path": path}
            store.how = how
            asking = asyncio.create_task(ann.post("load_weights", message))
            await until(lambda: store.how == "")
            if how == "cut off":
                asking.cancel()
            await asyncio.gather(asking, return_exceptions=True)
            await ann.result(await ann.post("load_weights", message))
            server.backend.lose()
            await ann.result(await ann.post("optim_step", optim_step(model, 3)))
            assert len(list(server.services.files.loads(model).iterdir())) == 1
        await store.close()

    run(scenario())


class Doubtful(BreakableStore):
    """Tells nobody of the next request that it has written down."""

    how = ""

    async def write(self, *statements: Statement) -> int:
        count = await super().write(*statements)
        how = self.how
        if not how or statements[0].name != "insert_job":
            return count
        self.how = ""
        if how == "cut off":
            await asyncio.Event().wait()
        raise StoreError("the connection was lost behind the commit")


def test_overwriting_leaves_one_directory_also_when_several_saves_wait(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with serving(tmp_path) as server:
            ann, _, model = await begun(server)
            message = {"model_id": model, "path": "one", "overwrite": True}
            for numbers in ((1, 2, 3), (4, 5, 6), (8, 7)):
                promises = [await ann.post("save_weights", {**message, "seq_id": seq}) for seq in numbers]
                for promise in promises:
                    await ann.result(promise)
            await server.services.jobs.drain()
            [row] = await server.rows(CheckpointRow, "checkpoints_of_model", model_id=model)
            assert Path(row.directory, "manifest.json").exists()  # what arrived early and ran late is kept
            await ann.result(await ann.post("save_weights", {**message, "seq_id": 9}))
            await server.services.jobs.drain()
            assert len(server.services.saves) == 0
            [row] = await server.rows(CheckpointRow, "checkpoints_of_model", model_id=model)
            left = [str(path) for path in Path(row.directory).parent.iterdir()]
            assert row.directory in left
            assert len(left) <= 2  # one more than needed at most: of the save that overtook another

    run(scenario())

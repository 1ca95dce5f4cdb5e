"""Deleting a run: when it is refused, what is deleted and what is kept."""

from __future__ import annotations

import asyncio
from pathlib import Path

from support.in_process import (
    BreakableStore,
    Gate,
    Recorder,
    begun,
    forward_backward,
    optim_step,
    run,
    serving,
    settled,
    until,
)

from tinsmith.server.data_dir import segment
from tinsmith.store.base import statement
from tinsmith.store.rows import AuditRow, CheckpointRow, CountRow, JobRow, ModelRow, SessionRow, StepRow, UsageRow

WHERE = "/tinsmith/v1/training_runs"


def test_a_run_that_takes_work_is_not_deleted(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with serving(tmp_path) as server:
            ann, _, model = await begun(server)
            path = await ann.save(model, 1, "kept")
            refused = await ann.call("DELETE", f"{WHERE}/{model}")
            assert (refused.status, refused.json["field"]) == (400, "training_run_id")
            assert f"tinsmith run kill {model}" in refused.detail
            assert [row.path for row in await server.rows(CheckpointRow, "checkpoints_of_model", model_id=model)] == [
                path
            ]
            await ann.result(await ann.post("forward_backward", forward_backward(model, 2)))

    run(scenario())


def test_what_goes_with_a_run_and_what_stays(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with serving(tmp_path) as server:
            ann, session, model = await begun(server)
            other = await ann.model(session, 1)
            for seq in (1, 3):
                await ann.result(await ann.post("forward_backward", forward_backward(model, seq)))
                await ann.result(await ann.post("optim_step", optim_step(model, seq + 1)))
            await ann.save(model, 5, "one")
            kept = await ann.save(other, 1, "two")
            await ann.result(await ann.post("unload_model", {"model_id": model}))
            snapshot = server.services.files.snapshot(model, "4-aa")
            snapshot.mkdir(parents=True)
            answer = await ann.call("DELETE", f"{WHERE}/{model}")
            assert (answer.status, answer.json["checkpoints"]) == (200, 1)
            assert await server.rows(ModelRow, "model", model_id=model) == []
            assert await server.rows(StepRow, "steps_after", model_id=model, after=-1, limit=9) == []
            assert await server.rows(JobRow, "jobs_of_lane_after", lane=model, seq=-1, limit=9) == []
            assert not snapshot.parent.exists()
            left = [
                place.name
                for place in (server.services.files.root / "checkpoints").iterdir()
                if any(place.rglob("*.json"))
            ]
            assert segment(model) not in left
            assert [row.path for row in await server.rows(CheckpointRow, "checkpoints_of_model", model_id=other)] == [
                kept
            ]
            period = {"org_id": "acme", "since_hour": 0, "until_hour": 2**40}
            assert sum(
                row.training for row in await server.rows(UsageRow, "usage_by_run", **period) if row.run_id == model
            )
            entries = await server.rows(AuditRow, "audit_of_org", org_id="acme", since=0.0, until=1e12, limit=99)
            assert {"checkpoint_deleted", "training_run_deleted"} <= {entry.event for entry in entries}
            for path in (f"training_runs/{model}", f"training_runs/{model}/checkpoints"):
                assert (await ann.get(path)).status == 404
            assert (await ann.call("DELETE", f"{WHERE}/{model}")).status == 404

    run(scenario())


def test_a_parked_run_does_not_come_back(tmp_path: Path) -> None:
    """Its session has expired; a client that returns finds the session, and not the run."""

    async def scenario() -> None:
        async with serving(tmp_path, session_timeout_s=300) as server:
            ann, session, model = await begun(server)
            server.clock.advance(400)
            await server.sweep()
            assert (await ann.get(f"training_runs/{model}")).json["tinsmith"]["status"] == "expired"
            assert (await ann.call("DELETE", f"{WHERE}/{model}")).status == 200
            assert (await ann.post("session_heartbeat", {"session_id": session})).status == 200
            assert (await ann.post("forward_backward", forward_backward(model, 1))).status == 404
            [row] = await server.rows(SessionRow, "session", session_id=session)
            assert row.status == "active"

    run(scenario())


def test_what_ends_with_the_run_is_waited_for(tmp_path: Path) -> None:
    """Found by fuzzing: deleting a run right after its end was a 503."""

    async def scenario() -> None:
        store = BreakableStore()
        await store.open()
        async with serving(tmp_path, store=store, backend=Recorder(hold=Gate("forward_backward"))) as server:
            ann, session, model = await begun(server)
            promises = [await ann.post("forward_backward", forward_backward(model, seq)) for seq in (1, 2, 3)]
            store.gates["insert_result"] = asyncio.Event()
            finish = ann.post(f"sessions/{session}/finish", {"reason": {"type": "success"}})
            finishing = asyncio.create_task(finish)
            await until(lambda: "insert_result" in store.reached)
            deleting = asyncio.create_task(ann.call("DELETE", f"{WHERE}/{model}"))
            await settled()
            assert not deleting.done()
            store.gates.pop("insert_result").set()
            assert [(await task).status for task in (finishing, deleting)] == [200, 200]
            assert [promise.status for promise in promises] == [200] * 3
        await store.close()

    run(scenario())


def test_requests_without_a_result_are_not_deleted(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with serving(tmp_path) as server:
            ann, _, model = await begun(server)
            [job] = await server.rows(
                JobRow, "jobs_of_lane_after", lane=f"{model.partition(':')[0]}/models", seq=-1, limit=9
            )
            await ann.result(await ann.post("unload_model", {"model_id": model}))
            late = JobRow(**{**job.parameters(), "request_id": "late", "lane": model, "seq": 9, "state": "queued"})
            await server.store.write(statement("insert_job", late))
            refused = await ann.call("DELETE", f"{WHERE}/{model}")
            assert (refused.status, refused.json["code"]) == (503, "not_ready")
            await server.store.write(statement("set_job_state", request_id="late", state="cancelled"))
            assert (await ann.call("DELETE", f"{WHERE}/{model}")).status == 200

    run(scenario())


def test_a_finished_run_says_so(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with serving(tmp_path) as server:
            ann, session, model = await begun(server)
            listed = await ann.get("training_runs")
            assert [item["tinsmith"]["status"] for item in listed.json["training_runs"]] == ["active"]
            await ann.post(f"sessions/{session}/finish", {"reason": {"type": "success"}})
            listed = await ann.get("training_runs")
            assert [item["tinsmith"]["status"] for item in listed.json["training_runs"]] == ["finished"]
            assert (await ann.get(f"training_runs/{model}")).json["tinsmith"]["status"] == "finished"
            assert (await server.rows(CountRow, "count_queued_of_lane", lane=model))[0].count == 0

    run(scenario())

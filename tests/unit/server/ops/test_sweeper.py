"""Expiry: silent sessions, checkpoints past their TTL, rows that nobody can ask for any more."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from support.in_process import (
    BASE,
    BreakableStore,
    Client,
    Server,
    create_model,
    forward_backward,
    optim_step,
    run,
    sample,
    serving,
    until,
)

from tinsmith.server.routes import sessions
from tinsmith.store.rows import (
    CheckpointRow,
    CustomLossRow,
    JobRow,
    ModelRow,
    SessionRow,
    SizeRow,
    TelemetryRow,
    UsageRow,
)


async def session_row(server: Server, session_id: str) -> SessionRow:
    row: SessionRow = (await server.rows(SessionRow, "session", session_id=session_id))[0]
    return row


def loss(session_id: str, number: int = 0) -> dict[str, Any]:
    nodes = [
        {"op": "placeholder", "name": "logprobs", "target": "logprobs"},
        {"op": "output", "name": "output", "target": "output", "args": [{"node": "logprobs"}]},
    ]
    return {
        "session_id": session_id,
        "custom_loss_seq_id": number,
        "name": "mine",
        "inputs": [{"name": "logprobs", "rank": 1}],
        "graph": {"nodes": nodes},
    }


def test_a_session_without_heartbeats_expires_and_one_with_them_does_not(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with serving(tmp_path, session_timeout_s=300) as server:
            ann = await server.client()
            silent, alive = await ann.session(), await ann.session()
            model = await ann.model(silent)
            for _ in range(4):
                server.clock.advance(100)
                assert (await ann.post("session_heartbeat", {"session_id": alive})).status == 200
                await server.sweep()
            row = await session_row(server, silent)
            assert (row.status, row.detail) == ("expired", "no heartbeat for 300 s")
            assert row.ended_at is not None
            assert (await session_row(server, alive)).status == "active"
            assert (await session_row(server, alive)).heartbeat_at == server.clock()
            assert [found.state for found in await server.rows(ModelRow, "models_of_session", session_id=silent)] == [
                "parked"
            ]
            assert server.backend.kinds() == ["create_model", "unload"]
            assert server.services.runs.known(model) is None
            found = (await ann.post("sessions/search", {"statuses": [{"type": "cancelled"}]})).json["sessions"]
            assert [(item["session_id"], item["status"]["detail"]) for item in found] == [
                (silent, "no heartbeat for 300 s")
            ]

    run(scenario())


def test_a_session_that_came_back_expires_again(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with serving(tmp_path) as server:
            ann = await server.client()
            session = await ann.session()
            sampler = await ann.sampler(session)
            server.clock.advance(1000)
            await server.sweep()
            await ann.result(await ann.post("asample", sample(sampler, 1)))  # revives, and no heartbeat follows
            assert (await session_row(server, session)).status == "active"
            await server.sweep()
            server.clock.advance(1000)
            await server.sweep()
            assert (await session_row(server, session)).status == "expired"

    run(scenario())


def test_heartbeats_are_known_after_a_restart(tmp_path: Path) -> None:
    async def scenario() -> None:
        store = BreakableStore()
        await store.open()
        async with serving(tmp_path, store=store) as server:
            ann = await server.client()
            session = await ann.session()
            clock = server.clock
        clock.advance(10_000)
        async with serving(tmp_path, store=store, clock=clock) as server:
            await server.sweep()
            assert (await session_row(server, session)).status == "active"  # it gets time to be heard of
            clock.advance(1000)
            await server.sweep()
            assert (await session_row(server, session)).status == "expired"
        await store.close()

    run(scenario())


def test_a_finished_session_is_over_for_good(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with serving(tmp_path) as server:
            ann = await server.client()
            session = await ann.session()
            end = {"reason": {"type": "errored"}, "detail": "it broke"}
            assert (await ann.post(f"sessions/{session}/finish", end)).json == {}
            assert (await ann.post(f"sessions/{session}/finish", {"reason": {"type": "success"}})).status == 200
            row = await session_row(server, session)
            assert (row.status, row.status_detail, row.detail) == ("finished", "errored", "it broke")
            for route, message in (
                ("session_heartbeat", {"session_id": session}),
                ("create_model", create_model(session)),
                ("create_sampling_session", {"session_id": session, "sampling_session_seq_id": 0, "base_model": BASE}),
            ):
                answer = await ann.post(route, message)
                assert (answer.status, answer.json["code"]) == (410, "gone")

    run(scenario())


def test_checkpoints_go_when_their_time_is_over(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with serving(tmp_path) as server:
            ann = await server.client()
            model = await ann.model(await ann.session())
            short = await ann.save(model, 1, "short", ttl_seconds=100)
            kept = await ann.save(model, 2, "kept", ttl_seconds=100)
            ids = f"training_runs/{model}/checkpoints"
            assert (await ann.call("PUT", f"{ids}/weights/kept/ttl", {"ttl_seconds": None})).status == 200
            [row] = await server.rows(CheckpointRow, "checkpoint", path=short)
            server.clock.advance(100)
            assert [item["checkpoint_id"] for item in (await ann.get(ids)).json["checkpoints"]] == ["weights/kept"]
            assert (await ann.post("weights_info", {"tinker_path": short})).status == 404
            assert (await ann.post("weights_info", {"tinker_path": kept})).status == 200
            server.clock.advance(1)
            await server.sweep()
            assert await server.rows(CheckpointRow, "checkpoint", path=short) == []
            assert not Path(row.directory).exists()

    run(scenario())


async def whole_life(ann: Client, number: int) -> str:
    """A session that leaves something of every kind."""
    session = await ann.session()
    model = await ann.model(session)
    await ann.result(await ann.post("forward_backward", forward_backward(model, 1)))
    await ann.result(await ann.post("optim_step", optim_step(model, 2)))
    path = await ann.save(model, 3, "w")
    await ann.result(await ann.post("load_weights", {"model_id": model, "seq_id": 4, "path": path}))
    sampler = await ann.sampler(session, 0, model_path=path)
    await ann.result(await ann.post("asample", sample(sampler, 1)))
    await ann.result(await ann.post("create_custom_loss", loss(session, number)))
    await ann.post("optim_step", optim_step(model, 5, beta1=2.0))  # refused
    assert (await ann.get(f"sessions/{session}/trace_export")).status == 200
    await ann.call("DELETE", f"training_runs/{model}/checkpoints/weights/w")
    await ann.post(f"sessions/{session}/finish", {"reason": {"type": "success"}})
    return session


def test_the_database_and_the_directory_do_not_grow_for_ever(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with serving(tmp_path, result_grace_s=3600) as server:
            ann = await server.client()
            sessions = [await whole_life(ann, number) for number in range(2)]
            losses = [
                row.context
                for row in await server.rows(
                    JobRow, "jobs_of_lane_after", lane=f"{sessions[0]}/losses", seq=-1, limit=9
                )
            ]
            assert len(losses) == 1
            await server.sweep()
            assert (await server.rows(SizeRow, "result_bytes"))[0].size_bytes > 0  # within the grace time
            server.clock.advance(3601)
            await server.sweep()
            await server.sweep()
            assert (await server.rows(SizeRow, "result_bytes"))[0].size_bytes == 0
            for session in sessions:
                assert (await session_row(server, session)).pruned
                for lane in (f"{session}:train:0", f"{session}:sample:0", f"{session}/models", f"{session}/losses"):
                    assert await server.rows(JobRow, "jobs_of_lane_after", lane=lane, seq=-(2**62), limit=9) == []
            left = [path for path in server.services.files.root.rglob("*") if path.is_file() and path.name != "secret"]
            assert left == []
            services = server.services
            assert (services.access.sessions, services.access.models, services.access.samplers) == ({}, {}, {})
            assert services.activity.heartbeats == {}
            assert services.runs.all() == []
            assert services.broker.count() == 0

    run(scenario())


def test_uploaded_losses_go_with_their_session(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with serving(tmp_path) as server:
            ann = await server.client()
            session = await ann.session()
            made = (await ann.result(await ann.post("create_custom_loss", loss(session)))).json["loss_id"]
            assert len(await server.rows(CustomLossRow, "custom_loss", loss_id=made)) == 1
            await ann.post(f"sessions/{session}/finish", {"reason": {"type": "success"}})
            server.clock.advance(4000)
            await server.sweep()
            assert await server.rows(CustomLossRow, "custom_loss", loss_id=made) == []

    run(scenario())


def test_results_of_a_session_that_goes_on_are_kept(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with serving(tmp_path) as server:
            ann = await server.client()
            session = await ann.session()
            model = await ann.model(session)
            promise = await ann.post("forward_backward", forward_backward(model, 1))
            await ann.result(promise)
            for _ in range(5):
                server.clock.advance(10_000)
                await ann.post("session_heartbeat", {"session_id": session})
                await server.sweep()
            server.services.broker.forget([model])
            await ann.result(promise)

    run(scenario())


def test_usage_adds_up_by_the_hour_and_storage_is_counted(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with serving(tmp_path) as server:
            ann = await server.client(scopes=("all", "admin"))
            session = await ann.session(user_metadata={"team": "red"})
            model = await ann.model(session)
            for seq in (1, 2):
                await ann.result(await ann.post("forward_backward", forward_backward(model, seq)))
            await ann.save(model, 3, "w")
            server.clock.advance(7200)
            await ann.post("session_heartbeat", {"session_id": session})
            await server.sweep()
            hour = int(server.clock() // 3600)
            rows = await server.rows(UsageRow, "usage_of_org", org_id="acme", since_hour=0, until_hour=hour + 1)
            [worked] = [row for row in rows if not row.storage]
            assert (worked.training, worked.checkpoints) == (6, 1)
            [storage] = [row for row in rows if row.storage]
            [saved] = await server.rows(CheckpointRow, "checkpoints_of_session", session_id=session)
            assert storage.storage == saved.size_bytes * 2
            day = {"starting_on": "2027-01-15T00:00:00Z", "ending_before": "2027-01-16T00:00:00Z"}
            answer = (await ann.get("billing/usage/events", **day)).json
            assert {event["event_info"]["type"] for event in answer["data"]} == {"training", "checkpoint", "storage"}
            assert answer["sessions"] == {session: {"user_metadata": {"team": "red"}}}
            current = (await ann.get("billing/usage/checkpoints/current")).json["data"]
            assert [(item["checkpoint_count"], item["size_bytes"]) for item in current] == [(1, saved.size_bytes)]

    run(scenario())


def test_finished_jobs_are_counted(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with serving(tmp_path) as server:
            ann = await server.client()
            await ann.model(await ann.session())
            await server.services.jobs.drain()
            text = (await ann.get("/metrics")).body.decode()
            assert 'tinsmith_jobs_total{kind="create_model",state="done"} 1.0' in text
            assert 'tinsmith_requests_total{route="create_model",status="200"} 1.0' in text

    run(scenario())


def telemetry(session_id: str, **data: Any) -> dict[str, Any]:
    event = {
        "event": "GENERIC_EVENT",
        "event_id": "e",
        "event_session_index": 0,
        "severity": "INFO",
        "timestamp": "2027-01-15T00:00:00Z",
        "event_name": "x",
        "event_data": data,
    }
    return {"events": [event], "platform": "x", "sdk_version": "0.36.0", "session_id": session_id}


def test_telemetry_is_kept_without_secrets_and_only_so_much(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with serving(tmp_path, max_telemetry_rows=3) as server:
            ann = await server.client()
            said = {"headers": {"X-API-Key": "hunter2", "cookie": "yum"}, "text": f"key {ann.key} eyJabcdef.x.y"}
            escaped = {"dump": "{\"authorization\": \"Bearer hunter2\", 'x-api-key': 'hunter2'}"}
            for data in (said, escaped):
                assert (await ann.post("telemetry", telemetry("s", **data))).json == {"status": "accepted"}
            await server.sweep()
            rows = await server.rows(TelemetryRow, "telemetry_newest", limit=10)
            text = repr(rows)
            for secret in ("hunter2", "yum", ann.key[4:], "eyJabcdef"):
                assert secret not in text
            for number in range(10):
                await ann.post("telemetry", telemetry(f"s{number}", size="x" * 300_000))
            await server.sweep()
            rows = await server.rows(TelemetryRow, "telemetry_newest", limit=10)
            assert [row.session_id for row in rows] == ["s9", "s8", "s7"]
            assert all(len(row.body) <= 256 * 1024 for row in rows)

    run(scenario())


def test_telemetry_that_comes_faster_than_it_is_written_is_bounded(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with serving(tmp_path, max_telemetry_rows=5) as server:
            ann = await server.client()
            for number in range(20):
                await ann.post("telemetry", telemetry(f"s{number}"))
            assert [row.session_id for row in server.services.activity.telemetry] == [f"s{n}" for n in range(15, 20)]

    run(scenario())


def test_no_telemetry_can_stop_the_sweeper(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with serving(tmp_path) as server:
            ann = await server.client()
            session = await ann.session()
            assert (await ann.post("telemetry", telemetry("bad\0id"))).status == 200
            server.clock.advance(1000)
            await server.sweep()
            assert (await session_row(server, session)).status == "expired"

    run(scenario())


def test_a_store_that_is_away_does_not_end_the_sweeper(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    async def scenario() -> None:
        store = BreakableStore()
        await store.open()
        async with serving(tmp_path, store=store, sweep_s=0.001) as server:
            caplog.set_level("INFO")
            ann = await server.client()
            session = await ann.session()
            store.is_down = True
            await until(lambda: "cannot reach the database" in caplog.text)
            store.is_down = False
            server.clock.advance(1000)
            await until(lambda: session not in server.services.activity.heartbeats)
            await until(lambda: "ended: expired" in caplog.text)
            assert (await session_row(server, session)).status == "expired"
        await store.close()

    run(scenario())


def test_a_search_pages_through_every_session_once(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with serving(tmp_path) as server:
            ann = await server.client()
            made = []
            for _ in range(9):
                server.clock.advance(0.12345678)
                made.append(await ann.session())
            found: list[str] = []
            message: dict[str, Any] = {"limit": 2}
            while True:
                page = (await ann.post("sessions/search", message)).json
                found += [item["session_id"] for item in page["sessions"]]
                if page.get("next_cursor") is None:
                    break
                message["cursor"] = page["next_cursor"]
            assert found == made[::-1]

    run(scenario())


def test_a_search_says_where_it_stopped_looking(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sessions, "SEARCH_PAGE", 2)
    monkeypatch.setattr(sessions, "SEARCH_LIMIT", 4)

    async def scenario() -> None:
        async with serving(tmp_path) as server:
            ann = await server.client()
            oldest = await ann.session(display_name="the first")
            for _ in range(9):
                server.clock.advance(0.25)
                await ann.session()
            message: dict[str, Any] = {"display_name": "first"}
            pages = []
            while len(pages) < 9:
                page = (await ann.post("sessions/search", message)).json
                pages.append([item["session_id"] for item in page["sessions"]])
                if page.get("next_cursor") is None:
                    break
                message["cursor"] = page["next_cursor"]
            assert pages[:3] == [[], [], [oldest]]
            assert not any(pages[3:])

    run(scenario())

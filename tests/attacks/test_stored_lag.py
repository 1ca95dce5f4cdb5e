"""Stored data of a tenant does not block the event loop either: lists, searches, traces, moves."""

from __future__ import annotations

import asyncio
from functools import partial
from pathlib import Path

import pytest
from attacks.test_loop_lag import MAX_S, longest
from support import store_rows as make
from support.in_process import API, Client, Server, serving
from support.loop_lag import watched_loop

from tinsmith.engine.protocol import LoraSpec
from tinsmith.store.base import Statement, statement
from tinsmith.wire.codecs.json_codec import encode

COUNT = 400
METADATA = encode({f"key-{number}": "v" * 100 for number in range(300)}).decode()
"""As much as a request may bring."""
SMALL = '{"key": "value"}'
MODEL = "0:train:0"
LORA = encode(LoraSpec(rank=8, seed=0, alpha=32.0)).decode()
HOUR = 490_000


async def fill(server: Server, metadata: str, org_id: str, user_id: str) -> None:
    """Sessions, runs, checkpoints, jobs, usage and audit of one user."""
    owner = {"org_id": org_id, "user_id": user_id, "project_id": None}
    rows: list[Statement] = []
    for number in range(COUNT):
        name = str(number)
        rows.append(
            statement("insert_session", make.session(name, **owner, user_metadata=metadata, created_at=5.0 + number))
        )
        run = make.model(f"{name}:train:0", **owner, session_id="0", user_metadata=metadata, lora=LORA)
        rows.append(statement("insert_model", run))
        kept = {"model_id": MODEL, "path": f"tinker://{MODEL}/weights/{name}", "expires_at": None, "session_id": "0"}
        rows.append(statement("put_checkpoint", make.checkpoint(name, **owner, **kept, user_metadata=metadata)))
        rows.append(
            statement("add_usage", make.usage(HOUR, **owner | {"project_id": ""}, session_id=name, run_id=name))
        )
    for number in range(20 * COUNT):
        rows.append(statement("insert_job", make.job(MODEL, number, session_id="0", org_id=org_id, user_id=user_id)))
        rows.append(statement("insert_result", make.result(f"{MODEL}:{number}")))
        rows.append(statement("insert_audit", make.audit(16.0 + number, **owner)))
    for start in range(0, len(rows), 1000):
        await server.services.store.write(*rows[start : start + 1000])


async def slow_calls(
    server: Server, ann: Client, calls: dict[str, tuple[str, str, bytes]], status: int
) -> dict[str, object]:
    slow: dict[str, object] = {}
    with watched_loop() as lag:
        for what, (method, path, body) in calls.items():
            given = {"x-api-key": ann.key, "content-type": "application/json"}
            answer = await server.request(method, path, body, given)
            assert answer.status == status, (what, answer.body[:300])
            seconds, where = await longest(lag, partial(server.request, method, path, body, given))
            if seconds >= MAX_S:
                slow[what] = (round(seconds, 4), where)
    return slow


CALLS = {
    "sessions": ("GET", f"{API}sessions?limit=1000", b""),
    "one session": ("GET", f"{API}sessions/0", b""),
    "search": ("POST", f"{API}sessions/search", b'{"owner": {"type": "own"}, "user_metadata": {"key-0": "x"}}'),
    "search by name": ("POST", f"{API}sessions/search", b'{"owner": {"type": "own"}, "display_name": "first"}'),
    "trace": ("GET", f"{API}sessions/0/trace_export", b""),
    "move": ("PUT", f"{API}sessions/0/project", b'{"project_id": "other"}'),
    "usage": (
        "GET",
        f"{API}billing/usage/events?starting_on=2025-11-24T00:00:00Z&ending_before=2025-12-01T00:00:00Z",
        b"",
    ),
    "storage": ("GET", f"{API}billing/usage/checkpoints/current", b""),
    "audit": ("GET", f"{API}audit", b""),
    "status": ("GET", "/tinsmith/v1/status", b""),
}
PAGES = {
    "runs": ("GET", f"{API}training_runs?limit=1000", b""),
    "checkpoints": ("GET", f"{API}checkpoints?limit=1000", b""),
    "checkpoints of a run": ("GET", f"{API}training_runs/{MODEL}/checkpoints", b""),
}


@pytest.mark.parametrize("metadata", [METADATA, SMALL], ids=["large metadata", "small metadata"])
def test_what_is_stored_does_not_hold_the_loop(tmp_path: Path, metadata: str) -> None:
    async def scenario() -> None:
        async with serving(tmp_path) as server:
            ann = await server.client(scopes=("all", "admin"))
            await ann.get("get_server_capabilities")
            caller = server.services.authenticator._keys[ann.key].caller
            await fill(server, metadata, caller.org_id, caller.user_id)
            assert await slow_calls(server, ann, {**CALLS, **PAGES}, 200) == {}

    asyncio.run(asyncio.wait_for(scenario(), 240))


def test_a_page_with_more_metadata_than_an_answer_holds_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in ("sessions", "runs"):
        monkeypatch.setattr(f"tinsmith.server.routes.{module}.MAX_PAGE_BYTES", 1024 * 1024)

    async def scenario() -> None:
        async with serving(tmp_path) as server:
            ann = await server.client(scopes=("all", "admin"))
            await ann.get("get_server_capabilities")
            caller = server.services.authenticator._keys[ann.key].caller
            await fill(server, METADATA, caller.org_id, caller.user_id)
            for method, path, body in (*PAGES.values(), CALLS["usage"]):
                answer = await server.request(method, path, body, {"x-api-key": ann.key})
                assert answer.status in (400, 413), path
                assert b"metadata" in answer.body
            few = await server.request("GET", f"{API}training_runs?limit=10", b"", {"x-api-key": ann.key})
            assert few.status == 200

    asyncio.run(asyncio.wait_for(scenario(), 120))

"""Stored data of a tenant does not block the event loop either: lists, searches, traces, moves."""

from __future__ import annotations

import asyncio
import json
from functools import partial
from pathlib import Path

import pytest
from attacks.test_loop_lag import MAX_S, longest
from support import store_rows as make
from support.in_process import API, Client, Recorder, Server, run, serving
from support.loop_lag import watched_loop

from tinsmith.engine.protocol import LoraSpec, ModelCard
from tinsmith.server.ops import usage
from tinsmith.server.runs.curves import MAX_NAMES
from tinsmith.store.base import Statement, statement
from tinsmith.store.rows import StepRow
from tinsmith.wire.codecs.json_codec import encode
from tinsmith.wire.routes.own import MAX_POINTS

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


PERIOD = "starting_on=2025-11-24T00:00:00Z&ending_before=2025-12-01T00:00:00Z"
RUNS = 20_000


async def with_long_curve(server: Server) -> None:
    """As many points as one page has, each with as many metrics, of as long names, as a loss may have."""
    metrics = json.dumps({f"{'n' * 100}{number}:mean": 0.1 * number for number in range(MAX_NAMES)})
    for first in range(0, MAX_POINTS, 100):
        steps = [
            StepRow(model_id=MODEL, seq=number, step=number, datums=1, seconds=1.0, finished_at=1.0, metrics=metrics)
            for number in range(first, first + 100)
        ]
        await server.store.write(*(statement("insert_step", step) for step in steps))


async def with_many_runs(server: Server, org_id: str, user_id: str) -> None:
    """The usage of a tenant that began run after run."""
    for first in range(0, RUNS, 1000):
        owner = {"org_id": org_id, "user_id": user_id, "project_id": ""}
        rows = [make.usage(HOUR, **owner, session_id="0", run_id=f"{n}:train:0") for n in range(first, first + 1000)]
        await server.store.write(*(statement("add_usage", row) for row in rows))


def test_curves_and_usage_do_not_hold_the_loop(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with serving(tmp_path) as server:
            ann = await server.client(scopes=("all", "admin"))
            await ann.get("get_server_capabilities")
            caller = server.services.authenticator._keys[ann.key].caller
            owner = {"org_id": caller.org_id, "user_id": caller.user_id, "project_id": None}
            model = make.model(MODEL, **owner, session_id="0", lora=LORA, state="unloaded")
            await server.store.write(statement("insert_model", model))
            await with_long_curve(server)
            await with_many_runs(server, caller.org_id, caller.user_id)
            calls = {
                "curve": ("GET", f"/tinsmith/v1/training_runs/{MODEL}/metrics", b""),
                "usage": ("GET", f"/tinsmith/v1/usage?{PERIOD}&by=run", b""),
                "billing": ("GET", f"{API}billing/usage/events?{PERIOD}", b""),
            }
            assert await slow_calls(server, ann, calls, 200) == {}

    asyncio.run(asyncio.wait_for(scenario(), 120))


def test_a_tokenizer_does_not_hold_the_loop(tmp_path: Path) -> None:
    """Every key may ask for it, and those of some models have 30 MB."""
    text = json.dumps({"vocab": {f'"\\é{number}': number for number in range(600_000)}}, ensure_ascii=False)
    (tmp_path / "tokenizer.json").write_text(text)
    (tmp_path / "tokenizer_config.json").write_text('{"a": 1}')
    card = ModelCard(name="base", vocab_size=32, max_context_length=24, tokenizer_directory=str(tmp_path))

    async def scenario() -> None:
        async with serving(tmp_path, backend=Recorder(cards=[card])) as server:
            ann = await server.client(scopes=("sample",))
            answer = await ann.get("/tinsmith/v1/tokenizer", model="base")
            assert answer.json == {"tokenizer_json": text, "tokenizer_config": {"a": 1}}
            call = {"tokenizer": ("GET", "/tinsmith/v1/tokenizer?model=base", b"")}
            assert await slow_calls(server, ann, call, 200) == {}

    asyncio.run(asyncio.wait_for(scenario(), 60))


def test_more_usage_than_one_answer_is_made_of_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(usage, "MAX_ROWS", 10)

    async def scenario() -> None:
        async with serving(tmp_path) as server:
            ann, eve = await server.client(), await server.client("eve", org="other")
            rows = [make.usage(HOUR, org_id="other", run_id=str(number)) for number in range(11)]
            await server.store.write(*(statement("add_usage", row) for row in rows))
            for path in (f"/tinsmith/v1/usage?{PERIOD}", f"billing/usage/events?{PERIOD}"):
                answer = await eve.get(path)
                assert (answer.status, answer.json["field"]) == (413, "starting_on"), answer
                assert "11 rows of usage" in answer.detail
                assert (await ann.get(path)).status == 200

    run(scenario())

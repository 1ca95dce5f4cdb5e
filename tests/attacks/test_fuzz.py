"""No generated request causes a 5xx; `make fuzz` sends a million of them, this sends a few thousand."""

from __future__ import annotations

import asyncio
from pathlib import Path

from support.fuzz import fuzz
from support.in_process import begun, create_model, optim_step, run, serving

from tinsmith.wire.routes.served import SERVED_ROUTES

REQUESTS = 6000


def test_no_generated_request_breaks_the_server(tmp_path: Path) -> None:
    report = asyncio.run(asyncio.wait_for(fuzz(tmp_path, REQUESTS, seed=1), 120))
    assert report.faults == []
    assert report.restarts == 0
    assert report.memory[-1][2] < 1.2 * report.memory[0][2], "what is alive does not grow with what was asked"
    assert report.count() == REQUESTS
    routes = {route.name for route in SERVED_ROUTES}
    assert set(report.statuses) >= routes - {"delete_api_key", "finish_session"}, "every route is tried"
    done = {name for name, statuses in report.statuses.items() if min(statuses) < 400}
    assert len(done) > 0.9 * len(routes), f"a fuzz that is refused at the door would prove nothing: {routes - done}"
    assert {"delete_run", "import_parts", "import_weights", "run_metrics", "tokenizer"} <= done


def test_a_number_that_a_copy_took_is_refused_for_good(tmp_path: Path) -> None:
    """Found by fuzzing: it was a 503, which clients try again for ever."""

    async def scenario() -> None:
        async with serving(tmp_path) as server:
            ann, session, model = await begun(server)
            path = await ann.save(model, 1, "one")
            copied = await ann.post("copy_weights", {"source_path": path, "session_id": session, "model_seq_id": 7})
            assert copied.status == 200, copied.body
            answer = await ann.post("create_model", create_model(session, 7))
            assert answer.status == 400, answer.body
            assert "exists already" in answer.detail

    run(scenario())


def test_there_is_no_number_behind_the_last(tmp_path: Path) -> None:
    """Found by fuzzing: the refusal could not be written, again and again."""

    async def scenario() -> None:
        async with serving(tmp_path) as server:
            ann, _, model = await begun(server)
            assert (await ann.post("optim_step", optim_step(model, 2**63 - 1))).status == 200
            answer = await ann.post("optim_step", optim_step(model, None))
            assert answer.status == 400, answer.body
            assert "is the largest number" in answer.detail

    run(scenario())

"""An engine that dies while it is starting: accepted work waits for it, with the reason, and is not blamed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest
from support.backends import ONE, arithmetic_spec, kill
from support.durable import Training
from support.in_process import BASE, create_model, run, sample, serving, until

from tinsmith.engine.backend.local import ProcessBackend
from tinsmith.engine.backend.supervisor import SupervisorOptions
from tinsmith.server.runs import replay

CARD = msgspec.structs.replace(ONE, name=BASE)
OTHER = msgspec.structs.replace(ONE, name="other/model")


@pytest.fixture(autouse=True)
def _no_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replay, "RETRY_S", (0.0, 0.0, 0.001))


def engine(folder: Path, start_deadline_s: float = 600.0, **options: Any) -> Any:
    """An engine with a line in `starts` for each of its starts."""
    spec = arithmetic_spec(CARD, start_log=str(folder / "starts"), **options)
    return ProcessBackend(
        [spec], SupervisorOptions(backoff_s=0.01, retry_failed_s=0.0, start_deadline_s=start_deadline_s)
    )


def starts(folder: Path) -> int:
    path = folder / "starts"
    return len(path.read_text().splitlines()) if path.exists() else 0


def test_accepted_work_outlives_an_engine_that_dies_while_it_starts(tmp_path: Path) -> None:
    async def scenario() -> None:
        backend = engine(tmp_path, die_at_start=6)
        async with serving(tmp_path, backend=backend, poll_s=0.05) as server:
            ann = await server.client()
            session = await ann.session()
            sampler = await ann.sampler(session)
            made = await ann.post("create_model", create_model(session))
            drawn = await ann.post("asample", sample(sampler, 1))
            await until(lambda: starts(tmp_path) >= 3)
            for promise in (made, drawn):
                waiting = (await ann.poll(promise)).json["queue_state_reason"]
                assert (
                    "while it was starting and is being started again; the last time it was killed by SIGKILL"
                    in waiting
                )
            late = await ann.post("asample", sample(sampler, 2))
            for promise in (made, drawn, late):
                assert "error" not in await ann.outcome(promise)
            assert starts(tmp_path) == 7
            suspects = backend._supervisors[BASE]._queue.suspects
            assert suspects.is_quiet, "nothing was computed, so nothing is to blame"

    run(scenario())


def test_a_run_that_exists_waits_with_the_reason(tmp_path: Path) -> None:
    async def scenario() -> None:
        backend = engine(tmp_path)
        async with serving(tmp_path, backend=backend, poll_s=0.05) as server:
            ann = await server.client()
            training = Training(ann, await ann.model(await ann.session()))
            await training.step(1)
            supervisor = backend._supervisors[BASE]
            supervisor.spec.options["die_at_start"] = 5  # its first start is done
            await kill(backend, BASE)
            promises = await training.ask(2)
            await until(lambda: starts(tmp_path) >= 3)
            assert "while it was starting" in (await ann.poll(promises[0])).json["queue_state_reason"]
            for promise in promises:
                assert "error" not in await ann.outcome(promise)

    run(scenario())


def test_after_the_deadline_work_is_failed_with_the_reason_and_later_work_is_tried(tmp_path: Path) -> None:
    async def scenario() -> None:
        backend = engine(tmp_path, start_deadline_s=1.0, die_at_start=10_000)
        async with serving(tmp_path, backend=backend, poll_s=0.05) as server:
            ann = await server.client()
            session = await ann.session()
            made = await ann.outcome(await ann.post("create_model", create_model(session)))
            assert made["category"] == "server"
            assert "cannot start: killed by SIGKILL" in made["error"]
            assert "(tried for 1 s)" in made["error"]
            ready = await ann.get("/readyz")
            assert (ready.status, ready.json["status"]) == (503, "failed")
            backend._supervisors[BASE].spec.options["die_at_start"] = 0
            await ann.model(session, 1)
            assert (await ann.get("/readyz")).status == 200

    run(scenario())


def test_each_job_has_its_own_deadline_and_nobody_joins_a_lost_cause(tmp_path: Path) -> None:
    """A job that came late waits as long as the first did; once that one is failed, others are refused."""

    async def scenario() -> None:
        backend = engine(tmp_path, die_at_start=10_000)
        async with serving(tmp_path, backend=backend, poll_s=0.05) as server:
            ann = await server.client()
            sampler = await ann.sampler(await ann.session())
            first, second = [await ann.post("asample", sample(sampler, seq)) for seq in (1, 2)]
            supervisor = backend._supervisors[BASE]
            await until(lambda: starts(tmp_path) >= 2)
            supervisor._starting_since -= 600
            supervisor._queue.get(first.json["request_id"]).since -= 600
            assert "error" in await ann.outcome(first)
            assert (await ann.poll(second)).status == 408
            refused = await ann.outcome(await ann.post("asample", sample(sampler, 3)))
            assert "cannot start: killed by SIGKILL" in refused["error"]
            supervisor._queue.get(second.json["request_id"]).since -= 600
            assert "error" in await ann.outcome(second)

    run(scenario())


def test_what_the_engine_calls_final_fails_at_once(tmp_path: Path) -> None:
    async def scenario() -> None:
        backend = engine(tmp_path, refuse=10_000)
        async with serving(tmp_path, backend=backend, poll_s=0.05) as server:
            ann = await server.client()
            made = await ann.outcome(await ann.post("create_model", create_model(await ann.session())))
            assert "start 1 was told to fail" in made["error"]
            assert starts(tmp_path) == 1

    run(scenario())


def test_an_engine_without_memory_to_start_is_tried_again(tmp_path: Path) -> None:
    async def scenario() -> None:
        backend = engine(tmp_path, no_memory=4)
        async with serving(tmp_path, backend=backend, poll_s=0.05) as server:
            ann = await server.client()
            await ann.model(await ann.session())
            assert starts(tmp_path) == 5

    run(scenario())


def test_an_engine_that_does_not_come_up_holds_no_other_base_model(tmp_path: Path) -> None:
    async def scenario() -> None:
        backend: Any = ProcessBackend([arithmetic_spec(CARD), arithmetic_spec(OTHER, hang=True)])
        async with serving(tmp_path, backend=backend, poll_s=0.05) as server:
            ann = await server.client()
            session = await ann.session()
            training = Training(ann, await ann.model(session))
            await training.step(1)
            stuck = await ann.post("create_model", create_model(session, 1, base_model=OTHER.name))
            await kill(backend, BASE)
            await training.step(2)
            await ann.model(session, 2)
            assert "is loading the model" in (await ann.poll(stuck)).json["queue_state_reason"]

    run(scenario())

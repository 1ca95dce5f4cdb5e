"""Promises, the polls that wait for them, and completion logs."""

from __future__ import annotations

import asyncio
from typing import Any

from support.in_process import Clock, run, settled

from tinsmith.server.jobs import pending_results
from tinsmith.server.jobs.pending_results import Broker, CompletionLog, Outcome, Promise

DONE = Outcome(b"{}", "json")


def promise(request_id: str = "r1", lane: str = "lane", sampling_client: tuple[str, int] | None = None) -> Promise:
    return Promise(
        request_id=request_id,
        kind="sample",
        lane=lane,
        session_id="s",
        org_id="o",
        user_id="u",
        created_at=0.0,
        sampling_client=sampling_client,
    )


def test_everyone_who_waits_is_told_at_once() -> None:
    async def scenario() -> None:
        broker = Broker()
        made = promise()
        broker.open(made)
        assert broker.count() == 1
        waiting = [asyncio.create_task(broker.wait(made, 3600)) for _ in range(3)]
        await settled()
        broker.settle("r1", DONE)
        assert await asyncio.gather(*waiting) == [DONE] * 3
        assert broker.count() == 0
        assert broker.pending("r1") is None
        assert broker.recent("r1") == (made, DONE)
        assert made.waiters == set()

    run(scenario())


def test_a_wait_ends_without_an_outcome_and_can_be_repeated() -> None:
    async def scenario() -> None:
        broker = Broker()
        made = promise()
        broker.open(made)
        assert await broker.wait(made, 0.0) is None
        assert made.waiters == set()
        again = asyncio.create_task(broker.wait(made, 3600))
        await settled()
        broker.settle("r1", DONE)
        assert await again == DONE

    run(scenario())


def test_a_cancelled_wait_leaves_nothing_behind() -> None:
    async def scenario() -> None:
        broker = Broker()
        made = promise()
        broker.open(made)
        waiting = asyncio.create_task(broker.wait(made, 3600))
        await settled()
        waiting.cancel()
        await asyncio.gather(waiting, return_exceptions=True)
        assert made.waiters == set()
        broker.settle("r1", DONE)

    run(scenario())


def test_the_first_outcome_stays() -> None:
    async def scenario() -> None:
        broker = Broker()
        made = promise()
        broker.open(made)
        broker.settle("r1", DONE)
        broker.settle("r1", Outcome(b"other", "error"))
        broker.settle("unknown", DONE)
        assert await broker.wait(made, 3600) == DONE

    run(scenario())


def test_recent_results_are_bounded_by_bytes_and_the_newest_stays() -> None:
    async def scenario() -> None:
        broker = Broker(kept_bytes=3 * (pending_results.ENTRY_BYTES + 100))
        for number in range(6):
            broker.open(promise(f"r{number}"))
            broker.settle(f"r{number}", Outcome(b"x" * 100, "json"))
        assert [f"r{n}" for n in range(6) if broker.recent(f"r{n}")] == ["r3", "r4", "r5"]
        broker.open(promise("huge"))
        broker.settle("huge", Outcome(b"x" * 10**5, "json"))
        assert broker.recent("huge") is not None
        assert broker.recent("r5") is None
        assert await broker.wait(promise("r0"), 3600) is None  # gone from memory: callers ask the store

    run(scenario())


def test_what_belongs_to_lanes_that_are_over_is_let_go() -> None:
    async def scenario() -> None:
        broker = Broker(Clock())
        for lane in ("a", "b"):
            broker.open(promise(f"of-{lane}", lane, (lane, 0)))
            broker.settle(f"of-{lane}", DONE)
        kept = broker.completion_log("o", ("b", 0))
        dropped = broker.completion_log("o", ("a", 0))
        broker.forget(["a"])
        assert broker.recent("of-a") is None
        assert broker.recent("of-b") is not None
        assert broker.completion_log("o", ("b", 0)) is kept
        assert broker.completion_log("o", ("a", 0)) is not dropped

    run(scenario())


def test_completions_of_a_sampler_come_in_order_behind_a_cursor() -> None:
    async def scenario() -> None:
        clock = Clock(5.0)
        broker = Broker(clock)
        log = broker.completion_log("o", ("s", 0))
        assert log.began == 5_000_000
        for number, outcome in enumerate((DONE, Outcome(b"{}", "error"), Outcome(b"12345", "protobuf"))):
            broker.open(promise(f"r{number}", "s", ("s", 0)))
            broker.settle(f"r{number}", outcome)
        events = log.after(log.began)
        assert [(event.request_id, event.size_bytes, event.is_error) for event in events] == [
            ("r0", 2, False),
            ("r1", 2, True),
            ("r2", 5, False),
        ]
        cursors = [event.cursor for event in events]
        assert cursors == sorted(set(cursors))
        assert [event.request_id for event in log.after(events[0].cursor)] == ["r1", "r2"]
        assert log.after(events[-1].cursor) == []

    run(scenario())


def test_cursors_grow_when_the_clock_stands_still_or_goes_back() -> None:
    clock = Clock(10.0)
    log = CompletionLog(clock)
    for number in range(3):
        clock.advance(-1)
        log.add(f"r{number}", 0, is_error=False)
    cursors = [event.cursor for event in log.after(0)]
    assert cursors == [10_000_001, 10_000_002, 10_000_003]
    clock.now = 20.0
    log.add("later", 0, is_error=False)
    assert log.after(0)[-1].cursor == 20_000_000


def test_a_poll_of_a_feed_waits_for_the_first_completion() -> None:
    async def scenario() -> None:
        log = CompletionLog(Clock())
        assert await log.wait(log.began, 0.0) == []
        polls = [asyncio.create_task(log.wait(log.began, 3600)) for _ in range(2)]
        await settled()
        log.add("r1", 1, is_error=False)
        log.add("r2", 1, is_error=False)
        found: Any = await asyncio.gather(*polls)
        assert [[event.request_id for event in events] for events in found] == [["r1", "r2"]] * 2
        assert [event.request_id for event in await log.wait(log.began, 3600)] == ["r1", "r2"]

    run(scenario())


def test_a_full_feed_says_from_where_the_store_must_be_asked(monkeypatch: Any) -> None:
    monkeypatch.setattr(pending_results, "KEPT_EVENTS", 3)
    log = CompletionLog(Clock(1.0))
    for number in range(5):
        log.add(f"r{number}", 0, is_error=False)
    kept = log.after(0)
    assert [event.request_id for event in kept] == ["r2", "r3", "r4"]
    assert log.began == kept[0].cursor - 1  # what is not in memory is not behind this cursor


def test_feeds_are_bounded_and_the_longest_unused_goes(monkeypatch: Any) -> None:
    monkeypatch.setattr(pending_results, "MAX_COMPLETION_LOGS", 2)

    async def scenario() -> None:
        broker = Broker()
        first, second = broker.completion_log("o", ("lane", 0)), broker.completion_log("o", ("lane", 1))
        assert broker.completion_log("o", ("lane", 0)) is first
        broker.completion_log("o", ("lane", 2))
        assert broker.completion_log("o", ("lane", 0)) is first
        assert broker.completion_log("o", ("lane", 1)) is not second

    run(scenario())

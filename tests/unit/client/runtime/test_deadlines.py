"""Deadlines of calls: which one applies, what it ends, and what its error says."""

from __future__ import annotations

import asyncio
import inspect
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest

from tinsmith import deadline
from tinsmith.client.runtime.deadlines import RUNNING, Deadline, limit_of, patience_s
from tinsmith.client.runtime.runner import Runner
from tinsmith.errors import APITimeoutError, InvalidInputError, TinkerError

USUAL = Deadline(600.0, "result_deadline_s of the client's settings")


@pytest.fixture
def runner() -> Iterator[Runner]:
    made = Runner()
    yield made
    made.close(timeout_s=10)


def left_s() -> float | None:
    """What a call that begins now has left, in whole seconds."""
    limit = limit_of("call", USUAL)
    return None if limit is None else round(limit.left_s)


def test_the_block_goes_before_the_client_and_the_inner_block_before_the_outer() -> None:
    assert left_s() == 600
    with deadline(30):
        assert left_s() == 30
        with deadline(7200.0):
            assert left_s() == 7200
        with deadline(None):
            assert left_s() is None
        assert left_s() == 30
    assert left_s() == 600


def test_a_block_ends_with_an_error_inside() -> None:
    with pytest.raises(KeyError), deadline(30):
        raise KeyError
    assert left_s() == 600


def test_each_call_counts_from_its_own_start() -> None:
    with deadline(30):
        first = limit_of("first", None)
        time.sleep(0.02)
        second = limit_of("second", None)
    assert first is not None
    assert second is not None
    assert second.left_s - first.left_s >= 0.02


def test_other_threads_and_tasks_are_not_affected() -> None:
    seen: list[float | None] = []
    with deadline(30):
        thread = threading.Thread(target=lambda: seen.append(left_s()))
        thread.start()
        thread.join()

    async def limited() -> float | None:
        with deadline(5):
            await asyncio.sleep(0.01)
            return left_s()

    async def unlimited() -> float | None:
        await asyncio.sleep(0)
        return left_s()

    async def run() -> list[float | None]:
        return list(await asyncio.gather(limited(), unlimited()))

    assert [*seen, *asyncio.run(run())] == [600, 5, 600]


@pytest.mark.parametrize("seconds", [0, -1, True, "3", float("nan"), float("inf")])
def test_what_is_no_deadline_is_refused_at_once(seconds: Any) -> None:
    with pytest.raises(InvalidInputError, match="seconds"):
        deadline(seconds)


def test_the_error_says_what_was_late_and_where_its_deadline_was_set() -> None:
    frame = inspect.currentframe()
    assert frame is not None
    with deadline(2.5):
        line = frame.f_lineno - 1
        limit = limit_of("optim_step of m", USUAL)
    assert limit is not None
    error = limit.error(goes_on=True)

    assert isinstance(error, APITimeoutError)
    assert not error.retryable
    place = f"{__file__}:{line}"
    assert str(error) == (
        f"optim_step of m: no result 2.5 s after the call (tinsmith.deadline(2.5) at {place}); "
        "the server may still carry it out"
    )
    usual = limit_of("sample of s", USUAL)
    assert usual is not None
    assert str(usual.error(goes_on=False)) == (
        "sample of s: no result 600 s after the call (result_deadline_s of the client's settings)"
    )


def test_the_runner_ends_what_is_late_whatever_it_waits_for(runner: Runner) -> None:
    cancelled = threading.Event()

    async def stubborn() -> None:
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            cancelled.set()
            await asyncio.sleep(0.5)  # tidying up does not hold the caller up
            raise

    with deadline(0.05):
        limit = limit_of("call", None)
    started = time.monotonic()
    error = runner.submit(stubborn(), limit=limit).exception(10)

    assert isinstance(error, APITimeoutError)
    assert time.monotonic() - started < 0.45
    assert cancelled.wait(10)


def test_what_is_in_time_has_its_result(runner: Runner) -> None:
    with deadline(30):
        future = runner.submit(asyncio.sleep(0, "done"), limit=limit_of("call", None))
    assert future.result(10) == "done"


def test_parts_of_an_operation_share_its_limit_and_others_do_not(runner: Runner) -> None:
    async def seen() -> tuple[Any, float]:
        return limit_of("part", USUAL), patience_s(300.0)

    with deadline(30):
        limit = limit_of("whole", None)
        within = runner.submit(seen(), limit=limit).result(10)
    without = runner.submit(seen()).result(10)

    assert within[0] is limit
    assert 29 < within[1] <= 30
    assert without[0] is not limit
    assert without[1] == 300.0
    assert RUNNING.get() is None


def test_operations_that_start_together_keep_their_own_contexts(runner: Runner) -> None:
    """They are started in the loop by one wake-up, whoever asked for it."""
    held = threading.Event()

    async def hold() -> None:
        held.wait(10)

    runner.submit(hold())
    futures = []
    for seconds in (30, None, 60):
        with deadline(seconds):
            limit = limit_of("call", USUAL)
            futures.append(runner.submit(_running(), limit=limit))
    held.set()
    assert [future.result(10) for future in futures] == [30, None, 60]


async def _running() -> float | None:
    limit = RUNNING.get()
    return None if limit is None else round(limit.left_s)


def test_a_late_operation_of_a_closed_runner_is_told_that_it_is_closed(runner: Runner) -> None:
    with deadline(60):
        future = runner.submit(asyncio.Event().wait(), limit=limit_of("call", None))
    runner.close(timeout_s=10)
    error = future.exception(10)
    assert type(error) is TinkerError
    assert "closed" in str(error)

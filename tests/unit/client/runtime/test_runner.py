"""Closing a client's loop: every waiting caller gets an error, however many there are, and nothing is left running."""

from __future__ import annotations

import asyncio
import threading
import warnings
from typing import Any

import pytest

from tinsmith.client.runtime.futures import Future
from tinsmith.client.runtime.runner import Runner
from tinsmith.errors import TinkerError


async def for_ever() -> None:
    await asyncio.Event().wait()


def waiting(runner: Runner, count: int) -> list[Future[None]]:
    """Operations that are under way when this returns."""
    futures = [runner.submit(for_ever()) for _ in range(count)]
    runner.submit(asyncio.sleep(0)).result(30)
    return futures


def thread_of(runner: Runner) -> threading.Thread:
    assert runner._thread is not None
    return runner._thread


def test_all_are_told_when_close_returns() -> None:
    runner = Runner()
    futures = waiting(runner, 5_000)
    thread = thread_of(runner)
    runner.close(timeout_s=30)

    assert not thread.is_alive()
    assert {type(future.exception(0)) for future in futures} == {TinkerError}
    assert "closed before the operation finished" in str(futures[0].exception(0))


def test_what_is_last_sees_all_that_is_under_way_and_runs_when_it_is_cancelled() -> None:
    runner, seen, open_names = Runner(), [], {"a", "b"}

    async def hold(name: str) -> None:
        try:
            await for_ever()
        finally:
            open_names.discard(name)

    for name in sorted(open_names):
        runner.submit(hold(name))
    runner.submit(asyncio.sleep(0)).result(30)
    thread = thread_of(runner)

    def last() -> Any:
        seen.append((threading.current_thread() is thread, set(open_names)))
        return say_goodbye()

    async def say_goodbye() -> None:
        await asyncio.sleep(0)
        seen.append(("goodbye", set(open_names)))

    runner.close(last, timeout_s=30)
    assert seen == [(True, {"a", "b"}), ("goodbye", set())]
    assert not thread.is_alive()


def test_a_result_that_is_there_stays() -> None:
    runner = Runner()
    done = runner.submit(asyncio.sleep(0, "value"))
    assert done.result(30) == "value"
    cancelled = waiting(runner, 1)[0]
    assert cancelled.cancel()
    runner.close(timeout_s=30)
    assert done.result(0) == "value"
    assert cancelled.cancelled()


def test_an_operation_that_closes_at_its_end_gives_its_result() -> None:
    runner = Runner()

    async def close_and_answer() -> str:
        runner.close(lambda: asyncio.sleep(0))
        return "value"

    assert runner.submit(close_and_answer()).result(30) == "value"


def test_closing_from_inside_ends_the_thread() -> None:
    runner = Runner()
    waits = waiting(runner, 1)[0]
    thread = thread_of(runner)

    async def close() -> None:
        runner.close(lambda: asyncio.sleep(0))

    runner.submit(close())
    assert isinstance(waits.exception(30), TinkerError)
    thread.join(30)
    assert not thread.is_alive()
    assert runner.is_closed


def test_what_is_submitted_just_before_the_end_is_told_of_it() -> None:
    """The loop hears of the end before it hears of the operation."""
    runner = Runner()
    waiting(runner, 1)
    thread, loop = thread_of(runner), runner._loop
    assert loop is not None
    wake, loop.call_soon_threadsafe = loop.call_soon_threadsafe, lambda *_, **__: None  # type: ignore[assignment,method-assign]
    submitted = runner.submit(for_ever())
    loop.call_soon_threadsafe = wake  # type: ignore[method-assign]
    runner.close(timeout_s=30)
    assert isinstance(submitted.exception(0), TinkerError)
    assert not thread.is_alive()


def test_closing_twice_and_unused_is_harmless() -> None:
    runner = Runner()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(2):
            runner.close(lambda: asyncio.sleep(0))
    with pytest.raises(TinkerError, match="This client is closed"):
        runner.submit(for_ever())

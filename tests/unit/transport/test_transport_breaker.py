"""The circuit breaker as a table, and the gate that limits concurrent requests."""

from __future__ import annotations

import asyncio

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tinsmith.errors import APIConnectionError, APITimeoutError, RequestInfo, WireError
from tinsmith.transport.gate import BreakerState, CircuitBreaker, Gate
from tinsmith.wire.rules.faults import status_error

REQUEST = RequestInfo("POST", "http://localhost:8000/api/v1/asample")
ERRORS = {
    "down": APIConnectionError(REQUEST, "POST http://localhost:8000/api/v1/asample: nothing listens there."),
    "slow": APITimeoutError(REQUEST, "no response in 60 s."),
    "500": status_error(500, b"oops", {}, REQUEST),
    "503": status_error(503, b"", {}, REQUEST),
    "404": status_error(404, b"", {}, REQUEST),
    "429": status_error(429, b"", {}, REQUEST),
    "unclear": WireError("malformed"),
}


class Clock:
    now = 1000.0

    def __call__(self) -> float:
        return self.now


def run(script: str) -> CircuitBreaker:
    """Follow a script: an error's name or `ok` reports; `pass` and `held` check; `+5` waits; `=open` looks."""
    clock = Clock()
    breaker = CircuitBreaker(threshold=3, cool_down_s=10.0, clock=clock)
    for step in script.split():
        if step.startswith("+"):
            clock.now += float(step)
        elif step.startswith("="):
            assert breaker.state("asample") == step[1:], script
        elif step == "pass":
            breaker.check("asample")
        elif step == "held":
            with pytest.raises(APIConnectionError):
                breaker.check("asample")
        elif step == "ok":
            breaker.succeeded("asample")
        else:
            breaker.failed("asample", ERRORS[step])
    return breaker


@pytest.mark.parametrize(
    "script",
    [
        "=closed pass ok =closed pass",
        "down down =closed pass",
        "down slow 500 =open held",
        "503 503 503 =open held",
        "down down ok down down =closed pass",
        "down down 404 down down =closed pass",
        "down down 429 down down =closed pass",
        "404 404 404 404 404 =closed pass",
        "unclear unclear unclear unclear =closed pass",
        "down down unclear down =open",
        # The cool-down, and the one that passes after it.
        "down down down +9.9 =open held +0.2 =half_open pass held =half_open",
        "down down down +11 pass ok =closed pass pass pass",
        "down down down +11 pass 404 =closed pass",
        "down down down +11 pass down =open held +9 held +2 pass",
        "down down down +11 pass down +11 pass ok =closed down down =closed pass",
        # One that never reports back, and one that says nothing about the server.
        "down down down +11 pass held +10 pass held",
        "down down down +11 pass unclear pass held",
        # Requests that were under way when it opened.
        "down down down +9 down down +2 pass",
        "down down down +1 unclear held",
        "down down down +1 ok =closed pass",
    ],
)
def test_states(script: str) -> None:
    run(script)


def test_endpoints_do_not_affect_each_other() -> None:
    breaker = run("down down down held")
    breaker.check("optim_step")
    assert breaker.state("optim_step") is BreakerState.CLOSED


def test_a_refusal_says_since_when_how_often_why_and_until_when() -> None:
    clock = Clock()
    breaker = CircuitBreaker(threshold=3, cool_down_s=10.0, clock=clock)
    for name in ("500", "500", "down"):
        breaker.failed("asample", ERRORS[name])
    clock.now += 4
    with pytest.raises(APIConnectionError) as caught:
        breaker.check("asample")
    assert str(caught.value) == (
        "asample: not sent, because the last 3 requests failed. No request has been sent for 4.0 s; the next one may"
        " be sent in 6.0 s. Last error: POST http://localhost:8000/api/v1/asample: nothing listens there."
    )
    assert caught.value.request == REQUEST
    assert caught.value.retryable


@pytest.mark.parametrize("retryable", [True, False])
def test_a_refusal_is_retryable_if_the_last_failure_was(retryable: bool) -> None:
    breaker = CircuitBreaker(threshold=1)
    breaker.failed("x", status_error(500, b"oops", {"x-should-retry": str(retryable).lower()}, REQUEST))
    with pytest.raises(APIConnectionError) as caught:
        breaker.check("x")
    assert caught.value.retryable is retryable
    assert isinstance(caught.value.__cause__, type(ERRORS["500"]))


def test_a_server_that_says_when_to_come_back_is_not_failing() -> None:
    breaker = CircuitBreaker(threshold=2)
    for _ in range(9):
        breaker.failed("x", status_error(503, b"", {"Retry-After": "1"}, REQUEST))
    breaker.check("x")


def test_requests_that_failed_together_are_one_failure() -> None:
    clock = Clock()
    breaker = CircuitBreaker(threshold=3, cool_down_s=10.0, clock=clock)
    for _ in range(2):
        sent = [breaker.check("x") for _ in range(100)]
        clock.now += 1
        for sent_at in sent:
            breaker.failed("x", ERRORS["down"], sent_at)
        clock.now += 1
    assert breaker.state("x") is BreakerState.CLOSED
    breaker.failed("x", ERRORS["down"], breaker.check("x"))
    assert breaker.state("x") is BreakerState.OPEN


def test_a_probe_that_is_still_under_way_after_a_while_closes_it() -> None:
    clock = Clock()
    breaker = CircuitBreaker(threshold=1, cool_down_s=1.0, settle_s=5.0, clock=clock)
    breaker.failed("poll", ERRORS["down"])
    clock.now += 1
    breaker.check("poll")  # a long poll: no answer for a minute if all is well
    for _ in range(3):
        clock.now += 1.1
        breaker.check("poll")
        with pytest.raises(APIConnectionError):
            breaker.check("poll")
    clock.now += 2
    for _ in range(9):
        breaker.check("poll")
    assert breaker.state("poll") is BreakerState.CLOSED


def test_a_probe_that_was_cancelled_lets_the_next_one_try() -> None:
    clock = Clock()
    breaker = CircuitBreaker(threshold=1, cool_down_s=10.0, clock=clock)
    breaker.failed("x", ERRORS["down"])
    clock.now += 10
    breaker.failed("x", asyncio.CancelledError(), breaker.check("x"))
    breaker.check("x")


def test_defaults() -> None:
    breaker = CircuitBreaker()
    for _ in range(9):
        breaker.failed("x", ERRORS["down"])
    breaker.check("x")
    breaker.failed("x", ERRORS["down"])
    with pytest.raises(APIConnectionError, match=r"last 10 requests.*may be sent in (10\.0|9\.9) s"):
        breaker.check("x")


async def waiters(gate: Gate, count: int) -> list[asyncio.Task[None]]:
    tasks = [asyncio.create_task(gate.enter()) for _ in range(count)]
    await asyncio.sleep(0)
    return tasks


async def admitted(tasks: list[asyncio.Task[None]]) -> list[bool]:
    for _ in range(3):
        await asyncio.sleep(0)
    return [task.done() and not task.cancelled() for task in tasks]


def test_a_gate_lets_so_many_in_and_the_rest_in_their_order() -> None:
    async def scenario() -> None:
        gate = Gate(2)
        assert gate.try_enter()
        await gate.enter()
        assert not gate.try_enter()
        tasks = await waiters(gate, 3)
        assert await admitted(tasks) == [False, False, False]
        gate.leave()
        assert not gate.try_enter()
        assert await admitted(tasks) == [True, False, False]
        gate.leave()
        gate.leave()
        assert await admitted(tasks) == [True, True, True]
        gate.leave()
        assert gate.try_enter()
        assert not gate.try_enter()

    asyncio.run(scenario())


@pytest.mark.parametrize("leaves_first", [True, False])
def test_who_gives_up_waiting_takes_no_place(leaves_first: bool) -> None:
    async def scenario() -> None:
        gate = Gate(1)
        assert gate.try_enter()
        first, second = await waiters(gate, 2)
        if leaves_first:
            gate.leave()  # the place is already handed to the first, who then gives up
            first.cancel()
        else:
            first.cancel()
            gate.leave()
        assert await admitted([first, second]) == [False, True]
        assert first.cancelled()
        gate.leave()
        assert gate.try_enter()

    asyncio.run(scenario())


def test_a_gate_grows_while_more_wait_than_get_in() -> None:
    async def scenario() -> None:
        gate = Gate(2, max_limit=5, grow_by=2, grow_after_s=3600)
        tasks = await waiters(gate, 9)
        assert await admitted(tasks) == [True] * 2 + [False] * 7
        gate.check()
        assert gate.limit == 4
        assert await admitted(tasks) == [True] * 4 + [False] * 5
        for _ in range(3):
            gate.leave()
        gate.check()  # three got in and two still wait: it goes on fast enough
        assert gate.limit == 4
        gate.check()  # nobody got in since
        assert gate.limit == 5
        gate.check()
        assert gate.limit == 5
        assert await admitted(tasks) == [True] * 8 + [False]
        for task in tasks:
            task.cancel()

    asyncio.run(scenario())


def test_a_gate_watches_by_itself_only_while_somebody_waits() -> None:
    async def scenario() -> None:
        gate = Gate(1, max_limit=2, grow_by=1, grow_after_s=0.001)
        await asyncio.gather(*(await waiters(gate, 2)))
        assert gate.limit == 2

    asyncio.run(scenario())


def test_a_gate_without_room_to_grow_stays() -> None:
    async def scenario() -> None:
        gate = Gate(1, max_limit=1, grow_by=64)
        tasks = await waiters(gate, 3)
        gate.check()
        assert await admitted(tasks) == [True, False, False]
        gate.close()
        assert await admitted(tasks) == [True, True, True]

    asyncio.run(scenario())


@given(st.lists(st.sampled_from(["enter", "leave", "cancel", "check"]), max_size=60))
def test_a_gate_never_loses_a_place(steps: list[str]) -> None:
    async def scenario() -> None:
        gate = Gate(2, max_limit=4, grow_by=1, grow_after_s=3600)
        waiting: list[asyncio.Task[None]] = []
        inside = 0
        for step in steps:
            if step == "enter":
                waiting += await waiters(gate, 1)
            elif step == "leave" and inside:
                gate.leave()
                inside -= 1
            elif step == "cancel" and waiting:
                waiting[len(waiting) // 2].cancel()
            elif step == "check":
                gate.check()
            done = await admitted(waiting)
            inside += sum(done)
            waiting = [task for task, is_in in zip(waiting, done, strict=True) if not is_in and not task.cancelled()]
            assert inside <= gate.limit
            assert not waiting or inside == gate.limit
        for task in waiting:
            task.cancel()

    asyncio.run(scenario())

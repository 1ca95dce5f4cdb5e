"""Which errors are retried, after which delay, and when the loop gives up."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from datetime import UTC, datetime, timedelta
from email.utils import format_datetime
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tinsmith.errors import (
    APIConnectionError,
    APIResponseValidationError,
    APIStatusError,
    APITimeoutError,
    InvalidInputError,
    RateLimitError,
    RequestFailedError,
    ResponseInfo,
    RetryableException,
    TinkerError,
    WireError,
)
from tinsmith.transport.retry import NO_RETRY, Retries, RetryPolicy, RetryWait, may_resend, retrying
from tinsmith.wire.rules.faults import status_error

DEFAULT = RetryPolicy()


def answer(status: int, headers: dict[str, str] | None = None, body: bytes = b"x") -> Exception:
    return status_error(status, body, headers or {})


def lasting(error: APIConnectionError) -> APIConnectionError:
    error.retryable = False
    return error


def delay(
    error: Exception, policy: RetryPolicy = DEFAULT, attempt: int = 1, elapsed_s: float = 0.0, **rest: Any
) -> Any:
    return policy.next_delay_s(error, attempt, elapsed_s, lambda: 0.5, **rest)


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        *[(answer(status), 0.25) for status in (408, 409, 429, 500, 502, 503, 504, 529, 599)],
        *[(answer(status), None) for status in (400, 401, 403, 404, 405, 410, 413, 418, 422, 451)],
        (answer(402), 5.0),
        (APIConnectionError(), 0.25),
        (APITimeoutError(), 0.25),
        (lasting(APIConnectionError()), None),
        (RetryableException("lost"), 0.25),
        (InvalidInputError("no"), None),
        (WireError("no"), None),
        (RequestFailedError("no", "1"), None),
        (APIResponseValidationError(ResponseInfo(200)), None),
        (ValueError("not ours"), None),
        # The server's own word goes first, whatever the status.
        (answer(400, {"x-should-retry": "true"}), 0.25),
        (answer(404, {"X-Should-Retry": "true"}), 0.25),
        (answer(503, {"x-should-retry": "false"}), None),
        (answer(409, {"x-should-retry": "false"}), None),
        (answer(402, {"x-should-retry": "false"}), None),
        (answer(503, {"x-should-retry": "perhaps"}), 0.25),
        # A 400 without a body is a proxy's.
        (answer(400, {"content-length": "0"}, b""), 0.25),
        (answer(400, {"Content-Length": "0"}, b""), 0.25),
        (answer(400, {"content-length": "0", "x-should-retry": "false"}, b""), None),
        (answer(400, {"content-length": "1"}), None),
        (answer(422, {"content-length": "0"}, b""), None),
        # How long the server wants us to wait.
        (answer(503, {"retry-after-ms": "1500"}), 1.5),
        (answer(503, {"Retry-After": "7"}), 7.0),
        (answer(429, {"retry-after": "0.25"}), 0.25),
        (answer(503, {"retry-after-ms": "1", "retry-after": "9"}), 0.001),
        (answer(402, {"retry-after": "9"}), 9.0),
        (answer(503, {"retry-after": "60"}), 60.0),
        (answer(503, {"retry-after": "60.1"}), 0.25),
        (answer(503, {"retry-after": "0"}), 0.25),
        (answer(503, {"retry-after": "-3"}), 0.25),
        (answer(503, {"retry-after": "soon"}), 0.25),
        (answer(503, {"retry-after": "nan"}), 0.25),
        (answer(503, {"retry-after": "Sun, 06 Nov 1994 08:49:37 GMT"}), 0.25),
        (answer(404, {"retry-after": "7"}), None),
    ],
)
def test_what_is_tried_again_and_when(error: Exception, expected: float | None) -> None:
    assert delay(error) == expected


def test_retry_after_may_be_a_date() -> None:
    moment = datetime.now(UTC) + timedelta(seconds=30)
    waited = delay(answer(503, {"retry-after": format_datetime(moment, usegmt=True)}))
    assert 20 < waited <= 30


@pytest.mark.parametrize(
    ("attempt", "random", "expected"),
    [
        (1, 1.0, 0.5),
        (2, 1.0, 1.0),
        (3, 1.0, 2.0),
        (7, 1.0, 30.0),
        (5000, 1.0, 30.0),
        (7, 0.5, 15.0),
        (1, 0.0, 0.05),
        (9, 0.0, 0.05),
    ],
)
def test_waits_double_with_full_jitter(attempt: int, random: float, expected: float) -> None:
    assert RetryPolicy(deadline_s=1e9).next_delay_s(APIConnectionError(), attempt, 0.0, lambda: random) == expected


@pytest.mark.parametrize(
    ("policy", "error", "attempt", "elapsed_s", "expected"),
    [
        (RetryPolicy(max_attempts=3), answer(503), 2, 0.0, 0.5),
        (RetryPolicy(max_attempts=3), answer(503), 3, 0.0, None),
        (NO_RETRY, answer(503), 1, 0.0, None),
        (NO_RETRY, answer(503, {"x-should-retry": "true", "retry-after": "1"}), 1, 0.0, None),
        (RetryPolicy(deadline_s=10), answer(503), 1, 9.75, 0.25),
        (RetryPolicy(deadline_s=10), answer(503), 1, 9.9, pytest.approx(0.1)),
        (RetryPolicy(deadline_s=10), answer(503), 1, 9.96, None),
        (RetryPolicy(deadline_s=10), answer(503, {"retry-after": "11"}), 1, 0.0, None),
        # A server that wants to be left alone until after the deadline is not asked again before it.
        (DEFAULT, answer(429, {"retry-after": "300"}), 1, 0.0, 0.25),
        (DEFAULT, answer(429, {"retry-after": "301"}), 1, 0.0, None),
        (DEFAULT, answer(503, {"retry-after-ms": "29742000"}), 1, 0.0, None),
        (DEFAULT, answer(402, {"retry-after": "200"}), 1, 101.0, None),
        (RetryPolicy(caller_left_s=lambda: 40.0), answer(429, {"retry-after": "40"}), 1, 0.0, 40.0),
        (RetryPolicy(caller_left_s=lambda: 40.0), answer(429, {"retry-after": "41"}), 1, 0.0, None),
        (RetryPolicy(caller_left_s=lambda: 0.1), answer(429, {"retry-after": "30"}), 1, 0.0, 30.0),
        (RetryPolicy(caller_left_s=lambda: 0.1), answer(429, {"retry-after": "31"}), 1, 0.0, None),
        (RetryPolicy(caller_left_s=lambda: 0.1), answer(429), 1, 0.0, 0.25),
        (RetryPolicy(deadline_s=10), answer(402), 1, 5.0, 5.0),
        (RetryPolicy(deadline_s=10), answer(402), 2, 5.1, None),
        (RetryPolicy(max_server_wait_s=5), answer(503, {"retry-after": "6"}), 1, 0.0, 0.25),
        (DEFAULT, answer(409), 3, 0.0, 1.0),
        (DEFAULT, answer(409), 4, 0.0, None),
        (RetryPolicy(max_conflicts=0), answer(409), 1, 0.0, None),
        (DEFAULT, answer(409, {"x-should-retry": "true"}), 4, 0.0, 2.0),
    ],
)
def test_limits(policy: RetryPolicy, error: Exception, attempt: int, elapsed_s: float, expected: float | None) -> None:
    assert delay(error, policy, attempt, elapsed_s) == expected


def test_conflicts_are_counted_apart_from_other_failures() -> None:
    assert delay(answer(409), attempt=9, conflicts=3) is not None
    assert delay(answer(409), attempt=9, conflicts=4) is None


@given(
    attempt=st.integers(1, 10_000),
    elapsed_s=st.floats(0, 1000),
    random=st.floats(0, 1, exclude_max=True),
    status=st.integers(400, 599),
)
def test_no_wait_is_too_short_or_passes_the_deadline(
    attempt: int, elapsed_s: float, random: float, status: int
) -> None:
    waited = DEFAULT.next_delay_s(answer(status), attempt, elapsed_s, lambda: random)
    assert waited is None or (0.05 <= waited <= 30 and elapsed_s + waited <= 300)


class Stage:
    """A clock that only waiting moves, and an operation with a list of outcomes."""

    def __init__(self, *outcomes: Exception | str) -> None:
        self.outcomes = list(outcomes)
        self.now = 100.0
        self.numbers: list[int] = []
        self.waits: list[RetryWait] = []

    async def operation(self, number: int) -> str:
        self.numbers.append(number)
        outcome = self.outcomes.pop(0)
        if isinstance(outcome, str):
            return outcome
        raise outcome

    async def sleep(self, delay_s: float) -> None:
        self.now += delay_s

    async def run(self, policy: RetryPolicy = DEFAULT, sleep: Callable[[float], Awaitable[None]] | None = None) -> str:
        return await retrying(
            self.operation,
            policy,
            retries=Retries(clock=lambda: self.now, random=lambda: 1.0),
            on_wait=self.waits.append,
            sleep=sleep or self.sleep,
        )


def test_the_loop_goes_on_until_success() -> None:
    refused, busy = APIConnectionError(), answer(429, {"retry-after": "3"})
    stage = Stage(refused, busy, "done")
    assert asyncio.run(stage.run()) == "done"
    assert stage.numbers == [0, 1, 2]
    assert stage.waits == [RetryWait(1, 0.5, refused, 0.0), RetryWait(2, 3.0, busy, 0.5)]
    assert stage.now == 103.5


def test_what_is_not_worth_retrying_passes_unchanged() -> None:
    error = answer(404)
    stage = Stage(error)
    with pytest.raises(TinkerError) as caught:
        asyncio.run(stage.run())
    assert caught.value is error
    assert not hasattr(error, "__notes__")
    assert stage.waits == []


@pytest.mark.parametrize(
    ("policy", "attempts", "seconds"),
    [
        (RetryPolicy(max_attempts=3), 3, 1.5),
        (RetryPolicy(deadline_s=4.0), 5, 4.0),
        (RetryPolicy(deadline_s=0.54), 2, 0.5),
    ],
)
def test_giving_up_keeps_the_error_and_says_how_long_it_took(
    policy: RetryPolicy, attempts: int, seconds: float
) -> None:
    errors = [answer(503) for _ in range(9)]
    stage = Stage(*errors)
    with pytest.raises(TinkerError) as caught:
        asyncio.run(stage.run(policy))
    assert caught.value is errors[attempts - 1]
    assert caught.value.__notes__ == [f"Gave up after {attempts} attempts in {seconds} s."]


def test_the_note_also_stands_where_another_error_ends_the_attempts() -> None:
    stage = Stage(answer(503), answer(401))
    with pytest.raises(TinkerError) as caught:
        asyncio.run(stage.run())
    assert caught.value.__notes__ == ["Gave up after 2 attempts in 0.5 s."]


def test_four_conflicts_end_it_and_other_failures_do_not_count() -> None:
    stage = Stage(*(answer(status) for status in (503, 409, 503, 409, 409, 503, 409)), "never")
    with pytest.raises(TinkerError) as caught:
        asyncio.run(stage.run())
    assert len(stage.numbers) == 7
    assert caught.value.__notes__


def test_billing_is_waited_for_until_the_deadline() -> None:
    stage = Stage(*(answer(402) for _ in range(100)))
    with pytest.raises(TinkerError):
        asyncio.run(stage.run(RetryPolicy(deadline_s=60)))
    assert stage.now == 160.0
    assert {wait.delay_s for wait in stage.waits} == {5.0}


def test_a_lost_promise_is_retried_and_errors_of_others_are_not() -> None:
    stage = Stage(RetryableException("lost"), "done")
    assert asyncio.run(stage.run()) == "done"
    with pytest.raises(ZeroDivisionError):
        asyncio.run(Stage(ZeroDivisionError()).run())


def test_cancelling_ends_it_at_once_while_working_and_while_waiting() -> None:
    async def forever(_: float) -> None:
        await asyncio.Event().wait()

    async def cancelled(stage: Stage) -> None:
        task = asyncio.create_task(stage.run(sleep=forever))
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    waiting = Stage(answer(503), "never")
    asyncio.run(cancelled(waiting))
    assert waiting.numbers == [0]

    class Working(Stage):
        async def operation(self, number: int) -> str:
            self.numbers.append(number)
            await forever(0)
            return "never"

    working = Working()
    asyncio.run(cancelled(working))
    assert working.numbers == [0]
    assert working.waits == []


def test_it_needs_nothing_but_an_operation_and_a_policy() -> None:
    assert asyncio.run(retrying(Stage("done").operation, NO_RETRY)) == "done"


@pytest.mark.parametrize(
    ("error", "elapsed_s", "expected"),
    [
        (APIConnectionError(), 0.0, 0.5),
        (lasting(APIConnectionError()), 0.0, None),
        (TimeoutError(), 0.0, 0.5),  # has no flag: being listed is enough
        (RetryableException("lost"), 0.0, None),
        (answer(503), 0.0, 0.5),
        (answer(503), 9.96, None),
        (answer(404), 0.0, None),
        (answer(429), 99.0, 0.5),
        (answer(429, {"retry-after": "60"}), 99.0, 60.0),
        (answer(429, {"retry-after": "61"}), 0.0, None),
        (ValueError("not ours"), 0.0, None),
    ],
)
def test_a_policy_may_list_what_it_retries_and_what_has_no_deadline(
    error: Exception, elapsed_s: float, expected: float | None
) -> None:
    policy = RetryPolicy(
        deadline_s=10.0,
        retry_on=(TimeoutError, APIConnectionError, APIStatusError),
        no_deadline_for=(RateLimitError,),
        jitter=(1.0, 1.0),
    )
    assert delay(error, policy, elapsed_s=elapsed_s) == expected


def test_jitter_spreads_a_delay_between_its_factors() -> None:
    policy = RetryPolicy(first_delay_s=1.0, max_delay_s=4.0, jitter=(0.75, 1.25))
    assert [policy.backoff_s(attempt, lambda: 0.0) for attempt in (1, 2, 3, 4)] == [0.75, 1.5, 3.0, 3.0]
    assert [policy.backoff_s(attempt, lambda: 1.0) for attempt in (1, 2, 3, 4)] == [1.25, 2.5, 4.0, 4.0]


def test_progress_starts_the_delays_and_the_deadline_anew() -> None:
    now = [100.0]
    retries = Retries(clock=lambda: now[0], random=lambda: 1.0)
    policy = RetryPolicy(deadline_s=2.0)
    assert [retries.after(answer(503), policy).delay_s for _ in range(2)] == [0.5, 1.0]  # type: ignore[union-attr]
    now[0] += 60.0
    assert retries.after(answer(503), policy) is None
    retries.restart()
    now[0] += 60.0
    error = answer(503)
    assert retries.after(error, policy) == RetryWait(1, 0.5, error, 0.0)


def test_a_policy_that_changes_is_asked_after_each_failure() -> None:
    policies = [RetryPolicy(), RetryPolicy(), NO_RETRY]
    stage = Stage(answer(503), answer(503), answer(503), "never")
    with pytest.raises(TinkerError):
        asyncio.run(retrying(stage.operation, lambda: policies.pop(0), sleep=stage.sleep))
    assert stage.numbers == [0, 1, 2]


@pytest.mark.parametrize("method", ["GET", "PUT", "POST"])
@pytest.mark.parametrize("is_stale", [True, False])
@pytest.mark.parametrize("was_sent", [True, False])
def test_a_request_goes_out_again_only_where_that_cannot_repeat_it(method: str, is_stale: bool, was_sent: bool) -> None:
    assert may_resend(method, is_stale=is_stale, was_sent=was_sent) == (is_stale and (method != "POST" or not was_sent))

"""When to try again and how long to wait first: the one retry policy, and the loop that follows it.

Does not know: HTTP libraries, endpoints, what an operation does. Nothing else in the package retries. The decision
reads an error's `retryable` flag and the headers of its answer, never its text.
"""

from __future__ import annotations

import asyncio
import random as random_source
import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import TypeVar

from tinsmith.errors import APIStatusError, RetryableException, TinkerError
from tinsmith.wire.faults import retry_after_s

T = TypeVar("T")

MIN_DELAY_S = 0.05
"""Full jitter may draw almost nothing; a server in trouble should not be asked again at once."""
BILLING_DELAY_S = 5.0
"""The official client's pause after a 402."""
_MAX_DOUBLINGS = 60


@dataclass(frozen=True, slots=True, kw_only=True)
class RetryPolicy:
    """How patient to be with one operation."""

    deadline_s: float = 300.0
    """No wait may end later than this after the first attempt began."""
    first_delay_s: float = 0.5
    """Upper end of the first random wait; it doubles with each attempt."""
    max_delay_s: float = 30.0
    """Upper end of any random wait."""
    max_attempts: int | None = None
    """Attempts in all; None: as many as the deadline allows."""
    max_conflicts: int = 3
    """How many answers of 409 are followed by another attempt."""
    max_server_wait_s: float = 60.0
    """A server's wish to wait longer than this is not followed."""


NO_RETRY = RetryPolicy(max_attempts=1)


@dataclass(frozen=True, slots=True)
class RetryWait:
    """One attempt failed and another follows."""

    attempt: int
    """Attempts so far."""
    delay_s: float
    error: Exception
    elapsed_s: float
    """Since the first attempt began."""


def next_delay_s(
    policy: RetryPolicy,
    error: Exception,
    attempt: int,
    elapsed_s: float,
    random: Callable[[], float],
    *,
    conflicts: int | None = None,
) -> float | None:
    """Seconds to wait before the next attempt; None: give up.

    `attempt` counts from 1; `conflicts` says how many of the attempts ended in 409, all of them if not given.
    """
    if policy.max_attempts is not None and attempt >= policy.max_attempts:
        return None
    if not _is_worth_retrying(policy, error, attempt if conflicts is None else conflicts):
        return None
    delay_s = _delay_s(policy, error, attempt, random)
    return delay_s if elapsed_s + delay_s <= policy.deadline_s else None


async def retrying(
    operation: Callable[[int], Awaitable[T]],
    policy: RetryPolicy,
    *,
    on_wait: Callable[[RetryWait], None] | None = None,
    clock: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
    random: Callable[[], float] = random_source.random,
) -> T:
    """Run an operation until it succeeds or the policy gives up. It is told the number of the attempt, from 0."""
    started = clock()
    attempt, conflicts = 0, 0
    while True:
        try:
            return await operation(attempt)
        except (TinkerError, RetryableException) as error:
            attempt += 1
            conflicts += _status(error) == 409
            elapsed_s = clock() - started
            delay_s = next_delay_s(policy, error, attempt, elapsed_s, random, conflicts=conflicts)
            if delay_s is None:
                if attempt > 1:
                    error.add_note(f"Gave up after {attempt} attempts in {elapsed_s:.1f} s.")
                raise
            wait = RetryWait(attempt, delay_s, error, elapsed_s)
        if on_wait is not None:
            on_wait(wait)
        await sleep(delay_s)


def _is_worth_retrying(policy: RetryPolicy, error: Exception, conflicts: int) -> bool:
    headers = _headers(error)
    word = headers.get("x-should-retry")
    if word in ("true", "false"):
        return word == "true"
    status = _status(error)
    if status == 409 and conflicts > policy.max_conflicts:
        return False
    if status == 400 and headers.get("content-length") == "0":
        return True  # servers give a 400 a body; without one it comes from a proxy (protocol.md, section 2)
    return bool(getattr(error, "retryable", False))


def _delay_s(policy: RetryPolicy, error: Exception, attempt: int, random: Callable[[], float]) -> float:
    wished_s = retry_after_s(_headers(error))
    if wished_s is not None and 0 < wished_s <= policy.max_server_wait_s:
        return wished_s
    if _status(error) == 402:
        return BILLING_DELAY_S
    ceiling_s = min(policy.max_delay_s, policy.first_delay_s * 2.0 ** min(attempt - 1, _MAX_DOUBLINGS))
    return max(MIN_DELAY_S, random() * ceiling_s)


def _status(error: Exception) -> int | None:
    return error.status_code if isinstance(error, APIStatusError) else None


def _headers(error: Exception) -> Mapping[str, str]:
    """The answer's headers with lower-case names; none where there was no answer."""
    if not isinstance(error, APIStatusError):
        return {}
    return {name.lower(): value.strip() for name, value in error.response.headers.items()}

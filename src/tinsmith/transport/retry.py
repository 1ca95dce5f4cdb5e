"""The one retry policy: what is retried, how long to wait first, and when to give up.

Every loop in the client that tries again asks a `RetryPolicy`: calls and submits, polls, samples, streams, downloads.
`Retries` counts the attempts of one operation, and `retrying` is the usual loop around both. None of them knows HTTP
libraries or endpoints. The decision reads an error's `retryable` flag and the headers of its response, never its text.
"""

from __future__ import annotations

import asyncio
import math
import random as random_source
import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import TypeVar

from tinsmith.errors import APIStatusError, RetryableException, TinkerError
from tinsmith.wire.rules.faults import retry_after_s

T = TypeVar("T")

IDEMPOTENT = frozenset({"GET", "HEAD", "OPTIONS", "TRACE", "PUT", "DELETE"})  # RFC 9110, 9.2.2
_MAX_DOUBLINGS = 60


def _unlimited() -> float:
    return math.inf


@dataclass(frozen=True, slots=True, kw_only=True)
class RetryPolicy:
    """How patient to be with one operation."""

    deadline_s: float = 300.0
    """No wait may end later than this after the first attempt began."""
    first_delay_s: float = 0.5
    """Delay after the first failure, before jitter; it doubles with each further failure."""
    max_delay_s: float = 30.0
    """The longest delay that backoff can reach."""
    min_delay_s: float = 0.05
    """The shortest: jitter may draw almost nothing, and a server in trouble should not be asked again at once."""
    jitter: tuple[float, float] = (0.0, 1.0)
    """A delay is multiplied by a random factor between these two. The default is full jitter."""
    max_attempts: int | None = None
    """Attempts in all; None: as many as the deadline allows."""
    max_conflicts: int = 3
    """How many responses of 409 are followed by another attempt."""
    max_server_wait_s: float = 60.0
    """A `Retry-After` longer than this, but within the deadline, is ignored: the server may recover sooner."""
    billing_delay_s: float = 5.0
    """Delay after a 402. The default is the official client's."""
    retry_on: tuple[type[Exception], ...] | None = None
    """If given, only these are retried, unless their `retryable` flag says no. None: whatever has the flag set."""
    no_deadline_for: tuple[type[Exception], ...] = ()
    """Errors after which the operation is repeated even when its deadline has passed."""
    caller_left_s: Callable[[], float] = _unlimited
    """What is left of the deadline that the caller set for the whole operation, asked for after each failure."""

    def next_delay_s(
        self,
        error: Exception,
        attempt: int,
        elapsed_s: float,
        random: Callable[[], float],
        *,
        conflicts: int | None = None,
    ) -> float | None:
        """Return the seconds to wait before the next attempt, or None to give up.

        `attempt` counts from 1; `conflicts` says how many of the attempts ended in 409, all of them if not given.
        """
        if self.max_attempts is not None and attempt >= self.max_attempts:
            return None
        if not self._is_worth_retrying(error, attempt if conflicts is None else conflicts):
            return None
        if self._is_too_late(error, elapsed_s):
            return None
        left_s = math.inf if isinstance(error, self.no_deadline_for) else self.deadline_s - elapsed_s
        fixed_s = self._fixed_delay_s(error)
        if fixed_s is not None:
            return fixed_s if fixed_s <= left_s else None
        # The last wait is cut short: a long random draw must not end the attempts well before the deadline.
        delay_s = min(self.backoff_s(attempt, random), left_s)
        return delay_s if delay_s >= self.min_delay_s else None

    def backoff_s(self, attempt: int, random: Callable[[], float] = random_source.random) -> float:
        """Return the exponential delay after so many failures, with jitter."""
        ceiling_s = min(self.max_delay_s, self.first_delay_s * 2.0 ** min(attempt - 1, _MAX_DOUBLINGS))
        low, high = self.jitter
        return max(self.min_delay_s, min(ceiling_s * (low + (high - low) * random()), self.max_delay_s))

    def _is_worth_retrying(self, error: Exception, conflicts: int) -> bool:
        if self.retry_on is not None and not isinstance(error, self.retry_on):
            return False
        headers = _headers(error)
        word = headers.get("x-should-retry")
        if word in ("true", "false"):
            return word == "true"
        status = _status(error)
        if status == 409 and conflicts > self.max_conflicts:
            return False
        if status == 400 and headers.get("content-length") == "0":
            return True  # servers give a 400 a body; without one it comes from a proxy (protocol.md, section 2)
        return bool(getattr(error, "retryable", self.retry_on is not None))

    def _is_too_late(self, error: Exception, elapsed_s: float) -> bool:
        """Whether the server asks to come back after the deadline: then no attempt before it can succeed.

        A short wait that the caller's own deadline would cut off does not count: the caller learns of the deadline.
        """
        asked_s = retry_after_s(_headers(error))
        if asked_s is None:
            return False
        has_no_deadline = isinstance(error, self.no_deadline_for)
        left_s = max(self.deadline_s, self.max_server_wait_s) if has_no_deadline else self.deadline_s - elapsed_s
        return asked_s > min(left_s, max(self.caller_left_s(), self.max_delay_s))

    def _fixed_delay_s(self, error: Exception) -> float | None:
        """Return the delay that the server asked for or that its status has; None: backoff decides."""
        asked_s = retry_after_s(_headers(error))
        if asked_s is not None and 0 < asked_s <= self.max_server_wait_s:
            return asked_s
        return self.billing_delay_s if _status(error) == 402 else None


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


class Retries:
    """The failed attempts of one operation so far. The policy is passed with each failure: it may change meanwhile."""

    def __init__(
        self, *, clock: Callable[[], float] = time.monotonic, random: Callable[[], float] = random_source.random
    ) -> None:
        self.attempts = 0
        self._conflicts = 0
        self._clock = clock
        self._random = random
        self._started: float | None = clock()

    @property
    def elapsed_s(self) -> float:
        return 0.0 if self._started is None else self._clock() - self._started

    def restart(self) -> None:
        """The operation has made progress: count from zero, and start the deadline with the next failure."""
        self.attempts = self._conflicts = 0
        self._started = None

    def after(self, error: Exception, policy: RetryPolicy) -> RetryWait | None:
        """Count a failure; return what to wait before the next attempt, or None to give up."""
        if self._started is None:
            self._started = self._clock()
        self.attempts += 1
        self._conflicts += _status(error) == 409
        elapsed_s = self.elapsed_s
        delay_s = policy.next_delay_s(error, self.attempts, elapsed_s, self._random, conflicts=self._conflicts)
        return None if delay_s is None else RetryWait(self.attempts, delay_s, error, elapsed_s)


async def retrying(
    operation: Callable[[int], Awaitable[T]],
    policy: RetryPolicy | Callable[[], RetryPolicy],
    *,
    retries: Retries | None = None,
    on_wait: Callable[[RetryWait], None] | None = None,
    sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
) -> T:
    """Run an operation until it succeeds or the policy gives up. It gets the number of the attempt, from 0.

    A policy that depends on what the server says meanwhile can be given as a function, called after each failure.
    """
    retries = retries or Retries()
    while True:
        try:
            return await operation(retries.attempts)
        except Exception as error:
            wait = retries.after(error, policy if isinstance(policy, RetryPolicy) else policy())
            if wait is None:
                if retries.attempts > 1 and isinstance(error, (TinkerError, RetryableException)):
                    error.add_note(f"Gave up after {retries.attempts} attempts in {retries.elapsed_s:.1f} s.")
                raise
        if on_wait is not None:
            on_wait(wait)
        await sleep(wait.delay_s)


def may_resend(method: str, *, is_stale: bool, was_sent: bool) -> bool:
    """Whether a request that met a closed connection goes out once more, on a new one, without counting as a retry.

    Servers close idle connections, perhaps just when a request is sent. If the connection had been used before and
    delivered no byte of a response (`is_stale`), the server did not act on the request unless it had been sent; sending
    it again is safe if none of it was sent, or if its method may be repeated.
    """
    return is_stale and (not was_sent or method in IDEMPOTENT)


def _status(error: Exception) -> int | None:
    return error.status_code if isinstance(error, APIStatusError) else None


def _headers(error: Exception) -> Mapping[str, str]:
    """The response's headers with lower-case names; none where there was no response."""
    if not isinstance(error, APIStatusError):
        return {}
    return {name.lower(): value.strip() for name, value in error.response.headers.items()}

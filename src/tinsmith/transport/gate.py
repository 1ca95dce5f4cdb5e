"""What holds requests back before they are sent: the circuit breaker decides whether, the gate how many at once.

Neither knows HTTP libraries or sockets. The breaker does no I/O and takes its clock as an argument; the gate needs a
running event loop only while a request waits.
"""

from __future__ import annotations

import asyncio
import enum
import math
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass

from tinsmith.errors import APIConnectionError, APIStatusError
from tinsmith.wire.rules.faults import retry_after_s


class BreakerState(enum.StrEnum):
    """closed: all requests pass. open: none pass. half_open: one passes, and its outcome decides."""

    CLOSED = "closed"
    OPEN = "open"
    HALF_OPEN = "half_open"


@dataclass(slots=True)
class _Endpoint:
    failures: int = 0
    last: APIConnectionError | APIStatusError | None = None
    failed_at: float = -math.inf
    """When the last counted failure was reported."""
    opened_at: float | None = None
    """Since when nothing passes; None while closed."""
    next_at: float = 0.0
    """When the next request may pass."""
    probing_since: float | None = None
    """When the request of the half-open state was sent; None while there is none."""


class CircuitBreaker:
    """Stops sending to an endpoint that keeps failing, and tries it again from time to time.

    Failures are connection errors and responses of 500 and above; any other response shows that the server works and
    closes the breaker. A 5xx with `Retry-After` is not counted: that server manages its own load. Endpoints do not
    affect each other.

    `threshold` failures in a row open the breaker. In a row means one after another: requests that were in flight
    together when the server went away are one failure, however many they are. While it is open, requests fail at once;
    after `cool_down_s` one passes as a probe. A probe that is still open after `settle_s` has reached the server, or
    it would have failed by then, so the breaker closes: a long poll gets no response for a minute when all is well.
    """

    def __init__(
        self,
        threshold: int = 10,
        cool_down_s: float = 10.0,
        settle_s: float = math.inf,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._threshold = threshold
        self._cool_down_s = cool_down_s
        self._settle_s = settle_s
        self._clock = clock
        self._endpoints: dict[str, _Endpoint] = {}

    def state(self, endpoint: str) -> BreakerState:
        known = self._endpoints.get(endpoint)
        if known is None or known.opened_at is None:
            return BreakerState.CLOSED
        is_probing = known.probing_since is not None
        return BreakerState.HALF_OPEN if is_probing or self._clock() >= known.next_at else BreakerState.OPEN

    def check(self, endpoint: str) -> float:
        """Return the time if a request may be sent, to be passed to `failed`; else raise APIConnectionError.

        The error says since when and until when requests are held back. It is retryable if the last failure was: an
        operation that would have waited for the server keeps waiting, and one that would have failed fails at once.
        """
        now = self._clock()
        known = self._endpoints.get(endpoint)
        if known is None or known.opened_at is None:
            return now
        if known.probing_since is not None and now - known.probing_since >= self._settle_s:
            self.succeeded(endpoint)
            return now
        if now < known.next_at:
            raise _refusal(endpoint, known, now - known.opened_at, known.next_at - now) from known.last
        if known.probing_since is None:
            known.probing_since = now
        known.next_at = now + self._cool_down_s  # then the next one passes if this one has not reported back
        return now

    def succeeded(self, endpoint: str) -> None:
        """The server responded: all is well."""
        self._endpoints.pop(endpoint, None)

    def failed(self, endpoint: str, error: BaseException, sent_at: float | None = None) -> None:
        """A request ended in an error. One that says nothing about the server only lets the next request try.

        `sent_at` is what `check` returned for it; without that it counts as sent after all earlier failures.
        """
        if isinstance(error, APIStatusError) and (
            error.status_code < 500 or retry_after_s(error.response.headers) is not None
        ):
            self.succeeded(endpoint)
        elif isinstance(error, (APIConnectionError, APIStatusError)):
            self._count(self._endpoints.setdefault(endpoint, _Endpoint()), error, sent_at)
        elif (known := self._endpoints.get(endpoint)) is not None and known.probing_since is not None:
            known.probing_since, known.next_at = None, self._clock()

    def _count(self, known: _Endpoint, error: APIConnectionError | APIStatusError, sent_at: float | None) -> None:
        now = self._clock()
        known.last = error
        if sent_at is None or sent_at >= known.failed_at:
            known.failures += 1
            known.failed_at = now
        opens = known.opened_at is None and known.failures >= self._threshold
        if opens:
            known.opened_at = now
        if opens or known.probing_since is not None:  # those in flight when it opened do not keep it open longer
            known.probing_since, known.next_at = None, now + self._cool_down_s


def _refusal(endpoint: str, known: _Endpoint, open_s: float, wait_s: float) -> APIConnectionError:
    error = APIConnectionError(
        known.last.request if known.last is not None else None,
        f"{endpoint}: not sent, because the last {known.failures} requests failed. No request has been sent for "
        f"{open_s:.1f} s; the next one may be sent in {wait_s:.1f} s. Last error: {known.last}",
    )
    error.retryable = known.last is None or known.last.retryable
    return error


class Gate:
    """A semaphore, first come first served, that can grow while too many wait.

    It grows by `grow_by`, up to `max_limit`, when in the last `grow_after_s` more waited than were admitted: those
    inside are long polls then, and the ones that wait would starve.
    """

    def __init__(self, limit: int, *, max_limit: int = 0, grow_by: int = 0, grow_after_s: float = 1.0) -> None:
        self.limit = limit
        self._max_limit = max_limit
        self._grow_by = grow_by
        self._grow_after_s = grow_after_s
        self._inside = 0
        self._admitted = 0
        self._waiting: deque[asyncio.Future[None]] = deque()
        self._timer: asyncio.TimerHandle | None = None

    def try_enter(self) -> bool:
        """Enter if there is room and nothing waits; return whether it did."""
        if self._inside >= self.limit or self._waiting:
            return False
        self._inside += 1
        return True

    async def enter(self) -> None:
        """Enter, waiting for a turn if need be."""
        if self.try_enter():
            return
        turn = asyncio.get_running_loop().create_future()
        self._waiting.append(turn)
        self._watch()
        try:
            await turn
        except asyncio.CancelledError:
            if turn.cancelled():
                with suppress(ValueError):  # `_admit` may have dropped it already
                    self._waiting.remove(turn)
            else:
                self.leave()
            raise

    def leave(self) -> None:
        """Make room for the next."""
        self._inside -= 1
        self._admit()

    def check(self) -> None:
        """Grow if too many wait; called every `grow_after_s` while any waits."""
        self._timer = None
        if len(self._waiting) > self._admitted:
            self.limit = max(self.limit, min(self.limit + self._grow_by, self._max_limit))
            self._admit()
        self._admitted = 0
        self._watch()

    def close(self) -> None:
        """Admit all that wait; they then find the transport closed."""
        self.limit = self._inside + len(self._waiting)
        self._admit()

    def _admit(self) -> None:
        while self._waiting and self._inside < self.limit:
            turn = self._waiting.popleft()
            if not turn.done():
                self._inside += 1
                self._admitted += 1
                turn.set_result(None)
        if not self._waiting and self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _watch(self) -> None:
        if self._timer is None and self._waiting and self.limit < self._max_limit:
            self._timer = asyncio.get_running_loop().call_later(self._grow_after_s, self.check)

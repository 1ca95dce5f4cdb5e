"""What holds requests back before they are sent: a breaker decides whether at all, a gate how many at once.

Does not know: HTTP libraries, sockets, retries. The breaker does no I/O and takes its clock as an argument; the gate
needs a running event loop only while somebody waits.
"""

from __future__ import annotations

import asyncio
import enum
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass

from tinsmith.errors import APIConnectionError, APIStatusError


class BreakerState(enum.StrEnum):
    """closed: all pass. open: none pass. half_open: one passes and decides what comes next."""

    CLOSED = "closed"
    OPEN = "open"
    HALF_OPEN = "half_open"


@dataclass(slots=True)
class _Endpoint:
    failures: int = 0
    last: APIConnectionError | APIStatusError | None = None
    opened_at: float | None = None
    """Since when nothing passes; None while closed."""
    next_at: float = 0.0
    """When the next request may pass."""
    is_probing: bool = False
    """Whether the one request of the half-open state is under way."""


class CircuitBreaker:
    """Stops calling an endpoint that fails again and again, and tries it now and then.

    Connection faults and answers of 500 and above count; any other answer shows that the server works and closes the
    breaker. Endpoints do not affect each other.
    """

    def __init__(
        self, threshold: int = 10, cool_down_s: float = 10.0, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._threshold = threshold
        self._cool_down_s = cool_down_s
        self._clock = clock
        self._endpoints: dict[str, _Endpoint] = {}

    def state(self, endpoint: str) -> BreakerState:
        known = self._endpoints.get(endpoint)
        if known is None or known.opened_at is None:
            return BreakerState.CLOSED
        return BreakerState.HALF_OPEN if known.is_probing or self._clock() >= known.next_at else BreakerState.OPEN

    def check(self, endpoint: str) -> None:
        """Return if a request may be sent; else raise APIConnectionError, which says since when and until when not."""
        known = self._endpoints.get(endpoint)
        if known is None or known.opened_at is None:
            return
        now = self._clock()
        if now < known.next_at:
            raise _refusal(endpoint, known, now - known.opened_at, known.next_at - now)
        known.is_probing = True
        known.next_at = now + self._cool_down_s  # a probe that never reports back is given up then

    def succeeded(self, endpoint: str) -> None:
        """The server answered: all is well."""
        self._endpoints.pop(endpoint, None)

    def failed(self, endpoint: str, error: Exception) -> None:
        """A request ended in an error. One that says nothing about the server only lets the next request try."""
        if isinstance(error, APIStatusError) and error.status_code < 500:
            self.succeeded(endpoint)
        elif isinstance(error, (APIConnectionError, APIStatusError)):
            self._count(self._endpoints.setdefault(endpoint, _Endpoint()), error)
        elif (known := self._endpoints.get(endpoint)) is not None and known.is_probing:
            known.is_probing, known.next_at = False, self._clock()

    def _count(self, known: _Endpoint, error: APIConnectionError | APIStatusError) -> None:
        known.failures += 1
        known.last = error
        opens = known.opened_at is None and known.failures >= self._threshold
        if opens:
            known.opened_at = self._clock()
        if opens or known.is_probing:  # requests that were under way when it opened do not keep it open longer
            known.is_probing, known.next_at = False, self._clock() + self._cool_down_s


def _refusal(endpoint: str, known: _Endpoint, open_s: float, wait_s: float) -> APIConnectionError:
    return APIConnectionError(
        known.last.request if known.last is not None else None,
        f"{endpoint}: not sent, because the last {known.failures} calls failed. Calls are held back for {open_s:.1f} s"
        f" now; the next may pass in {wait_s:.1f} s. Last cause: {known.last}",
    )


class Gate:
    """Lets so many in at once and the rest wait their turn; may open wider while too many wait.

    It grows by `grow_by`, up to `max_limit`, when in the last `grow_after_s` more were waiting than were let in: those
    inside are long polls then, and whoever waits behind them would starve.
    """

    def __init__(self, limit: int, *, max_limit: int = 0, grow_by: int = 0, grow_after_s: float = 1.0) -> None:
        self.limit = limit
        self._max_limit = max_limit
        self._grow_by = grow_by
        self._grow_after_s = grow_after_s
        self._inside = 0
        self._let_in = 0
        self._waiting: deque[asyncio.Future[None]] = deque()
        self._timer: asyncio.TimerHandle | None = None

    def try_enter(self) -> bool:
        """Enter if there is room and nobody waits."""
        if self._inside >= self.limit or self._waiting:
            return False
        self._inside += 1
        return True

    async def enter(self) -> None:
        """Enter when it is one's turn."""
        if self.try_enter():
            return
        turn = asyncio.get_running_loop().create_future()
        self._waiting.append(turn)
        self._watch()
        try:
            await turn
        except asyncio.CancelledError:
            if turn.cancelled():
                with suppress(ValueError):  # it may have been passed over already
                    self._waiting.remove(turn)
            else:
                self.leave()
            raise

    def leave(self) -> None:
        """Make room for the next one."""
        self._inside -= 1
        self._admit()

    def check(self) -> None:
        """Open wider if too many wait; called every `grow_after_s` while somebody waits."""
        self._timer = None
        if len(self._waiting) > self._let_in:
            self.limit = max(self.limit, min(self.limit + self._grow_by, self._max_limit))
            self._admit()
        self._let_in = 0
        self._watch()

    def close(self) -> None:
        """Let everybody in, who then find the transport closed."""
        self.limit = self._inside + len(self._waiting)
        self._admit()

    def _admit(self) -> None:
        while self._waiting and self._inside < self.limit:
            turn = self._waiting.popleft()
            if not turn.done():
                self._inside += 1
                self._let_in += 1
                turn.set_result(None)
        if not self._waiting and self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _watch(self) -> None:
        if self._timer is None and self._waiting and self.limit < self._max_limit:
            self._timer = asyncio.get_running_loop().call_later(self._grow_after_s, self.check)

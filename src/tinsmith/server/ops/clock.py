"""A wall clock that cannot be set back while the server runs."""

from __future__ import annotations

import time
from collections.abc import Callable


class SteadyClock:
    """Seconds since 1970, never less than the time at the start plus the seconds that have really passed since.

    A clock that is set back would make valid again what has expired: keys, tokens, signed addresses. One that is set
    forward by mistake and put right again does no lasting harm, since the start is what counts, not the latest time
    that was seen.
    """

    def __init__(self, wall: Callable[[], float] = time.time, ticks: Callable[[], float] = time.monotonic) -> None:
        self._wall = wall
        self._ticks = ticks
        self._lead = wall() - ticks()

    def __call__(self) -> float:
        return max(self._wall(), self._lead + self._ticks())

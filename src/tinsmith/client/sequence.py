"""The order of a model's operations.

Owns: handing out numbers in the caller's thread, and letting submits go out in that order. Results are not waited for.
Does not know: what is submitted.
"""

from __future__ import annotations

import asyncio
import threading


class Sequence:
    """Numbers from 0 without gaps; thread-safe."""

    def __init__(self, first: int = 0) -> None:
        self._next = first
        self._lock = threading.Lock()

    def take(self, count: int = 1) -> int:
        """The first of `count` consecutive numbers."""
        with self._lock:
            first = self._next
            self._next += count
            return first


class Turns:
    """Lets the holder of number n go when all lower numbers are done; used inside one loop.

    Done means accepted by the server or finally refused: either way the next one may be sent.
    """

    def __init__(self) -> None:
        self._next = 0
        self._done: set[int] = set()
        self._waiting: dict[int, asyncio.Event] = {}

    async def reach(self, number: int) -> None:
        """Wait until it is this number's turn."""
        if number <= self._next:
            return
        event = self._waiting.setdefault(number, asyncio.Event())
        await event.wait()

    def done(self, number: int) -> None:
        """This number will not be sent (again)."""
        self._done.add(number)
        while self._next in self._done:
            self._done.discard(self._next)
            self._next += 1
        event = self._waiting.pop(self._next, None)
        if event is not None:
            event.set()

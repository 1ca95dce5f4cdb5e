"""The order of a model's operations: numbers taken in the caller's thread, and requests sent in that order.

Only sending is ordered. The next operation is sent as soon as the one before it was accepted, not when it is done.
"""

from __future__ import annotations

import asyncio
import threading


class Numbers:
    """Numbers from 0 without gaps; thread-safe."""

    def __init__(self, first: int = 0) -> None:
        self._next = first
        self._lock = threading.Lock()

    def take(self, count: int = 1) -> int:
        """Take `count` consecutive numbers and return the first."""
        with self._lock:
            first = self._next
            self._next += count
            return first


class Turns:
    """Lets number n proceed when all lower numbers are done; used inside one loop.

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
        """Mark a number as sent, or as never to be sent."""
        self._done.add(number)
        while self._next in self._done:
            self._done.discard(self._next)
            self._next += 1
        event = self._waiting.pop(self._next, None)
        if event is not None:
            event.set()

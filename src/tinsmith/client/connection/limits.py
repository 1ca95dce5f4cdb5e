"""How much is sent to one server at once, and the pause after a 429.

Budgets and pauses are shared by all clients of the same (base URL, key) in the process, and by no others. Each client
has its own event loop, so everything here is thread-safe.
"""

from __future__ import annotations

import asyncio
import hashlib
import os
import sys
import threading
import time
import weakref
from collections import deque
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

NEW_INCIDENT_S = 30.0
"""Pauses closer together than this are one incident, which is logged once."""


class Budget:
    """A shared budget, first come first served: a request proceeds while the balance is above 0.

    A single request larger than the whole budget can therefore still be sent, alone.
    """

    def __init__(self, size: int) -> None:
        self._free = size
        self._lock = threading.Lock()
        self._waiting: deque[tuple[int, asyncio.AbstractEventLoop, asyncio.Future[None]]] = deque()

    @asynccontextmanager
    async def hold(self, units: int) -> AsyncIterator[None]:
        await self.acquire(units)
        try:
            yield
        finally:
            self.release(units)

    def acquire_now(self, units: int) -> bool:
        """Take the units if they are available without waiting; return whether they were."""
        with self._lock:
            if self._free > 0 and not self._waiting:
                self._free -= units
                return True
            return False

    async def acquire(self, units: int) -> None:
        if self.acquire_now(units):
            return
        loop = asyncio.get_running_loop()
        future: asyncio.Future[None] = loop.create_future()
        entry = (units, loop, future)
        with self._lock:
            if self._free > 0 and not self._waiting:  # released since the first check
                self._free -= units
                return
            self._waiting.append(entry)
        try:
            await future
        except asyncio.CancelledError:
            with self._lock:
                if entry in self._waiting:
                    self._waiting.remove(entry)
                    raise
            self.release(units)  # it had been granted meanwhile
            raise

    def release(self, units: int) -> None:
        with self._lock:
            self._free += units
            while self._waiting and self._free > 0:
                wanted, loop, future = self._waiting.popleft()
                if loop.is_closed():
                    continue
                self._free -= wanted
                loop.call_soon_threadsafe(_grant, future)


def _grant(future: asyncio.Future[None]) -> None:
    if not future.done():
        future.set_result(None)


class Limits:
    """The budgets of one (base URL, key)."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.sample_count = Budget(400)
        self.sample_bytes = Budget(10 * 1024 * 1024)
        self.train_bytes = Budget(50_000_000)
        self.response_bytes = Budget(50 * 1024 * 1024)
        self._clock = clock
        self._paused_until = float("-inf")
        self._lock = threading.Lock()

    def pause(self, seconds: float) -> bool:
        """Hold all samples back after a 429; return True if this is a new incident."""
        with self._lock:
            now = self._clock()
            is_new = now - self._paused_until > NEW_INCIDENT_S
            self._paused_until = max(self._paused_until, now + seconds)
            return is_new

    async def wait_for_pause(self) -> None:
        while (left := self._paused_until - self._clock()) > 0:
            await asyncio.sleep(left)


class LimitsByServer:
    """The limits by base URL and key; they are dropped with their last client."""

    def __init__(self) -> None:
        self._limits: weakref.WeakValueDictionary[tuple[str, str], Limits] = weakref.WeakValueDictionary()
        self._lock = threading.Lock()

    def forget(self) -> None:
        """Start empty in a forked child: its copies of the parent's locks may be locked forever."""
        self.__init__()  # type: ignore[misc]

    def find(self, base_url: str, credential: str | None) -> Limits:
        digest = hashlib.sha256((credential or "").encode()).hexdigest()
        with self._lock:
            limits = self._limits.get((base_url, digest))
            if limits is None:
                limits = self._limits[(base_url, digest)] = Limits()
            return limits


SHARED = LimitsByServer()
"""The one table of this process, since sharing between clients is its purpose."""
if sys.platform != "win32":  # where processes do not fork
    os.register_at_fork(after_in_child=SHARED.forget)

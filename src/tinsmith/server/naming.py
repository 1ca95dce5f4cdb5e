"""Digests of large requests, computed in a thread while the loop decodes them.

Hashing does not need Python's lock, but the thread needs it to begin, and would wait for it as long as Python lets the
loop go on (5 ms), about what decoding takes. So the loop stands still until the thread has begun, about 0.1 ms.
Does not know: what is named.
"""

from __future__ import annotations

import asyncio
import threading
from concurrent.futures import Future, ThreadPoolExecutor

from tinsmith.server.work import digest_of

LARGE_BYTES = 512 * 1024
"""Less than this is hashed sooner than a thread is woken."""
BEGIN_S = 0.002
"""How long the loop stands still at most."""


class Naming:
    """The digest of a request, under way."""

    def __init__(self, parts: tuple[bytes, ...], hashing: Future[str] | None) -> None:
        self._parts = parts
        self._hashing = hashing

    async def digest(self) -> str:
        if self._hashing is None or self._hashing.cancel():  # small, or the thread has not begun
            self._hashing = None
            return digest_of(*self._parts)
        return self._hashing.result() if self._hashing.done() else await asyncio.wrap_future(self._hashing)


class Namer:
    """One thread that hashes. The loop does it itself while the thread is busy."""

    def __init__(self) -> None:
        self._pool = ThreadPoolExecutor(1, "tinsmith-naming")
        self._last: Future[str] | None = None

    def begin(self, *parts: bytes) -> Naming:
        if sum(map(len, parts)) < LARGE_BYTES or (self._last is not None and not self._last.done()):
            return Naming(parts, None)
        has_begun = threading.Event()
        self._last = self._pool.submit(_hash, has_begun, parts)
        has_begun.wait(BEGIN_S)
        return Naming(parts, self._last)

    def close(self) -> None:
        self._pool.shutdown()


def _hash(has_begun: threading.Event, parts: tuple[bytes, ...]) -> str:
    has_begun.set()
    return digest_of(*parts)

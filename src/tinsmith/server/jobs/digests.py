"""Digests of requests: small bodies are hashed at once, large ones in threads, since hashing releases Python's lock."""

from __future__ import annotations

import asyncio
from concurrent.futures import Future, ThreadPoolExecutor

from tinsmith.server.jobs.job import digest_of

LARGE_BYTES = 512 * 1024
"""Hashing less than this takes less time than waking a thread."""
THREADS = 2


class PendingDigest:
    """A digest that may still be being computed."""

    def __init__(self, parts: tuple[bytes, ...], hashing: Future[str] | None) -> None:
        self._parts = parts
        self._hashing = hashing

    async def digest(self) -> str:
        if self._hashing is None:
            return digest_of(*self._parts)
        return self._hashing.result() if self._hashing.done() else await asyncio.wrap_future(self._hashing)


class Hasher:
    """Threads that hash bodies while these are decoded elsewhere."""

    def __init__(self) -> None:
        self._pool = ThreadPoolExecutor(THREADS, "tinsmith-hashing")

    def begin(self, *parts: bytes) -> PendingDigest:
        is_large = sum(map(len, parts)) >= LARGE_BYTES
        return PendingDigest(parts, self._pool.submit(digest_of, *parts) if is_large else None)

    def close(self) -> None:
        self._pool.shutdown()

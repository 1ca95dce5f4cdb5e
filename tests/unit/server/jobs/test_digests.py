"""Digests computed in threads equal those computed on the loop."""

from __future__ import annotations

import asyncio
import threading

import pytest

from tinsmith.server.jobs import digests
from tinsmith.server.jobs.digests import LARGE_BYTES, Hasher
from tinsmith.server.jobs.job import digest_of


@pytest.mark.parametrize("size", [0, LARGE_BYTES - 2, LARGE_BYTES, 3 * LARGE_BYTES])
def test_small_and_large_content_has_the_same_kind_of_name(size: int) -> None:
    async def scenario() -> None:
        hasher = Hasher()
        parts = (b"kind", bytes(size))
        begun = hasher.begin(*parts)
        assert await begun.digest() == await begun.digest() == digest_of(*parts)
        hasher.close()

    asyncio.run(scenario())


def test_what_is_large_is_never_hashed_on_the_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    threads = []

    def watched(*parts: bytes) -> str:
        threads.append(threading.current_thread().name)
        return digest_of(*parts)

    monkeypatch.setattr(digests, "digest_of", watched)

    async def scenario() -> None:
        hasher = Hasher()
        begun = [hasher.begin(bytes([value]) * LARGE_BYTES) for value in range(5)]
        for value, one in enumerate(begun):
            assert await one.digest() == digest_of(bytes([value]) * LARGE_BYTES)
        hasher.close()

    asyncio.run(scenario())
    assert len(threads) == 5
    assert all(name.startswith("tinsmith-hashing") for name in threads)

"""Digests that are computed beside the loop are those that it computes itself."""

from __future__ import annotations

import asyncio
import threading

import pytest

from tinsmith.server import naming
from tinsmith.server.naming import LARGE_BYTES, Namer
from tinsmith.server.work import digest_of


@pytest.mark.parametrize("size", [0, LARGE_BYTES - 2, LARGE_BYTES, 3 * LARGE_BYTES])
def test_small_and_large_content_has_the_same_kind_of_name(size: int) -> None:
    async def scenario() -> None:
        namer = Namer()
        parts = (b"kind", bytes(size))
        begun = namer.begin(*parts)
        assert await begun.digest() == await begun.digest() == digest_of(*parts)
        namer.close()

    asyncio.run(scenario())


def test_a_busy_thread_holds_nobody_up(monkeypatch: pytest.MonkeyPatch) -> None:
    gate, threads = threading.Event(), []

    def slow(*parts: bytes) -> str:
        threads.append(threading.current_thread().name)
        if threads[-1].startswith("tinsmith-naming"):
            assert gate.wait(20)
        return digest_of(*parts)

    monkeypatch.setattr(naming, "digest_of", slow)

    async def scenario() -> None:
        namer = Namer()
        first, second = namer.begin(bytes(LARGE_BYTES)), namer.begin(b"\1" * LARGE_BYTES)
        assert await second.digest() == digest_of(b"\1" * LARGE_BYTES)
        gate.set()
        assert await first.digest() == digest_of(bytes(LARGE_BYTES))
        namer.close()

    asyncio.run(scenario())
    assert [name.startswith("tinsmith-naming") for name in threads] == [True, False]

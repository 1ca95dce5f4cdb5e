"""A bound on memory, by count rather than by clock."""

from __future__ import annotations

import tracemalloc
from collections.abc import Iterator
from contextlib import contextmanager

MIB = 1 << 20


@contextmanager
def memory_below(limit: int) -> Iterator[None]:
    """Fails if the block holds more than `limit` bytes at any time, beside what was there before."""
    tracemalloc.start()
    try:
        yield
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < limit

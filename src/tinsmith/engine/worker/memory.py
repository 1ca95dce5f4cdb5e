"""The memory of an engine: limits for adapters and cache, and what happens to memory that is freed.

Limits follow the memory that the machine or device has, not what is free at the moment: the longest sequence that the
sampler accepts must not change from start to start.

Freed memory is kept while there is work, and returned when there is none. By default the C library returns large blocks
to the kernel at once, and the next pass gets them again page by page, zeroed: on two cores that took a tenth of a
training step. Only the GNU C library can be configured this way; others are left alone.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

GB = 1 << 30


@dataclass(frozen=True, slots=True)
class MemoryCaps:
    """The most bytes of each kind."""

    adapter_bytes: int
    """Adapters in training."""
    sampler_adapter_bytes: int
    """Frozen adapters."""
    cache_bytes: int
    """Keys and values of the sampler."""

    def __str__(self) -> str:
        adapters, samplers, cache = (
            f"{size / GB:.2f} GB" for size in (self.adapter_bytes, self.sampler_adapter_bytes, self.cache_bytes)
        )
        return f"at most {adapters} of adapters in training, {samplers} of adapters to sample from, {cache} of cache"


LEAST = MemoryCaps(GB // 2, GB // 4, GB // 2)
"""Half a gigabyte of cache holds the whole context of the default model."""
MOST = MemoryCaps(64 * GB, 32 * GB, 64 * GB)
USUAL_BYTES = 16 * GB
"""Assumed for a machine that does not report its memory."""
PARTS = {"cpu": MemoryCaps(8, 16, 16), "cuda": MemoryCaps(4, 8, 4)}
"""What the weights leave is divided by these. On a machine that other programs share, that is a quarter in all; on a
CUDA device five eighths, with the rest for activations."""


def default_caps(built_in: int | None, weights_bytes: int, device_kind: str, engines: int = 1) -> MemoryCaps:
    """Return the limits of one of `engines` engines on a device with this much memory (None: unknown)."""
    left = max(0, (built_in or USUAL_BYTES) - weights_bytes) // engines
    parts = PARTS["cuda" if device_kind == "cuda" else "cpu"]
    return MemoryCaps(
        _within(LEAST.adapter_bytes, left // parts.adapter_bytes, MOST.adapter_bytes),
        _within(LEAST.sampler_adapter_bytes, left // parts.sampler_adapter_bytes, MOST.sampler_adapter_bytes),
        _within(LEAST.cache_bytes, left // parts.cache_bytes, MOST.cache_bytes),
    )


def chosen_caps(defaults: MemoryCaps, **given: int | None) -> MemoryCaps:
    """Return the defaults, with the operator's settings in place of them."""
    return replace(defaults, **{name: size for name, size in given.items() if size is not None})


def _within(least: int, size: int, most: int) -> int:
    return max(least, min(size, most))


_TRIM_THRESHOLD, _TOP_PAD, _MMAP_THRESHOLD = -1, -2, -3
"""Parameters of mallopt, from malloc.h."""
KEPT_BYTES = 1 << 30
"""Free memory at the end of the heap that is kept, at most."""
MAPPED_BYTES = 32 << 20
"""Larger blocks get a mapping of their own, which is returned when they are freed. This is the highest value."""
GROWTH_BYTES = 16 << 20


def keep() -> bool:
    """Keep freed memory from now on; return whether that could be configured."""
    mallopt = _function("mallopt")
    wanted = (_MMAP_THRESHOLD, MAPPED_BYTES), (_TRIM_THRESHOLD, KEPT_BYTES), (_TOP_PAD, GROWTH_BYTES)
    return mallopt is not None and all(mallopt(name, value) for name, value in wanted)


def give_back() -> None:
    """Return free memory to the kernel."""
    trim = _function("malloc_trim")
    if trim is not None:
        trim(0)


@functools.cache
def _function(name: str) -> Callable[..., Any] | None:
    try:
        return getattr(ctypes.CDLL(None), name, None)
    except OSError:
        return None

"""What becomes of memory that tensors leave: while there is work it is kept for the next ones, then it is given back.

By default the C library returns large blocks to the kernel at once, and the next pass gets them again page by page,
zeroed: on two cores that was a tenth of the time of a training step. Only the GNU library is told; others go on as they
do.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable
from typing import Any

_TRIM_THRESHOLD, _TOP_PAD, _MMAP_THRESHOLD = -1, -2, -3
"""Numbers of the settings, from malloc.h."""
KEPT_BYTES = 1 << 30
"""Free memory at the heap's end that is kept, at most."""
MAPPED_BYTES = 32 << 20
"""Blocks from this size on are mapped on their own, and returned when they are free. It cannot be set higher."""
GROWTH_BYTES = 16 << 20


def keep() -> bool:
    """From now on keep what is freed; whether that could be set."""
    mallopt = _function("mallopt")
    wanted = (_MMAP_THRESHOLD, MAPPED_BYTES), (_TRIM_THRESHOLD, KEPT_BYTES), (_TOP_PAD, GROWTH_BYTES)
    return mallopt is not None and all(mallopt(name, value) for name, value in wanted)


def give_back() -> None:
    """Return to the kernel what is free now."""
    trim = _function("malloc_trim")
    if trim is not None:
        trim(0)


@functools.cache
def _function(name: str) -> Callable[..., Any] | None:
    try:
        return getattr(ctypes.CDLL(None), name, None)
    except OSError:
        return None

"""Disk space reserved for what must work on a full disk: a file beside the database, released slice by slice.

Deleting rows needs space, too: SQLite writes the change to its log before it frees anything. The file has real blocks
(`posix_fallocate`, or zeros on macOS, which lacks it), and grows back as soon as there is space.
"""

from __future__ import annotations

import contextlib
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path

SLICE_BYTES = 256 * 1024
"""Deleting a checkpoint writes some 100 KB."""
SLICES = 32
PAUSE_S = 5.0
"""Between two attempts to restore its full size."""


class Reserve:
    """The reserve file. Used by one thread at a time."""

    def __init__(self, path: Path, clock: Callable[[], float] = time.monotonic) -> None:
        self._path = path
        self._clock = clock
        self._slices = 0
        self._again_at = 0.0

    @property
    def is_due(self) -> bool:
        return self._slices < SLICES and self._clock() >= self._again_at

    def fill(self) -> None:
        """Reserve as much as there is, up to the full size."""
        self._again_at = self._clock() + PAUSE_S
        with contextlib.suppress(OSError):
            descriptor = os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW, 0o600)
            try:
                while self._slices < SLICES:
                    _allocate(descriptor, self._slices * SLICE_BYTES)
                    self._slices += 1
            finally:
                os.close(descriptor)

    def give_up(self) -> bool:
        """Release a slice; return whether there was one. The next commit reserves it again if it is still free."""
        if not self._slices:
            return False
        self._slices -= 1
        self._again_at = 0.0
        with contextlib.suppress(OSError):
            os.truncate(self._path, self._slices * SLICE_BYTES)
        return True

    def close(self) -> None:
        with contextlib.suppress(OSError):
            os.unlink(self._path)


def _allocate(descriptor: int, offset: int) -> None:
    """Give a slice of a file real blocks."""
    if sys.platform == "linux":
        os.posix_fallocate(descriptor, offset, SLICE_BYTES)
    else:
        zeros = memoryview(bytes(SLICE_BYTES))
        while zeros:
            written = os.pwrite(descriptor, zeros, offset)
            zeros, offset = zeros[written:], offset + written

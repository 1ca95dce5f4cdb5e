"""A disk on which one chosen step fails, or on which every write is short."""

from __future__ import annotations

import errno
from pathlib import Path

from tinsmith.engine.checkpoints.durable_files import DurableDisk


class FailingDisk(DurableDisk):
    """Counts the steps it takes; the one numbered `fails_at` raises. `fails_at` None counts only."""

    def __init__(self, fails_at: int | None = None, code: int = errno.ENOSPC) -> None:
        self.steps: list[str] = []
        self._fails_at = fails_at
        self._code = code

    def _step(self, name: str) -> None:
        self.steps.append(name)
        if len(self.steps) - 1 == self._fails_at:
            raise OSError(self._code, errno.errorcode[self._code])

    def write_some(self, descriptor: int, data: memoryview) -> int:
        half = max(1, len(data) // 2)  # part of the bytes arrive before the failure
        if len(self.steps) == self._fails_at:
            super().write_some(descriptor, data[:half])
        self._step("write")
        return super().write_some(descriptor, data)

    def fsync(self, descriptor: int) -> None:
        self._step("fsync")
        super().fsync(descriptor)

    def rename(self, source: Path, target: Path) -> None:
        self._step("rename")
        super().rename(source, target)

    def remove_tree(self, directory: Path) -> None:
        self._step("remove")
        super().remove_tree(directory)


class ShortWrites(DurableDisk):
    """Writes at most seven bytes at a time."""

    def write_some(self, descriptor: int, data: memoryview) -> int:
        return super().write_some(descriptor, data[:7])


class FullDisk(DurableDisk):
    """Takes no byte and does not say so."""

    def write_some(self, descriptor: int, data: memoryview) -> int:
        return 0

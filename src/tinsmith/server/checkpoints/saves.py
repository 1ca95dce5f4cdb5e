"""Checkpoints that are being made: their paths are taken before their rows exist."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from weakref import WeakValueDictionary

from tinsmith.server.checkpoints.disk_budget import DiskBudget


class Saves:
    """Saves and imports under way, by path."""

    def __init__(self, disk: DiskBudget) -> None:
        self._disk = disk
        self._directories: dict[str, list[str]] = {}
        self._imports: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()

    def begin(self, path: str, directory: str) -> None:
        """A save to this path was accepted and will write to this directory."""
        self._directories.setdefault(path, []).append(directory)

    def end(self, path: str, directory: str) -> None:
        """A save has ended, or was not accepted after all."""
        self._disk.release(directory)
        directories = self._directories.get(path, [])
        if directory in directories:
            directories.remove(directory)
        if not directories:
            self._directories.pop(path, None)

    def directories(self, path: str) -> Sequence[str]:
        """Return where the unfinished saves to a path write, in the order in which they were accepted."""
        return self._directories.get(path, ())

    def import_lock(self, path: str) -> asyncio.Lock:
        """Return the lock that the request which imports to this path holds."""
        return self._imports.setdefault(path, asyncio.Lock())

    def __contains__(self, path: str) -> bool:
        return path in self._directories

    def __len__(self) -> int:
        return len(self._directories)

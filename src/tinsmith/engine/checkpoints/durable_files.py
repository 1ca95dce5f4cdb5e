"""Files that are on the disk when a call returns, and directories that appear complete or not at all.

The order matters. A file's bytes survive a power failure only after an fsync of the file, and its name only after an
fsync of its directory. A directory is therefore filled under a temporary name, everything in it is synced, and only
then it is renamed, which is atomic; then the parent is synced. Tests replace the four smallest steps of `DurableDisk`
to see what a full or failing disk does.
"""

from __future__ import annotations

import errno
import os
import secrets
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

PARTIAL = ".partial"
"""Suffix of a directory that is being written."""
REPLACED = ".replaced"
"""Suffix of a directory that is being replaced by another."""


class DurableDisk:
    """Writes to the real disk."""

    def write_some(self, descriptor: int, data: memoryview) -> int:
        return os.write(descriptor, data)

    def fsync(self, descriptor: int) -> None:
        os.fsync(descriptor)

    def rename(self, source: Path, target: Path) -> None:
        os.rename(source, target)

    def remove_tree(self, directory: Path) -> None:
        shutil.rmtree(directory)

    def write_file(self, path: Path, data: bytes | memoryview) -> None:
        """Create a file; its bytes are on the disk when this returns."""
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | getattr(os, "O_CLOEXEC", 0), 0o644)
        try:
            rest = memoryview(data).cast("B")
            while rest:
                written = self.write_some(descriptor, rest)
                if written <= 0:
                    raise OSError(errno.EIO, "the disk accepts no more bytes", str(path))
                rest = rest[written:]
            self.fsync(descriptor)
        finally:
            os.close(descriptor)

    def sync_directory(self, directory: Path) -> None:
        """Make the names in a directory durable."""
        descriptor = os.open(directory, os.O_RDONLY)
        try:
            self.fsync(descriptor)
        finally:
            os.close(descriptor)


DISK = DurableDisk()


@contextmanager
def whole_directory(target: Path, *, overwrite: bool = False, disk: DurableDisk = DISK) -> Iterator[Path]:
    """Provide a directory to fill. It is renamed to `target` if the block succeeds, and removed if it does not.

    Files must be written with `disk.write_file`. A crash leaves at most a temporary directory, which `tidy` removes.
    """
    if target.exists() and not overwrite:
        raise FileExistsError(f"{target} already exists")
    _make_directories(target.parent, disk)
    token = secrets.token_hex(8)
    partial = target.with_name(f".{target.name}.{token}{PARTIAL}")
    replaced = target.with_name(f".{target.name}.{token}{REPLACED}")
    partial.mkdir()
    try:
        yield partial
        disk.sync_directory(partial)
        _put_in_place(partial, target, replaced, disk)
    except BaseException:
        if partial.exists():
            _remove(partial, disk)
        raise
    if replaced.exists():
        _remove(replaced, disk)


def tidy(parent: Path, disk: DurableDisk = DISK) -> list[str]:
    """Clean up what a crash left in a directory of such directories; return the names that were changed.

    Must not be called while something writes there.
    """
    touched = []
    for path in sorted(parent.glob(".*")):
        name = path.name[1:].rsplit(".", 2)[0]
        if path.name.endswith(REPLACED) and not (parent / name).exists():
            disk.rename(path, parent / name)
            disk.sync_directory(parent)
        elif path.name.endswith((PARTIAL, REPLACED)):
            disk.remove_tree(path)
        else:
            continue
        touched.append(path.name)
    return touched


def _make_directories(directory: Path, disk: DurableDisk) -> None:
    if directory.is_dir():
        return
    _make_directories(directory.parent, disk)
    directory.mkdir(exist_ok=True)
    disk.sync_directory(directory.parent)


def _put_in_place(partial: Path, target: Path, replaced: Path, disk: DurableDisk) -> None:
    """Rename and sync; undo all renames if any step fails."""
    done: list[tuple[Path, Path]] = []
    try:
        steps = [(target, replaced)] if target.exists() else []
        for source, destination in [*steps, (partial, target)]:
            disk.rename(source, destination)
            done.append((source, destination))
        disk.sync_directory(target.parent)
    except BaseException:
        for source, destination in reversed(done):
            disk.rename(destination, source)
        raise


def _remove(directory: Path, disk: DurableDisk) -> None:
    """Remove a directory, or leave it to `tidy`: a failure here must not affect the outcome of the write."""
    with suppress(OSError):
        disk.remove_tree(directory)

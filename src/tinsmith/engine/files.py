"""Files that are on the disk when a call returns, and directories that appear whole or not at all.

Owns: the order of write, fsync and rename. `Disk` is the seam: its four smallest steps can be replaced to see what a
full or failing disk does.
Does not know: what is in the files.
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
"""Ending of a directory that is being written."""
REPLACED = ".replaced"
"""Ending of a directory that another is about to take the name of."""


class Disk:
    """The real one."""

    def write_some(self, descriptor: int, data: memoryview) -> int:
        return os.write(descriptor, data)

    def fsync(self, descriptor: int) -> None:
        os.fsync(descriptor)

    def rename(self, source: Path, target: Path) -> None:
        os.rename(source, target)

    def remove_tree(self, directory: Path) -> None:
        shutil.rmtree(directory)

    def write_file(self, path: Path, data: bytes | memoryview) -> None:
        """A new file whose bytes have reached the disk."""
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | getattr(os, "O_CLOEXEC", 0), 0o644)
        try:
            rest = memoryview(data).cast("B")
            while rest:
                written = self.write_some(descriptor, rest)
                if written <= 0:
                    raise OSError(errno.EIO, "the disk takes no more bytes", str(path))
                rest = rest[written:]
            self.fsync(descriptor)
        finally:
            os.close(descriptor)

    def sync_directory(self, directory: Path) -> None:
        """Make the names in a directory last."""
        descriptor = os.open(directory, os.O_RDONLY)
        try:
            self.fsync(descriptor)
        finally:
            os.close(descriptor)


DISK = Disk()


@contextmanager
def whole_directory(target: Path, *, overwrite: bool = False, disk: Disk = DISK) -> Iterator[Path]:
    """A directory to fill, which takes the name `target` when the block ends well, and is gone when it does not.

    Files must be written with `disk.write_file`. A crash leaves no more than a directory that `tidy` takes care of.
    """
    if target.exists() and not overwrite:
        raise FileExistsError(f"{target} exists already")
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


def tidy(parent: Path, disk: Disk = DISK) -> list[str]:
    """Put right what a crash left in a directory of such directories; returns the names that it touched.

    Not to be called while something writes there.
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


def _make_directories(directory: Path, disk: Disk) -> None:
    if directory.is_dir():
        return
    _make_directories(directory.parent, disk)
    directory.mkdir(exist_ok=True)
    disk.sync_directory(directory.parent)


def _put_in_place(partial: Path, target: Path, replaced: Path, disk: Disk) -> None:
    """Rename, and take every rename back if one, or making it last, fails."""
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


def _remove(directory: Path, disk: Disk) -> None:
    """What cannot be removed now is left to `tidy`: the outcome of the write must not depend on it."""
    with suppress(OSError):
        disk.remove_tree(directory)

"""The data directory: where checkpoints, samplers, exports and traces lie, and how much room is left.

Names of directories are made here from ids, so that nothing a client says becomes part of a path unchecked.
Does not know: what is in a checkpoint.
"""

from __future__ import annotations

import math
import os
import re
import secrets
import shutil
import time
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from pathlib import Path

from tinsmith.errors import InvalidInputError
from tinsmith.server.refusals import NotReadyError

NAME = re.compile(r"[A-Za-z0-9_.-]{1,255}")
SHOWN_CHARS = 200
"""Of a checkpoint's name in its directory's: file systems allow 255, and engines put something around it."""
_SAFE = re.compile(r"[^A-Za-z0-9_.-]")


def check_name(name: str, field: str = "path") -> str:
    """A checkpoint's name as it may be: one segment of a path."""
    if not NAME.fullmatch(name) or name.startswith("."):
        raise InvalidInputError(
            f"{field}: {name!r} cannot name a checkpoint; use at most 255 letters, digits, _ - . and no . in front",
            field=field,
        )
    return name


ROOM_S = 0.25
"""How long room that was found is taken for granted; asking the file system costs as much as a small request."""


class Files:
    """Places under one directory."""

    def __init__(self, root: Path, min_free_bytes: int, clock: Callable[[], float] = time.monotonic) -> None:
        self.root = root
        self._min_free_bytes = min_free_bytes
        self._clock = clock
        self._has_room_until = -math.inf

    def prepare(self) -> None:
        """Make the directories; only this user may look in."""
        self.root.mkdir(parents=True, exist_ok=True)
        os.chmod(self.root, 0o700)
        for name in ("checkpoints", "samplers", "loads", "snapshots", "traces", "uploads"):
            (self.root / name).mkdir(exist_ok=True)

    def checkpoint(self, model_id: str, kind: str, name: str, request_id: str) -> Path:
        """Where a save of this name goes; every save has its own directory, also under the same name."""
        return self.root / "checkpoints" / _segment(model_id) / kind / f"{name[:SHOWN_CHARS]}-{request_id[:12]}"

    def sampler(self, sampler_id: str) -> Path:
        return self.root / "samplers" / _segment(sampler_id)

    def loads(self, model_id: str) -> Path:
        """Second names for what a run loaded, so that its journal can be replayed when the checkpoint is gone."""
        return self.root / "loads" / _segment(model_id)

    def snapshot(self, model_id: str, name: str) -> Path:
        return self.root / "snapshots" / _segment(model_id) / name

    def snapshots(self, model_id: str) -> Path:
        """Where the snapshots of a run are."""
        return self.root / "snapshots" / _segment(model_id)

    def remove_leftovers(self, snapshots: Collection[str]) -> list[Path]:
        """Delete what a crash left half done, and snapshots that no run names. Not while an engine writes."""
        left = [path for depth in ("*", "*/*", "*/*/*", "*/*/*/*") for path in self.root.glob(f"{depth}.partial")]
        left = [path for path in left if path.name.startswith(".")]
        known = {Path(name).parts[-2:] for name in snapshots}  # whatever the data directory was called then
        left += [path for path in (self.root / "snapshots").glob("*/*") if path.parts[-2:] not in known]
        for path in left:
            remove_tree(path)
        return left

    def trace(self, session_id: str) -> Path:
        return self.root / "traces" / f"{_segment(session_id)}.json"

    def check_room(self) -> None:
        """Refuse new work when the disk is nearly full; what was accepted is not touched."""
        now = self._clock()
        if now < self._has_room_until:
            return
        free = self.free_bytes()
        if free < self._min_free_bytes:
            raise NotReadyError(
                f"the disk under {self.root} has {free // 2**20} MB left (limit {self._min_free_bytes // 2**20} MB); "
                "no new work is taken until there is room: delete checkpoints or make space",
                retry_after_s=30,
            )
        self._has_room_until = now + ROOM_S

    def free_bytes(self) -> int:
        return shutil.disk_usage(self.root).free

    def relative(self, path: Path) -> str:
        return path.relative_to(self.root).as_posix()

    def resolve(self, name: str) -> Path:
        """A file by its relative name; never one outside the data directory."""
        path = (self.root / name.replace("\0", "/")).resolve()
        if "\0" in name or not path.is_relative_to(self.root.resolve()) or not path.is_file():
            raise InvalidInputError(f"{name!r} is not a file here", field="name")
        return path


def link_tree(source: Path, target: Path) -> None:
    """The files of a directory under a second name: hard links, copies where the file system has none.

    They are on the disk when this returns: a journal that depends on them is written next.
    """
    target.mkdir(parents=True, exist_ok=True)
    for path in source.iterdir():
        place = target / path.name
        if path.is_file() and not place.exists():
            try:
                os.link(path, place)
            except OSError:
                shutil.copy2(path, place)
                _sync(place)
    for directory in (target, target.parent, target.parent.parent):
        _sync(directory)


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Where to write a file that is to appear whole; several may write the same one at once, and the last counts."""
    temporary = path.with_name(f".{secrets.token_hex(8)}.new")
    try:
        yield temporary
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def write_whole(path: Path, body: bytes) -> None:
    with replacing(path) as temporary:
        temporary.write_bytes(body)


def remove_tree(path: Path) -> None:
    """Delete a directory; one that is gone already is fine."""
    shutil.rmtree(path, ignore_errors=True)


def _segment(identifier: str) -> str:
    segment = _SAFE.sub("_", identifier)
    return segment if segment.strip(".") else "_" * len(segment)

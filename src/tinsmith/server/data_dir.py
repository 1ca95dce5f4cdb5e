"""The data directory: where checkpoints, samplers, exports and traces are, and how much space is left.

Directory names are made here from ids, so that nothing a client sends becomes part of a path unchecked.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import logging
import math
import os
import re
import secrets
import shutil
import time
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

from tinsmith.errors import InvalidInputError
from tinsmith.server.refusals import NotReadyError, UnknownResourceError

logger = logging.getLogger(__name__)

NAME = re.compile(r"[A-Za-z0-9_.-]{1,255}")
ARCHIVE = ".archive.tar"
"""The archive in a checkpoint's directory; created when it is first requested."""
SHOWN_CHARS = 200
"""Characters of a checkpoint's name in its directory's name: file systems allow 255, and engines add to it."""
_SAFE = re.compile(r"[^A-Za-z0-9_.-]")


def check_name(name: str, field: str = "path") -> str:
    """Validate a checkpoint's name, which is one segment of a path, and return it."""
    if not NAME.fullmatch(name) or name.startswith("."):
        raise InvalidInputError(
            f"{field}: {name!r} cannot name a checkpoint; use at most 255 letters, digits, _ - . and no . at the start",
            field=field,
        )
    return name


DIRECTORIES = ("checkpoints", "samplers", "loads", "snapshots", "traces", "uploads")
"""What a data directory has besides the database and single files."""
OF_RUNS = ("samplers", "snapshots", "loads")
"""Directories whose entries are named after a session, and are deleted when the session is pruned."""
DOWNLOADED = ("checkpoints", "traces")
"""Directories whose files can have signed URLs; the database, the secret and the keys are elsewhere."""
ROOM_S = 0.25
"""How long the last check is trusted: asking the file system costs as much as a small request."""


class Files:
    """Paths in the data directory."""

    def __init__(self, root: Path, min_free_bytes: int, clock: Callable[[], float] = time.monotonic) -> None:
        self.root = root
        self._min_free_bytes = min_free_bytes
        self._clock = clock
        self._has_room_until = -math.inf

    def prepare(self) -> None:
        """Create the directories, accessible to this user only."""
        self.root.mkdir(parents=True, exist_ok=True)
        os.chmod(self.root, 0o700)
        for name in DIRECTORIES:
            (self.root / name).mkdir(exist_ok=True)

    def checkpoint(self, model_id: str, kind: str, name: str, request_id: str) -> Path:
        """Return the directory of a save; each save has its own, even under the same name."""
        return self.root / "checkpoints" / segment(model_id) / kind / f"{name[:SHOWN_CHARS]}-{request_id[:12]}"

    def sampler(self, sampler_id: str) -> Path:
        return self.root / "samplers" / segment(sampler_id)

    def loads(self, model_id: str) -> Path:
        """Return where links to a run's loaded files are: a replay needs them even if the checkpoint is deleted."""
        return self.root / "loads" / segment(model_id)

    def snapshot(self, model_id: str, name: str) -> Path:
        return self.root / "snapshots" / segment(model_id) / name

    def snapshots(self, model_id: str) -> Path:
        """Return the directory of a run's snapshots."""
        return self.root / "snapshots" / segment(model_id)

    def remove_leftovers(self, snapshots: Collection[str], runs: Collection[str]) -> list[Path]:
        """Delete what a crash left half written, and snapshots that their run does not name.

        Must not be called while an engine writes. Files of runs that the database does not know stay.
        """
        left = [path for depth in ("*", "*/*", "*/*/*", "*/*/*/*") for path in self.root.glob(f"{depth}.partial")]
        left = [path for path in left if path.name.startswith(".")]
        known = {Path(name).parts[-2:] for name in snapshots}  # whatever the data directory was called then
        ours = {segment(run) for run in runs}
        there = [path for path in (self.root / "snapshots").glob("*/*") if path.parts[-2] in ours]
        left += [path for path in there if path.parts[-2:] not in known]
        for path in left:
            remove_tree(path)
        return left

    def trace(self, session_id: str) -> Path:
        return self.root / "traces" / f"{segment(session_id)}.json"

    def check_room(self) -> None:
        """Refuse new work if the disk is nearly full; accepted work is not affected."""
        now = self._clock()
        if now < self._has_room_until:
            return
        free = self.free_bytes()
        if free < self._min_free_bytes:
            raise NotReadyError(
                f"the server's disk has {free // 2**20} MB left (limit {self._min_free_bytes // 2**20} MB); "
                "no new work is accepted until there is more: delete checkpoints or free space",
                retry_after_s=30,
            )
        self._has_room_until = now + ROOM_S

    def free_bytes(self) -> int:
        return shutil.disk_usage(self.root).free

    def remove(self, directory: str) -> None:
        """Delete a directory that a row names, if it is in this data directory: rows of a copied installation name
        those of the original."""
        if Path(directory).resolve().is_relative_to(self.root.resolve()):
            remove_tree(Path(directory))
        else:
            logger.warning("not deleting %s: it is not in %s", directory, self.root, extra={"event": "files"})

    def relative(self, path: Path) -> str:
        return path.relative_to(self.root).as_posix()

    def resolve(self, name: str) -> Path:
        """Return a file for download by its relative name; never one outside of `DOWNLOADED`."""
        path = (self.root / name.replace("\0", "/")).resolve()
        is_inside = any(path.is_relative_to((self.root / place).resolve()) for place in DOWNLOADED)
        if "\0" in name or not is_inside or not path.is_file():
            raise InvalidInputError(f"{name[:100]!r} is not a file that can be downloaded", field="name")
        return path


@contextmanager
def still_there() -> Iterator[None]:
    """Report files that are deleted while they are read, after their checkpoint's row was found."""
    try:
        yield
    except FileNotFoundError:
        raise UnknownResourceError("the checkpoint was deleted while it was being read") from None


def link_tree(source: Path, target: Path) -> None:
    """Link the regular files of a directory into another one; copy them if the file system has no hard links.

    They are durable when this returns, since a journal entry that depends on them is written next. Several callers may
    make the same directory at once, or complete one that a crash left half done.
    """
    target.mkdir(parents=True, exist_ok=True)
    with still_there():
        for path in source.iterdir():
            place = target / path.name
            if path.is_file() and not path.is_symlink() and not place.exists():
                _link(path, place)
    for directory in (target, target.parent, target.parent.parent):
        _sync(directory)


def _link(path: Path, place: Path) -> None:
    try:
        os.link(path, place)
    except FileExistsError:
        pass  # another caller was faster
    except OSError:
        with replacing(place) as temporary:
            shutil.copy2(path, temporary)
            _sync(temporary)


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Yield a temporary path that replaces `path` atomically; with several writers the last one wins."""
    temporary = path.with_name(f".{secrets.token_hex(8)}.new")
    try:
        yield temporary
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def write_whole(path: Path, body: bytes) -> None:
    with replacing(path) as temporary:
        temporary.write_bytes(body)


def write_private(path: Path, text: str) -> None:
    """Write a file that only this user can read, atomically and durably."""
    temporary = path.with_name(path.name + ".new")
    descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    with os.fdopen(descriptor, "w") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    os.replace(temporary, path)


def tree_bytes(path: Path) -> int:
    """Return the bytes of a directory; a file with n links counts 1/n, and one that disappears counts 0."""
    total = 0
    for place, _, names in os.walk(path):
        for name in names:
            with contextlib.suppress(OSError):
                found = os.lstat(os.path.join(place, name))
                total += found.st_size // max(1, found.st_nlink)
    return total


def upload_prefix(org_id: str) -> str:
    """Return the prefix of the names of an organisation's uploads."""
    return f"{hashlib.sha256(b'uploads' + org_id.encode()).hexdigest()[:16]}-"


def upload_bytes(data_dir: Path, orgs: Iterable[str]) -> dict[str, int]:
    """Return how many bytes the unfinished uploads of each organisation take."""
    found: dict[str, int] = {}
    for place in (data_dir / "uploads").glob("*-*"):
        prefix = f"{place.name.partition('-')[0]}-"
        found[prefix] = found.get(prefix, 0) + tree_bytes(place)
    return {org_id: found[upload_prefix(org_id)] for org_id in orgs if upload_prefix(org_id) in found}


def is_disk_full(error: BaseException) -> bool:
    """Whether a write failed because there is no space left: the server's problem, not that of the sender."""
    return isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT)


def remove_tree(path: Path) -> None:
    """Delete a directory if it exists."""
    shutil.rmtree(path, ignore_errors=True)


def segment(identifier: str) -> str:
    """Return an id as a directory name."""
    name = _SAFE.sub("_", identifier)
    return name if name.strip(".") else "_" * len(name)


def run_names(data_dir: Path) -> frozenset[str]:
    """Return the runs that have files in a data directory, each by its `segment`."""
    found = (path for kind in ("checkpoints", "snapshots", "loads") for path in (data_dir / kind).glob("*"))
    return frozenset(path.name for path in found if path.is_dir() and not path.name.startswith("."))


def run_places(data_dir: Path) -> list[Path]:
    """Return the directories of runs and their samplers, other than checkpoints."""
    return [place for kind in OF_RUNS for place in sorted((data_dir / kind).glob("*"))]


def session_of(place: Path) -> str:
    """Return the session that one of `run_places` belongs to; its name begins with the session's id."""
    return place.name.partition("_")[0]

"""Files uploaded in parts, until they become a checkpoint or expire.

A part is written at its offset, so sending it again does no harm; digests show at the end whether everything arrived.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import time
from collections.abc import Mapping
from pathlib import Path

from tinsmith.errors import InvalidInputError, TinkerError
from tinsmith.server.auth.identity import Caller
from tinsmith.server.checkpoints.manifest import FILES, StopCheck
from tinsmith.server.checkpoints.retention import checkpoint_bytes
from tinsmith.server.data_dir import Files, is_disk_full, remove_tree, tree_bytes, upload_prefix
from tinsmith.server.jobs.accept import check_open
from tinsmith.server.jobs.job import digest_of
from tinsmith.server.refusals import OverLimitError
from tinsmith.server.services import Services
from tinsmith.wire.routes.own import ImportPartQuery

STALE_S = 3600.0
"""An upload expires if nothing is added to it for this long."""
CROWDED_S = 60.0
"""The same if its organisation has reached `MAX_OPEN`."""
MAX_OPEN = 16
"""Uploads of one organisation at a time."""
BLOCK = 1024 * 1024


async def add_part(services: Services, caller: Caller, part: ImportPartQuery, body: bytes) -> int:
    """Store a part and return the size of its file."""
    _check(part)
    check_open(services)
    path = place_of(services.files, caller, part.upload) / part.file
    more = part.offset + len(body) - (path.stat().st_size if path.exists() else 0)
    if more > 0:  # a part that is sent again needs no room
        await _check_cap(services, more)
        services.disk.check(caller.org_id, more, "body")
        services.disk.add(caller.org_id, more)
    try:
        return await services.file_work.run(caller.org_id, _write, path, part.offset, body)
    except (TinkerError, OSError):
        services.disk.add(caller.org_id, -max(0, more))
        raise


def read_form_part(form: Mapping[str, bytes], file: str) -> bytes:
    """Return the part that a multipart form brings in its only field, which has the file's name."""
    if set(form) != {file}:
        raise InvalidInputError(
            f"body: the form must have one field, named after the file, {file[:100]!r}; it has {len(form)}",
            field="body",
        )
    return form[file]


def _check(part: ImportPartQuery) -> None:
    if not 16 <= len(part.upload) <= 64:
        raise InvalidInputError(
            "upload: the name must have 16 to 64 characters, chosen at random so that no two are the same",
            field="upload",
        )
    if part.file not in FILES:
        raise InvalidInputError(f"file: {part.file[:100]!r} is not one of {', '.join(sorted(FILES))}", field="file")


def place_of(files: Files, caller: Caller, upload: str) -> Path:
    """Return an upload's directory. Its name is a digest that no other organisation can produce."""
    name = digest_of(*caller.namespace, upload.encode())
    return files.root / "uploads" / f"{upload_prefix(caller.org_id)}{name[:32]}"


async def _check_cap(services: Services, size_bytes: int) -> None:
    """Refuse a part that would exceed the server's disk cap."""
    cap = services.config.disk_cap_bytes
    if cap is None:
        return
    coming = await asyncio.to_thread(tree_bytes, services.files.root / "uploads")
    used = await checkpoint_bytes(services.store) + coming
    if used + size_bytes > cap:
        raise InvalidInputError(
            f"checkpoints and uploads use {used // 2**20} MB of the {cap // 2**20} MB that this server allows "
            f"(disk_cap_bytes), and {size_bytes} more bytes do not fit; delete checkpoints",
            field="body",
        )


def _write(check: StopCheck, path: Path, offset: int, body: bytes) -> int:
    size = path.stat().st_size if path.exists() else 0
    if not 0 <= offset <= size:
        raise InvalidInputError(
            f"offset: {offset} is not between 0 and {size}, where {path.name} ends; send its parts in order",
            field="offset",
        )
    try:
        _make_place(path.parent)
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW, 0o600)
        try:
            view = memoryview(body)
            while view:
                check()
                written = os.pwrite(descriptor, view[:BLOCK], offset)
                view, offset = view[written:], offset + written
            return os.fstat(descriptor).st_size
        finally:
            os.close(descriptor)
    except OSError as error:
        if is_disk_full(error):
            raise
        raise InvalidInputError(f"{path.name} could not be written: {error.strerror}", field="body") from error


def _make_place(place: Path) -> None:
    """Create the directory of an upload. If the organisation has too many, those that have not grown for a while are
    deleted first."""
    if place.exists():
        return
    others = list(place.parent.glob(f"{place.name.partition('-')[0]}-*"))
    if len(others) >= MAX_OPEN:
        left = [other for other in others if not _forget(other, time.time() - CROWDED_S)]
        if len(left) >= MAX_OPEN:
            raise OverLimitError(
                f"upload: your organisation has {len(left)} unfinished uploads, and {MAX_OPEN} is the limit; import "
                f"them, or wait: each expires when nothing was added to it for {CROWDED_S:g} s",
                retry_after_s=CROWDED_S,
            )
    place.mkdir(parents=True, exist_ok=True, mode=0o700)


def forget_stale(root: Path, now: float | None = None) -> None:
    """Delete uploads that have expired."""
    before = (time.time() if now is None else now) - STALE_S
    for place in (root / "uploads").glob("*"):
        _forget(place, before)


def _forget(place: Path, before: float) -> bool:
    """Delete an upload if nothing was added since `before`; return whether it is gone."""
    with contextlib.suppress(FileNotFoundError):
        if max(path.stat().st_mtime for path in (place, *place.glob("*"))) >= before:
            return False
        remove_tree(place)
    return True

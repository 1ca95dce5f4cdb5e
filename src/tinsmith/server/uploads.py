"""Files that come in parts: what a client uploads piece by piece, until it becomes a checkpoint or is forgotten.

A part goes where its offset says, so one that is sent again does no harm; digests show at the end whether all is there.
Does not know: HTTP, what is in the files.
"""

from __future__ import annotations

import asyncio
import hashlib
import os
import time
from collections.abc import Mapping
from pathlib import Path

import msgspec

from tinsmith.errors import InvalidInputError
from tinsmith.server.files import remove_tree
from tinsmith.server.identity import Caller
from tinsmith.server.services import Services
from tinsmith.server.submitting import check_open
from tinsmith.server.work import digest_of

FILES = frozenset({"adapter_model.safetensors", "adapter_config.json", "optimizer.safetensors", "manifest.json"})
"""What a checkpoint may consist of."""
STALE_S = 3600.0
"""An upload to which nothing was added for this long is deleted."""
BLOCK = 1024 * 1024


class Part(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Where a part belongs: an upload under a name that its client chose, a file of it, and the place in that."""

    upload: str
    file: str
    offset: int


def read_part(parameters: Mapping[str, str]) -> Part:
    try:
        part = msgspec.convert(dict(parameters), Part, strict=False)
    except msgspec.ValidationError as error:
        raise InvalidInputError(f"import_parts: {error}") from None
    if not 16 <= len(part.upload) <= 64:
        raise InvalidInputError("upload: must have 16 to 64 characters, so that no two are the same", field="upload")
    if part.file not in FILES:
        raise InvalidInputError(f"file: {part.file[:100]!r} is not one of {', '.join(sorted(FILES))}", field="file")
    return part


async def add_part(services: Services, caller: Caller, part: Part, body: bytes) -> int:
    """Keep a part; the size that its file has now."""
    check_open(services)
    path = place_of(services, caller, part.upload) / part.file
    await _check_cap(services, path, part.offset + len(body))
    return await asyncio.to_thread(_write, path, part.offset, body)


def place_of(services: Services, caller: Caller, upload: str) -> Path:
    """An upload's directory; its name says nothing, and no other tenant can make the same."""
    name = digest_of(caller.org_id.encode(), caller.user_id.encode(), upload.encode())
    return services.files.root / "uploads" / name[:32]


async def _check_cap(services: Services, path: Path, end: int) -> None:
    """Whether a file may grow to this size; what is there already, and comes again, needs no room."""
    cap = services.config.disk_cap_bytes
    size_bytes = end - (path.stat().st_size if path.exists() else 0)
    if cap is None or size_bytes <= 0:
        return
    coming = await asyncio.to_thread(_tree_bytes, services.files.root / "uploads")
    used = await services.checkpoint_bytes() + coming
    if used + size_bytes > cap:
        raise InvalidInputError(
            f"checkpoints and uploads take {used // 2**20} MB of {cap // 2**20} MB that this server allows "
            f"(disk_cap_bytes), and there is no room for {size_bytes} bytes more; delete checkpoints",
            field="body",
        )


def _tree_bytes(root: Path) -> int:
    return sum(path.stat().st_size for path in root.glob("*/*"))


def _write(path: Path, offset: int, body: bytes) -> int:
    path.parent.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT, 0o600)
    try:
        size = os.fstat(descriptor).st_size
        if not 0 <= offset <= size:
            raise InvalidInputError(
                f"offset: {offset} is not between 0 and {size}, where {path.name} ends; send its parts in order",
                field="offset",
            )
        view = memoryview(body)
        while view:
            written = os.pwrite(descriptor, view, offset)
            view, offset = view[written:], offset + written
        return os.fstat(descriptor).st_size
    except OSError as error:
        raise InvalidInputError(f"{path.name} could not be written: {error.strerror}", field="body") from error
    finally:
        os.close(descriptor)


def sha256_of(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(BLOCK):
            digest.update(block)
    return digest.hexdigest()


def forget_stale(root: Path, now: float | None = None) -> None:
    """Delete the uploads that nobody goes on with."""
    before = (time.time() if now is None else now) - STALE_S
    for place in (root / "uploads").glob("*"):
        latest = max((path.stat().st_mtime for path in (place, *place.glob("*"))), default=0.0)
        if latest < before:
            remove_tree(place)

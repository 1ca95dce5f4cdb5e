"""Files from signed addresses to disk: streamed, resumed, checked."""

from __future__ import annotations

import asyncio
import hashlib
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from tinsmith.errors import APIConnectionError, InvalidInputError, RequestInfo, TinkerError
from tinsmith.transport.base import HttpRequest, Purpose, Transport
from tinsmith.wire import faults

PARTIAL = ".part"
ATTEMPTS = 5
TIMEOUT_S = 3600.0


@dataclass(frozen=True, slots=True)
class Progress:
    """How far a file has come; `total` is None while the server has not said."""

    path: Path
    received: int
    total: int | None


async def download_files(
    transport: Transport, urls: Mapping[str, str], folder: Path, progress: Callable[[Progress], None] | None = None
) -> list[Path]:
    """Fetch every file; each appears under its name only when it is whole."""
    places = {name: _inside(folder, name) for name in sorted(urls)}
    return [await download(transport, urls[name], path, progress) for name, path in places.items()]


async def download(
    transport: Transport, url: str, path: Path, progress: Callable[[Progress], None] | None = None
) -> Path:
    """Fetch one file, going on from a partial one, and check it against the digest that the server names, if any."""
    if path.exists():
        return path
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(path.name + PARTIAL)
    for attempt in range(1, ATTEMPTS + 1):
        try:
            expected = await _fetch(transport, url, path, partial, progress)
            break
        except TinkerError as error:
            if attempt == ATTEMPTS or not error.retryable:
                raise
            await asyncio.sleep(0.2 * 2**attempt)
    if expected is not None and await asyncio.to_thread(_sha256, partial) != expected:
        partial.unlink()
        raise TinkerError(f"{path.name}: the downloaded bytes do not have the digest that the server names; try again")
    os.replace(partial, path)
    return path


async def _fetch(
    transport: Transport, url: str, path: Path, partial: Path, progress: Callable[[Progress], None] | None
) -> str | None:
    have = partial.stat().st_size if partial.exists() else 0
    headers = {"range": f"bytes={have}-", "accept-encoding": "identity"} if have else {"accept-encoding": "identity"}
    request = HttpRequest(method="GET", url=url, headers=headers, timeout_s=TIMEOUT_S, purpose=Purpose.REST)
    async with transport.stream(request) as response:
        if response.status == 416 and have:
            if response.headers.get("content-range") == f"bytes */{have}":
                return _digest(response.headers)
            partial.unlink()  # of another file, or longer than this one
            raise APIConnectionError(RequestInfo("GET", url.split("?")[0]), "the file changed; starting again")
        if response.status >= 400:
            body = await response.read(64 * 1024)
            raise faults.status_error(response.status, body, response.headers, RequestInfo("GET", url.split("?")[0]))
        if response.status != 206:
            have = 0
        length = response.headers.get("content-length")
        total = have + int(length) if length is not None and length.isdigit() else None
        with partial.open("ab" if have else "wb") as file:
            async for chunk in response.chunks():
                await asyncio.to_thread(file.write, chunk)
                have += len(chunk)
                if progress is not None:
                    progress(Progress(path, have, total))
        return _digest(response.headers)


def _digest(headers: Mapping[str, str]) -> str | None:
    """A SHA-256 in hex, as `x-checksum-sha256` or `x-amz-meta-sha256`."""
    digest = headers.get("x-checksum-sha256") or headers.get("x-amz-meta-sha256")
    return digest.strip().lower() if digest else None


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _inside(folder: Path, name: str) -> Path:
    """The place of a file below the folder; names that lead out of it are refused."""
    parts = PurePosixPath(name).parts
    if not parts or PurePosixPath(name).is_absolute() or ".." in parts:
        raise InvalidInputError(f"the server names a file {name!r}, which is not inside the folder", field="urls")
    return folder.joinpath(*parts)

"""Downloading files from signed URLs: streamed to disk, resumed after an interruption, verified by checksum.

A partial download is kept in `<name>.part`, with the server's validator (RFC 9110: a strong ETag, or a date) in
`<name>.part.from`. A download resumes only if the validator still matches (`If-Range`): otherwise the start of one
version and the end of another would be joined into a file that never existed.
"""

from __future__ import annotations

import asyncio
import hashlib
import os
from collections.abc import Callable, Mapping
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Protocol

from tinsmith.client.runtime.deadlines import left_s
from tinsmith.errors import APIConnectionError, InvalidInputError, RequestInfo, TinkerError
from tinsmith.transport.base import HttpRequest, Purpose, StreamedResponse
from tinsmith.transport.retry import RetryPolicy, retrying
from tinsmith.wire.rules import faults

PARTIAL = ".part"
VALIDATOR = ".from"
TIMEOUT_S = 3600.0
POLICY = RetryPolicy(
    max_attempts=5, deadline_s=5 * TIMEOUT_S, first_delay_s=0.4, jitter=(0.5, 1.0), caller_left_s=left_s
)
"""A download resumes where it was cut off, so a few attempts suffice, however long each one takes."""


class StreamSource(Protocol):
    """Where files are streamed from: a client's connection, or a bare transport."""

    def stream(self, request: HttpRequest) -> AbstractAsyncContextManager[StreamedResponse]: ...


@dataclass(frozen=True, slots=True)
class DownloadProgress:
    """The progress of one file; `total` is None if the server does not send a length."""

    path: Path
    received: int
    total: int | None


async def download_files(
    source: StreamSource,
    urls: Mapping[str, str],
    folder: Path,
    progress: Callable[[DownloadProgress], None] | None = None,
) -> list[Path]:
    """Download every file; each appears under its name only when it is complete."""
    places = {name: _inside(folder, name) for name in sorted(urls)}
    return [await download(source, urls[name], path, progress) for name, path in places.items()]


async def download(
    source: StreamSource,
    url: str,
    path: Path,
    progress: Callable[[DownloadProgress], None] | None = None,
    headers: Mapping[str, str] | None = None,
) -> Path:
    """Download one file, resuming a partial download, and verify the server's checksum if it sends one."""
    if path.exists():
        return path
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = Partial(path.with_name(path.name + PARTIAL))
    expected = await retrying(lambda _: _fetch(source, url, path, partial, progress, headers or {}), POLICY)
    if expected is not None and await asyncio.to_thread(_sha256, partial.path) != expected:
        partial.drop()
        raise TinkerError(f"{path.name}: the downloaded file does not match the server's checksum; try again")
    os.replace(partial.path, path)
    partial.drop()
    return path


class Partial:
    """A partial download, and which version of the file it is from."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._note = path.with_name(path.name + VALIDATOR)

    def known(self) -> tuple[int, str]:
        """Return the number of bytes to resume from and their validator; (0, "") if their version is unknown."""
        size = self.path.stat().st_size if self.path.exists() else 0
        validator = self._note.read_text() if size and self._note.exists() else ""
        return (size, validator) if validator else (0, "")

    def begin(self, validator: str) -> None:
        """Start over with this version. The bytes are deleted first: they must never be paired with a new validator."""
        self.drop()
        if validator:
            self._note.write_text(validator)

    def drop(self) -> None:
        self.path.unlink(missing_ok=True)
        self._note.unlink(missing_ok=True)


async def _fetch(
    source: StreamSource,
    url: str,
    path: Path,
    partial: Partial,
    progress: Callable[[DownloadProgress], None] | None,
    headers: Mapping[str, str],
) -> str | None:
    have, validator = partial.known()
    sent = {**headers, "accept-encoding": "identity"}
    if have:
        sent |= {"range": f"bytes={have}-", "if-range": validator}
    request = HttpRequest(method="GET", url=url, headers=sent, timeout_s=TIMEOUT_S, purpose=Purpose.REST)
    async with source.stream(request) as response:
        if response.status == 416 and have and response.headers.get("content-range") == f"bytes */{have}":
            return _digest(response.headers)
        if have and not _continues(response, have, validator):
            partial.drop()
            raise APIConnectionError(
                RequestInfo("GET", url.split("?")[0]),
                "the file changed on the server; downloading it again from the start",
            )
        if response.status >= 400:
            body = await response.read(64 * 1024)
            raise faults.status_error(response.status, body, response.headers, RequestInfo("GET", url.split("?")[0]))
        if response.status != 206:
            have = 0
            partial.begin(_validator(response.headers))
        length = response.headers.get("content-length")
        total = have + int(length) if length is not None and length.isdigit() else None
        with partial.path.open("ab" if have else "wb") as file:
            async for chunk in response.chunks():
                await asyncio.to_thread(file.write, chunk)
                have += len(chunk)
                if progress is not None:
                    progress(DownloadProgress(path, have, total))
        return _digest(response.headers)


def _continues(response: StreamedResponse, have: int, validator: str) -> bool:
    """Whether a response continues the partial download. Servers that support ranges but not `If-Range` are recognised
    by a different validator or position in their response."""
    if response.status == 416:
        return False
    if response.status != 206:
        return True
    place = response.headers.get("content-range", "")
    return place.startswith(f"bytes {have}-") and _validator(response.headers) in ("", validator)


def _validator(headers: Mapping[str, str]) -> str:
    """Return what identifies a version of a file: a strong ETag, else the date of its last change, else nothing."""
    etag = headers.get("etag", "")
    return etag if etag and not etag.startswith("W/") else headers.get("last-modified", "")


def _digest(headers: Mapping[str, str]) -> str | None:
    """Return the SHA-256 from `x-checksum-sha256` or `x-amz-meta-sha256`, in hex."""
    digest = headers.get("x-checksum-sha256") or headers.get("x-amz-meta-sha256")
    return digest.strip().lower() if digest else None


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _inside(folder: Path, name: str) -> Path:
    """Return the path of a file in the folder; reject names that lead out of it."""
    parts = PurePosixPath(name).parts
    if not parts or PurePosixPath(name).is_absolute() or ".." in parts:
        raise InvalidInputError(
            f"the server listed a file {name!r}, which is outside the download folder", field="urls"
        )
    return folder.joinpath(*parts)

"""Files from signed addresses to disk: streamed, resumed, checked.

While a file comes, what is there of it lies in `<name>.part`, and beside it, in `<name>.part.from`, the validator that
the server gave (RFC 9110: a strong ETag, or a date). A download goes on only with that (`If-Range`): the start of one
version and the end of another would make a file that nobody wrote.
"""

from __future__ import annotations

import asyncio
import hashlib
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from tinsmith.errors import APIConnectionError, InvalidInputError, RequestInfo, TinkerError
from tinsmith.transport.base import HttpRequest, Purpose, StreamedResponse, Transport
from tinsmith.wire import faults

PARTIAL = ".part"
VALIDATOR = ".from"
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
    transport: Transport,
    url: str,
    path: Path,
    progress: Callable[[Progress], None] | None = None,
    headers: Mapping[str, str] | None = None,
) -> Path:
    """Fetch one file, going on from a partial one, and check it against the digest that the server names, if any."""
    if path.exists():
        return path
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = Partial(path.with_name(path.name + PARTIAL))
    for attempt in range(1, ATTEMPTS + 1):
        try:
            expected = await _fetch(transport, url, path, partial, progress, headers or {})
            break
        except TinkerError as error:
            if attempt == ATTEMPTS or not error.retryable:
                raise
            await asyncio.sleep(0.2 * 2**attempt)
    if expected is not None and await asyncio.to_thread(_sha256, partial.path) != expected:
        partial.drop()
        raise TinkerError(f"{path.name}: the downloaded bytes do not have the digest that the server names; try again")
    os.replace(partial.path, path)
    partial.drop()
    return path


class Partial:
    """What is there of a file, and of which version of it."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._note = path.with_name(path.name + VALIDATOR)

    def known(self) -> tuple[int, str]:
        """The bytes to go on from and their validator; (0, "") if it is not known of what they are."""
        size = self.path.stat().st_size if self.path.exists() else 0
        validator = self._note.read_text() if size and self._note.exists() else ""
        return (size, validator) if validator else (0, "")

    def begin(self, validator: str) -> None:
        """Start anew with this version. The bytes go first, so that no moment pairs them with another's validator."""
        self.drop()
        if validator:
            self._note.write_text(validator)

    def drop(self) -> None:
        self.path.unlink(missing_ok=True)
        self._note.unlink(missing_ok=True)


async def _fetch(
    transport: Transport,
    url: str,
    path: Path,
    partial: Partial,
    progress: Callable[[Progress], None] | None,
    headers: Mapping[str, str],
) -> str | None:
    have, validator = partial.known()
    sent = {**headers, "accept-encoding": "identity"}
    if have:
        sent |= {"range": f"bytes={have}-", "if-range": validator}
    request = HttpRequest(method="GET", url=url, headers=sent, timeout_s=TIMEOUT_S, purpose=Purpose.REST)
    async with transport.stream(request) as response:
        if response.status == 416 and have and response.headers.get("content-range") == f"bytes */{have}":
            return _digest(response.headers)
        if have and not _goes_on(response, have, validator):
            partial.drop()
            raise APIConnectionError(RequestInfo("GET", url.split("?")[0]), "the file changed; starting again")
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
                    progress(Progress(path, have, total))
        return _digest(response.headers)


def _goes_on(response: StreamedResponse, have: int, validator: str) -> bool:
    """Whether an answer can follow what is there. Some servers know ranges but not `If-Range`: their answer shows
    another validator, or another place."""
    if response.status == 416:
        return False
    if response.status != 206:
        return True
    place = response.headers.get("content-range", "")
    return place.startswith(f"bytes {have}-") and _validator(response.headers) in ("", validator)


def _validator(headers: Mapping[str, str]) -> str:
    """What tells one version of a file from another: a strong ETag, else the date of its last change, else nothing."""
    etag = headers.get("etag", "")
    return etag if etag and not etag.startswith("W/") else headers.get("last-modified", "")


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

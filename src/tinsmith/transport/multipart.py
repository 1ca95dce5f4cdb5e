"""Uploads: form fields and files as one `multipart/form-data` body, streamed in pieces.

Files are read while they are sent and never loaded as a whole.
"""

from __future__ import annotations

import asyncio
import inspect
import os
import re
import secrets
from collections.abc import AsyncIterator, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, Protocol, TypeAlias, cast, runtime_checkable

from tinsmith.errors import InvalidInputError

PIECE_BYTES = 256 * 1024
"""How much of a file is in memory at a time."""
DEFAULT_FILENAME = "upload"
"""What HTTP clients call a file without a name."""
DEFAULT_CONTENT_TYPE = "application/octet-stream"

_BOUNDARY = re.compile(r"[0-9A-Za-z'()+_,\-./:=?]{1,70}")  # RFC 2046, 5.1.1, without the space
_LINE_BREAK = re.compile(r"[\r\n]")


@runtime_checkable
class AsyncReader(Protocol):
    """Anything that can be read piece by piece, such as asyncio.StreamReader; b"" means the end."""

    async def read(self, n: int, /) -> bytes: ...


Content: TypeAlias = bytes | Path | AsyncReader | BinaryIO
Field: TypeAlias = str | Content | tuple[str, Content] | tuple[str, Content, str]


@dataclass(frozen=True, slots=True)
class _Part:
    head: bytes
    content: Content
    start: int | None
    """The position of a file object when it was passed in; None for other content and for pipes."""
    length: int | None

    @property
    def is_repeatable(self) -> bool:
        return isinstance(self.content, (bytes, Path)) or self.start is not None


class Multipart:
    """A body of named fields, sent in the order given.

    A field is a string; a file's content (bytes, a path, an open binary file, an async reader); or a tuple of file
    name, content and, if wanted, content type. A name may come twice when the fields are given as pairs.
    """

    def __init__(
        self, fields: Mapping[str, Field] | Iterable[tuple[str, Field]], *, boundary: str | None = None
    ) -> None:
        self.boundary = secrets.token_hex(16) if boundary is None else boundary
        if not _BOUNDARY.fullmatch(self.boundary):
            raise InvalidInputError(f"boundary: {boundary!r} must be 1 to 70 of the characters that RFC 2046 allows")
        pairs = fields.items() if isinstance(fields, Mapping) else fields
        self._parts = [_part(name, field, self.boundary) for name, field in pairs]
        self._tail = f"--{self.boundary}--\r\n".encode()
        self._is_used_up = False

    @property
    def content_type(self) -> str:
        return f"multipart/form-data; boundary={self.boundary}"

    @property
    def length(self) -> int | None:
        """Size of the whole body in bytes; None if that of a reader is unknown."""
        total = len(self._tail)
        for part in self._parts:
            if part.length is None:
                return None
            total += len(part.head) + part.length + 2
        return total

    async def parts(self) -> AsyncIterator[bytes]:
        """Yield the body in pieces of at most 256 KiB. Can be repeated, unless a reader in it cannot be rewound."""
        if self._is_used_up:
            raise InvalidInputError(
                "body: a reader in this upload was already read and cannot be rewound; open it again"
            )
        for part in self._parts:
            yield part.head
            self._is_used_up = self._is_used_up or not part.is_repeatable
            try:
                async for piece in _pieces(part):
                    yield piece
            except OSError as error:
                raise InvalidInputError(f"body: a file cannot be read: {error.strerror or error}") from error
            yield b"\r\n"
        yield self._tail

    def __repr__(self) -> str:
        return f"Multipart({len(self._parts)} fields, length={self.length})"


def _part(name: str, field: Field, boundary: str) -> _Part:
    _check_line(name, "name")
    disposition = f'--{boundary}\r\nContent-Disposition: form-data; name="{_quoted(name)}"'
    if isinstance(field, str):
        content = field.encode()
        return _Part(f"{disposition}\r\n\r\n".encode(), content, None, len(content))
    filename, file, content_type = _file(name, field)
    _check_line(filename, "filename")
    _check_line(content_type, "content type")
    start, length = _extent(name, file)
    head = f'{disposition}; filename="{_quoted(filename)}"\r\nContent-Type: {content_type}\r\n\r\n'
    return _Part(head.encode(), file, start, length)


def _file(name: str, field: Field) -> tuple[str, Content, str]:
    """Return the file name, content and content type of a field that is not a string."""
    if isinstance(field, tuple):
        filename, content, content_type = field if len(field) == 3 else (*field, DEFAULT_CONTENT_TYPE)
    else:
        content, content_type = cast(Content, field), DEFAULT_CONTENT_TYPE
        path = content if isinstance(content, Path) else getattr(content, "name", None)
        filename = os.path.basename(path) if isinstance(path, (str, Path)) else DEFAULT_FILENAME
    if not isinstance(content, (bytes, Path)) and not callable(getattr(content, "read", None)):
        raise InvalidInputError(
            f"{name}: {type(content).__name__} is not a string, bytes, a path, a file or a reader", field=name
        )
    return filename, content, content_type


def _extent(name: str, content: Content) -> tuple[int | None, int | None]:
    """Return the current position of a file object and how many bytes will be sent; None for what is unknown."""
    if isinstance(content, bytes):
        return None, len(content)
    if isinstance(content, Path):
        if not content.is_file():
            raise InvalidInputError(f"{name}: no such file: {content}", field=name)
        return None, content.stat().st_size
    if hasattr(content, "encoding"):
        raise InvalidInputError(f"{name}: the file is open in text mode; open it in binary mode ('rb')", field=name)
    if inspect.iscoroutinefunction(content.read) or not (hasattr(content, "seekable") and content.seekable()):
        return None, None
    file = cast(BinaryIO, content)
    start = file.tell()
    end = file.seek(0, os.SEEK_END)
    file.seek(start)
    return start, end - start


async def _pieces(part: _Part) -> AsyncIterator[bytes]:
    content = part.content
    if isinstance(content, bytes):
        for position in range(0, len(content), PIECE_BYTES):
            yield content[position : position + PIECE_BYTES]
    elif isinstance(content, Path):
        file = await asyncio.to_thread(content.open, "rb")
        try:
            async for piece in _measured(file, part.length):
                yield piece
        finally:
            file.close()
    else:
        if part.start is not None:
            cast(BinaryIO, content).seek(part.start)
        async for piece in _measured(content, part.length):
            yield piece


async def _measured(reader: AsyncReader | BinaryIO, length: int | None) -> AsyncIterator[bytes]:
    """Yield what a reader returns, exactly `length` bytes if given; blocking reads run in a thread."""
    is_async = inspect.iscoroutinefunction(reader.read)
    left = length
    while left is None or left > 0:
        size = PIECE_BYTES if left is None else min(PIECE_BYTES, left)
        piece = await cast(AsyncReader, reader).read(size) if is_async else await asyncio.to_thread(_read, reader, size)
        if not piece:
            break
        yield piece
        left = None if left is None else left - len(piece)
    if left:
        raise InvalidInputError(f"body: a file shrank by {left} bytes while it was being sent")


def _read(reader: AsyncReader | BinaryIO, size: int) -> bytes:
    return cast(BinaryIO, reader).read(size)


def _quoted(text: str) -> str:
    """Escape quotes as browsers do; line breaks were rejected before."""
    return text.replace('"', "%22")


def _check_line(text: str, what: str) -> None:
    if not isinstance(text, str) or _LINE_BREAK.search(text):
        raise InvalidInputError(f"{what}: {text!r} must be a single line of text")

"""HTTP/1.1 as bytes: the head of a request, and an answer read from whatever pieces it comes in (RFC 9112).

Does not know: sockets, event loops, time, redirects, what a status means to anybody.
"""

from __future__ import annotations

import functools
import io
import re
import zlib
from collections.abc import Callable, Mapping
from typing import NamedTuple
from urllib.parse import urlsplit

MAX_HEAD_BYTES = 64 * 1024
"""Status line and headers of an answer, or the trailers behind its body."""
MAX_LINE_BYTES = 4096
"""The line before a chunk: its size, and extensions that nobody uses."""
ACCEPT_ENCODING = "gzip, deflate"
IN_PLACE_BYTES = (64 * 1024, 64 * 1024 * 1024)
"""Bodies of these lengths are received where they will lie. Memory for longer ones is taken as they come: a length is
easily claimed."""

_PORTS = {"http": 80, "https": 443}
_CONTROL = re.compile(r"[\x00-\x20\x7f]")
_TOKEN = re.compile(r"[!#$%&'*+\-.^_`|~0-9A-Za-z]+")
_END_OF_HEAD = re.compile(rb"\n\r?\n")
_FOLD = re.compile(r"\n[ \t]+")
_STATUS_LINE = re.compile(r"HTTP/(1\.[01]) ([1-9]\d\d)(?: .*)?")
_DIGITS = re.compile(r"\d{1,18}", re.ASCII)
_CHUNK_SIZE = re.compile(rb"[0-9A-Fa-f]{1,15}")
_START = b"HTTP/1."


class FormatError(Exception):
    """What came is not valid HTTP/1.1, or not of a kind that was asked for."""


class SizeError(Exception):
    """The body is larger than allowed; the text is the limit in bytes."""


class CutOffError(Exception):
    """A packed body ends too soon."""


class Target(NamedTuple):
    """Where a URL leads, and how it is spoken of there."""

    scheme: str
    host: str
    port: int
    host_header: str
    path: str


@functools.lru_cache(maxsize=1024)
def target_of(url: str) -> Target:
    """The parts of a percent-encoded http or https URL; ValueError for anything else. User names are left out."""
    if _CONTROL.search(url):
        raise ValueError("a control character in a URL")
    parts = urlsplit(url)
    host, port = parts.hostname, parts.port
    if parts.scheme not in _PORTS or not host:
        raise ValueError("not an http URL")
    name = f"[{host}]" if ":" in host else host
    usual = _PORTS[parts.scheme]
    path = (parts.path or "/") + (f"?{parts.query}" if parts.query else "")
    return Target(parts.scheme, host, port or usual, name if port in (None, usual) else f"{name}:{port}", path)


def request_head(method: str, target: Target, headers: Mapping[str, str], body_length: int | None) -> bytes:
    """The head of a request, with what its connection and body need; ValueError for headers that cannot be sent.

    A length of None means a chunked body.
    """
    names = [_lower(name) for name in headers]
    if not _TOKEN.fullmatch(method):
        raise ValueError("not a method")
    lines = [f"{method} {target.path} HTTP/1.1"]
    if "host" not in names:
        lines.append(f"host: {target.host_header}")
    if "accept-encoding" not in names:
        lines.append(f"accept-encoding: {ACCEPT_ENCODING}")
    lines += [
        f"{name}: {value}"
        for name, value in zip(names, headers.values(), strict=True)
        if name != "content-length" and name != "transfer-encoding"
    ]
    if body_length is None:
        lines.append("transfer-encoding: chunked")
    elif body_length or method not in ("GET", "HEAD"):
        lines.append(f"content-length: {body_length}")
    text = "\r\n".join(lines)
    if text.count("\n") != len(lines) - 1 or text.count("\r") != len(lines) - 1 or "\0" in text:
        raise ValueError("a line break in a header")
    return f"{text}\r\n\r\n".encode()


@functools.lru_cache(maxsize=1024)
def _lower(name: str) -> str:
    """A header's name in lower case; ValueError if it is none."""
    if not _TOKEN.fullmatch(name):
        raise ValueError("not the name of a header")
    return name.lower()


class Answer:
    """The answer to one request, fed with the connection's bytes until it is complete."""

    __slots__ = (
        "_has_body",
        "_left",
        "_max_bytes",
        "_parts",
        "_place",
        "_rest",
        "_size",
        "_step",
        "can_reuse",
        "has_begun",
        "headers",
        "is_complete",
        "status",
    )

    def __init__(self, method: str, max_bytes: int) -> None:
        self.status = 0
        """0 until the head is there."""
        self.headers: Mapping[str, str] = {}
        self.has_begun = False
        self.is_complete = False
        self.can_reuse = False
        """Whether another request may follow on the connection; known when the answer is complete."""
        self._has_body = method != "HEAD"
        self._max_bytes = max_bytes
        self._parts: list[bytes] = []
        self._place: tuple[io.BytesIO, memoryview] | None = None
        self._rest = b""
        self._size = 0
        self._left = max_bytes
        """Bytes that may still come: of the body, or of the chunk."""
        self._step: Callable[[Answer, bytes], bytes] = Answer._read_head  # unbound: a bound one would be a cycle

    def feed(self, data: bytes) -> bool:
        """Take what came; True: the answer is complete."""
        self.has_begun = True
        while data and not self.is_complete:
            data = self._step(self, data)
        if data:
            self.can_reuse = False  # more than one answer to one request: who knows whose the next would be
        return self.is_complete

    def end(self) -> bool:
        """The connection has ended; True: that was the end of the answer, too."""
        if self._step is Answer._read_to_the_end:
            self.is_complete = True
        return self.is_complete

    def place(self) -> memoryview | None:
        """Where to receive what comes next; `received` then says how much came. None: anywhere, for `feed`."""
        if self._place is None or self.is_complete:
            return None
        return self._place[1][-self._left :]

    def received(self, nbytes: int) -> bool:
        """So much came, and lies in its place already; True: the answer is complete."""
        self._left -= nbytes
        self.is_complete = self._left == 0
        return self.is_complete

    def body(self) -> bytes:
        """The whole body, unpacked."""
        parts = self._parts
        if self._place is not None:
            buffer, view = self._place
            view.release()
            parts = [buffer.getvalue()]  # which is the memory itself, no copy
        body = parts[0] if len(parts) == 1 else b"".join(parts)
        coding = self.headers.get("content-encoding")
        return body if coding is None or not body else _unpacked(body, coding, self._max_bytes)

    def _read_head(self, data: bytes) -> bytes:
        data = self._rest + data if self._rest else data
        end = data.find(b"\r\n\r\n")
        length = 4
        if end < 0:
            found = _END_OF_HEAD.search(data)  # lines that end in a bare line feed
            if found is None:
                return self._keep(data, MAX_HEAD_BYTES, "its head")
            end, length = found.start(), found.end() - found.start()
        if end > MAX_HEAD_BYTES:
            raise FormatError(f"its head is larger than {MAX_HEAD_BYTES} bytes")
        self._rest = b""
        self._take_head(data[:end].decode("utf-8", "surrogateescape"))
        return data[end + length :]

    def _keep(self, data: bytes, limit: int, what: str) -> bytes:
        """Wait for more of what has to be read as one."""
        if self._step is Answer._read_head and data[: len(_START)] != _START[: len(data)]:
            raise FormatError("it does not begin with HTTP/1")
        if len(data) > limit:
            raise FormatError(f"{what} is larger than {limit} bytes")
        self._rest = data
        return b""

    def _take_head(self, text: str) -> None:
        lines = text.replace("\r\n", "\n")
        if "\n " in lines or "\n\t" in lines:
            lines = _FOLD.sub(" ", lines)
        first, *rest = lines.split("\n")
        found = _STATUS_LINE.fullmatch(first)
        if found is None or "\0" in lines or "\r" in lines:
            raise FormatError("a bad status line" if found is None else "a control character in its head")
        status, headers = int(found[2]), _headers(rest)
        if status == 101:
            raise FormatError("it switches to another protocol")
        if status < 200:
            return  # 100 Continue, 103 Early Hints: the answer proper follows
        self.status, self.headers = status, headers
        words = headers.get("connection", "").lower()
        is_kept = "close" not in words if found[1] == "1.1" else "keep-alive" in words
        self._begin_body(status, headers, is_kept)

    def _begin_body(self, status: int, headers: Mapping[str, str], is_kept: bool) -> None:
        """How the body ends: RFC 9112, 6.3."""
        coding, length = headers.get("transfer-encoding"), headers.get("content-length")
        self.can_reuse = is_kept and (coding is None or length is None)
        if not self._has_body or status in (204, 304):
            self.is_complete = True
        elif coding is not None:
            if coding.lower() != "chunked":
                raise FormatError(f"transfer-encoding {coding[:40]}, which is not known")
            self._step = Answer._read_chunk_size
        elif length is not None:
            self._left = _length(length)
            if self._left > self._max_bytes:
                raise SizeError(self._max_bytes)
            self.is_complete = self._left == 0
            self._step = Answer._read_exactly
            if IN_PLACE_BYTES[0] <= self._left <= IN_PLACE_BYTES[1]:
                buffer = io.BytesIO(bytes(self._left))
                self._place = buffer, buffer.getbuffer()
                self._step = Answer._read_into_place
        else:
            self.can_reuse = False
            self._step = Answer._read_to_the_end

    def _read_exactly(self, data: bytes) -> bytes:
        taken = data if len(data) <= self._left else data[: self._left]
        self._parts.append(taken)
        self._left -= len(taken)
        self.is_complete = self._left == 0
        return data[len(taken) :]

    def _read_into_place(self, data: bytes) -> bytes:
        place = self.place()
        assert place is not None
        taken = min(len(data), self._left)
        place[:taken] = data[:taken]
        self.received(taken)
        return data[taken:]

    def _read_to_the_end(self, data: bytes) -> bytes:
        self._parts.append(data)
        self._left -= len(data)
        if self._left < 0:
            raise SizeError(self._max_bytes)
        return b""

    def _line(self, data: bytes, limit: int, what: str) -> tuple[bytes | None, bytes]:
        """The next line and what follows it; None: its end has not come yet."""
        data = self._rest + data
        end = data.find(b"\n")
        if end < 0 or end > limit:
            return None, self._keep(data, limit, what)
        self._rest = b""
        return data[:end].removesuffix(b"\r"), data[end + 1 :]

    def _read_chunk_size(self, data: bytes) -> bytes:
        line, data = self._line(data, MAX_LINE_BYTES, "the line before a chunk")
        if line is None:
            return data
        size = line.partition(b";")[0].strip(b" \t")
        if not _CHUNK_SIZE.fullmatch(size):
            raise FormatError("a bad chunk size")
        self._left = int(size, 16)
        self._size += self._left
        if self._size > self._max_bytes:
            raise SizeError(self._max_bytes)
        self._step = Answer._read_chunk if self._left else Answer._read_trailer
        return data

    def _read_chunk(self, data: bytes) -> bytes:
        rest = self._read_exactly(data)
        if self.is_complete:
            self.is_complete = False
            self._step = Answer._read_chunk_end
        return rest

    def _read_chunk_end(self, data: bytes) -> bytes:
        line, data = self._line(data, 1, "the end of a chunk")
        if line is None:
            return data
        if line:
            raise FormatError("a chunk longer than it said")
        self._step = Answer._read_chunk_size
        return data

    def _read_trailer(self, data: bytes) -> bytes:
        line, data = self._line(data, MAX_HEAD_BYTES, "its trailer")
        if line is not None:
            self.is_complete = not line
        return data


def _headers(lines: list[str]) -> dict[str, str]:
    """Headers by lower-case name; what came more than once is joined by commas."""
    headers: dict[str, str] = {}
    for line in lines:
        name, colon, value = line.partition(":")
        try:
            name = _lower(name)
        except ValueError:
            colon = ""
        if not colon:
            raise FormatError("a bad header line")
        value = value.strip(" \t")
        headers[name] = f"{headers[name]}, {value}" if name in headers else value
    return headers


def _length(text: str) -> int:
    """A content length, which may have been said twice."""
    found = {part.strip() for part in text.split(",")} if "," in text else {text}
    if len(found) != 1 or not _DIGITS.fullmatch(text := found.pop()):
        raise FormatError("a bad content-length")
    return int(text)


def _unpacked(body: bytes, coding: str, max_bytes: int) -> bytes:
    """A body without its content codings, if it is then at most `max_bytes` large."""
    for name in reversed([word.strip().lower() for word in coding.split(",")]):
        if name in ("gzip", "x-gzip"):
            body = _inflated(body, 16 + zlib.MAX_WBITS, max_bytes)
        elif name == "deflate":  # by its definition in zlib's format, which some servers leave out
            body = _inflated(body, zlib.MAX_WBITS if body[0] & 0xF == 8 else -zlib.MAX_WBITS, max_bytes)
        elif name not in ("identity", ""):
            raise FormatError(f"content-encoding {name[:40]}, which was not asked for")
    return body


def _inflated(body: bytes, window_bits: int, max_bytes: int) -> bytes:
    parts, left = [], max_bytes
    while body:
        unpacker = zlib.decompressobj(window_bits)
        try:
            parts.append(unpacker.decompress(body, left + 1))
        except zlib.error as error:
            raise FormatError(f"its body cannot be unpacked: {error}") from None
        left -= len(parts[-1])
        if left < 0:
            raise SizeError(max_bytes)
        if not unpacker.eof:
            raise CutOffError
        body = unpacker.unused_data if window_bits > zlib.MAX_WBITS else b""  # gzip may come in several members
    return b"".join(parts)

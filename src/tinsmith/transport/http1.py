"""HTTP/1.1 as bytes: the head of a request, and a response from whatever pieces it arrives in (RFC 9112).

No sockets, no event loop, no clock: `http_connection` has those.
"""

from __future__ import annotations

import functools
import io
import re
import zlib
from collections.abc import Mapping
from typing import NamedTuple
from urllib.parse import urlsplit

import httptools

MAX_HEAD_BYTES = 64 * 1024
"""Status line and headers of a response."""
MAX_LINE_BYTES = 4096
"""The line before a chunk: its size, and extensions, which are rarely used. Also the trailers after the last chunk."""
ACCEPT_ENCODING = "gzip, deflate"
IN_PLACE_BYTES = (64 * 1024, 64 * 1024 * 1024)
"""Bodies of these lengths are received straight into their final memory. For longer ones memory is taken as they
arrive: a length is easily claimed."""

_PORTS = {"http": 80, "https": 443}
_CONTROL = re.compile(r"[\x00-\x20\x7f]")
_TOKEN = re.compile(r"[!#$%&'*+\-.^_`|~0-9A-Za-z]+")
_START = b"HTTP/1."
_VERSIONS = frozenset({"1.0", "1.1"})
_STATUS_LINE_BYTES = len(b"HTTP/1.1 200 \r\n\r\n")
"""Without the reason, and with the empty line that ends the head."""


class FormatError(Exception):
    """What was received is not valid HTTP/1.1, or not of a kind that was asked for."""


class SizeError(Exception):
    """The body is larger than allowed; the message is the limit in bytes."""


class CutOffError(Exception):
    """A compressed body ends too soon."""


class Target(NamedTuple):
    """The parts of a URL that a connection and a request line need."""

    scheme: str
    host: str
    port: int
    host_header: str
    path: str


@functools.lru_cache(maxsize=1024)
def target_of(url: str) -> Target:
    """Split a percent-encoded http or https URL, leaving out user names; raise ValueError for anything else."""
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
    """Return the head of a request, with what its body needs. Raise ValueError for headers that cannot be sent.

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
    """Return a header's name in lower case; raise ValueError if it is not a token."""
    if not _TOKEN.fullmatch(name):
        raise ValueError("not the name of a header")
    return name.lower()


class ResponseParser:
    """The response to one request, fed with the connection's bytes until it is complete.

    llhttp (in `httptools`) reads the syntax; this class adds what it leaves to its user: limits on the size of the
    head, the body and the lines around chunks, responses to HEAD, the versions we speak, and large bodies that are
    received straight into their final memory. The parser calls the `on_...` methods from within `feed`.
    """

    __slots__ = (
        "_body_bytes",
        "_chunks",
        "_ends_with_connection",
        "_failure",
        "_fed_bytes",
        "_has_body",
        "_head_bytes",
        "_headers",
        "_left",
        "_max_bytes",
        "_parser",
        "_parts",
        "_place",
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
        """Whether another request may follow on the connection; known when the response is complete."""
        self._has_body = method != "HEAD"
        self._max_bytes = max_bytes
        self._headers: dict[str, str] = {}
        self._head_bytes = _STATUS_LINE_BYTES
        self._fed_bytes = 0
        self._body_bytes = 0
        self._chunks = 0
        self._parts: list[bytes] = []
        self._place: tuple[io.BytesIO, memoryview] | None = None
        self._left = 0
        """Bytes of a body received in place that are still to come."""
        self._ends_with_connection = False
        self._failure: FormatError | SizeError | None = None
        # The parser refers to this object and this object to it: `feed` breaks the cycle when it is done.
        self._parser: httptools.HttpResponseParser | None = httptools.HttpResponseParser(self)
        self._parser.set_dangerous_leniencies(
            lenient_headers=True,  # folded lines, which RFC 9112 (5.2) wants a client to accept
            lenient_optional_cr_before_lf=True,  # lines that end in a bare line feed (2.2)
            lenient_chunked_length=True,  # a length beside chunks, which is ignored; the connection is not reused (6.3)
            lenient_data_after_close=True,  # ignored as well
        )

    def feed(self, data: bytes) -> bool:
        """Take what was received; return whether the response is complete."""
        parser = self._parser
        if parser is None:
            self.can_reuse = False  # more than one response to one request: the next request would get the wrong one
            return self.is_complete
        if not self.has_begun and not data.startswith(_START[: len(data)]):
            raise FormatError("it does not begin with HTTP/1")
        self.has_begun = True
        self._fed_bytes += len(data)
        try:
            parser.feed_data(data)
        except httptools.HttpParserError as error:
            if self.is_complete:
                self.can_reuse = False
            elif self._failure is None:
                self._failure = FormatError(str(error))
        if self._failure is None and not self.is_complete:
            self._check_overhead()
        if self._failure is not None or self.is_complete:
            self._parser = None
        if self._failure is not None:
            raise self._failure
        return self.is_complete

    def end(self) -> bool:
        """The connection has ended; return whether that was the end of the response, too."""
        if self._ends_with_connection:
            self.is_complete = True
        return self.is_complete

    def place(self) -> memoryview | None:
        """Where to receive what comes next, to be reported by `received`. None: anywhere, for `feed`."""
        if self._place is None or self.is_complete:
            return None
        return self._place[1][-self._left :]

    def received(self, nbytes: int) -> bool:
        """So many bytes were received in place; return whether the response is complete."""
        self._left -= nbytes
        if self._left == 0:
            self.is_complete, self._parser = True, None
        return self.is_complete

    def body(self) -> bytes:
        """Return the whole body, decompressed."""
        parts = self._parts
        if self._place is not None:
            buffer, view = self._place
            view.release()
            parts = [buffer.getvalue()]  # which is the memory itself, no copy
        body = parts[0] if len(parts) == 1 else b"".join(parts)
        coding = self.headers.get("content-encoding")
        return body if coding is None or not body else _unpacked(body, coding, self._max_bytes)

    def on_message_begin(self) -> None:
        if self.is_complete:
            self.can_reuse = False

    def on_status(self, reason: bytes) -> None:
        self._head_bytes += len(reason)

    def on_header(self, name: bytes, value: bytes) -> None:
        if self.status:
            return  # a trailer
        self._head_bytes += len(name) + len(value) + 4
        if self._head_bytes > MAX_HEAD_BYTES:
            self._failure = FormatError(f"its head is larger than {MAX_HEAD_BYTES} bytes")
        elif b"\0" in value:
            self._failure = FormatError("a control character in its head")
        else:
            key, text = _lower(name.decode()), value.decode("utf-8", "surrogateescape").strip(" \t")
            self._headers[key] = f"{self._headers[key]}, {text}" if key in self._headers else text

    def on_headers_complete(self) -> None:
        parser = self._parser
        assert parser is not None
        status, headers, self._headers = parser.get_status_code(), self._headers, {}
        if self.is_complete or self._failure is not None:
            return
        if parser.get_http_version() not in _VERSIONS or status < 100:
            self._failure = FormatError("a bad status line")
        elif status == 101:
            self._failure = FormatError("it switches to another protocol")
        elif status >= 200:  # 100 Continue and 103 Early Hints precede the response proper
            self.status, self.headers = status, headers
            self._begin_body(status, headers, parser.should_keep_alive())

    def _begin_body(self, status: int, headers: Mapping[str, str], is_kept: bool) -> None:
        """Find out how the body ends: RFC 9112, 6.3."""
        coding, length = headers.get("transfer-encoding"), headers.get("content-length")
        self.can_reuse = is_kept and (coding is None or length is None)
        if not self._has_body or status in (204, 304):
            self.is_complete = True
        elif coding is not None:
            if coding.lower() != "chunked":
                self._failure = FormatError(f"transfer-encoding {coding[:40]}, which is not known")
        elif length is not None:
            size = int(length)
            if size > self._max_bytes:
                self._failure = SizeError(self._max_bytes)
            elif IN_PLACE_BYTES[0] <= size <= IN_PLACE_BYTES[1]:
                buffer = io.BytesIO(bytes(size))
                self._place, self._left = (buffer, buffer.getbuffer()), size
        else:
            self.can_reuse = False
            self._ends_with_connection = True

    def on_body(self, data: bytes) -> None:
        self._body_bytes += len(data)
        if self.is_complete:
            self.can_reuse = False  # what follows a response to HEAD
        elif self._body_bytes > self._max_bytes:
            self._failure = SizeError(self._max_bytes)
        elif self._place is None:
            self._parts.append(data)
        else:
            self._place[1][-self._left :][: len(data)] = data
            self._left -= len(data)

    def on_chunk_header(self) -> None:
        self._chunks += 1

    def on_message_complete(self) -> None:
        if self.status:
            self.is_complete = True

    def _check_overhead(self) -> None:
        """Limit what is not body: the parser passes over chunk extensions and trailers of any length."""
        overhead_bytes = self._fed_bytes - self._body_bytes
        if not self.status:
            if overhead_bytes > MAX_HEAD_BYTES:
                self._failure = FormatError(f"its head is larger than {MAX_HEAD_BYTES} bytes")
        elif overhead_bytes > self._head_bytes + MAX_LINE_BYTES * (self._chunks + 1):
            self._failure = FormatError(f"a line around a chunk is larger than {MAX_LINE_BYTES} bytes")


def _unpacked(body: bytes, coding: str, max_bytes: int) -> bytes:
    """Undo the content codings of a body; raise SizeError if it is then larger than `max_bytes`."""
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
            raise FormatError(f"its body cannot be decompressed: {error}") from None
        left -= len(parts[-1])
        if left < 0:
            raise SizeError(max_bytes)
        if not unpacker.eof:
            raise CutOffError
        body = unpacker.unused_data if window_bits > zlib.MAX_WBITS else b""  # gzip may come in several members
    return b"".join(parts)

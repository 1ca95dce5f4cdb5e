"""The transport interface: requests, responses (whole or streamed), and the error messages for a missing one.

A transport never raises for a status code. It raises APIConnectionError or APITimeoutError if there is no complete
response, and lets cancellation through. It does not retry, and does not know endpoints or wire types.
"""

from __future__ import annotations

import enum
import re
import urllib.request
from collections.abc import AsyncIterator, Collection, Iterable, Mapping
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, replace
from typing import Protocol
from urllib.parse import SplitResult, quote, urljoin, urlsplit

from tinsmith.errors import APIConnectionError, APITimeoutError, InvalidInputError, LimitExceededError, RequestInfo
from tinsmith.transport.multipart import PIECE_BYTES, Multipart

MAX_REDIRECTS = 10

_THIS_MACHINE = frozenset({"localhost", "127.0.0.1", "::1"})
_REDIRECTS = frozenset({301, 302, 303, 307, 308})
_PORTS = {"http": 80, "https": 443}
_KEPT_HEADERS = frozenset({"accept", "accept-encoding", "content-encoding", "content-type", "range", "user-agent"})
"""The headers that may be sent to another host after a redirect; any other could contain a key."""
_USER_INFO = re.compile(r"^(\w+://)[^/?#]*@")
_URL_CHARACTERS = "%/:?[]@!$&'()*+,;=~"


class Purpose(enum.StrEnum):
    """What a request is for. Each purpose has its own connections, so that none can starve another."""

    TRAIN = "train"
    SAMPLE = "sample"
    SESSION = "session"
    RETRIEVE = "retrieve"
    REST = "rest"
    TELEMETRY = "telemetry"


LIMITS: Mapping[Purpose, int] = {
    Purpose.TRAIN: 8,
    Purpose.SAMPLE: 16,
    Purpose.SESSION: 4,
    Purpose.RETRIEVE: 64,
    Purpose.REST: 6,
    Purpose.TELEMETRY: 2,
}
"""Connections for each purpose, 100 in total. Only RETRIEVE, with its long polls, may grow beyond its limit."""
GROW_BY = 64
MAX_RETRIEVE = 1024
KEEP_ALIVE_S = 4.0
"""Below the 5 s after which uvicorn closes idle connections, so that it seldom closes one that is being used."""


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class HttpRequest:
    """One request. `url` is absolute and already percent-encoded; a Multipart body sets its own content type."""

    method: str
    url: str
    headers: Mapping[str, str]
    body: bytes | memoryview | Multipart | None = None
    timeout_s: float = 60.0
    """For the whole request: waiting for a connection, sending, redirects, and reading the last byte."""
    connect_timeout_s: float = 5.0
    purpose: Purpose

    def __post_init__(self) -> None:
        if " " in self.url or not self.url.isascii():
            raise InvalidInputError(f"url: {self.shown_url!r} is not percent-encoded", field="url")

    @property
    def shown_url(self) -> str:
        """The URL without a user name and password."""
        return _USER_INFO.sub(r"\1", self.url) if "@" in self.url else self.url

    @property
    def info(self) -> RequestInfo:
        """What errors may contain about the request; never its headers."""
        return RequestInfo(self.method, self.shown_url)

    def all_headers(self) -> Mapping[str, str]:
        """Return the headers, including those of the body."""
        if not isinstance(self.body, Multipart):
            return self.headers
        kept = {name: value for name, value in self.headers.items() if name.lower() != "content-type"}
        return {**kept, "content-type": self.body.content_type}

    @property
    def body_length(self) -> int | None:
        return self.body.length if isinstance(self.body, Multipart) else len(self.body or b"")

    async def pieces(self) -> AsyncIterator[bytes]:
        """Yield the body in pieces small enough not to block the event loop."""
        if isinstance(self.body, Multipart):
            async for piece in self.body.parts():
                yield piece
        elif self.body:
            for position in range(0, len(self.body), PIECE_BYTES):
                yield bytes(self.body[position : position + PIECE_BYTES])

    def __repr__(self) -> str:
        is_plain = isinstance(self.body, (bytes, memoryview))
        body = f"{self.body_length} bytes" if is_plain else repr(self.body)
        names = ", ".join(self.headers)
        return f"HttpRequest({self.method} {self.shown_url}, headers: {names or 'none'}, body: {body}, {self.purpose})"


@dataclass(frozen=True, slots=True, kw_only=True)
class HttpResponse:
    """A complete response. The keys of `headers` are lower-case; `body` is decompressed."""

    status: int
    headers: Mapping[str, str]
    body: bytes
    url: str
    """Where the response came from, after redirects."""


class StreamedResponse(Protocol):
    """A response whose body is still arriving. It can be read once."""

    @property
    def status(self) -> int: ...

    @property
    def headers(self) -> Mapping[str, str]: ...

    @property
    def url(self) -> str: ...

    def chunks(self) -> AsyncIterator[bytes]:
        """Yield the body as it arrives."""
        ...

    async def read(self, max_bytes: int) -> bytes:
        """Return the whole body; raise LimitExceededError if it is larger than `max_bytes`."""
        ...


class Transport(Protocol):
    """Sends requests. `close` closes all its connections."""

    async def send(self, request: HttpRequest) -> HttpResponse: ...

    def stream(self, request: HttpRequest) -> AbstractAsyncContextManager[StreamedResponse]: ...

    async def close(self) -> None: ...


class StreamedBody:
    """A StreamedResponse that reads from any source of bytes."""

    def __init__(self, status: int, headers: Mapping[str, str], url: str, source: AsyncIterator[bytes]) -> None:
        self.status = status
        self.headers = headers
        self.url = url
        self._source: AsyncIterator[bytes] | None = source

    def chunks(self) -> AsyncIterator[bytes]:
        if self._source is None:
            raise RuntimeError(f"the response from {self.url} was already read; send the request again")
        source, self._source = self._source, None
        return source

    async def read(self, max_bytes: int) -> bytes:
        parts, total = [], 0
        async for chunk in self.chunks():
            parts.append(chunk)
            total += len(chunk)
            if total > max_bytes:
                raise LimitExceededError(
                    f"body: the response from {self.url} is larger than {max_bytes} bytes", field="body"
                )
        return parts[0] if len(parts) == 1 else b"".join(parts)


class Why(enum.StrEnum):
    """Why there is no complete response, and what to check."""

    REFUSED = "connection refused: nothing is listening at {host}. Check that the server is running, and the port."
    NOT_STARTED = "connection refused: nothing is listening at {host}. Start a server: tinsmith serve --port {port}"
    UNKNOWN_HOST = "cannot resolve the host name {name}. Check the base URL and the network."
    UNREACHABLE = "{host} cannot be reached ({cause}). Check the network and the base URL."
    NO_CONNECTION = "no connection to {host} in {connect_s:g} s. Check the network, firewalls and the base URL."
    CERTIFICATE = "TLS: the certificate of {host} is not trusted ({cause}). Check the host name, or set SSL_CERT_FILE."
    TLS = "TLS with {host} failed ({cause}). Check that the server speaks https at this port, or use http."
    PROXY = "the proxy rejected the request ({cause}). Check HTTP_PROXY, HTTPS_PROXY and NO_PROXY."
    ALL_BUSY = "no free connection in {total_s:g} s ({cause}). Send fewer requests at once, or raise the timeout."
    NO_ANSWER = "no response in {total_s:g} s. The server may be busy: check its log, or raise the timeout."
    DROPPED = "the server closed the connection without a response ({cause}). Check whether it crashed or restarted."
    CUT_OFF = "the response was cut off ({cause}). Check whether the server crashed, and the network."
    TOO_LARGE = "the response is larger than the limit of {cause} bytes. Request less at once."
    NOT_HTTP = "the response is not valid HTTP ({cause}). Check the base URL."
    REDIRECT = "redirected {cause}. Check the base URL."
    INVALID = "not sent: the URL or a header is not valid."
    NOT_SENT = "not sent: {cause}"
    CLOSED = "not completed: the transport was closed."


_TIMEOUTS = frozenset({Why.NO_CONNECTION, Why.ALL_BUSY, Why.NO_ANSWER})
_LASTING = frozenset({Why.CERTIFICATE, Why.TOO_LARGE, Why.REDIRECT, Why.INVALID, Why.NOT_SENT, Why.CLOSED})
"""Failures that the same request would meet again, so that they are not retryable."""


def fault(request: HttpRequest, why: Why, cause: object = "") -> APIConnectionError:
    """Return the error for a request without a complete response: where it went, why it failed, and what to check."""
    info = request.info
    host = info.url.partition("://")[2].partition("/")[0]
    port = None
    if why is Why.REFUSED and (url := urlsplit(info.url)).hostname in _THIS_MACHINE:
        why, port = Why.NOT_STARTED, url.port or _PORTS[url.scheme]
    seconds = {"total_s": request.timeout_s, "connect_s": request.connect_timeout_s}
    reason = why.format(host=host, name=host.partition(":")[0], port=port, cause=cause, **seconds)
    error = (APITimeoutError if why in _TIMEOUTS else APIConnectionError)(info, f"{info.method} {info.url}: {reason}")
    error.retryable = why not in _LASTING
    error.is_not_started = why is Why.NOT_STARTED
    return error


def lower_case(headers: Iterable[tuple[str, str]]) -> dict[str, str]:
    """Return headers by lower-case name; repeated ones are joined by commas."""
    pairs = [(name.lower(), value) for name, value in headers]
    lowered = dict(pairs)
    if len(lowered) < len(pairs):
        lowered = {name: ", ".join(value for other, value in pairs if other == name) for name in lowered}
    return lowered


def is_redirect(status: int, headers: Mapping[str, str]) -> bool:
    """Whether a response is a redirect to follow."""
    return status in _REDIRECTS and bool(headers.get("location"))


def redirected(request: HttpRequest, status: int, headers: Mapping[str, str]) -> HttpRequest:
    """Return the request that a redirect asks for.

    Methods change as in browsers. Only harmless headers are sent to another host, or from https to http.
    """
    location = headers["location"]
    try:
        url = quote(urljoin(request.url, location).partition("#")[0], safe=_URL_CHARACTERS)
        new = urlsplit(url)
        stays = _stays(urlsplit(request.url), new)
    except ValueError as error:
        raise fault(request, Why.REDIRECT, f"to {location!r}, which is not a URL") from error
    if new.scheme not in _PORTS or not new.hostname:
        raise fault(request, Why.REDIRECT, f"to {location!r}, which is not an http URL")
    dropped = () if stays else [name for name in request.headers if name.lower() not in _KEPT_HEADERS]
    becomes_get = request.method not in ("GET", "HEAD") and (
        status in (302, 303) or (status == 301 and request.method == "POST")
    )
    if not becomes_get:
        return replace(request, url=url, headers=_without(request.headers, dropped))
    dropped = [*dropped, *(name for name in request.headers if name.lower().startswith("content-"))]
    return replace(request, method="GET", url=url, headers=_without(request.headers, dropped), body=None)


def proxy_for(proxies: Mapping[str, str], scheme: str, host: str) -> str | None:
    """Return the proxy that the environment sets for a host; never one for this machine."""
    is_direct = host in _THIS_MACHINE or urllib.request.proxy_bypass(host)
    return None if is_direct else proxies.get(scheme)


def _stays(old: SplitResult, new: SplitResult) -> bool:
    """Whether a redirect leads to the same server: same origin, or same host with https instead of http."""
    origins = [(url.scheme, url.port or _PORTS.get(url.scheme)) for url in (old, new)]
    is_upgrade = origins == [("http", 80), ("https", 443)]
    return old.hostname == new.hostname and (origins[0] == origins[1] or is_upgrade)


def _without(headers: Mapping[str, str], dropped: Collection[str]) -> dict[str, str]:
    return {name: value for name, value in headers.items() if name not in dropped}

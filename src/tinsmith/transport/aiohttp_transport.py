"""A transport on aiohttp, for streamed responses, proxies and URLs with a password.

Proxies are those of the environment (HTTP_PROXY, HTTPS_PROXY, NO_PROXY), not used for this machine. Cookies and .netrc
are not used. aiohttp decompresses responses (gzip, deflate; zstd with Python 3.14 or backports.zstd installed).
"""

from __future__ import annotations

import asyncio
import functools
import urllib.request
import weakref
from collections.abc import AsyncIterator, Mapping
from contextlib import AbstractAsyncContextManager
from typing import NamedTuple

import aiohttp
from aiohttp.abc import AbstractStreamWriter
from aiohttp.connector import Connection
from yarl import URL

from tinsmith.errors import APIConnectionError, LimitExceededError, TinkerError
from tinsmith.transport.base import (
    GROW_BY,
    KEEP_ALIVE_S,
    LIMITS,
    MAX_REDIRECTS,
    MAX_RETRIEVE,
    HttpRequest,
    HttpResponse,
    Purpose,
    StreamedBody,
    StreamedResponse,
    Why,
    fault,
    is_redirect,
    lower_case,
    proxy_for,
    redirected,
)
from tinsmith.transport.gate import Gate
from tinsmith.transport.multipart import PIECE_BYTES
from tinsmith.transport.retry import may_resend

_FAULTS = (aiohttp.ClientError, OSError, ValueError)


class _Pool(NamedTuple):
    session: aiohttp.ClientSession
    gate: Gate
    loop: asyncio.AbstractEventLoop


class HttpTransport:
    """Sends requests over the network. It belongs to the event loop on which it is first used."""

    def __init__(
        self, *, limits: Mapping[Purpose, int] = LIMITS, grow_after_s: float = 1.0, max_body_bytes: int = 2**30
    ) -> None:
        self._limits = {**LIMITS, **limits}
        self._grow_after_s = grow_after_s
        self._max_body_bytes = max_body_bytes
        self._proxies = urllib.request.getproxies()
        self._proxy = functools.cache(functools.partial(proxy_for, self._proxies))
        self._answer_class = _answer_class()
        self._pools: dict[Purpose, _Pool] = {}
        self._is_closed = False

    async def send(self, request: HttpRequest) -> HttpResponse:
        async with self.stream(request) as response:
            try:
                body = await response.read(self._max_body_bytes)
            except LimitExceededError:
                raise fault(request, Why.TOO_LARGE, self._max_body_bytes) from None
            return HttpResponse(status=response.status, headers=response.headers, body=body, url=response.url)

    def stream(self, request: HttpRequest) -> AbstractAsyncContextManager[StreamedResponse]:
        return _Call(self, request)

    async def close(self) -> None:
        """Close all connections; requests in progress or waiting fail."""
        self._is_closed = True
        pools, self._pools = self._pools, {}
        for pool in pools.values():
            pool.gate.close()
            await pool.session.close()

    async def enter(self, request: HttpRequest) -> tuple[_Pool, float]:
        """Take one of the purpose's connections, waiting if all are in use; return it with the request's deadline."""
        pool = self._pools.get(request.purpose) or self._open(request)
        deadline = pool.loop.time() + request.timeout_s
        if not pool.gate.try_enter():
            try:
                async with asyncio.timeout_at(deadline):
                    await pool.gate.enter()
            except TimeoutError:
                cause = f"all {pool.gate.limit} for purpose {request.purpose} are in use"
                raise fault(request, Why.ALL_BUSY, cause) from None
        return pool, deadline

    async def answer(
        self, pool: _Pool, request: HttpRequest, deadline: float
    ) -> tuple[aiohttp.ClientResponse, Mapping[str, str], HttpRequest]:
        """Return the head of a response that is not a redirect, and the request that it answers."""
        for _ in range(MAX_REDIRECTS + 1):
            response = await self._answer(pool, request, deadline)
            headers = lower_case(response.headers.items())
            if not is_redirect(response.status, headers):
                return response, headers, request
            response.close()
            request = redirected(request, response.status, headers)
        raise fault(request, Why.REDIRECT, f"more than {MAX_REDIRECTS} times")

    def explained(self, error: Exception, request: HttpRequest) -> APIConnectionError:
        return fault(request, Why.CLOSED) if self._is_closed else explained(error, request)

    def _open(self, request: HttpRequest) -> _Pool:
        if self._is_closed:
            raise fault(request, Why.CLOSED)
        session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=KEEP_ALIVE_S),
            cookie_jar=aiohttp.DummyCookieJar(),
            response_class=self._answer_class,
        )
        limit = self._limits[request.purpose]
        max_limit = MAX_RETRIEVE if request.purpose is Purpose.RETRIEVE else limit
        gate = Gate(limit, max_limit=max_limit, grow_by=GROW_BY, grow_after_s=self._grow_after_s)
        pool = self._pools[request.purpose] = _Pool(session, gate, asyncio.get_running_loop())
        return pool

    async def _answer(self, pool: _Pool, request: HttpRequest, deadline: float) -> aiohttp.ClientResponse:
        """Return the head of the response to one request; a stale connection is replaced once."""
        payload = _Payload(request) if request.body else None
        for attempt in range(2):
            if self._is_closed:
                raise fault(request, Why.CLOSED)
            try:
                url = URL(request.url, encoded=True)
                return await pool.session.request(
                    request.method,
                    url,
                    headers=request.all_headers(),
                    data=payload,
                    allow_redirects=False,
                    timeout=_timeout(round(deadline - pool.loop.time(), 2), request.connect_timeout_s),
                    proxy=self._proxy(url.scheme, url.host or "") if self._proxies else None,
                )
            except _FAULTS as error:
                failure = self.explained(error, request)
                if attempt or not _may_repeat(error, request, payload):
                    break
        raise failure  # outside the handler: aiohttp's errors can contain the headers, and so the key


class _Call:
    """A request in progress: the context manager that `stream` returns, and then the source of the response's bytes."""

    def __init__(self, transport: HttpTransport, request: HttpRequest) -> None:
        self._transport = transport
        self._request = request

    async def __aenter__(self) -> StreamedResponse:
        self._pool, deadline = await self._transport.enter(self._request)
        try:
            self._response, headers, self._request = await self._transport.answer(self._pool, self._request, deadline)
        except BaseException:
            self._pool.gate.leave()
            raise
        return StreamedBody(self._response.status, headers, self._request.shown_url, self)

    async def __aexit__(self, *_: object) -> None:
        self._response.close()  # keeps the connection if the response was read to its end
        self._pool.gate.leave()

    def __aiter__(self) -> AsyncIterator[bytes]:
        return self

    async def __anext__(self) -> bytes:
        try:
            if chunk := await self._response.content.readany():
                return chunk
            raise StopAsyncIteration
        except _FAULTS as error:
            failure = self._transport.explained(error, self._request)
        raise failure


def explained(error: Exception, request: HttpRequest) -> APIConnectionError:
    """Return the error to raise for one of aiohttp. Not chained: the original can contain headers, and so the key."""
    if isinstance(error, _Unanswered):
        error = error.cause
    if isinstance(error.__cause__, TinkerError):
        return fault(request, Why.NOT_SENT, error.__cause__)  # an upload could not be read
    if type(error) is aiohttp.ClientConnectorError and isinstance(error.os_error, ConnectionRefusedError):
        return fault(request, Why.REFUSED)
    return fault(request, next((why for kind, why in _WHY if isinstance(error, kind)), Why.DROPPED), _cause(error))


def _cause(error: Exception) -> str:
    for name in ("verify_message", "strerror", "message"):
        for source in (error, error.__cause__):
            if isinstance(text := getattr(source, name, None), str):
                return " ".join(text.split())[:200].rstrip(".")
    return "no reason known"


_WHY: tuple[tuple[type[Exception] | tuple[type[Exception], ...], Why], ...] = (  # the first match counts
    (aiohttp.ConnectionTimeoutError, Why.NO_CONNECTION),
    (TimeoutError, Why.NO_ANSWER),
    (aiohttp.ClientConnectorCertificateError, Why.CERTIFICATE),
    (aiohttp.ClientConnectorSSLError, Why.TLS),
    (aiohttp.ClientConnectorDNSError, Why.UNKNOWN_HOST),
    ((aiohttp.ClientProxyConnectionError, aiohttp.ClientHttpProxyError), Why.PROXY),
    (aiohttp.ClientConnectorError, Why.UNREACHABLE),
    (aiohttp.ClientPayloadError, Why.CUT_OFF),
    (aiohttp.ClientResponseError, Why.NOT_HTTP),
    ((aiohttp.NonHttpUrlClientError, ValueError), Why.INVALID),
)


class _Unanswered(aiohttp.ClientError):
    """A connection that closed before the head of a response. With this error, aiohttp does not retry by itself."""

    def __init__(self, cause: aiohttp.ClientError, *, was_used: bool) -> None:
        super().__init__(str(cause))
        self.cause = cause
        has_begun = isinstance(cause, aiohttp.ServerDisconnectedError) and not isinstance(cause.message, str)
        self.is_stale = was_used and not has_begun


def _answer_class() -> type[aiohttp.ClientResponse]:
    """Create a response class that records whether a connection that failed had been used before."""
    used: weakref.WeakSet[object] = weakref.WeakSet()

    class Answer(aiohttp.ClientResponse):
        async def start(self, connection: Connection) -> aiohttp.ClientResponse:
            protocol = connection.protocol
            try:
                await super().start(connection)
            except (aiohttp.ClientOSError, aiohttp.ServerDisconnectedError) as error:
                raise _Unanswered(error, was_used=protocol in used) from error
            used.add(protocol)
            return self

    return Answer


class _Payload(aiohttp.Payload):
    """A body for aiohttp that records whether any of it was sent."""

    def __init__(self, request: HttpRequest) -> None:
        super().__init__(request)
        self._size = request.body_length
        self._request = request
        self.was_sent = False

    async def write(self, writer: AbstractStreamWriter) -> None:
        body = self._request.body
        if isinstance(body, bytes) and len(body) <= PIECE_BYTES:
            await writer.write(body)  # raises before anything is sent if the connection has gone
            self.was_sent = True
            return
        async for piece in self._request.pieces():
            await writer.write(piece)
            self.was_sent = True

    async def write_with_length(self, writer: AbstractStreamWriter, content_length: int | None) -> None:
        await self.write(writer)

    def decode(self, encoding: str = "utf-8", errors: str = "strict") -> str:
        raise TypeError("a body is sent, not decoded")


def _may_repeat(error: Exception, request: HttpRequest, payload: _Payload | None) -> bool:
    """Whether the server closed a kept connection before it could have acted on the request."""
    was_sent = payload is None or payload.was_sent
    if isinstance(error, aiohttp.ClientConnectionResetError):  # from a write that could not start
        return payload is None or not was_sent
    is_stale = isinstance(error, _Unanswered) and error.is_stale
    return may_resend(request.method, is_stale=is_stale, was_sent=was_sent)


@functools.lru_cache(maxsize=256)
def _timeout(total_s: float, connect_s: float) -> aiohttp.ClientTimeout:
    return aiohttp.ClientTimeout(total=max(total_s, 0.01), sock_connect=connect_s)

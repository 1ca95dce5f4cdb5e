"""The client's default transport: HTTP/1.1 on kept connections directly to the server, in a pool for each purpose.

Streamed responses, proxies and URLs with a password go through `aiohttp_transport`, which is only loaded for them.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import socket
import ssl
import urllib.request
from collections.abc import Mapping
from contextlib import AbstractAsyncContextManager
from typing import Any, TypeAlias

import aiohappyeyeballs

from tinsmith.errors import APIConnectionError
from tinsmith.transport.base import (
    GROW_BY,
    LIMITS,
    MAX_REDIRECTS,
    MAX_RETRIEVE,
    HttpRequest,
    HttpResponse,
    Purpose,
    StreamedResponse,
    Transport,
    Why,
    fault,
    is_redirect,
    proxy_for,
    redirected,
)
from tinsmith.transport.gate import Gate
from tinsmith.transport.http1 import Target, request_head, target_of
from tinsmith.transport.http_connection import READ_BYTES, ExchangeError, HttpConnection
from tinsmith.transport.retry import may_resend

AddressInfo: TypeAlias = tuple[Any, Any, int, str, Any]

ADDRESSES_S = 10.0
"""How long the addresses of a host are cached."""
SECOND_TRY_S = 0.25
"""The head start of one address of a host before the next is tried as well (RFC 8305)."""


class DirectTransport:
    """Sends requests over the network. It belongs to the event loop on which it is first used."""

    def __init__(
        self, *, limits: Mapping[Purpose, int] = LIMITS, grow_after_s: float = 1.0, max_body_bytes: int = 2**30
    ) -> None:
        self._limits = {**LIMITS, **limits}
        self._grow_after_s = grow_after_s
        self._max_body_bytes = max_body_bytes
        self._proxies = urllib.request.getproxies()
        self._proxy = functools.cache(functools.partial(proxy_for, self._proxies))
        self._addresses = _Addresses()
        self._buffer = memoryview(bytearray(READ_BYTES))
        self._pools: dict[Purpose, _Pool] = {}
        self._library: Transport | None = None
        self._is_closed = False

    async def send(self, request: HttpRequest) -> HttpResponse:
        pool = self._pools.get(request.purpose) or self._open_pool(request)
        deadline = pool.loop.time() + request.timeout_s
        if not pool.gate.try_enter():
            await _enter(pool, request, deadline)
        try:
            for _ in range(MAX_REDIRECTS + 1):
                response = await self._answer(pool, request, deadline)
                if not is_redirect(response.status, response.headers):
                    return response
                request = redirected(request, response.status, response.headers)
            raise fault(request, Why.REDIRECT, f"more than {MAX_REDIRECTS} times")
        finally:
            pool.gate.leave()

    def stream(self, request: HttpRequest) -> AbstractAsyncContextManager[StreamedResponse]:
        if self._is_closed:
            raise fault(request, Why.CLOSED)
        return self._by_library().stream(request)

    async def close(self) -> None:
        """Close all connections; requests in progress or waiting fail."""
        self._is_closed = True
        pools, self._pools = self._pools, {}
        for pool in pools.values():
            pool.close()
        if self._library is not None:
            await self._library.close()
        await asyncio.sleep(0)  # sockets are closed in the loop's next iteration

    def _by_library(self) -> Transport:
        if self._library is None:
            from tinsmith.transport.aiohttp_transport import HttpTransport

            self._library = HttpTransport(
                limits=self._limits, grow_after_s=self._grow_after_s, max_body_bytes=self._max_body_bytes
            )
        return self._library

    def _open_pool(self, request: HttpRequest) -> _Pool:
        if self._is_closed:
            raise fault(request, Why.CLOSED)
        limit = self._limits[request.purpose]
        max_limit = MAX_RETRIEVE if request.purpose is Purpose.RETRIEVE else limit
        gate = Gate(limit, max_limit=max_limit, grow_by=GROW_BY, grow_after_s=self._grow_after_s)
        pool = self._pools[request.purpose] = _Pool(gate, self._addresses, self._buffer)
        return pool

    async def _answer(self, pool: _Pool, request: HttpRequest, deadline: float) -> HttpResponse:
        """Return the response to one request; a stale connection is replaced once."""
        try:
            target = target_of(request.url)
            if "@" in request.url or (self._proxies and self._proxy(target.scheme, target.host)):
                return await self._by_library().send(request)
            head = request_head(request.method, target, request.all_headers(), request.body_length)
        except ValueError:
            raise fault(request, Why.INVALID) from None
        for attempt in range(2):
            if self._is_closed:
                raise fault(request, Why.CLOSED)
            kept = None if attempt else pool.take(target)
            try:
                connection = kept or await pool.open(target, request.connect_timeout_s, deadline)
                return await connection.exchange(request, head, deadline, self._max_body_bytes)
            except ExchangeError as error:
                failure = error
            if kept is None or not _may_repeat(failure, kept, request):
                break
        raise self._explained(failure, request)

    def _explained(self, failure: ExchangeError, request: HttpRequest) -> APIConnectionError:
        return fault(request, Why.CLOSED) if self._is_closed else fault(request, failure.why, failure.cause)


class _Pool:
    """The connections of one purpose."""

    def __init__(self, gate: Gate, addresses: _Addresses, buffer: memoryview) -> None:
        self.gate = gate
        self.loop = asyncio.get_running_loop()
        self._addresses = addresses
        self._buffer = buffer
        self._idle: dict[tuple[str, str, int], list[HttpConnection]] = {}
        self._connections: set[HttpConnection] = set()
        self._opening: set[asyncio.Timeout] = set()

    def take(self, target: Target) -> HttpConnection | None:
        """Return the connection used last, which the server is least likely to have closed."""
        idle = self._idle.get(target[:3])
        while idle:
            connection = idle.pop()
            if connection.is_open:
                return connection
        return None

    async def open(self, target: Target, connect_timeout_s: float, deadline: float) -> HttpConnection:
        until = self.loop.time() + connect_timeout_s
        limit = asyncio.timeout_at(min(until, deadline))
        self._opening.add(limit)
        try:
            async with limit:
                return await self._connect(target)
        except TimeoutError:
            failure = ExchangeError(Why.NO_CONNECTION if until <= deadline else Why.NO_ANSWER)
        except OSError as error:
            failure = ExchangeError(*_reason(error))
        finally:
            self._opening.discard(limit)
        raise failure

    def close(self) -> None:
        self.gate.close()
        for connection in list(self._connections):
            connection.close()
        for limit in self._opening:
            limit.reschedule(self.loop.time())

    async def _connect(self, target: Target) -> HttpConnection:
        addresses = await self._addresses.find(target.host, target.port)
        connected = await aiohappyeyeballs.start_connection(addresses, happy_eyeballs_delay=SECOND_TRY_S)
        idle = self._idle.setdefault(target[:3], [])
        is_safe = target.scheme == "https"
        _, connection = await self.loop.create_connection(
            lambda: HttpConnection(self.loop, self._buffer, idle.append, functools.partial(self._forget, idle)),
            sock=connected,
            ssl=_tls() if is_safe else None,
            server_hostname=target.host if is_safe else None,
        )
        self._connections.add(connection)
        return connection

    def _forget(self, idle: list[HttpConnection], connection: HttpConnection) -> None:
        self._connections.discard(connection)
        with contextlib.suppress(ValueError):
            idle.remove(connection)


class _Addresses:
    """A DNS cache: each lookup takes a thread, so many connections share one."""

    def __init__(self) -> None:
        self._known: dict[tuple[str, int], tuple[float, list[AddressInfo]]] = {}
        self._lock = asyncio.Lock()

    async def find(self, host: str, port: int) -> list[AddressInfo]:
        with contextlib.suppress(socket.gaierror):
            return socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_NUMERICHOST)
        loop = asyncio.get_running_loop()
        async with self._lock:
            until, found = self._known.get((host, port), (0.0, []))
            if loop.time() >= until:
                found = await loop.getaddrinfo(host, port, type=socket.SOCK_STREAM)
                self._known[host, port] = (loop.time() + ADDRESSES_S, found)
        return found


@functools.cache
def _tls() -> ssl.SSLContext:
    context = ssl.create_default_context()
    context.set_alpn_protocols(["http/1.1"])
    return context


async def _enter(pool: _Pool, request: HttpRequest, deadline: float) -> None:
    """Wait for a free connection of the purpose."""
    try:
        async with asyncio.timeout_at(deadline):
            await pool.gate.enter()
    except TimeoutError:
        cause = f"all {pool.gate.limit} for purpose {request.purpose} are in use"
        raise fault(request, Why.ALL_BUSY, cause) from None


def _may_repeat(failure: ExchangeError, kept: HttpConnection, request: HttpRequest) -> bool:
    """Whether the server closed a kept connection before it could have acted on the request."""
    is_stale = failure.why is Why.DROPPED and not kept.has_begun
    return may_resend(request.method, is_stale=is_stale, was_sent=kept.was_sent)


def _reason(error: OSError) -> tuple[Why, str]:
    """Return why there is no connection, and the system's message."""
    cause = " ".join(str(getattr(error, "verify_message", None) or error.strerror or error).split())[:200].rstrip(".")
    return next(why for kind, why in _REASONS if isinstance(error, kind)), cause


_REASONS: tuple[tuple[type[OSError], Why], ...] = (  # the first match counts
    (ssl.SSLCertVerificationError, Why.CERTIFICATE),
    (ssl.SSLError, Why.TLS),
    (socket.gaierror, Why.UNKNOWN_HOST),
    (ConnectionRefusedError, Why.REFUSED),
    (OSError, Why.UNREACHABLE),
)

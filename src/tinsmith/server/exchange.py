"""Small requests without ASGI's messages: a body that is there already, and an answer that leaves in one piece.

ASGI gives a body by a coroutine that may wait, and takes an answer as two messages and as many system calls; each call
hands over Python's lock, and getting it back costs more than the call itself while the store's threads work. uvicorn's
exchange is offered to the application as an extension of the scope; without it, or when the client reads slowly,
everything goes by ASGI.
Does not know: routes, what is in a body.
"""

from __future__ import annotations

import asyncio
from typing import Any, TypeAlias

from uvicorn._types import ASGI3Application
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, RequestResponseCycle

from tinsmith.server.sockets import TimedHttpProtocol

EXTENSION = "tinsmith.exchange"
JOINED_BYTES = 64 * 1024
"""Larger bodies are not copied to join them with their head."""

_Started: TypeAlias = tuple[RequestResponseCycle, ASGI3Application]


class ExchangeProtocol(TimedHttpProtocol):
    """The server's protocol, which offers its exchanges.

    A connection has one task for all its requests, and one timer that looks whether it is idle: a new task, or a timer
    set and stopped, for each request would cost as much as reading its head.
    """

    _next: asyncio.Future[_Started | None] | None = None
    """What the connection's task waits for while there is no request."""
    _idle_since: float | None = None

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        if self._next is not None and not self._next.done():
            self._next.set_result(None)
        if self.timeout_keep_alive_task is not None:
            self.timeout_keep_alive_task.cancel()

    def on_headers_complete(self) -> None:
        super().on_headers_complete()
        if self.cycle is not None and self.cycle.scope is self.scope:
            self.scope["extensions"] = {EXTENSION: self.cycle}  # type: ignore[dict-item]

    def on_response_complete(self) -> None:
        self.server_state.total_requests += 1
        if self.transport.is_closing():
            return
        self.flow.resume_reading()
        if self.pipeline:
            self._start_asgi_task(*self.pipeline.pop())
            return
        self._idle_since = self.loop.time()
        if self.timeout_keep_alive_task is None:
            self._look_later(self.timeout_keep_alive)

    def timeout_keep_alive_handler(self) -> None:
        """Close the connection if it has been idle for as long as it may; else look again."""
        self.timeout_keep_alive_task = None
        if self._idle_since is None:
            return  # the next answer sets the timer
        left_s = self._idle_since + self.timeout_keep_alive - self.loop.time()
        if left_s > 0:
            self._look_later(left_s)
        else:
            super().timeout_keep_alive_handler()

    def _look_later(self, seconds: float) -> None:
        self.timeout_keep_alive_task = self.loop.call_later(seconds, self.timeout_keep_alive_handler)

    def _unset_keepalive_if_required(self) -> None:
        """Called when something has come: from now on the connection is not idle."""
        self._idle_since = None

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: ASGI3Application) -> None:
        waiting, self._next = self._next, None
        if waiting is not None and not waiting.done():
            waiting.set_result((cycle, app))
        else:
            self.loop.create_task(self._carry_out((cycle, app)))

    async def _carry_out(self, started: _Started | None) -> None:
        """Requests one after another. A second task is there only while one goes on behind its answer."""
        task = asyncio.current_task()
        assert task is not None
        while started is not None:
            cycle, app = started
            self.tasks.add(task)
            try:
                await cycle.run_asgi(app)
            finally:
                self.tasks.discard(task)
            if self._next is not None or self.transport.is_closing():
                return
            self._next = self.loop.create_future()
            started = await self._next


def exchange_of(scope: Any) -> RequestResponseCycle | None:
    """The exchange behind a scope, if the server offers it."""
    extensions = scope.get("extensions")
    return extensions.get(EXTENSION) if extensions else None


def whole_body(exchange: RequestResponseCycle) -> bytes | None:
    """The body if all of it is there; None: ask for it by ASGI."""
    if exchange.more_body or exchange.disconnected or exchange.response_complete:
        return None
    body = bytes(exchange.body)
    exchange.body = bytearray()
    return body


def answer(exchange: RequestResponseCycle, status: int, headers: list[tuple[bytes, bytes]], body: bytes) -> bool:
    """Send a whole answer, whose headers include its length; False: send it by ASGI."""
    if exchange.disconnected or exchange.response_started or exchange.flow.write_paused:
        return False
    lines = [b"%b: %b" % header for header in (*exchange.default_headers, *headers)]
    if not exchange.keep_alive:
        lines.append(b"connection: close")
    head = STATUS_LINE[status] + b"\r\n".join(lines) + b"\r\n\r\n"
    if exchange.scope["method"] == "HEAD" or head.count(b"\n") != len(lines) + 2:  # ASGI's way refuses line breaks
        return False
    exchange.response_started = exchange.response_complete = True
    if len(body) <= JOINED_BYTES:
        exchange.transport.write(head + body)
    else:
        exchange.transport.writelines((head, body))
    exchange.message_event.set()
    if not exchange.keep_alive:
        exchange.transport.close()
    exchange.on_response()
    return True

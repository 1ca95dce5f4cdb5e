"""Connections that may not dawdle: a client whose request head does not come in time, or is too large, is told and cut
off. Large bodies are gathered here, and bounded in `http`.
"""

from __future__ import annotations

import asyncio
from typing import Any, cast

import msgspec
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

HEAD_S = 15.0
"""From the first byte of a request to the end of its head; a new connection has as long to begin."""
MAX_HEAD_BYTES = 64 * 1024

GATHER_BYTES = 8 * 1024 * 1024
GATHER_S = 0.02
"""A large body is handed on in pieces of this size, or after this time."""

LINGER_S = 2.0
LINGER_BYTES = 16 * 1024 * 1024
"""How long, and how much, a client that was refused may go on sending before its connection ends. A connection that is
closed while something comes is reset, and the client can lose the answer that it has not read yet."""

_END = b"\r\n\r\n"


class TimedHttpProtocol(HttpToolsProtocol):
    """uvicorn's protocol with a clock on request heads, a bound on their size, and refusals in JSON."""

    head_s = HEAD_S
    max_head_bytes = MAX_HEAD_BYTES
    _timer: asyncio.TimerHandle | None = None
    _is_in_head = True
    _has_begun = False
    """Whether a part of a head is there, and not all of it."""
    _head_bytes = 0
    _tail = b""
    _gathering: asyncio.TimerHandle | None = None
    _linger_bytes: int | None = None
    """What may still come, and is thrown away; None: nobody was refused."""
    _gathered_bytes = 0

    def __init__(self, *arguments: Any, **named: Any) -> None:
        super().__init__(*arguments, **named)
        self._pieces: list[bytes] = []
        """Of the body that is coming, what the application has not been given."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._start_timer()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_timer()
        if self._gathering is not None:
            self._gathering.cancel()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if self._linger_bytes is not None:
            self._linger_bytes -= len(data)
            if self._linger_bytes < 0:
                self.transport.close()
            return
        if self._is_in_head and self._is_too_large(data):
            self._refuse(
                b"431 Request Header Fields Too Large",
                "head_too_large",
                f"the request's head has more than {self.max_head_bytes} bytes",
            )
            return
        super().data_received(data)
        if self._has_begun and self._timer is None:
            self._start_timer()
        if self._pieces and self._gathering is None:
            self._gathering = self.loop.call_later(GATHER_S, self._pass_on)

    def on_body(self, body: bytes) -> None:
        """Gather a body that comes in pieces: the application is woken for many at once, or when no more come."""
        if self.cycle.response_complete:
            return
        self._pieces.append(body)
        self._gathered_bytes += len(body)
        if self._gathered_bytes >= GATHER_BYTES:
            self.flow.pause_reading()
            self._hand_over()
            self.cycle.message_event.set()

    def _pass_on(self) -> None:
        self._gathering = None
        if self._pieces:
            self._hand_over()
        self.cycle.message_event.set()

    def _hand_over(self) -> None:
        """Give what was gathered to the exchange: joined once, and as bytes, which nobody has to copy again."""
        pieces, self._pieces, self._gathered_bytes = self._pieces, [], 0
        if not self.cycle.response_complete:
            self.cycle.body = b"".join((self.cycle.body, *pieces) if self.cycle.body else pieces)  # type: ignore[assignment]

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._has_begun = True

    def on_headers_complete(self) -> None:
        self._stop_timer()
        self._has_begun = self._is_in_head = False
        self._head_bytes, self._tail = 0, b""
        super().on_headers_complete()

    def on_message_complete(self) -> None:
        self._is_in_head = True
        if self._pieces:
            self._hand_over()
        super().on_message_complete()

    def send_400_response(self, msg: str) -> None:
        self._refuse(b"400 Bad Request", "bad_http", msg)

    def _is_too_large(self, data: bytes) -> bool:
        """Counts what belongs to the head; the last piece may carry the beginning of a body."""
        if self._head_bytes + len(data) <= self.max_head_bytes:  # so little, whatever it is
            self._head_bytes += len(data)
            self._tail = data[-len(_END) + 1 :]
            return False
        seen = self._tail + data
        end = seen.find(_END)
        self._head_bytes += len(data) if end < 0 else max(0, end - len(self._tail))
        self._tail = seen[-len(_END) + 1 :]
        return self._head_bytes > self.max_head_bytes

    def _start_timer(self) -> None:
        self._timer = self.loop.call_later(self.head_s, self._give_up)

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _give_up(self) -> None:
        self._refuse(b"408 Request Timeout", "slow_head", f"the request's head did not come within {self.head_s:g} s")

    def _refuse(self, status: bytes, code: str, detail: str) -> None:
        """Answer without the application, and close."""
        self._stop_timer()
        if self.transport is None or self.transport.is_closing():
            return
        body = msgspec.json.encode({"detail": detail, "code": code})
        head = b"HTTP/1.1 %s\r\ncontent-type: application/json\r\ncontent-length: %d\r\nconnection: close\r\n\r\n"
        self.transport.write(head % (status, len(body)) + body)
        self.linger()

    def linger(self) -> None:
        """Say nothing more, and close when the client does, or after a bounded while: it may still be sending."""
        if self._linger_bytes is not None or self.transport.is_closing():
            return
        self._linger_bytes = LINGER_BYTES
        if self.cycle is not None and not self.cycle.response_complete:  # what it would answer has no way any more
            self.cycle.disconnected = True
            self.cycle.message_event.set()
        if self.transport.can_write_eof():
            self.transport.write_eof()
        self.flow.resume_reading()
        self._stop_timer()
        self._timer = self.loop.call_later(LINGER_S, self.transport.close)


class _Gentle:
    """The transport of an exchange, which is not closed at once while the request's body comes."""

    def __init__(self, exchange: RequestResponseCycle) -> None:
        self._exchange = exchange
        self._transport = exchange.transport

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)

    def close(self) -> None:
        if self._exchange.more_body:
            cast(TimedHttpProtocol, self._transport.get_protocol()).linger()
        else:
            self._transport.close()


def close_gently(exchange: RequestResponseCycle | None) -> None:
    """If the answer to this request ends its connection, the client is to have it, even one that is still sending."""
    if exchange is not None and exchange.more_body and not isinstance(exchange.transport, _Gentle):
        exchange.transport = cast(asyncio.Transport, _Gentle(exchange))

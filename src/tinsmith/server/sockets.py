"""Connections that may not dawdle, and answers in one piece.

A client that has not sent its whole request head in time is cut off. Head and body of an answer leave with one system
call: each call hands over Python's lock, which costs more than the call.
"""

from __future__ import annotations

import asyncio
from typing import Any

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

HEAD_S = 15.0
"""From the first byte of a request to the end of its head."""
MAX_HEAD_BYTES = 64 * 1024
JOINED_BYTES = 64 * 1024
"""Larger bodies are not copied to join them with their head."""


class JoiningTransport:
    """A transport that holds back a write until the next one, or until the loop's next round. The rest is passed on."""

    def __init__(self, transport: asyncio.Transport, loop: asyncio.AbstractEventLoop) -> None:
        self._transport = transport
        self._loop = loop
        self._held = b""

    def write(self, data: bytes) -> None:
        if self._held:
            held, self._held = self._held, b""
            if len(data) <= JOINED_BYTES:
                self._transport.write(held + data)
            else:
                self._transport.writelines((held, data))
        else:
            self._held = data
            self._loop.call_soon(self._flush)

    def close(self) -> None:
        self._flush()
        self._transport.close()

    def _flush(self) -> None:
        if self._held:
            held, self._held = self._held, b""
            self._transport.write(held)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)


class TimedHttpProtocol(HttpToolsProtocol):
    """uvicorn's protocol with a clock on request heads, and a bound on their size."""

    head_s = HEAD_S
    _timer: asyncio.TimerHandle | None = None
    _head_bytes = 0
    _is_in_head = False

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(JoiningTransport(transport, self.loop))  # type: ignore[arg-type]
        self._start_timer()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_timer()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if self._timer is not None:
            self._head_bytes += len(data)
            if self._head_bytes > MAX_HEAD_BYTES + self._body_allowance(data):
                self._cut()
                return
        super().data_received(data)
        if self._is_in_head and self._timer is None:  # most heads arrive in one piece and need no timer
            self._start_timer()

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._head_bytes = 0
        self._is_in_head = True

    def on_headers_complete(self) -> None:
        self._is_in_head = False
        self._stop_timer()
        super().on_headers_complete()

    def _body_allowance(self, data: bytes) -> int:
        """The last piece may carry the beginning of a body, which is not counted."""
        return len(data)

    def _start_timer(self) -> None:
        self._timer = self.loop.call_later(self.head_s, self._cut)

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _cut(self, *_: Any) -> None:
        self._stop_timer()
        if self.transport is not None and not self.transport.is_closing():
            self.transport.close()

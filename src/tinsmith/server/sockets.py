"""Connections that may not dawdle: a client that has not sent its whole request head in time is cut off."""

from __future__ import annotations

import asyncio
from typing import Any

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

HEAD_S = 15.0
"""From the first byte of a request to the end of its head."""
MAX_HEAD_BYTES = 64 * 1024


class TimedHttpProtocol(HttpToolsProtocol):
    """uvicorn's protocol with a clock on request heads, and a bound on their size."""

    head_s = HEAD_S
    _timer: asyncio.TimerHandle | None = None
    _head_bytes = 0

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
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

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._head_bytes = 0
        if self._timer is None:
            self._start_timer()

    def on_headers_complete(self) -> None:
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

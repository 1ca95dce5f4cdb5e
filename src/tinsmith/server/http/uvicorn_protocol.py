"""Limits on clients that uvicorn does not have: slow or huge request heads, too many connections, slow readers.

`GuardedProtocol` is uvicorn's httptools protocol with these limits. Everything else (parsing, keep-alive, pipelining,
ASGI) is uvicorn's. A client that breaks a limit gets an answer in JSON, as from a route, and is disconnected.

uvicorn calls none of this a public interface. `tests/unit/server/http/test_uvicorn_interface.py` names everything that
this module relies on, and `pyproject.toml` allows only releases that the test has passed with.
"""

from __future__ import annotations

import asyncio
from typing import Any, ClassVar, cast

import msgspec
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from tinsmith.config import ServerConfig

HEAD_S = 15.0
"""From the first byte of a request to the end of its head; a new connection has as long to begin."""
MAX_HEAD_BYTES = 64 * 1024

LINGER_S = 2.0
LINGER_BYTES = 16 * 1024 * 1024
"""How long, and how much, a client that was refused may continue to send before its connection is closed. Closing a
socket while data arrives makes the kernel reset the connection, and the client may never read the answer."""

READ_BYTES = 128 * 1024
"""How much of the waiting data a client has to read within `read_timeout_s`."""

EXTENSION = "tinsmith.connection"
"""The key in an ASGI scope's extensions under which the application finds the connection."""

_END = b"\r\n\r\n"


class GuardedProtocol(HttpToolsProtocol):
    """uvicorn's HTTP protocol with limits on clients, and refusals in JSON."""

    head_s = HEAD_S
    max_head_bytes = MAX_HEAD_BYTES
    read_timeout_s = 30.0
    max_connections = 8192
    connections_by_address: ClassVar[dict[str, int]] = {}
    _address = ""
    _timer: asyncio.TimerHandle | None = None
    _is_in_head = True
    _has_begun = False
    """Whether a part of a head has come, and not all of it."""
    _head_bytes = 0
    _tail = b""
    _linger_bytes: int | None = None
    """Bytes that may still arrive and are discarded; None unless the client was refused."""
    _reading: asyncio.TimerHandle | None = None
    _unread_bytes = 0
    """Bytes that were waiting for the client at the last check."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        peer = transport.get_extra_info("peername")
        self._address = peer[0] if isinstance(peer, tuple) else ""
        count = self.connections_by_address[self._address] = self.connections_by_address.get(self._address, 0) + 1
        self._start_timer()
        if count > self.max_connections:
            detail = (
                f"{self._address} already has {self.max_connections} open connections, the most that this server "
                "allows (max_connections); close some"
            )
            self._refuse(b"429 Too Many Requests", "too_many_connections", detail)

    def connection_lost(self, exc: Exception | None) -> None:
        left = self.connections_by_address[self._address] - 1
        if left:
            self.connections_by_address[self._address] = left
        else:
            del self.connections_by_address[self._address]
        self._stop_timer()
        if self._reading is not None:
            self._reading.cancel()
        super().connection_lost(exc)

    def pause_writing(self) -> None:
        """Watch a client that reads more slowly than it is written to."""
        super().pause_writing()
        self._watch_reader()

    def resume_writing(self) -> None:
        super().resume_writing()
        if self._reading is not None:
            self._reading.cancel()
            self._reading = None

    def _watch_reader(self) -> None:
        self._unread_bytes = self.transport.get_write_buffer_size()
        self._reading = self.loop.call_later(self.read_timeout_s, self._look_at_reader)

    def _look_at_reader(self) -> None:
        """Disconnect a client that has read next to nothing since the last check, and free what waits for it."""
        self._reading = None
        if self._unread_bytes - self.transport.get_write_buffer_size() < READ_BYTES:
            self.transport.abort()
        else:
            self._watch_reader()

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
                f"the request line and headers have more than {self.max_head_bytes} bytes",
            )
            return
        super().data_received(data)
        if self._has_begun and self._timer is None:
            self._start_timer()

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._has_begun = True
        self.scope["extensions"] = {EXTENSION: self}  # type: ignore[dict-item]

    def on_headers_complete(self) -> None:
        self._stop_timer()
        self._has_begun = self._is_in_head = False
        self._head_bytes, self._tail = 0, b""
        super().on_headers_complete()

    def on_message_complete(self) -> None:
        self._is_in_head = True
        super().on_message_complete()

    def send_400_response(self, msg: str) -> None:
        self._refuse(b"400 Bad Request", "bad_http", msg)

    def _is_too_large(self, data: bytes) -> bool:
        """Count the bytes of the head; the last piece of it may carry the beginning of a body."""
        if self._head_bytes + len(data) <= self.max_head_bytes:  # too little to matter
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
        detail = f"the request line and headers did not arrive within {self.head_s:g} s"
        self._refuse(b"408 Request Timeout", "slow_head", detail)

    def _refuse(self, status: bytes, code: str, detail: str) -> None:
        """Answer without the application, and close the connection."""
        self._stop_timer()
        if self.transport is None or self.transport.is_closing():
            return
        body = msgspec.json.encode({"detail": detail, "code": code})
        head = b"HTTP/1.1 %s\r\ncontent-type: application/json\r\ncontent-length: %d\r\nconnection: close\r\n\r\n"
        self.transport.write(head % (status, len(body)) + body)
        self.linger()

    def linger(self) -> None:
        """Send nothing more, and close when the client does, or after a limited time: it may still be sending."""
        if self._linger_bytes is not None or self.transport.is_closing():
            return
        self._linger_bytes = LINGER_BYTES
        if self.cycle is not None and not self.cycle.response_complete:  # its answer can no longer be sent
            self.cycle.disconnected = True
            self.cycle.message_event.set()
        if self.transport.can_write_eof():
            self.transport.write_eof()
        self.flow.resume_reading()
        self._stop_timer()
        self._timer = self.loop.call_later(LINGER_S, self.transport.close)

    def close_gently(self) -> None:
        """If the answer to the current request ends the connection, let a client that still sends read it first."""
        cycle = self.cycle
        if cycle.more_body and not isinstance(cycle.transport, _Gentle):
            cycle.transport = cast(asyncio.Transport, _Gentle(self, cycle))


class _Gentle:
    """The transport of a request; `close` lingers while the request's body is still arriving."""

    def __init__(self, connection: GuardedProtocol, cycle: RequestResponseCycle) -> None:
        self._connection = connection
        self._cycle = cycle
        self._transport = connection.transport

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)

    def close(self) -> None:
        if self._cycle.more_body:
            self._connection.linger()
        else:
            self._transport.close()


def protocol_for(config: ServerConfig) -> type[GuardedProtocol]:
    """Return the protocol class with a server's settings, and counts of its own."""
    limits = {"max_connections": config.max_connections, "read_timeout_s": config.read_timeout_s}
    return type("ServerProtocol", (GuardedProtocol,), {**limits, "connections_by_address": {}})


def connection_of(scope: Any) -> GuardedProtocol | None:
    """Return the connection that a request came by; None if another server than ours runs the application."""
    extensions = scope.get("extensions")
    return extensions.get(EXTENSION) if extensions else None

"""Answers in one piece: head and body leave with one system call.

Each call hands over Python's lock, and getting it back costs more than the call itself while the store's threads work.
Does not know: HTTP.
"""

from __future__ import annotations

import asyncio
from typing import Any

from tinsmith.server.sockets import TimedHttpProtocol

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


class JoiningHttpProtocol(TimedHttpProtocol):
    """The server's protocol on such a transport."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(JoiningTransport(transport, self.loop))  # type: ignore[arg-type]

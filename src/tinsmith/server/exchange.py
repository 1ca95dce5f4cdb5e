"""Small requests without ASGI's messages: a body that is there already, and an answer that leaves in one piece.

ASGI gives a body by a coroutine that may wait, and takes an answer as two messages and as many system calls; each call
hands over Python's lock, and getting it back costs more than the call itself while the store's threads work. uvicorn's
exchange is offered to the application as an extension of the scope; without it, or when the client reads slowly,
everything goes by ASGI.
Does not know: routes, what is in a body.
"""

from __future__ import annotations

from typing import Any

from uvicorn.protocols.http.httptools_impl import STATUS_LINE, RequestResponseCycle

from tinsmith.server.sockets import TimedHttpProtocol

EXTENSION = "tinsmith.exchange"
JOINED_BYTES = 64 * 1024
"""Larger bodies are not copied to join them with their head."""


class ExchangeProtocol(TimedHttpProtocol):
    """The server's protocol, which offers its exchanges."""

    def on_headers_complete(self) -> None:
        super().on_headers_complete()
        if self.cycle is not None and self.cycle.scope is self.scope:
            self.scope["extensions"] = {EXTENSION: self.cycle}  # type: ignore[dict-item]


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

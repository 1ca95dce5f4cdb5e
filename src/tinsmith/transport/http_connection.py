"""One HTTP/1.1 connection: it sends a request, receives the response, and then waits idle for the next.

It enforces the deadline of the request in progress and closes itself when it has been idle for too long.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from tinsmith.errors import TinkerError
from tinsmith.transport.base import KEEP_ALIVE_S, HttpRequest, HttpResponse, Why
from tinsmith.transport.http1 import CutOffError, FormatError, ResponseParser, SizeError
from tinsmith.transport.multipart import PIECE_BYTES, Multipart

READ_BYTES = 256 * 1024

_GONE = "Server disconnected"
_TOO_SOON_S = 0.001
"""A timer may fire this much early; that counts as in time."""


class ExchangeError(Exception):
    """An exchange without a complete response."""

    def __init__(self, why: Why, cause: object = "") -> None:
        super().__init__(why, cause)
        self.why = why
        self.cause = cause


class HttpConnection(asyncio.BufferedProtocol):
    """A connection for one exchange at a time. It calls `on_idle` when it is free again, `on_lost` when it closes."""

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        buffer: memoryview,
        on_idle: Callable[[HttpConnection], None],
        on_lost: Callable[[HttpConnection], None],
    ) -> None:
        self._loop = loop
        self._buffer = buffer
        """Shared by all connections of a loop: received bytes are copied out of it at once."""
        self._on_idle = on_idle
        self._on_lost = on_lost
        self._transport: asyncio.Transport | None = None
        self._answer: ResponseParser | None = None
        self._is_in_place = False
        self._done: asyncio.Future[None] | None = None
        self._sender: asyncio.Task[None] | None = None
        self._room: asyncio.Future[None] | None = None
        self._due = 0.0
        self._timer: asyncio.TimerHandle | None = None
        self.was_sent = False
        """Whether any part of the last request was sent."""

    @property
    def is_open(self) -> bool:
        return self._transport is not None and not self._transport.is_closing()

    @property
    def has_begun(self) -> bool:
        """Whether any part of the response was received."""
        return self._answer is not None and self._answer.has_begun

    async def exchange(self, request: HttpRequest, head: bytes, deadline: float, max_bytes: int) -> HttpResponse:
        """Send a request and wait for its response. Without one, or when cancelled, the connection is closed."""
        answer = self._answer = ResponseParser(request.method, max_bytes)
        self.was_sent = False
        if not self.is_open:
            raise ExchangeError(Why.DROPPED, _GONE)
        done = self._done = self._loop.create_future()
        self._wake_at(deadline)
        try:
            self._begin_sending(request, head)
            await done
            if not answer.can_reuse or self._sender is not None:
                self.close()
        except BaseException:
            if done.done() and not done.cancelled():
                done.exception()  # mark it as retrieved, even if a cancellation came first
            self.close()
            raise
        finally:
            self._done = None
            if self._sender is not None:
                await self._stop_sending()
        self._answer = None
        if self.is_open:
            self._wake_at(self._loop.time() + KEEP_ALIVE_S)
            self._on_idle(self)
        return HttpResponse(status=answer.status, headers=answer.headers, body=_body(answer), url=request.shown_url)

    def close(self) -> None:
        """Close the connection now; an exchange in progress fails."""
        if self._transport is not None:
            self._transport.abort()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport

    def get_buffer(self, sizehint: int) -> memoryview:
        place = self._answer.place() if self._answer is not None else None
        self._is_in_place = place is not None
        return self._buffer if place is None else place

    def buffer_updated(self, nbytes: int) -> None:
        done, answer = self._done, self._answer
        if done is None or answer is None:
            self.close()  # bytes that no request asked for
            return
        if done.done():
            answer.can_reuse = False
            return
        try:
            if answer.received(nbytes) if self._is_in_place else answer.feed(self._buffer[:nbytes].tobytes()):
                done.set_result(None)
        except FormatError as error:
            done.set_exception(ExchangeError(Why.NOT_HTTP, error))
        except SizeError as limit:
            done.set_exception(ExchangeError(Why.TOO_LARGE, limit))

    def eof_received(self) -> None:
        if self._done is not None and self._answer is not None and not self._done.done() and self._answer.end():
            self._done.set_result(None)

    def connection_lost(self, exc: Exception | None) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        self.resume_writing()
        self._on_lost(self)
        done, answer = self._done, self._answer
        if done is None or answer is None or done.done():
            return
        cause = getattr(exc, "strerror", None) or _GONE
        done.set_exception(ExchangeError(Why.CUT_OFF if answer.status else Why.DROPPED, cause))

    def pause_writing(self) -> None:
        self._room = self._loop.create_future()

    def resume_writing(self) -> None:
        room, self._room = self._room, None
        if room is not None and not room.done():
            room.set_result(None)

    def _begin_sending(self, request: HttpRequest, head: bytes) -> None:
        assert self._transport is not None
        body = request.body or b""
        if isinstance(body, bytes) and len(body) <= PIECE_BYTES:
            self.was_sent = True
            self._transport.write(head + body)
            return
        self._sender = self._loop.create_task(
            self._send_pieces(request, head) if isinstance(body, Multipart) else self._send_bytes(body, head)
        )
        self._sender.add_done_callback(self._sending_ended)

    async def _send_bytes(self, body: bytes | memoryview, head: bytes) -> None:
        """Send a large body, no faster than the socket accepts it."""
        assert self._transport is not None
        self.was_sent = True
        self._transport.write(head)
        view = memoryview(body)
        for position in range(0, len(body), PIECE_BYTES):
            self._transport.write(view[position : position + PIECE_BYTES])
            if self._room is not None:
                await self._room

    async def _send_pieces(self, request: HttpRequest, head: bytes) -> None:
        """Send an upload, no faster than the socket accepts it; the head is sent with the first piece."""
        assert self._transport is not None
        is_chunked = request.body_length is None
        async for piece in request.pieces():
            if not piece:
                continue
            if is_chunked:
                piece = b"%x\r\n%b\r\n" % (len(piece), piece)
            self._transport.write(head + piece if head else piece)
            self.was_sent, head = True, b""
            if self._room is not None:
                await self._room
        if head or is_chunked:
            self.was_sent = True
            self._transport.write(head + b"0\r\n\r\n" if is_chunked else head)

    def _sending_ended(self, sender: asyncio.Task[None]) -> None:
        self._sender = None
        error = None if sender.cancelled() else sender.exception()
        if error is not None and self._done is not None and not self._done.done():
            self._done.set_exception(ExchangeError(Why.NOT_SENT, error) if isinstance(error, TinkerError) else error)

    async def _stop_sending(self) -> None:
        """Stop sending: the response or the end of the connection came before everything was sent."""
        sender = self._sender
        assert sender is not None
        sender.cancel()
        await asyncio.wait([sender])

    def _wake_at(self, due: float) -> None:
        """Set the time of the next timeout. A timer that is already set for an earlier time stays and is moved when it
        fires, which saves creating and cancelling one for every request."""
        self._due = due
        if self._timer is None or due < self._timer.when():
            if self._timer is not None:
                self._timer.cancel()
            self._timer = self._loop.call_at(due, self._on_timer)

    def _on_timer(self) -> None:
        self._timer = None
        if self._due - self._loop.time() > _TOO_SOON_S:
            self._wake_at(self._due)
        elif self._done is None:
            self.close()
        elif not self._done.done():
            self._done.set_exception(ExchangeError(Why.NO_ANSWER))


def _body(answer: ResponseParser) -> bytes:
    try:
        return answer.body()
    except SizeError as limit:
        raise ExchangeError(Why.TOO_LARGE, limit) from None
    except FormatError as error:
        raise ExchangeError(Why.NOT_HTTP, error) from None
    except CutOffError:
        raise ExchangeError(Why.CUT_OFF, "the compressed body is incomplete") from None

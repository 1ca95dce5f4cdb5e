"""The transport into an ASGI application in the same process: for tests, and for a server embedded in a program.

Owns one task for each request and the application's lifespan. Does not know: HTTP libraries, sockets, what the
application is. The host in a URL is not looked at: every request goes to the one application.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, MutableMapping
from contextlib import aclosing, asynccontextmanager
from typing import Any, TypeAlias
from urllib.parse import unquote, urlsplit

from tinsmith.errors import APIConnectionError, TinkerError
from tinsmith.transport.base import (
    MAX_REDIRECTS,
    HttpRequest,
    HttpResponse,
    StreamedBody,
    StreamedResponse,
    Why,
    fault,
    is_redirect,
    lower_case,
    redirected,
)

logger = logging.getLogger(__name__)

Message: TypeAlias = MutableMapping[str, Any]
Receive: TypeAlias = Callable[[], Awaitable[Message]]
Send: TypeAlias = Callable[[Message], Awaitable[None]]
AsgiApp: TypeAlias = Callable[[Message, Receive, Send], Awaitable[None]]

CLOSING_GRACE_S = 1.0
"""How long requests may go on when the transport closes, before they are cancelled."""

_AHEAD = 8
"""Messages the application may be ahead of the consumer."""
_VERSIONS = {"version": "3.0", "spec_version": "2.3"}
_CRASHED: Message = {"type": "http.response.start", "status": 500, "headers": [(b"content-type", b"text/plain")]}


class AsgiTransport:
    """Sends requests to an application. Starts it (ASGI lifespan) when first used, stops it when closed."""

    def __init__(self, app: AsgiApp, *, closing_grace_s: float = CLOSING_GRACE_S) -> None:
        self._app = app
        self._closing_grace_s = closing_grace_s
        self._lifespan: _Lifespan | None = None
        self._exchanges: dict[asyncio.Task[None], _Exchange] = {}
        self._is_closed = False

    async def __aenter__(self) -> AsgiTransport:
        await self._start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def send(self, request: HttpRequest) -> HttpResponse:
        async with self.stream(request) as response:
            body = b"".join([chunk async for chunk in response.chunks()])
            return HttpResponse(status=response.status, headers=response.headers, body=body, url=response.url)

    @asynccontextmanager
    async def stream(self, request: HttpRequest) -> AsyncIterator[StreamedResponse]:
        deadline = asyncio.get_running_loop().time() + request.timeout_s
        for _ in range(MAX_REDIRECTS + 1):
            if self._is_closed:
                raise fault(request, Why.CLOSED)
            await self._start()
            exchange = self._begin(request, deadline)
            try:
                status, headers = await exchange.head()
                if not is_redirect(status, headers):
                    async with aclosing(exchange.chunks()) as chunks:
                        yield StreamedBody(status, headers, request.shown_url, chunks)
                    return
            finally:
                exchange.disconnect()
            request = redirected(request, status, headers)
        raise fault(request, Why.REDIRECT, f"more than {MAX_REDIRECTS} times")

    async def close(self) -> None:
        """Disconnect from requests under way, cancel those that do not end soon, and stop the application."""
        self._is_closed = True
        tasks = list(self._exchanges)
        for exchange in self._exchanges.values():
            exchange.disconnect()
        if tasks:
            _, slow = await asyncio.wait(tasks, timeout=self._closing_grace_s)
            for task in slow:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
        lifespan, self._lifespan = self._lifespan, None
        if lifespan is not None:
            await lifespan.stop()

    async def _start(self) -> None:
        if self._lifespan is None:
            self._lifespan = _Lifespan(self._app)
        await self._lifespan.started()

    def _begin(self, request: HttpRequest, deadline: float) -> _Exchange:
        exchange = _Exchange(request, deadline)
        state = {} if self._lifespan is None else self._lifespan.state
        task = asyncio.create_task(exchange.run(self._app, _scope(request, state)))
        self._exchanges[task] = exchange
        task.add_done_callback(self._exchanges.pop)
        return exchange


class _Exchange:
    """One request and its answer: what the application takes with `receive`, and what it gives with `send`."""

    def __init__(self, request: HttpRequest, deadline: float) -> None:
        self._request = request
        self._deadline = deadline
        self._pieces = request.pieces()
        self._is_body_sent = False
        self._answers: asyncio.Queue[Message | None] = asyncio.Queue(_AHEAD)
        self._is_over = asyncio.Event()
        self._unreadable: TinkerError | None = None

    async def run(self, app: AsgiApp, scope: Message) -> None:
        try:
            await app(scope, self._receive, self._send)
        except Exception:
            if not self._is_over.is_set():
                logger.exception("the application failed at %s", self._request.info, extra={"event": "app_failed"})
        await self._answers.put(None)

    async def head(self) -> tuple[int, dict[str, str]]:
        message = await self._next()
        if message is None:
            if self._unreadable is not None:
                raise fault(self._request, Why.NOT_SENT, self._unreadable)
            message = _CRASHED
            for following in ({"type": "http.response.body", "body": b"Internal Server Error"}, None):
                self._answers.put_nowait(following)
        headers = [(name.decode("latin-1"), value.decode("latin-1")) for name, value in message.get("headers", ())]
        return message["status"], lower_case(headers)

    async def chunks(self) -> AsyncGenerator[bytes, None]:
        has_more = True
        while has_more:
            message = await self._next()
            if message is None:
                raise fault(self._request, Why.CUT_OFF, "the application stopped")
            has_more = message.get("more_body", False)
            if message.get("body"):
                yield message["body"]
        self._is_over.set()

    def disconnect(self) -> None:
        """Tell the application that nobody listens any more, let it go on if it waits to be heard, and end `_next`."""
        self._is_over.set()
        while not self._answers.empty():
            self._answers.get_nowait()
        self._answers.put_nowait(None)

    async def _next(self) -> Message | None:
        try:
            async with asyncio.timeout_at(self._deadline):
                message = await self._answers.get()
        except TimeoutError:
            raise fault(self._request, Why.NO_ANSWER) from None
        if self._is_over.is_set():
            raise fault(self._request, Why.CLOSED)
        return message

    async def _receive(self) -> Message:
        if self._is_body_sent:
            await self._is_over.wait()
        if self._is_over.is_set():
            return {"type": "http.disconnect"}
        try:
            piece = await anext(self._pieces, b"")
        except TinkerError as error:
            self._unreadable = error
            raise
        self._is_body_sent = not piece
        return {"type": "http.request", "body": piece, "more_body": bool(piece)}

    async def _send(self, message: Message) -> None:
        if self._is_over.is_set():
            raise ConnectionResetError("the client has gone")
        await self._answers.put(message)


class _Lifespan:
    """The application's start and end. One that does not know lifespan raises at once, and needs none."""

    def __init__(self, app: AsgiApp) -> None:
        self.state: dict[str, Any] = {}
        self._has_started = asyncio.Event()
        self._must_end = asyncio.Event()
        self._failure: str | None = None
        self._messages = iter(["lifespan.startup", "lifespan.shutdown"])
        self._task = asyncio.create_task(self._run(app))

    async def started(self) -> None:
        await self._has_started.wait()
        if self._failure is not None:
            error = APIConnectionError(message=f"The application did not start: {self._failure}")
            error.retryable = False
            raise error

    async def stop(self) -> None:
        self._must_end.set()
        await self._task

    async def _run(self, app: AsgiApp) -> None:
        try:
            await app({"type": "lifespan", "asgi": _VERSIONS, "state": self.state}, self._receive, self._send)
        except Exception:
            level = logging.ERROR if self._has_started.is_set() else logging.DEBUG
            logger.log(level, "the application left its lifespan", exc_info=True, extra={"event": "lifespan_left"})
        self._has_started.set()

    async def _receive(self) -> Message:
        if self._has_started.is_set():
            await self._must_end.wait()
        return {"type": next(self._messages)}

    async def _send(self, message: Message) -> None:
        if message["type"] == "lifespan.startup.failed":
            self._failure = message.get("message") or "it gave no reason"
        self._has_started.set()


def _scope(request: HttpRequest, state: dict[str, Any]) -> Message:
    url = urlsplit(request.url)
    skipped = {"accept-encoding", "content-length", "transfer-encoding"}
    headers = {name.lower(): value for name, value in request.all_headers().items() if name.lower() not in skipped}
    headers.setdefault("host", url.netloc.rpartition("@")[2])
    if request.body is not None:
        length = request.body_length
        headers |= {"transfer-encoding": "chunked"} if length is None else {"content-length": str(length)}
    return {
        "type": "http",
        "asgi": _VERSIONS,
        "http_version": "1.1",
        "method": request.method,
        "scheme": url.scheme,
        "path": unquote(url.path) or "/",
        "raw_path": url.path.encode() or b"/",
        "query_string": url.query.encode(),
        "root_path": "",
        "headers": [(name.encode("latin-1"), value.encode("latin-1")) for name, value in headers.items()],
        "server": (url.hostname or "", url.port or (443 if url.scheme == "https" else 80)),
        "client": ("127.0.0.1", 0),
        "state": dict(state),
    }

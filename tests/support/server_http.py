"""The socket side of the test server: connections, reading requests, writing answers whole, slowly or not at all."""

from __future__ import annotations

import asyncio
import gzip
import logging
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from aiohttp import web

from support.server_answers import (
    Answer,
    Delay,
    Drop,
    DropMidBody,
    Hold,
    Pass,
    Redirect,
    Replace,
    Script,
    Scripted,
    SlowBytes,
    Status,
    is_final,
)
from support.server_core import Core
from support.server_recording import MAX_BODY_BYTES, Recorded, Recorder, decode_body
from support.server_runs import FILES, send_file
from support.server_sampling import STREAM_PATH, stream
from support.server_service import TOKENIZER_PATH, tokenizer
from tinsmith.wire.codecs import zstd

logger = logging.getLogger(__name__)

MIN_COMPRESSED_BYTES = 100
BODYLESS = frozenset({204, 304})


class CountingServer(web.Server):
    """Gives each connection a number and keeps the peak of how many are open."""

    def __init__(self, handler: Callable[[web.BaseRequest], Any], keepalive_s: float) -> None:
        super().__init__(
            handler,
            request_factory=_make_request,
            handler_cancellation=True,
            auto_decompress=False,
            keepalive_timeout=keepalive_s,
            access_log=None,
        )
        self.numbers: dict[Any, int] = {}
        self.total = 0
        self.peak = 0
        self.open: dict[Any, asyncio.Transport] = {}

    def connection_made(self, handler: Any, transport: asyncio.Transport) -> None:
        super().connection_made(handler, transport)
        self.total += 1
        self.numbers[handler] = self.total
        self.open[handler] = transport
        self.peak = max(self.peak, len(self.open))

    def connection_lost(self, handler: Any, exc: BaseException | None = None) -> None:
        super().connection_lost(handler, exc)
        self.open.pop(handler, None)
        self.numbers.pop(handler, None)

    def abort_all(self) -> None:
        for transport in list(self.open.values()):
            transport.abort()


def _make_request(message: Any, payload: Any, protocol: Any, writer: Any, task: Any) -> web.BaseRequest:
    loop = asyncio.get_running_loop()
    return web.BaseRequest(message, payload, protocol, writer, task, loop, client_max_size=MAX_BODY_BYTES)


@dataclass
class HttpShell:
    """Records each request, follows the script, and otherwise asks the core."""

    core: Core
    recorder: Recorder
    script: Script
    prefix: str
    server: CountingServer | None = None

    async def handle(self, request: web.BaseRequest) -> web.StreamResponse:
        recorded = await self._record(request)
        try:
            return await self._respond(request, recorded, self.script.take(recorded.path))
        except asyncio.CancelledError:
            recorded.is_aborted = True
            raise
        except ConnectionError:
            recorded.is_aborted = True
            return _dropped(request)
        except Exception as error:  # a fault of this server: say so where the test will see it, and end the retries
            logger.exception("%s %s", recorded.method, recorded.path)
            self.core.state.violate(f"the test server failed: {recorded.method} {recorded.path}: {error!r}")
            return web.json_response({"detail": f"the test server failed: {error!r}"}, status=400)

    async def _record(self, request: web.BaseRequest) -> Recorded:
        raw = await request.read()
        headers = {name.lower(): value for name, value in request.headers.items()}
        body, problem = decode_body(headers, raw)
        assert self.server is not None
        recorded = Recorded(
            method=request.method,
            path=request.path.removeprefix(self.prefix),
            query=dict(request.query),
            headers=headers,
            body=body,
            raw_body=raw,
            time=time.monotonic(),
            connection_id=self.server.numbers.get(request.protocol, 0),
            releases=self.core.releases,
        )
        if problem is not None:
            self.core.state.violate(f"{recorded.method} {recorded.name}: the body cannot be read: {problem}")
        self.recorder.add(recorded)
        return recorded

    async def _respond(self, request: web.BaseRequest, recorded: Recorded, scripted: Scripted) -> web.StreamResponse:
        if isinstance(scripted, Drop):
            if scripted.after_work:
                await self._normal(recorded)
            return _dropped(request)
        if isinstance(scripted, Replace):
            made = scripted.function(recorded)
            scripted = made if isinstance(made, Status) else Status(200, body=made)
        if isinstance(scripted, Status):
            if is_final(scripted):
                self.core.close_number(recorded)
            return await self._send(request, recorded, scripted.answer(), Pass())
        if isinstance(scripted, Redirect):
            return await self._send(
                request, recorded, Answer(scripted.status, headers={"location": scripted.url}), Pass()
            )
        if isinstance(scripted, Delay):
            await asyncio.sleep(scripted.delay_s)
        elif isinstance(scripted, Hold):
            await self.core.wait_for_release(recorded.releases)
        return await self._send(request, recorded, await self._normal(recorded), scripted)

    async def _normal(self, recorded: Recorded) -> Answer:
        if recorded.path.startswith(FILES) and recorded.method in ("GET", "HEAD"):
            return send_file(self.core, recorded)
        if recorded.path == STREAM_PATH and recorded.method == "POST":
            return stream(self.core, recorded)
        if recorded.path == TOKENIZER_PATH and recorded.method == "GET":
            return tokenizer(self.core, recorded)
        return await self.core.answer(recorded)

    async def _send(
        self, request: web.BaseRequest, recorded: Recorded, answer: Answer, how: Scripted
    ) -> web.StreamResponse:
        answer = self._compressed(answer, recorded.headers)
        headers = dict(answer.headers)
        if answer.status not in BODYLESS:
            headers.setdefault("content-type", answer.content_type)
        recorded.status = answer.status
        if answer.pieces is None and isinstance(how, (Pass, Delay, Hold)):
            return web.Response(status=answer.status, body=answer.body, headers=headers)
        response = web.StreamResponse(status=answer.status, headers=headers)
        pieces = answer.pieces
        if pieces is None:
            response.content_length = len(answer.body)
            pieces = (answer.body,)
        await response.prepare(request)
        if isinstance(how, DropMidBody):
            whole = b"".join(piece for piece in pieces if piece)
            await response.write(whole[: len(whole) // 2])
            return _dropped(request, response)
        for piece in pieces:
            if piece is None:
                await self.core.wait_for_release(recorded.releases)
            elif isinstance(how, SlowBytes):
                for i in range(len(piece)):
                    await response.write(piece[i : i + 1])
                    await asyncio.sleep(how.delay_s)
            elif piece:
                await response.write(piece)
        return response

    def _compressed(self, answer: Answer, headers: Mapping[str, str]) -> Answer:
        wanted = self.core.settings.compress_answers
        can_be = answer.pieces is None and answer.status == 200 and len(answer.body) >= MIN_COMPRESSED_BYTES
        if wanted is None or not can_be or wanted not in headers.get("accept-encoding", ""):
            return answer
        body = gzip.compress(answer.body) if wanted == "gzip" else zstd.compress(answer.body)
        return replace(answer, body=body, headers={**answer.headers, "content-encoding": wanted})


def _dropped(request: web.BaseRequest, response: web.StreamResponse | None = None) -> web.StreamResponse:
    """Close the connection, what was written still going out."""
    if request.transport is not None:
        request.transport.close()
    return response if response is not None else web.Response()

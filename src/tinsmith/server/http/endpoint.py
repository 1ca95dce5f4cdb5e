"""From ASGI to calls and back: credentials, bodies within limits, decoding, and errors as answers.

Every route, the protocol's and our own, has one `Endpoint`; there is no other way in. It checks what the route's door
declares, in this order: the key, its rate, its scope, a turn if calls are costly, the size of the body before it is
read, and its size decompressed. Handlers raise errors; `errors` maps them to statuses.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping
from contextlib import AbstractContextManager, aclosing, nullcontext
from functools import partial
from typing import Any
from urllib.parse import parse_qsl

import msgspec
from starlette.responses import FileResponse, Response, StreamingResponse
from starlette.types import Message, Receive, Scope, Send

from tinsmith.errors import InvalidInputError, LimitExceededError, TinkerError, WireError
from tinsmith.server.auth.admission import MAX_TOGETHER
from tinsmith.server.auth.identity import Caller
from tinsmith.server.bodies.multipart import is_form, read_form
from tinsmith.server.call import JSON, PROTOBUF, Answer, AnyAnswer, Call, FileAnswer, Handler, StreamAnswer
from tinsmith.server.data_dir import is_disk_full
from tinsmith.server.http import errors
from tinsmith.server.http.uvicorn_protocol import GuardedProtocol, connection_of
from tinsmith.server.refusals import NotReadyError, SlowBodyError, UnknownResourceError, UnsupportedBodyError
from tinsmith.server.services import Services
from tinsmith.wire.codecs import json_codec, zstd
from tinsmith.wire.message import dec_hook, describe, field_of
from tinsmith.wire.routes.table import Dialect, Encoding, Route

logger = logging.getLogger(__name__)

SLOWEST_BYTES_PER_S = 4096
"""A body that arrives more slowly than this for longer than `body_timeout_s` is refused."""
READ_HERE_BYTES = 1024 * 1024
"""Bodies of routes that allow more than this are decoded by `bodies.reader_pool`, not on the loop."""
LARGE_BYTES = 256 * 1024
"""Larger bodies are joined, decompressed and taken apart in a thread; the first two release Python's lock."""
NOBODY = Caller(org_id="", user_id="", key_id=0, scopes=frozenset())
"""The caller of a route that needs no key."""


class Endpoint:
    """The ASGI application of one route."""

    def __init__(self, services: Services, route: Route, handler: Handler) -> None:
        door, config = route.door, services.config
        if door.open_to == "nobody":
            raise ValueError(f"route {route.name} is open to nobody; declare in its door who may call it")
        self._services = services
        self._route = route
        self._handler = handler
        self._needs_key = door.open_to == "keys" or (door.open_to == "machine" and not config.is_loopback)
        self._scopes = sorted(door.scopes)
        self._takes_turns = self._needs_key and door.cost in MAX_TOGETHER
        self._max_bytes = min(config.max_body_bytes, door.body.max_bytes or config.max_body_bytes)
        self._max_unpacked_bytes = min(
            config.max_unpacked_bytes, door.body.max_unpacked_bytes or config.max_unpacked_bytes
        )

        self._is_read_here = not route.is_future and self._max_unpacked_bytes <= READ_HERE_BYTES
        """Whether the body is decoded before the handler is called. Handlers of numbered requests decode it themselves,
        since they must close the number of what they refuse; large bodies are decoded by `bodies.reader_pool`."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        began = time.perf_counter()
        connection = connection_of(scope)
        answer: AnyAnswer
        caller = NOBODY
        try:
            headers = {name.decode("latin-1"): value.decode("latin-1") for name, value in scope["headers"]}
            if self._needs_key:
                credential = headers.get("x-api-key") or _bearer(headers)
                caller = await self._services.authenticator.caller(credential)
                self._services.admission.check_rate(caller)
                caller.need(*self._scopes)
            if self._takes_turns:
                async with self._services.admission.turn(caller, self._route.door.cost):
                    answer = await self._answer(scope, headers, caller, receive, connection)
            else:
                answer = await self._answer(scope, headers, caller, receive, connection)
        except TinkerError as error:
            answer = refusal(error, self._route.dialect)
            if connection is not None:
                connection.close_gently()
            self._services.refusals.add(self._route.name, answer.status, caller, error)
        except Exception as error:
            logger.exception("%s failed", self._route.name, extra={"event": "fault", "route": self._route.name})
            answer = refusal(fault(error), self._route.dialect)
        if not isinstance(answer, Answer):
            await self._send_long(answer, scope, receive, send, began)
            return
        await send_answer(send, answer)
        self._services.metrics.request(self._route.name, answer.status, time.perf_counter() - began)

    async def _answer(
        self,
        scope: Scope,
        headers: dict[str, str],
        caller: Caller,
        receive: Receive,
        connection: GuardedProtocol | None,
    ) -> AnyAnswer:
        services = self._services
        size = check_announced(headers, self._max_bytes)
        with services.budgets.body(caller.org_id, size), self._waiting(caller):
            answer = await self._taken_in(scope, headers, caller, receive)
        if isinstance(answer, StreamAnswer):
            return msgspec.structs.replace(answer, pieces=self._held_open(answer.pieces, caller))
        if isinstance(answer, Answer) and connection is not None:
            services.budgets.answer(caller.org_id, len(answer.body), connection.transport)
        return answer

    async def _held_open(self, pieces: AsyncGenerator[bytes, None], caller: Caller) -> AsyncGenerator[bytes, None]:
        """Count a stream as a waiting call until it ends."""
        with self._waiting(caller):
            async with aclosing(pieces):
                async for piece in pieces:
                    yield piece

    def _waiting(self, caller: Caller) -> AbstractContextManager[None]:
        return self._services.budgets.wait(caller.org_id) if self._route.door.cost == "wait" else nullcontext()

    async def _taken_in(self, scope: Scope, headers: dict[str, str], caller: Caller, receive: Receive) -> AnyAnswer:
        services = self._services
        body = await read_body(receive, self._max_bytes, services.config.body_timeout_s)
        return await self._handler(services, await self._call(scope, headers, caller, body, partial(_gone, receive)))

    async def _call(
        self,
        scope: Scope,
        headers: dict[str, str],
        caller: Caller,
        body: bytes,
        gone: Callable[[], Awaitable[None]],
    ) -> Call:
        route = self._route
        message: Any = None
        form: dict[str, bytes] | None = None
        is_protobuf = False
        if body or route.request is not None:
            body = await unpacked(body, headers, self._max_unpacked_bytes)
            content_type = headers.get("content-type", "")
            is_protobuf = PROTOBUF in content_type
            if is_protobuf:
                self._check_encoding("protobuf")
            elif is_form(content_type):
                self._check_encoding("multipart")
                form = await asyncio.to_thread(read_form, body, content_type)
                body = b""
            elif route.request is not None and self._is_read_here:
                message = json_codec.decode(body or b"{}", route.request)
        return Call(
            route=route,
            caller=caller,
            params=scope.get("path_params", {}),
            query=_query(route.query, scope["query_string"]) if route.query is not None else None,
            message=message,
            body=body,
            form=form,
            is_protobuf=is_protobuf,
            headers=headers,
            scheme=scope.get("scheme", "http"),
            root_path=scope.get("root_path", ""),
            gone=gone,
        )

    def _check_encoding(self, encoding: Encoding) -> None:
        route = self._route
        if encoding not in route.body_encodings:
            known = " or ".join(ENCODING_NAMES[each] for each in route.body_encodings)
            raise UnsupportedBodyError(f"{route.path} accepts {known}, not {ENCODING_NAMES[encoding]}")

    async def _send_long(
        self, answer: StreamAnswer | FileAnswer, scope: Scope, receive: Receive, send: Send, began: float
    ) -> None:
        """Send a stream or a file; it is counted when its response begins."""
        has_begun = False

        async def counted(message: Message) -> None:
            nonlocal has_begun
            if message["type"] == "http.response.start":
                if message["status"] in (400, 416):  # Starlette's own words on a range, as plain text
                    raise _RangeError(message)
                has_begun = True
                self._services.metrics.request(self._route.name, message["status"], time.perf_counter() - began)
            await send(message)

        try:
            await _response(answer)(scope, receive, counted)
        except _RangeError as error:
            await send_answer(send, error.answer)
            self._services.metrics.request(self._route.name, error.answer.status, time.perf_counter() - began)
        except Exception as error:
            if has_begun:
                raise  # too late for an error response: uvicorn logs it and closes the connection
            if isinstance(answer, FileAnswer) and not answer.path.exists():
                await send_answer(counted, refusal(UnknownResourceError(f"{answer.name!r} no longer exists")))
                return
            logger.exception("%s failed", self._route.name, extra={"event": "fault", "route": self._route.name})
            await send_answer(counted, refusal(fault(error), self._route.dialect))


class _RangeError(Exception):
    """A range of a file that cannot be sent."""

    def __init__(self, start: Message) -> None:
        super().__init__()
        headers = {name.decode("latin-1"): value.decode("latin-1") for name, value in start["headers"]}
        size = {name: value for name, value in headers.items() if name == "content-range"}
        error = InvalidInputError("range: is malformed, or outside of the file", field="range")
        self.answer = Answer(errors.body_of(error), start["status"], JSON, size)


ENCODING_NAMES: Mapping[Encoding, str] = {
    "json": "JSON",
    "msgpack": "MessagePack",
    "bytes": "plain bytes",
    "protobuf": "protobuf",
    "multipart": "multipart/form-data",
}


def _response(answer: StreamAnswer | FileAnswer) -> Response:
    if isinstance(answer, FileAnswer):
        return FileResponse(answer.path, filename=answer.name)
    return StreamingResponse(answer.pieces, media_type=answer.content_type, headers=answer.headers)


def check_announced(headers: Mapping[str, str], max_bytes: int) -> int:
    """Refuse a body whose content-length is too large before reading it; return how large it may become."""
    announced = headers.get("content-length", "0")
    size = int(announced[:30]) if announced.isascii() and announced.isdigit() else max_bytes
    if size > max_bytes:
        raise _too_large(max_bytes)
    is_open_ended = "transfer-encoding" in headers or "zstd" in headers.get("content-encoding", "")
    return max_bytes if is_open_ended else size


async def read_body(receive: Receive, max_bytes: int, timeout_s: float) -> bytes:
    """Read the whole body; refuse one that is too large or arrives too slowly."""
    began = time.monotonic()
    message = await _receive(receive, timeout_s)
    if not message.get("more_body"):
        body: bytes = message.get("body", b"")
        if len(body) > max_bytes:
            raise _too_large(max_bytes)
        return body
    parts, size = [message.get("body", b"")], len(message.get("body", b""))
    while message.get("more_body"):
        if time.monotonic() - began > timeout_s + size / SLOWEST_BYTES_PER_S:
            raise SlowBodyError(f"the body arrives too slowly: {size} bytes in more than {timeout_s:g} s")
        message = await _receive(receive, timeout_s)
        parts.append(message.get("body", b""))
        size += len(parts[-1])
        if size > max_bytes:
            raise _too_large(max_bytes)
    return b"".join(parts) if size <= LARGE_BYTES else await asyncio.to_thread(b"".join, parts)


async def _gone(receive: Receive) -> None:
    """Return when the client has left; call it when the body was read."""
    while (await receive())["type"] != "http.disconnect":
        pass


async def _receive(receive: Receive, timeout_s: float) -> Message:
    try:
        async with asyncio.timeout(timeout_s):
            message = await receive()
    except TimeoutError:
        raise SlowBodyError(f"no more of the body arrived within {timeout_s:g} s") from None
    if message["type"] == "http.disconnect":
        raise WireError("the client disconnected before the body was complete", field="body")
    return message


async def unpacked(body: bytes, headers: Mapping[str, str], max_bytes: int) -> bytes:
    """Return the body with its content encoding removed."""
    encoding = headers.get("content-encoding", "identity").strip().lower()
    if encoding in ("", "identity"):
        return body
    if encoding == "zstd":
        if max_bytes <= LARGE_BYTES:
            return zstd.decompress(body, max_bytes)
        return await asyncio.to_thread(zstd.decompress, body, max_bytes)
    raise UnsupportedBodyError(f"content-encoding {encoding!r} is not supported; send zstd or none")


def fault(error: Exception) -> TinkerError:
    """Return the error that a client gets for an unexpected exception, or for a full disk."""
    if is_disk_full(error):
        return NotReadyError(
            "the server's disk is full; retry after deleting checkpoints or freeing space",
            retry_after_s=30,
        )
    return TinkerError(f"internal server error ({type(error).__name__}); the server's log has the cause")


def refusal(error: TinkerError, dialect: Dialect = "tinker") -> Answer:
    """Return an error as an answer."""
    return Answer(errors.body_of(error, dialect), errors.status_of(error), JSON, errors.headers_of(error))


async def send_answer(send: Send, answer: Answer) -> None:
    headers = [(b"content-type", answer.content_type.encode("latin-1")), (b"content-length", b"%d" % len(answer.body))]
    if answer.headers:
        headers += [(name.encode("latin-1"), value.encode("latin-1")) for name, value in answer.headers.items()]
    await send({"type": "http.response.start", "status": answer.status, "headers": headers})
    await send({"type": "http.response.body", "body": answer.body})


def _query(type_: type[Any], query_string: bytes) -> Any:
    values = dict(parse_qsl(query_string.decode("latin-1"), keep_blank_values=True))
    try:
        return msgspec.convert(values, type_, strict=False, dec_hook=dec_hook)
    except msgspec.ValidationError as error:
        raise InvalidInputError(f"query: {describe(error, type_)}", field=field_of(error)) from None


def _bearer(headers: Mapping[str, str]) -> str | None:
    kind, _, credential = headers.get("authorization", "").partition(" ")
    return credential.strip() if kind.lower() == "bearer" else None


def _too_large(max_bytes: int) -> LimitExceededError:
    return LimitExceededError(
        f"body: larger than the allowed {max_bytes} bytes; send less in one request", field="body"
    )

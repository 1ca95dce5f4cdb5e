"""From ASGI to calls and back: bodies within limits, credentials, decoding, and errors as answers.

One `Endpoint` per route of the table. A handler raises what is wrong; the status is in `http_errors`.
Does not know: what any route does.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Mapping
from typing import Any
from urllib.parse import parse_qsl

import msgspec
from starlette.types import Message, Receive, Scope, Send
from uvicorn.protocols.http.httptools_impl import RequestResponseCycle

from tinsmith.errors import InvalidInputError, LimitExceededError, TinkerError, WireError
from tinsmith.server import http_errors
from tinsmith.server.calls import JSON, PROTOBUF, Answer, Call, Handler
from tinsmith.server.exchange import answer as answer_whole
from tinsmith.server.exchange import exchange_of, whole_body
from tinsmith.server.identity import Caller
from tinsmith.server.refusals import SlowBodyError, UnsupportedBodyError
from tinsmith.server.services import Services
from tinsmith.server.sockets import close_gently
from tinsmith.wire import json_codec, zstd
from tinsmith.wire.message import dec_hook, describe, field_of
from tinsmith.wire.routes import Route

logger = logging.getLogger(__name__)

SLOWEST_BYTES_PER_S = 4096
"""A body that comes more slowly than this, for longer than one pause may last, is not waited for."""
NOBODY = Caller(org_id="", user_id="", key_id=0, scopes=frozenset())
"""Who calls a route that needs no key."""


class Endpoint:
    """The ASGI application of one route."""

    def __init__(self, services: Services, route: Route, handler: Handler, scope_needed: str | None) -> None:
        self._services = services
        self._route = route
        self._handler = handler
        self._scope_needed = scope_needed
        self._is_open = scope_needed is None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        began = time.perf_counter()
        exchange = exchange_of(scope)
        try:
            answer = await self._answer(scope, receive, exchange)
        except TinkerError as error:
            answer = refusal(error)
            close_gently(exchange)
            if answer.status >= 500:
                logger.error("%s: %s", self._route.name, error, extra={"event": "refused", "route": self._route.name})
        except Exception as error:
            logger.exception("%s failed", self._route.name, extra={"event": "fault", "route": self._route.name})
            answer = refusal(fault(error))
        await send_answer(send, answer, exchange)
        self._services.metrics.request(self._route.name, answer.status, time.perf_counter() - began)

    async def _answer(self, scope: Scope, receive: Receive, exchange: RequestResponseCycle | None) -> Answer:
        headers = {name.decode("latin-1"): value.decode("latin-1") for name, value in scope["headers"]}
        services = self._services
        if self._is_open:
            caller = NOBODY
        else:
            caller = await services.authenticator.caller(headers.get("x-api-key") or _bearer(headers))
            services.admission.check_rate(caller)
            if self._scope_needed:
                caller.need(self._scope_needed)
        config = services.config
        body = whole_body(exchange) if exchange is not None else None
        if body is None:
            body = await read_body(receive, headers, config.max_body_bytes, config.body_timeout_s)
        elif len(body) > config.max_body_bytes:
            raise _too_large(config.max_body_bytes)
        return await self._handler(services, self._call(scope, headers, caller, body))

    def _call(self, scope: Scope, headers: dict[str, str], caller: Caller, body: bytes) -> Call:
        route = self._route
        message: Any = None
        is_protobuf = False
        if body or route.request is not None:
            body = unpacked(body, headers, self._services.config.max_unpacked_bytes)
            is_protobuf = PROTOBUF in headers.get("content-type", "")
            if is_protobuf and "protobuf" not in route.body_encodings:
                raise UnsupportedBodyError(f"{route.path} reads JSON, not protobuf")
            if not is_protobuf and route.request is not None and not route.is_future:
                message = json_codec.decode(body or b"{}", route.request)
        return Call(
            route=route,
            caller=caller,
            params=scope.get("path_params", {}),
            query=_query(route.query, scope["query_string"]) if route.query is not None else None,
            message=message,
            body=body,
            is_protobuf=is_protobuf,
            headers=headers,
            scheme=scope.get("scheme", "http"),
            root_path=scope.get("root_path", ""),
        )


async def read_body(receive: Receive, headers: Mapping[str, str], max_bytes: int, timeout_s: float) -> bytes:
    """The whole body, if it is not too large and does not come too slowly."""
    announced = headers.get("content-length", "0")
    if announced.isascii() and announced.isdigit() and int(announced[:30]) > max_bytes:
        raise _too_large(max_bytes)
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
            raise SlowBodyError(f"the body comes too slowly: {size} bytes in more than {timeout_s:g} s")
        message = await _receive(receive, timeout_s)
        parts.append(message.get("body", b""))
        size += len(parts[-1])
        if size > max_bytes:
            raise _too_large(max_bytes)
    return b"".join(parts)


async def _receive(receive: Receive, timeout_s: float) -> Message:
    try:
        async with asyncio.timeout(timeout_s):
            message = await receive()
    except TimeoutError:
        raise SlowBodyError(f"no more of the body came within {timeout_s:g} s") from None
    if message["type"] == "http.disconnect":
        raise WireError("the client went away before the body was complete", field="body")
    return message


def unpacked(body: bytes, headers: Mapping[str, str], max_bytes: int) -> bytes:
    """The body without its content encoding."""
    encoding = headers.get("content-encoding", "identity").strip().lower()
    if encoding in ("", "identity"):
        return body
    if encoding == "zstd":
        return zstd.decompress(body, max_bytes)
    raise UnsupportedBodyError(f"content-encoding {encoding!r} is not read here; send zstd or none")


def fault(error: Exception) -> TinkerError:
    """What a client is told of a mistake of ours."""
    return TinkerError(f"the server failed: {type(error).__name__}; its log has the cause")


def refusal(error: TinkerError) -> Answer:
    """An error as an answer."""
    return Answer(http_errors.body_of(error), http_errors.status_of(error), JSON, http_errors.headers_of(error))


async def send_answer(send: Send, answer: Answer, exchange: RequestResponseCycle | None = None) -> None:
    headers = [(b"content-type", answer.content_type.encode("latin-1")), (b"content-length", b"%d" % len(answer.body))]
    if answer.headers:
        headers += [(name.encode("latin-1"), value.encode("latin-1")) for name, value in answer.headers.items()]
    is_last = "connection" in answer.headers
    if exchange is not None and not is_last and answer_whole(exchange, answer.status, headers, answer.body):
        return
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
    return LimitExceededError(f"body: larger than the allowed {max_bytes} bytes; send less at once", field="body")

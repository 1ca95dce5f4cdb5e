"""Tokens as they are drawn: one of our own extensions, used where the server announces it."""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass
from typing import Any

import msgspec

from tinsmith.client.deadlines import Limit
from tinsmith.client.operations import Operations
from tinsmith.errors import RequestFailedError, RequestInfo, TinkerError, WireError
from tinsmith.transport.base import HttpRequest, Purpose
from tinsmith.transport.sse import events
from tinsmith.wire import faults, json_codec
from tinsmith.wire.sampling import SampleRequest

STREAM_PATH = "/tinsmith/v1/sample_stream"
MAX_ERROR_BYTES = 64 * 1024
MAX_STREAM_S = 24 * 3600.0
BUFFERED_EVENTS = 256
"""How far the server may be ahead of the consumer."""


@dataclass(frozen=True, slots=True)
class SampledTokens:
    """A piece of one sample; the last piece of each says why it stopped."""

    index: int
    tokens: list[int]
    logprobs: list[float]
    stop_reason: str | None = None


async def stream_sample(
    holder: Operations, request: SampleRequest, take_number: Callable[[], Awaitable[int]], limit: Limit | None
) -> AsyncIterator[SampledTokens]:
    """Pieces of the samples in the order they arrive. Leaving the loop early cancels the request on the server."""
    pieces: deque[SampledTokens | BaseException | None] = deque()
    loop = asyncio.get_running_loop()
    arrived = asyncio.Event()

    def put(piece: SampledTokens | BaseException | None) -> None:
        pieces.append(piece)
        with contextlib.suppress(RuntimeError):  # the consumer's loop is gone
            loop.call_soon_threadsafe(arrived.set)

    async def pump() -> None:
        async for piece in _pieces(holder, request, take_number):
            while len(pieces) >= BUFFERED_EVENTS:
                await asyncio.sleep(0.005)
            put(piece)

    pumping = holder.submit("sample_stream", pump(), limit=limit)
    pumping.add_done_callback(lambda done: put(None if done.cancelled() else done.exception()))
    try:
        while True:
            arrived.clear()
            if not pieces:
                await arrived.wait()
                continue
            piece = pieces.popleft()
            if piece is None:
                return
            if isinstance(piece, BaseException):
                raise piece
            yield piece
    finally:
        pumping.cancel()


async def _pieces(
    holder: Operations, request: SampleRequest, take_number: Callable[[], Awaitable[int]]
) -> AsyncIterator[SampledTokens]:
    connection = holder.connection
    await connection.ready()
    if not connection.extensions.get("sample_stream"):
        raise TinkerError(
            f"{connection.config.base_url} does not stream tokens (it announces no sample_stream); use sample() instead"
        )
    url = connection.config.base_url + STREAM_PATH
    body = json_codec.encode(request.model_copy(update={"seq_id": await take_number()}))
    http = HttpRequest(
        method="POST",
        url=url,
        headers=await connection.headers({"content-type": "application/json", "accept": "text/event-stream"}),
        body=body,
        timeout_s=MAX_STREAM_S,
        connect_timeout_s=connection.config.connect_timeout_s,
        purpose=Purpose.SAMPLE,
    )
    async with connection.transport().stream(http) as response:
        if response.status >= 400:
            refused = await response.read(MAX_ERROR_BYTES)
            raise faults.status_error(response.status, refused, response.headers, RequestInfo("POST", url))
        async for event in events(response):
            data = _data(event.data)
            if event.event == "error":
                raise RequestFailedError(str(data.get("error")), "", str(data.get("category") or "unknown"))
            if event.event == "done":
                for index, sequence in enumerate(data.get("sequences", [])):
                    yield SampledTokens(index, [], [], sequence.get("stop_reason"))
                return
            if event.event == "token":
                yield _token_event(data)
    raise WireError("the stream ended before the samples were done")


class _TokenEvent(msgspec.Struct):
    index: int
    tokens: list[int]
    logprobs: list[float] | None = None


def _token_event(data: dict[str, Any]) -> SampledTokens:
    try:
        event = msgspec.convert(data, _TokenEvent)
    except msgspec.ValidationError as error:
        raise WireError(f"a token event of the stream is malformed: {error}") from None
    return SampledTokens(event.index, event.tokens, event.logprobs or [])


def _data(text: str) -> dict[str, Any]:
    try:
        decoded = msgspec.json.decode(text)
    except msgspec.DecodeError as error:
        raise WireError(f"an event of the stream is not JSON: {error}") from None
    if not isinstance(decoded, dict):
        raise WireError("an event of the stream is not an object")
    return decoded

"""Tokens as they are drawn: an extension of the protocol, used where the server announces `sample_stream`."""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass
from typing import Any, TypeVar

import msgspec

from tinsmith.client.connection.operations import Operations, cancel_sample
from tinsmith.client.connection.outage import Affected
from tinsmith.client.runtime.deadlines import Limit
from tinsmith.errors import (
    APITimeoutError,
    RequestFailedError,
    RequestInfo,
    TinkerError,
    WireError,
)
from tinsmith.transport.base import HttpRequest, Purpose
from tinsmith.transport.retry import Retries
from tinsmith.transport.sse import SseEvent, events
from tinsmith.wire.codecs import json_codec
from tinsmith.wire.messages.sampling import SampleRequest
from tinsmith.wire.routes.own import REQUEST_ID_HEADER, SAMPLE_STREAM
from tinsmith.wire.rules import faults

T = TypeVar("T")

MAX_ERROR_BYTES = 64 * 1024
MAX_STREAM_S = 24 * 3600.0
BUFFERED_EVENTS = 256
"""How many events are buffered before reading from the server pauses."""


@dataclass(frozen=True, slots=True)
class SampledTokens:
    """A piece of one sample; the last piece of each says why it stopped."""

    index: int
    tokens: list[int]
    logprobs: list[float]
    stop_reason: str | None = None
    topk_logprobs: list[list[tuple[int, float]]] | None = None
    """For each token the most likely ones at its position; None unless `topk_sample_logprobs` asks for them."""


async def stream_sample(
    holder: Operations, request: SampleRequest, take_number: Callable[[], Awaitable[int]], limit: Limit | None
) -> AsyncIterator[SampledTokens]:
    """Yield pieces of the samples as they arrive. Leaving the loop early cancels the request on the server."""
    pieces: deque[SampledTokens | BaseException | None] = deque()
    loop = asyncio.get_running_loop()
    arrived = asyncio.Event()

    def put(piece: SampledTokens | BaseException | None) -> None:
        pieces.append(piece)
        with contextlib.suppress(RuntimeError):  # the consumer's loop is closed
            loop.call_soon_threadsafe(arrived.set)

    async def take(piece: SampledTokens) -> None:
        while len(pieces) >= BUFFERED_EVENTS:
            await asyncio.sleep(0.005)
        put(piece)

    async def pump() -> None:
        await _SampleStream(holder, take).run(request, take_number)

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


class _SampleStream:
    """One sample, read to its end over as many connections as needed; each token is delivered once."""

    def __init__(self, holder: Operations, take: Callable[[SampledTokens], Awaitable[None]]) -> None:
        self._holder = holder
        self._take = take
        self._have: list[int] = []
        """The number of tokens received of each sequence."""
        self._request_id: str | None = None
        self._trouble = Affected(holder.connection.outage)
        self._retries = Retries()

    async def run(self, request: SampleRequest, take_number: Callable[[], Awaitable[int]]) -> None:
        connection = self._holder.connection
        await connection.ready()
        if not connection.extensions.get("sample_stream"):
            url = connection.config.base_url
            raise TinkerError(f"{url} does not stream tokens (it announces no sample_stream); use sample() instead")
        self._have = [0] * request.num_samples
        body = json_codec.encode(request.model_copy(update={"seq_id": await take_number()}))
        try:
            await self._follow(body)
        except asyncio.CancelledError:
            self._take_back()
            raise
        finally:
            self._holder.pending_samples.discard(self._request_id or "")

    async def _follow(self, body: bytes) -> None:
        """Connect until the sample is complete; tokens that arrive give the next connections the full deadline."""
        connection = self._holder.connection
        url = connection.config.base_url + SAMPLE_STREAM.path
        await connection.persist(
            url,
            lambda _: self._read(url, body),
            connection.policy(),
            trouble=self._trouble,
            retries=self._retries,
        )

    async def _read(self, url: str, body: bytes) -> None:
        """Read one connection until the sample is complete."""
        connection = self._holder.connection
        http = HttpRequest(
            method="POST",
            url=f"{url}?have={','.join(map(str, self._have))}" if any(self._have) else url,
            headers=await connection.headers({"content-type": "application/json", "accept": "text/event-stream"}),
            body=body,
            timeout_s=MAX_STREAM_S,
            connect_timeout_s=connection.config.connect_timeout_s,
            purpose=Purpose.SAMPLE,
        )
        async with connection.stream(http, SAMPLE_STREAM.name) as response:
            if response.status >= 400:
                refused = await response.read(MAX_ERROR_BYTES)
                raise faults.status_error(response.status, refused, response.headers, RequestInfo("POST", url))
            self._trouble.over()
            self._begun(response.headers.get(REQUEST_ID_HEADER))
            coming = aiter(events(response))
            while True:
                try:
                    async with asyncio.timeout(connection.config.poll_timeout_s):
                        event = await anext(coming)
                except TimeoutError:
                    raise APITimeoutError(
                        RequestInfo("POST", url), f"{url} has stopped sending in the middle of a stream"
                    ) from None
                except StopAsyncIteration:
                    raise WireError("the stream ended before the samples were complete") from None
                if await self._is_last(event):
                    return

    async def _is_last(self, event: SseEvent) -> bool:
        data = _data(event.data)
        if event.event == "error":
            text, category = str(data.get("error")), str(data.get("category") or "unknown")
            raise RequestFailedError(text, self._request_id or "", category)
        if event.event == "token":
            await self._take_tokens(_converted(data, _TokenEvent))
        if event.event != "done":
            return False
        ends = _converted(data, _DoneEvent).sequences
        for index, end in enumerate(ends):
            have = self._have[index] if index < len(self._have) else 0
            if end.tokens is not None and end.tokens != have:
                raise WireError(f"the stream ended with {have} of {end.tokens} tokens of sample {index}")
        for index, end in enumerate(ends):
            await self._take(SampledTokens(index, [], [], end.stop_reason))
        return True

    async def _take_tokens(self, event: _TokenEvent) -> None:
        """Deliver the new tokens of an event; a server may start earlier than it was asked to."""
        if not 0 <= event.index < len(self._have):
            raise WireError(f"a token event names sample {event.index}, but only {len(self._have)} were requested")
        have = self._have[event.index]
        position = have if event.position is None else event.position
        if position > have:
            raise WireError(f"the stream skipped tokens {have} to {position} of sample {event.index}")
        new = slice(have - position, None)
        tokens, logprobs = event.tokens[new], (event.logprobs or [])[new]
        topk = None if event.topk is None else event.topk[new]
        if tokens:
            self._have[event.index] += len(tokens)
            self._retries.restart()
            await self._take(SampledTokens(event.index, tokens, logprobs, None, topk))

    def _begun(self, request_id: str | None) -> None:
        if request_id is not None:
            self._request_id = request_id
            self._holder.pending_samples.add(request_id)

    def _take_back(self) -> None:
        """Cancel the sample on the server: the consumer has left, and will not reconnect."""
        connection = self._holder.connection
        if self._request_id is None or not connection.dynamic.sample_cancel_enabled or connection.runner.is_closed:
            return
        connection.runner.spawn(cancel_sample(connection, self._request_id))


class _TokenEvent(msgspec.Struct):
    index: int
    tokens: list[int]
    logprobs: list[float] | None = None
    position: int | None = None
    """The position of the first token in its sample."""
    topk: list[list[tuple[int, float]]] | None = None


class _End(msgspec.Struct):
    stop_reason: str | None = None
    tokens: int | None = None
    """The number of tokens in the sample."""


class _DoneEvent(msgspec.Struct):
    sequences: list[_End] = []


def _converted(data: dict[str, Any], type_: type[T]) -> T:
    try:
        return msgspec.convert(data, type_)
    except msgspec.ValidationError as error:
        raise WireError(f"malformed stream event: {error}") from None


def _data(text: str) -> dict[str, Any]:
    try:
        decoded = msgspec.json.decode(text)
    except msgspec.DecodeError as error:
        raise WireError(f"stream event is not JSON: {error}") from None
    if not isinstance(decoded, dict):
        raise WireError("stream event is not a JSON object")
    return decoded

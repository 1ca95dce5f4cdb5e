"""Samples that are submitted at the same time go in one request, where the server announces `samples`.

Each keeps its own number, promise and error, as if it had been sent alone; a single sample is.
"""

from __future__ import annotations

import asyncio
from collections import deque

import msgspec

from tinsmith.client.connection.connection import JSON_TYPE, decode_answer
from tinsmith.client.connection.operations import Operations, cancel_sample
from tinsmith.errors import APIResponseValidationError, RequestInfo, TinkerError
from tinsmith.transport.base import HttpResponse, Purpose
from tinsmith.transport.retry import NO_RETRY
from tinsmith.wire.messages.futures import UntypedAPIFuture
from tinsmith.wire.routes.own import MSGPACK_TYPE, SAMPLES, SubmitAnswer
from tinsmith.wire.routes.table import ASAMPLE
from tinsmith.wire.rules import faults

MAX_BATCH = 64
MAX_BATCH_BYTES = 512 * 1024

_HEADERS = {"x-tinker-sampling-backpressure": "1"}
_answers = msgspec.msgpack.Decoder(list[SubmitAnswer])

_Item = tuple[bytes, "asyncio.Future[UntypedAPIFuture]"]


class SampleSubmits:
    """The submits of one client."""

    def __init__(self, holder: Operations) -> None:
        self._holder = holder
        self._waiting: deque[_Item] = deque()

    async def promise(self, body: bytes) -> UntypedAPIFuture:
        """Submit the body of a sample and return its promise."""
        if not self._holder.connection.extensions.get(SAMPLES.name):
            return await self._alone(body)
        loop = asyncio.get_running_loop()
        future: asyncio.Future[UntypedAPIFuture] = loop.create_future()
        if not self._waiting:
            loop.call_soon(self._flush)
        self._waiting.append((body, future))
        return await future

    async def _alone(self, body: bytes) -> UntypedAPIFuture:
        return await self._holder.promise(ASAMPLE, body, purpose=Purpose.SAMPLE, policy=NO_RETRY, headers=_HEADERS)

    def _flush(self) -> None:
        """Send what was submitted in this iteration of the event loop."""
        while self._waiting:
            batch: list[_Item] = []
            size_bytes = 0
            while self._waiting and len(batch) < MAX_BATCH and size_bytes < MAX_BATCH_BYTES:
                body, future = self._waiting.popleft()
                if not future.done():  # else its caller was cancelled
                    batch.append((body, future))
                    size_bytes += len(body)
            if batch:
                self._holder.connection.runner.spawn(self._send(batch))

    async def _send(self, batch: list[_Item]) -> None:
        try:
            if len(batch) == 1:
                promises: list[UntypedAPIFuture | TinkerError] = [await self._alone(batch[0][0])]
            else:
                promises = await self._together([body for body, _ in batch])
        except BaseException as error:
            for _, future in batch:
                if not future.done():
                    future.set_exception(error) if isinstance(error, Exception) else future.cancel()
            if not isinstance(error, TinkerError):
                raise
            return
        for (_, future), promise in zip(batch, promises, strict=True):
            self._settle(future, promise)

    def _settle(self, future: asyncio.Future[UntypedAPIFuture], promise: UntypedAPIFuture | TinkerError) -> None:
        connection = self._holder.connection
        if isinstance(promise, TinkerError):
            if not future.done():
                future.set_exception(promise)
        elif not future.done():
            future.set_result(promise)
        elif connection.dynamic.sample_cancel_enabled and not connection.runner.is_closed:
            connection.runner.spawn(cancel_sample(connection, promise.request_id))  # its caller was cancelled meanwhile

    async def _together(self, bodies: list[bytes]) -> list[UntypedAPIFuture | TinkerError]:
        response = await self._holder.connection.send(
            SAMPLES,
            msgspec.msgpack.encode(bodies),
            headers={"content-type": MSGPACK_TYPE, "accept": f"{MSGPACK_TYPE}, {JSON_TYPE}", **_HEADERS},
            purpose=Purpose.SAMPLE,
            policy=NO_RETRY,
        )
        try:
            answers = _answers.decode(response.body)
        except msgspec.DecodeError as error:
            raise TinkerError(f"the response of {response.url} cannot be decoded: {error}") from None
        if len(answers) != len(bodies):
            raise TinkerError(f"{response.url} returned {len(answers)} results for {len(bodies)} samples")
        return [_promise(answer, response.url) for answer in answers]


def _promise(answer: SubmitAnswer, url: str) -> UntypedAPIFuture | TinkerError:
    if answer.status >= 400:
        return faults.status_error(answer.status, answer.body, answer.headers, RequestInfo(SAMPLES.method, url))
    whole = HttpResponse(status=answer.status, headers=answer.headers, body=answer.body, url=url)
    try:
        promise: UntypedAPIFuture = decode_answer(ASAMPLE, whole, UntypedAPIFuture)
    except APIResponseValidationError as error:
        return error
    return promise

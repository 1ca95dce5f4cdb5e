"""Asking for a result until it is there.

Owns: the meaning of every answer of `retrieve_future`, and the pace of polling.
Does not know: what the result is for.
"""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import random
import time
from collections.abc import Mapping
from typing import Any

import msgspec

from tinsmith.client.connection import JSON_TYPE, PROTOBUF_TYPE, Connection, decode_answer
from tinsmith.client.deadlines import patience_s
from tinsmith.client.outage import Affected, Outage
from tinsmith.client.queue_state import QueueState, QueueStateLogger, QueueStateObserver
from tinsmith.errors import (
    APIConnectionError,
    APIStatusError,
    RequestFailedError,
    RetryableException,
    TinkerError,
)
from tinsmith.transport.base import HttpResponse, Purpose
from tinsmith.transport.retry import NO_RETRY, next_delay_s
from tinsmith.wire import faults, proto_outputs, proto_sampling
from tinsmith.wire.routes import RETRIEVE_FUTURE, Route
from tinsmith.wire.sampling import SampleResponse
from tinsmith.wire.training import ForwardBackwardOutput

logger = logging.getLogger(__name__)

BINARY_RESULTS: Mapping[type[Any], Any] = {
    ForwardBackwardOutput: proto_outputs.decode_output,
    SampleResponse: proto_sampling.decode_response,
}
QUICK_ANSWER_S = 0.2
"""A pending answer faster than this was no long poll; then we set the pace, five polls a second at most."""


class _Probe(msgspec.Struct):
    """What tells a pending, large or failed answer from a result."""

    type: Any = None
    status: Any = None
    error: Any = msgspec.UNSET
    category: Any = None
    queue_state: Any = None
    queue_state_reason: Any = None
    response_payload_size: Any = None


_probe = msgspec.json.Decoder(_Probe)
_encode = msgspec.json.Encoder().encode
"""Bare, because this is the most frequent request there is; FutureRetrieveRequest is its type."""


async def wait_for_result(
    connection: Connection,
    route: Route,
    request_id: str,
    *,
    what: str,
    outage: Outage,
    observer: QueueStateObserver | None = None,
    metadata_first: bool = True,
    submit_s: float | None = None,
    answer: HttpResponse | None = None,
) -> Any:
    """The result of a promise; `answer` is one to it that is there already.

    Raises RequestFailedError when the operation failed, RetryableException when the server no longer knows the promise,
    APIConnectionError when it has been out of reach for too long."""
    wait = _Wait(connection, route, request_id, what, outage, observer, metadata_first, submit_s)
    try:
        return await wait.run(answer)
    finally:
        wait.end()


class _Wait:
    """One wait for one result: what has been asked, and what is held for it."""

    def __init__(
        self,
        connection: Connection,
        route: Route,
        request_id: str,
        what: str,
        outage: Outage,
        observer: QueueStateObserver | None,
        metadata_first: bool,
        submit_s: float | None,
    ) -> None:
        self._trouble = Trouble(connection, what, outage)
        self._connection = connection
        self._route = route
        self._request_id = request_id
        self._what = what
        self._observer = observer
        self._metadata_first = metadata_first
        self._is_binary = route.result in BINARY_RESULTS
        self._headers = {
            "content-type": JSON_TYPE,
            "accept": f"{PROTOBUF_TYPE}, {JSON_TYPE}" if self._is_binary else JSON_TYPE,
            "x-tinker-request-type": route.request_type or "",
        }
        self._submit_s = submit_s
        self._polls = 0
        self._quick = 0
        self._held_bytes: int | None = None

    def end(self) -> None:
        """Give back what the wait holds."""
        self._trouble.over()
        if self._held_bytes is not None:
            self._connection.limits.response_bytes.release(self._held_bytes)

    async def run(self, answer: HttpResponse | None = None) -> Any:
        """Ask until there is a result."""
        while True:
            asked = time.monotonic()
            try:
                response, answer = answer or await self._poll(), None
            except APIStatusError as error:
                await self._refused(error, asked)
                continue
            except APIConnectionError as error:
                await self._trouble.wait(error)
                continue
            if self._is_binary and PROTOBUF_TYPE in response.headers.get("content-type", ""):
                return BINARY_RESULTS[self._route.result](response.body)  # type: ignore[index]
            probe = _read_probe(response, self._what)
            if probe.type == "try_again":
                await self._pending(QueueState(probe.queue_state), probe.queue_state_reason, asked)
            elif probe.status == "complete_metadata":
                await self._make_room(probe.response_payload_size)
            elif probe.error is not msgspec.UNSET:
                failure = faults.failed_operation({"error": probe.error, "category": probe.category}, self._request_id)
                assert isinstance(failure, RequestFailedError)
                raise failure
            else:
                return decode_answer(self._route, response, self._route.result)

    async def _poll(self) -> HttpResponse:
        self._headers["x-tinker-request-iteration"] = str(self._polls)
        if self._polls == 0 and self._submit_s is not None:
            self._headers["x-tinker-create-promise-roundtrip-time"] = str(self._submit_s)
        body = _encode({"request_id": self._request_id, "allow_metadata_only": self._metadata_first})
        self._polls += 1
        return await self._connection.send(
            RETRIEVE_FUTURE,
            body,
            headers=self._headers,
            purpose=Purpose.RETRIEVE,
            policy=NO_RETRY,
            timeout_s=self._connection.config.poll_timeout_s,
        )

    async def _refused(self, error: APIStatusError, asked: float) -> None:
        if error.status_code == 410:
            raise RetryableException(f"{self._what}: the server lost the promise {self._request_id}") from error
        if error.status_code != 408:
            await self._trouble.wait(error)
            return
        body = error.body if isinstance(error.body, Mapping) else {}
        reason = body.get("queue_state_reason")
        state = QueueState(body.get("queue_state", "active"))
        await self._pending(state, reason if isinstance(reason, str) else None, asked)

    async def _pending(self, state: QueueState, reason: str | None, asked: float) -> None:
        """Not yet: tell the observer, and ask again, not too often."""
        self._trouble.over()
        self._quick = self._quick + 1 if time.monotonic() - asked < QUICK_ANSWER_S else 0
        self._observer = self._observer or QueueStateLogger(self._what)
        self._observer.on_queue_state_change(state, reason)
        await _pace(self._quick)

    async def _make_room(self, size: Any) -> None:
        """The result is there and this large: ask for it itself when there is room for it."""
        if not self._metadata_first:
            raise TinkerError(f"{self._what}: the server tells the size of the result instead of the result")
        self._metadata_first = False
        size = size if isinstance(size, int) else 0
        await self._connection.limits.response_bytes.acquire(size)
        self._held_bytes = size


class Trouble:
    """A server that errs while we poll: waits grow, one line is said, and the error is raised if it lasts."""

    def __init__(self, connection: Connection, what: str, outage: Outage) -> None:
        self._connection = connection
        self._what = what
        self._affected = Affected(outage)
        self._count = 0
        self._since = 0.0

    def over(self) -> None:
        self._count = 0
        self._affected.over()

    async def wait(self, error: Exception) -> None:
        now = time.monotonic()
        if self._count == 0:
            self._since = now
        self._count += 1
        policy = dataclasses.replace(self._connection.policy(), first_delay_s=0.25, max_delay_s=2.0)
        delay = next_delay_s(policy, error, self._count, now - self._since, random.random)
        if delay is None:
            raise error
        if self._affected.begin():
            left = patience_s(policy.deadline_s)
            logger.warning("waiting for %s: %s; asking again for up to %.0f s", self._what, error, left)
        await asyncio.sleep(max(delay, QUICK_ANSWER_S))


async def _pace(quick_answers: int) -> None:
    if quick_answers:
        await asyncio.sleep(min(0.025 * 2**quick_answers, QUICK_ANSWER_S))


def _read_probe(response: HttpResponse, what: str) -> _Probe:
    try:
        return _probe.decode(response.body)
    except msgspec.DecodeError as error:
        raise TinkerError(f"{what}: the answer of {response.url} is not JSON: {error}") from error

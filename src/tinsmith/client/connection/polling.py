"""Polling `retrieve_future` until a result is there, and reporting to the user what an operation waits for."""

from __future__ import annotations

import asyncio
import enum
import logging
import time
from collections.abc import Callable, Mapping
from typing import Any, Protocol

import msgspec

from tinsmith.client.connection.connection import JSON_TYPE, PROTOBUF_TYPE, Connection, decode_answer
from tinsmith.client.connection.outage import Affected, Outage
from tinsmith.client.runtime.deadlines import patience_s
from tinsmith.errors import (
    APIConnectionError,
    APIStatusError,
    RequestFailedError,
    RetryableException,
    TinkerError,
)
from tinsmith.transport.base import HttpResponse, Purpose
from tinsmith.transport.retry import NO_RETRY, Retries, RetryPolicy
from tinsmith.wire.codecs import proto_outputs, proto_sampling
from tinsmith.wire.messages.sampling import SampleResponse
from tinsmith.wire.messages.training import ForwardBackwardOutput
from tinsmith.wire.routes.table import RETRIEVE_FUTURE, Route
from tinsmith.wire.rules import faults

logger = logging.getLogger(__name__)

REPEAT_S = 60.0


class QueueState(enum.Enum):
    """Why an operation is waiting."""

    ACTIVE = "active"
    PAUSED_CAPACITY = "paused_capacity"
    PAUSED_RATE_LIMIT = "paused_rate_limit"
    UNKNOWN = "unknown"

    @classmethod
    def _missing_(cls, value: object) -> QueueState:
        return cls.UNKNOWN


class QueueStateObserver(Protocol):
    """Called after every poll that found no result yet; set your own with `ServiceClient.set_queue_observer`."""

    def on_queue_state_change(self, queue_state: QueueState, queue_state_reason: str | None) -> None: ...


class QueueStateLogger:
    """Logs an operation that has waited for more than a minute, or whose queue is paused; then once a minute."""

    def __init__(self, what: str, clock: Callable[[], float] = time.monotonic) -> None:
        self._what = what
        self._clock = clock
        self._started = clock()
        self._said = self._started - REPEAT_S

    def on_queue_state_change(self, queue_state: QueueState, queue_state_reason: str | None) -> None:
        now = self._clock()
        if queue_state is QueueState.ACTIVE and now - self._started < REPEAT_S:
            return
        if now - self._said < REPEAT_S:
            return
        self._said = now
        reason = queue_state_reason or _DEFAULT_REASONS[queue_state]
        logger.warning("%s has been waiting for %.0f s: %s", self._what, now - self._started, reason)


_DEFAULT_REASONS = {
    QueueState.ACTIVE: "the server is working on it",
    QueueState.PAUSED_CAPACITY: "the server is short of capacity",
    QueueState.PAUSED_RATE_LIMIT: "this account has reached its rate limit",
    QueueState.UNKNOWN: "the server gives no reason",
}


BINARY_RESULTS: Mapping[type[Any], Any] = {
    ForwardBackwardOutput: proto_outputs.decode_output,
    SampleResponse: proto_sampling.decode_response,
}
QUICK_ANSWER_S = 0.2
"""A server that answers "not yet" sooner than this does no long polling; the client then waits between polls."""
PACE = RetryPolicy(first_delay_s=0.05, max_delay_s=QUICK_ANSWER_S, jitter=(1.0, 1.0))
"""The wait after each quick "not yet": 0.05 s at first, and at most five polls a second."""


class _Probe(msgspec.Struct):
    """The fields that distinguish a pending, large or failed response from a result."""

    type: Any = None
    status: Any = None
    error: Any = msgspec.UNSET
    category: Any = None
    queue_state: Any = None
    queue_state_reason: Any = None
    response_payload_size: Any = None


_probe = msgspec.json.Decoder(_Probe)
_encode = msgspec.json.Encoder().encode
"""Without a message type, because this is the most frequent request; FutureRetrieveRequest describes it."""


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
    """Wait for the result of a promise. `answer` is a response that has already arrived.

    Raises RequestFailedError if the operation failed, RetryableException if the server no longer knows the promise, and
    APIConnectionError if the server has been unreachable for too long."""
    wait = _Wait(connection, route, request_id, what, outage, observer, metadata_first, submit_s)
    try:
        return await wait.run(answer)
    finally:
        wait.end()


class _Wait:
    """One wait for one result: its polls, and the memory budget it holds."""

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
        """Release what the wait holds."""
        self._trouble.over()
        if self._held_bytes is not None:
            self._connection.limits.response_bytes.release(self._held_bytes)

    async def run(self, answer: HttpResponse | None = None) -> Any:
        """Poll until there is a result."""
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
            raise RetryableException(f"{self._what}: the server no longer knows request {self._request_id}") from error
        if error.status_code != 408:
            await self._trouble.wait(error)
            return
        body = error.body if isinstance(error.body, Mapping) else {}
        reason = body.get("queue_state_reason")
        state = QueueState(body.get("queue_state", "active"))
        await self._pending(state, reason if isinstance(reason, str) else None, asked)

    async def _pending(self, state: QueueState, reason: str | None, asked: float) -> None:
        """Notify the observer that there is no result yet, and wait before the next poll if the server answers fast."""
        self._trouble.over()
        self._quick = self._quick + 1 if time.monotonic() - asked < QUICK_ANSWER_S else 0
        self._observer = self._observer or QueueStateLogger(self._what)
        self._observer.on_queue_state_change(state, reason)
        if self._quick:
            await asyncio.sleep(PACE.backoff_s(self._quick))

    async def _make_room(self, size: Any) -> None:
        """The result is ready and has this size: fetch it once the memory budget allows."""
        if not self._metadata_first:
            raise TinkerError(f"{self._what}: the server sent the size of the result again instead of the result")
        self._metadata_first = False
        size = size if isinstance(size, int) else 0
        await self._connection.limits.response_bytes.acquire(size)
        self._held_bytes = size


class Trouble:
    """Failed polls of one wait: `wait` sleeps before the next poll, or raises the error when the policy gives up."""

    def __init__(self, connection: Connection, what: str, outage: Outage) -> None:
        self._connection = connection
        self._what = what
        self._affected = Affected(outage)
        self._retries = Retries()
        self._retries.restart()  # the deadline is for the trouble, not for the wait

    def over(self) -> None:
        self._retries.restart()
        self._affected.over()

    async def wait(self, error: Exception) -> None:
        policy = self._connection.poll_policy()
        wait = self._retries.after(error, policy)
        if wait is None:
            raise error
        if self._affected.begin():
            left = patience_s(policy.deadline_s)
            logger.warning("waiting for %s: %s; polling again for up to %.0f s", self._what, error, left)
        await asyncio.sleep(wait.delay_s)


def _read_probe(response: HttpResponse, what: str) -> _Probe:
    try:
        return _probe.decode(response.body)
    except msgspec.DecodeError as error:
        raise TinkerError(f"{what}: the response of {response.url} is not JSON: {error}") from error

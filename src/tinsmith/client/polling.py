"""Asking for a result until it is there.

Owns: the meaning of every answer of `retrieve_future`, the pace of polling, and the shared poll of a sampling session.
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
from tinsmith.client.queue_state import QueueState, QueueStateLogger, QueueStateObserver
from tinsmith.errors import (
    APIConnectionError,
    APIStatusError,
    APITimeoutError,
    RequestFailedError,
    RetryableException,
    TinkerError,
)
from tinsmith.transport.base import HttpResponse, Purpose
from tinsmith.transport.retry import NO_RETRY, next_delay_s
from tinsmith.wire import faults, proto_outputs, proto_sampling
from tinsmith.wire.futures import FuturesRetrieveRequest, SamplingSessionFuturesTarget
from tinsmith.wire.routes import RETRIEVE_FUTURE, RETRIEVE_FUTURES, Route
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
    observer: QueueStateObserver | None = None,
    metadata_first: bool = True,
    submit_s: float | None = None,
) -> Any:
    """The result of a promise. Raises RequestFailedError when the operation failed, RetryableException when the
    server no longer knows the promise, APIConnectionError when it has been out of reach for too long."""
    deadline = connection.config.result_deadline_s
    started = time.monotonic()
    is_binary = route.result in BINARY_RESULTS
    headers = {
        "content-type": JSON_TYPE,
        "accept": f"{PROTOBUF_TYPE}, {JSON_TYPE}" if is_binary else JSON_TYPE,
        "x-tinker-request-type": route.request_type or "",
    }
    iteration, quick = 0, 0
    trouble = Trouble(connection, what)
    while True:
        headers["x-tinker-request-iteration"] = str(iteration)
        if iteration == 0 and submit_s is not None:
            headers["x-tinker-create-promise-roundtrip-time"] = str(submit_s)
        asked = time.monotonic()
        poll_s = connection.config.poll_timeout_s
        if deadline is not None:
            left = started + deadline - asked
            if left <= 0:
                raise APITimeoutError(None, f"{what}: no result after {deadline:g} s (result_deadline_s)")
            poll_s = min(poll_s, left)
        body = _encode({"request_id": request_id, "allow_metadata_only": metadata_first})
        iteration += 1
        try:
            response = await connection.send(
                RETRIEVE_FUTURE,
                body,
                headers=headers,
                purpose=Purpose.RETRIEVE,
                policy=NO_RETRY,
                timeout_s=poll_s,
            )
        except APIStatusError as error:
            if error.status_code == 410:
                raise RetryableException(f"{what}: the server lost the promise {request_id}") from error
            if error.status_code == 408:
                trouble.over()
                quick = quick + 1 if time.monotonic() - asked < QUICK_ANSWER_S else 0
                observer = observer or QueueStateLogger(what)
                _observe_body(observer, error)
                await _pace(quick)
                continue
            await trouble.wait(error)
            continue
        except APIConnectionError as error:
            if deadline is None or time.monotonic() - started < deadline:
                await trouble.wait(error)
            continue
        if is_binary and PROTOBUF_TYPE in response.headers.get("content-type", ""):
            return BINARY_RESULTS[route.result](response.body)  # type: ignore[index]
        probe = _read_probe(response, what)
        if probe.type == "try_again":
            trouble.over()
            quick = quick + 1 if time.monotonic() - asked < QUICK_ANSWER_S else 0
            observer = observer or QueueStateLogger(what)
            observer.on_queue_state_change(QueueState(probe.queue_state), probe.queue_state_reason)
            await _pace(quick)
        elif probe.status == "complete_metadata":
            size = probe.response_payload_size if isinstance(probe.response_payload_size, int) else 0
            async with connection.limits.response_bytes.hold(size):
                return await wait_for_result(
                    connection, route, request_id, what=what, observer=observer, metadata_first=False
                )
        elif probe.error is not msgspec.UNSET:
            failure = faults.failed_operation({"error": probe.error, "category": probe.category}, request_id)
            assert isinstance(failure, RequestFailedError)
            raise failure
        else:
            return decode_answer(route, response, route.result)


class Trouble:
    """A server that errs while we poll: waits grow, one line is said, and the error is raised if it lasts."""

    def __init__(self, connection: Connection, what: str) -> None:
        self._connection = connection
        self._what = what
        self._count = 0
        self._since = 0.0

    def over(self) -> None:
        self._count = 0

    async def wait(self, error: Exception) -> None:
        now = time.monotonic()
        if self._count == 0:
            self._since = now
        self._count += 1
        policy = dataclasses.replace(self._connection.policy(), first_delay_s=0.25, max_delay_s=2.0)
        delay = next_delay_s(policy, error, self._count, now - self._since, random.random)
        if delay is None:
            raise error
        if self._count == 1:
            logger.warning("waiting for %s: %s; asking again for up to %.0f s", self._what, error, policy.deadline_s)
        await asyncio.sleep(max(delay, QUICK_ANSWER_S))


async def _pace(quick_answers: int) -> None:
    if quick_answers:
        await asyncio.sleep(min(0.025 * 2**quick_answers, QUICK_ANSWER_S))


def _read_probe(response: HttpResponse, what: str) -> _Probe:
    try:
        return _probe.decode(response.body)
    except msgspec.DecodeError as error:
        raise TinkerError(f"{what}: the answer of {response.url} is not JSON: {error}") from error


def _observe_body(observer: QueueStateObserver, error: APIStatusError) -> None:
    body = error.body if isinstance(error.body, Mapping) else {}
    reason = body.get("queue_state_reason")
    observer.on_queue_state_change(
        QueueState(body.get("queue_state", "active")), reason if isinstance(reason, str) else None
    )


class SamplingSessionPoller:
    """One poll for all pending samples of a sampling session, where the server offers that.

    `wait` returns when a sample is done, whatever its outcome; the caller then fetches it. When the shared poll fails
    for good, waiters are let go and poll by themselves.
    """

    def __init__(self, connection: Connection, sampling_session_id: str, clone: int) -> None:
        self._connection = connection
        self._target = SamplingSessionFuturesTarget(sampling_session_id=sampling_session_id, cloned_sampler_id=clone)
        self._waiting: dict[str, asyncio.Future[bool]] = {}
        self._early: set[str] = set()
        self._fetched: list[str] = []
        self._task: asyncio.Task[Any] | None = None
        self._cursor = 0

    async def wait(self, request_id: str) -> bool:
        """True: the result's size is bounded, fetch it directly; False: ask in the ordinary way."""
        if request_id in self._early:
            self._early.discard(request_id)
            return True
        future = self._waiting.setdefault(request_id, asyncio.get_running_loop().create_future())
        if self._task is None or self._task.done():
            self._task = self._connection.runner.spawn(self._poll())
        try:
            return await future
        except asyncio.CancelledError:
            self._waiting.pop(request_id, None)
            raise

    def fetched(self, request_id: str) -> None:
        self._fetched.append(request_id)

    async def _poll(self) -> None:
        trouble = Trouble(self._connection, f"samples of {self._target.sampling_session_id}")
        while self._waiting:
            reported = list(self._fetched)
            request = FuturesRetrieveRequest(
                target=self._target, prev_cursor=self._cursor, retrieved_request_ids=reported
            )
            asked = time.monotonic()
            try:
                answer = await self._connection.call(
                    RETRIEVE_FUTURES,
                    request,
                    purpose=Purpose.RETRIEVE,
                    policy=NO_RETRY,
                    timeout_s=self._connection.config.poll_timeout_s,
                )
            except TinkerError as error:
                if self._connection.runner.is_closed:
                    return
                try:
                    await trouble.wait(error)
                except TinkerError:
                    logger.warning("polling samples together failed (%s); each polls by itself now", error)
                    break
                continue
            trouble.over()
            self._cursor = answer.cursor
            del self._fetched[: len(reported)]
            for completion in answer.completions:
                self._finish(completion.request_id, True)
            if not answer.completions and time.monotonic() - asked < QUICK_ANSWER_S:
                await asyncio.sleep(QUICK_ANSWER_S)
        for request_id in list(self._waiting):
            self._finish(request_id, False)

    def _finish(self, request_id: str, value: bool) -> None:
        future = self._waiting.pop(request_id, None)
        if future is None:
            self._early.add(request_id)
        elif not future.done():
            future.set_result(value)

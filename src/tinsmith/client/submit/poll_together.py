"""One poll for all pending samples of a sampling session, where the server offers that.

The protocol's own poll says which samples are done, and each is then fetched. A server that announces
`sample_results` includes the results.
"""

from __future__ import annotations

import asyncio
import logging
import time
from typing import Any, NamedTuple

import msgspec

from tinsmith.client.connection.connection import JSON_TYPE, Connection
from tinsmith.client.connection.outage import Outage
from tinsmith.client.connection.polling import QUICK_ANSWER_S, Trouble
from tinsmith.errors import TinkerError
from tinsmith.transport.base import HttpResponse, Purpose
from tinsmith.transport.retry import NO_RETRY
from tinsmith.wire.codecs import json_codec
from tinsmith.wire.messages.futures import FuturesRetrieveRequest, SamplingSessionFuturesTarget
from tinsmith.wire.routes.own import SAMPLE_RESULTS, SampleResult, SampleResults
from tinsmith.wire.routes.table import RETRIEVE_FUTURES

logger = logging.getLogger(__name__)

MAX_EARLY = 256
"""Results kept for samples whose submit response has not arrived yet; results beyond these are fetched later."""
REPORTED = 4096
"""Results that one poll reports as received: a poll's body is limited. The next one reports the rest."""

_results = msgspec.msgpack.Decoder(SampleResults)


class PollOutcome(NamedTuple):
    """What the shared poll found out about a sample."""

    is_done: bool
    """True: fetch the result directly, its size is bounded; False: poll for it in the ordinary way."""
    answer: HttpResponse | None = None
    """The result itself, if it was included."""


class SamplingSessionPoller:
    """Polls for all samples of a sampling session. `wait` returns when a sample is done, whatever its outcome; if the
    shared poll fails for good, it returns so that each sample is polled for on its own."""

    def __init__(self, connection: Connection, sampling_session_id: str, clone: int, outage: Outage) -> None:
        self._connection = connection
        self._outage = outage
        self._target = SamplingSessionFuturesTarget(sampling_session_id=sampling_session_id, cloned_sampler_id=clone)
        self._waiting: dict[str, asyncio.Future[PollOutcome]] = {}
        self._early: dict[str, PollOutcome] = {}
        self._given_up: set[str] = set()
        """Cancelled samples, whose results are dropped."""
        self._fetched: list[str] = []
        self._task: asyncio.Task[Any] | None = None
        self._cursor = 0

    async def wait(self, request_id: str) -> PollOutcome:
        early = self._early.pop(request_id, None)
        if early is not None:
            return early
        future = self._waiting.setdefault(request_id, asyncio.get_running_loop().create_future())
        if self._task is None or self._task.done():
            self._task = self._connection.runner.spawn(self._poll())
        try:
            return await future
        except asyncio.CancelledError:
            if self._waiting.pop(request_id, None) is not None:
                self._given_up.add(request_id)
            raise

    def fetched(self, request_id: str) -> None:
        self._fetched.append(request_id)

    async def _poll(self) -> None:
        trouble = Trouble(self._connection, f"samples of {self._target.sampling_session_id}", self._outage)
        try:
            while self._waiting and await self._ask(trouble):
                pass
        finally:
            trouble.over()
            if not self._connection.runner.is_closed:
                for request_id in list(self._waiting):
                    self._finish(request_id, PollOutcome(False))

    async def _ask(self, trouble: Trouble) -> bool:
        """Poll once; return False if polling has failed for good."""
        reported = self._fetched[:REPORTED]
        request = FuturesRetrieveRequest(target=self._target, prev_cursor=self._cursor, retrieved_request_ids=reported)
        asked = time.monotonic()
        try:
            if self._connection.extensions.get(SAMPLE_RESULTS.name):
                self._cursor, done = await self._results(request)
            else:
                self._cursor, done = await self._completions(request)
        except TinkerError as error:
            return await self._may_go_on(trouble, error)
        trouble.over()
        del self._fetched[: len(reported)]
        for request_id, outcome in done:
            self._finish(request_id, outcome)
        if not done and time.monotonic() - asked < QUICK_ANSWER_S:
            await asyncio.sleep(QUICK_ANSWER_S)
        return True

    async def _completions(self, request: FuturesRetrieveRequest) -> tuple[int, list[tuple[str, PollOutcome]]]:
        answer = await self._connection.call(
            RETRIEVE_FUTURES,
            request,
            purpose=Purpose.RETRIEVE,
            policy=NO_RETRY,
            timeout_s=self._connection.config.poll_timeout_s,
        )
        return answer.cursor, [(done.request_id, PollOutcome(True)) for done in answer.completions]

    async def _results(self, request: FuturesRetrieveRequest) -> tuple[int, list[tuple[str, PollOutcome]]]:
        response = await self._connection.send(
            SAMPLE_RESULTS,
            json_codec.encode(request),
            headers={"content-type": JSON_TYPE},
            purpose=Purpose.RETRIEVE,
            policy=NO_RETRY,
            timeout_s=self._connection.config.poll_timeout_s,
        )
        try:
            answer = _results.decode(response.body)
        except msgspec.DecodeError as error:
            raise TinkerError(f"the response of {response.url} cannot be decoded: {error}") from None
        return answer.cursor, [(done.request_id, _outcome(done, response.url)) for done in answer.results]

    async def _may_go_on(self, trouble: Trouble, error: TinkerError) -> bool:
        if self._connection.runner.is_closed:
            return False
        try:
            await trouble.wait(error)
        except TinkerError:
            logger.warning("polling for all samples at once failed (%s); polling for each one instead", error)
            return False
        return True

    def _finish(self, request_id: str, outcome: PollOutcome) -> None:
        future = self._waiting.pop(request_id, None)
        if request_id in self._given_up:
            self._given_up.discard(request_id)
        elif future is None:
            self._early[request_id] = outcome if len(self._early) < MAX_EARLY else PollOutcome(outcome.is_done)
        elif not future.done():
            future.set_result(outcome)


def _outcome(done: SampleResult, url: str) -> PollOutcome:
    if done.body is None:
        return PollOutcome(True)
    return PollOutcome(
        True, HttpResponse(status=200, headers={"content-type": done.content_type}, body=done.body, url=url)
    )

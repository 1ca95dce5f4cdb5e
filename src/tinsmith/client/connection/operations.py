"""Submitting an operation and waiting for its result: what every client does.

`Operations` holds the parts that the clients of one service share: connection, session, telemetry and metrics.
"""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import logging
import time
import weakref
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

from tinsmith.client.connection.connection import JSON_TYPE, Connection, decode_answer
from tinsmith.client.connection.polling import QueueStateObserver, wait_for_result
from tinsmith.client.connection.session import Session
from tinsmith.client.connection.telemetry import Telemetry
from tinsmith.client.runtime.deadlines import Deadline, Limit, limit_of
from tinsmith.client.runtime.futures import Future
from tinsmith.client.runtime.metrics import OperationTimes
from tinsmith.config import HOSTED_URL
from tinsmith.errors import APIStatusError, RequestFailedError, TinkerError
from tinsmith.transport.base import Purpose
from tinsmith.transport.retry import NO_RETRY, RetryPolicy
from tinsmith.version import PROTOCOL_VERSION
from tinsmith.wire.codecs import json_codec
from tinsmith.wire.messages.futures import CancelFutureRequest, UntypedAPIFuture
from tinsmith.wire.messages.weights import HOSTED_CONSOLE, WeightsInfoRequest, WeightsInfoResponse
from tinsmith.wire.routes.table import CANCEL_FUTURE, WEIGHTS_INFO, Route

logger = logging.getLogger(__name__)

T = TypeVar("T")

CANCEL_TIMEOUT_S = 30.0
CANCELLERS = 32
"""How many samples are cancelled concurrently when a client closes."""
FAREWELL_S = 0.6
"""How long the last requests of a closing client may take."""


class Operations:
    """The parts that the clients of one service share."""

    def __init__(self, connection: Connection, session: Session) -> None:
        self.connection = connection
        self.session = session
        self.metrics = OperationTimes()
        self.outage = connection.outage
        self.telemetry = Telemetry(connection, enabled=connection.config.telemetry)
        session.on_created = self.telemetry.session_started
        self.queue_observer: Callable[[str], QueueStateObserver] | None = None
        """Creates the observer of a waiting operation from its description; None: waits are logged."""
        self.pending_samples: set[str] = set()
        seconds = connection.config.result_deadline_s
        self._usual = None if seconds is None else Deadline(seconds, "result_deadline_s of the client's settings")
        self._finalizer = weakref.finalize(self, close_parts, connection, self.telemetry, self.pending_samples)

    @property
    def console(self) -> str:
        """The URL of the web console of this server."""
        base_url = self.connection.config.base_url
        return HOSTED_CONSOLE if base_url == HOSTED_URL else base_url

    def close(self) -> None:
        """Close everything that the clients of this service share."""
        self._finalizer()

    def submit(
        self,
        name: str,
        coroutine: Coroutine[Any, Any, T],
        *,
        cancellable: bool = True,
        limit: Limit | None = None,
    ) -> Future[T]:
        """Run an operation in the client's loop; its metrics and telemetry carry its name. Without a limit, that of the
        surrounding `with` block applies."""
        limit = limit or limit_of(name, None)
        try:
            watched = self._watched(name, coroutine, limit)
            future = self.connection.runner.submit(watched, cancellable=cancellable, limit=limit)
        except TinkerError:
            coroutine.close()
            raise
        future.add_done_callback(lambda _: _close_unstarted(coroutine))
        return future

    def limit(self, name: str, of: str = "") -> Limit | None:
        """Return the limit of an operation that is called now and waits for a result; clients have a default."""
        return limit_of(f"{name} of {of}" if of else name, self._usual)

    async def promise(
        self,
        route: Route,
        body: bytes | memoryview,
        *,
        content_type: str = JSON_TYPE,
        purpose: Purpose = Purpose.TRAIN,
        policy: RetryPolicy | None = None,
        headers: dict[str, str] | None = None,
    ) -> UntypedAPIFuture:
        """Submit a body and return the promise of its result."""
        response = await self.connection.send(
            route, body, headers={"content-type": content_type, **(headers or {})}, purpose=purpose, policy=policy
        )
        answer: UntypedAPIFuture = decode_answer(route, response, UntypedAPIFuture)
        return answer

    async def result(self, route: Route, promise: UntypedAPIFuture, *, what: str, submit_s: float | None = None) -> Any:
        """Wait for the result of a promise."""
        observer = self.queue_observer(what) if self.queue_observer is not None else None
        return await wait_for_result(
            self.connection,
            route,
            promise.request_id,
            what=what,
            outage=self.outage,
            observer=observer,
            submit_s=submit_s,
        )

    async def run(self, route: Route, request: Any, *, what: str, purpose: Purpose = Purpose.TRAIN) -> Any:
        """Submit a request that is not part of a model's ordered operations, and wait for its result."""
        await self.connection.ready()
        started = time.monotonic()
        promise = await self.promise(route, json_codec.encode(request), purpose=purpose)
        return await self.result(route, promise, what=what, submit_s=time.monotonic() - started)

    async def weights_info(self, path: str) -> WeightsInfoResponse:
        """Fetch the base model and the LoRA settings of a checkpoint."""
        answer: WeightsInfoResponse = await self.connection.call(
            WEIGHTS_INFO,
            WeightsInfoRequest(tinker_path=path),
            purpose=Purpose.REST,
            headers={"x-sdk-version": PROTOCOL_VERSION, "x-sdk-method": "get_weights_info_by_tinker_path"},
        )
        return answer

    async def _watched(self, name: str, coroutine: Coroutine[Any, Any, T], limit: Limit | None) -> T:
        self.telemetry.start()
        started = time.perf_counter()
        failed = True
        try:
            with self.metrics.span(name):
                result = await coroutine
            failed = False
            return result
        except TinkerError as error:
            self._report(name, error)
            raise
        except asyncio.CancelledError:
            if limit is not None and limit.left_s <= 0:
                self._report(name, limit.error(goes_on=False))
            raise
        finally:
            self.metrics.record(name, time.perf_counter() - started, failed)

    def _report(self, name: str, error: TinkerError) -> None:
        is_user = (isinstance(error, RequestFailedError) and error.category == "user") or (
            isinstance(error, APIStatusError) and error.status_code < 500 and error.status_code != 408
        )
        self.telemetry.event(
            "user_error" if is_user else f"{name}.exception",
            {"operation": name, "error_type": type(error).__name__, "message": str(error)},
            "WARNING" if is_user else "ERROR",
        )


def _close_unstarted(coroutine: Coroutine[Any, Any, Any]) -> None:
    """Close a coroutine that was cancelled before it started; else Python warns that it was never awaited."""
    if inspect.getcoroutinestate(coroutine) == inspect.CORO_CREATED:
        coroutine.close()


def close_parts(connection: Connection, telemetry: Telemetry, pending_samples: set[str]) -> None:
    """Close a client within about a second: fail its operations, cancel its samples, send its telemetry, close sockets,
    loop and thread.

    Runs when the last client that shares the parts is dropped or closed, or when the program ends.
    """
    runner = connection.runner
    if not runner.is_closed and not runner.is_inherited:
        # The set belongs to the loop, so it is copied there, before cancelling empties it.
        runner.close(lambda: _shut_down(connection, telemetry, list(pending_samples)))


async def _shut_down(connection: Connection, telemetry: Telemetry, request_ids: list[str]) -> None:
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(FAREWELL_S):
            if connection.is_ready and connection.dynamic.sample_cancel_enabled:
                await _cancel_samples(connection, request_ids)
            if connection.is_ready:
                await telemetry.flush()
    await connection.close()


async def _cancel_samples(connection: Connection, request_ids: list[str]) -> None:
    """Cancel as many samples as there is time for; the server drops the others with their session."""
    left = iter(request_ids)

    async def work() -> None:
        for request_id in left:
            await cancel_sample(connection, request_id)

    await asyncio.gather(*(work() for _ in range(min(CANCELLERS, len(request_ids)))))


async def cancel_sample(connection: Connection, request_id: str) -> None:
    """Cancel a sample on the server."""
    try:
        await connection.call(
            CANCEL_FUTURE,
            CancelFutureRequest(request_id=request_id),
            purpose=Purpose.SESSION,
            policy=NO_RETRY,
            timeout_s=CANCEL_TIMEOUT_S,
        )
    except TinkerError as error:
        logger.debug("cancelling %s failed: %s", request_id, error)

"""Telemetry for the operator of the server: batched and bounded, never blocking, without secrets."""

from __future__ import annotations

import asyncio
import logging
import platform
import threading
import traceback
import uuid
from collections import deque
from datetime import UTC, datetime
from typing import Any

from tinsmith.client.connection.connection import Connection
from tinsmith.errors import APIStatusError, TinkerError, redacted
from tinsmith.transport.base import Purpose
from tinsmith.transport.retry import NO_RETRY
from tinsmith.version import PROTOCOL_VERSION
from tinsmith.wire.messages.service import (
    GenericEvent,
    SessionStartEvent,
    Severity,
    TelemetryEvent,
    TelemetrySendRequest,
    UnhandledExceptionEvent,
)
from tinsmith.wire.routes.table import TELEMETRY

logger = logging.getLogger(__name__)

MAX_QUEUED = 10_000
BATCH = 100
FLUSH_S = 10.0
TIMEOUT_S = 5.0
MAX_FAILURES = 5
"""After this many failed batches in a row telemetry is turned off."""


class Telemetry:
    """Collects events and sends them in the client's loop; failures are only logged for debugging."""

    def __init__(self, connection: Connection, *, enabled: bool) -> None:
        self._connection = connection
        self._is_enabled = enabled
        self._events: deque[TelemetryEvent] = deque(maxlen=MAX_QUEUED)
        self._lock = threading.Lock()
        self._count = 0
        self._failures = 0
        self._session_id = f"sessionless-{uuid.uuid4()}"
        self._process = str(uuid.uuid4())
        self._task: asyncio.Task[Any] | None = None

    def session_started(self, session_id: str) -> None:
        self._session_id = session_id
        self._add(SessionStartEvent(**self._common("INFO")))

    def event(self, name: str, data: dict[str, Any] | None = None, severity: Severity = "INFO") -> None:
        """Record an event."""
        self._add(GenericEvent(event_name=name, event_data=_clean(data or {}), **self._common(severity)))

    def exception(self, error: BaseException) -> None:
        """Record an error that reached the user."""
        text = "".join(traceback.format_exception(error))
        self._add(
            UnhandledExceptionEvent(
                error_type=type(error).__name__,
                error_message=redacted(str(error)),
                traceback=redacted(text)[-8000:],
                **self._common("ERROR"),
            )
        )

    def start(self) -> None:
        """Start sending; called in the loop."""
        if self._is_enabled and self._task is None:
            self._task = self._connection.runner.spawn(self._flush_forever())

    async def flush(self) -> None:
        """Send the queued events; a batch that the server rejects is dropped."""
        while self._is_enabled and self._events:
            batch = [self._events.popleft() for _ in range(min(BATCH, len(self._events)))]
            request = TelemetrySendRequest(
                events=batch,
                platform=platform.system(),
                sdk_version=PROTOCOL_VERSION,
                session_id=self._session_id,
                process_uuid=self._process,
            )
            try:
                await self._connection.call(
                    TELEMETRY, request, purpose=Purpose.TELEMETRY, policy=NO_RETRY, timeout_s=TIMEOUT_S
                )
                self._failures = 0
            except TinkerError as error:
                self._failures += 1
                is_unwanted = isinstance(error, APIStatusError) and error.status_code in (404, 405, 501)
                if is_unwanted or self._failures >= MAX_FAILURES:
                    self._is_enabled = False
                    self._events.clear()
                logger.debug("sending telemetry failed: %s", error)
                return

    async def _flush_forever(self) -> None:
        while self._is_enabled:
            await asyncio.sleep(FLUSH_S)
            await self.flush()

    def _add(self, event: TelemetryEvent) -> None:
        if self._is_enabled:
            self._events.append(event)

    def _common(self, severity: Severity) -> dict[str, Any]:
        with self._lock:
            index, self._count = self._count, self._count + 1
        return {
            "event_id": str(uuid.uuid4()),
            "event_session_index": index,
            "severity": severity,
            "timestamp": datetime.now(UTC),
        }


def _clean(value: Any) -> Any:
    """Return plain values with keys and tokens redacted."""
    if isinstance(value, str):
        return redacted(value)
    if isinstance(value, dict):
        return {redacted(str(key)): _clean(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_clean(item) for item in value]
    return value if isinstance(value, (int, bool)) or value is None else redacted(str(value))

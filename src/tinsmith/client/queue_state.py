"""What a waiting user is told."""

from __future__ import annotations

import enum
import logging
import time
from collections.abc import Callable
from typing import Protocol

logger = logging.getLogger(__name__)

REPEAT_S = 60.0


class QueueState(enum.Enum):
    """Why an operation waits."""

    ACTIVE = "active"
    PAUSED_CAPACITY = "paused_capacity"
    PAUSED_RATE_LIMIT = "paused_rate_limit"
    UNKNOWN = "unknown"

    @classmethod
    def _missing_(cls, value: object) -> QueueState:
        return cls.UNKNOWN


class QueueStateObserver(Protocol):
    """Told of every pending answer; plug in your own with `ServiceClient.set_queue_observer`."""

    def on_queue_state_change(self, queue_state: QueueState, queue_state_reason: str | None) -> None: ...


class QueueStateLogger:
    """Writes a line when an operation waits for longer than a minute or its queue is paused, then once a minute."""

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
        logger.warning("%s has waited for %.0f s: %s", self._what, now - self._started, reason)


_DEFAULT_REASONS = {
    QueueState.ACTIVE: "the server is working on it",
    QueueState.PAUSED_CAPACITY: "the server is short of capacity",
    QueueState.PAUSED_RATE_LIMIT: "the rate limit of this account is reached",
    QueueState.UNKNOWN: "the server gives no reason",
}

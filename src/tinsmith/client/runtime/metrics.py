"""Local metrics of a client's operations (counts and percentiles), and OpenTelemetry spans if it is installed."""

from __future__ import annotations

import contextlib
import threading
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

WINDOW = 4096
"""Latest durations kept per operation."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OperationMetrics:
    """The metrics of one operation; durations in seconds, over the latest calls."""

    count: int
    errors: int
    p50_s: float
    p95_s: float
    p99_s: float


class OperationTimes:
    """Records operations; thread-safe, bounded."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._durations: dict[str, deque[float]] = {}
        self._counts: dict[str, list[int]] = {}
        self._tracer = _tracer()

    def span(self, operation: str) -> contextlib.AbstractContextManager[Any]:
        """Return a context manager that opens an OpenTelemetry span if the library is installed."""
        return _NO_SPAN if self._tracer is None else self._tracer.start_as_current_span(f"tinsmith.{operation}")

    def snapshot(self) -> Mapping[str, OperationMetrics]:
        """Return the current metrics by operation."""
        with self._lock:
            return {name: self._figures(name) for name in self._counts}

    def record(self, operation: str, seconds: float, failed: bool) -> None:
        """Record one call."""
        with self._lock:
            durations = self._durations.get(operation)
            if durations is None:
                durations = self._durations[operation] = deque(maxlen=WINDOW)
                self._counts[operation] = [0, 0]
            durations.append(seconds)
            counts = self._counts[operation]
            counts[0] += 1
            counts[1] += failed

    def _figures(self, name: str) -> OperationMetrics:
        ordered = sorted(self._durations[name])
        count, errors = self._counts[name]

        def percentile(share: float) -> float:
            return ordered[min(len(ordered) - 1, int(share * len(ordered)))]

        return OperationMetrics(
            count=count, errors=errors, p50_s=percentile(0.5), p95_s=percentile(0.95), p99_s=percentile(0.99)
        )


_NO_SPAN: contextlib.AbstractContextManager[Any] = contextlib.nullcontext()


def _tracer() -> Any:
    try:
        from opentelemetry import trace
    except ImportError:
        return None
    return trace.get_tracer("tinsmith")

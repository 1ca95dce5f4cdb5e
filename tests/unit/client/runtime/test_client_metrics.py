"""Local metrics are exact and bounded; telemetry is bounded and batched; spans go to OpenTelemetry, if installed."""

from __future__ import annotations

import asyncio
import contextlib
import sys
import types
from collections.abc import Iterator
from typing import Any

import pytest

from tinsmith.client.connection.telemetry import BATCH, MAX_FAILURES, MAX_QUEUED, Telemetry
from tinsmith.client.runtime.metrics import WINDOW, OperationTimes
from tinsmith.errors import APIConnectionError, NotFoundError, RequestInfo, ResponseInfo


def test_percentiles_are_those_of_the_latest_calls() -> None:
    metrics = OperationTimes()
    for number in range(100):
        metrics.record("sample", number / 100, failed=number < 3)
    figures = metrics.snapshot()["sample"]
    assert (figures.count, figures.errors) == (100, 3)
    assert (figures.p50_s, figures.p95_s, figures.p99_s) == (0.5, 0.95, 0.99)
    for _ in range(WINDOW):
        metrics.record("sample", 7.0, failed=False)
    figures = metrics.snapshot()["sample"]
    assert (figures.count, figures.p50_s, figures.p99_s) == (100 + WINDOW, 7.0, 7.0)
    assert len(metrics._durations["sample"]) == WINDOW


def test_operations_are_spans_where_opentelemetry_is_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    spans: list[str] = []

    class Tracer:
        @contextlib.contextmanager
        def start_as_current_span(self, name: str) -> Iterator[None]:
            spans.append(f"begin {name}")
            yield
            spans.append(f"end {name}")

    package = types.ModuleType("opentelemetry")
    package.trace = types.SimpleNamespace(get_tracer=lambda name: Tracer() if name == "tinsmith" else None)  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "opentelemetry", package)
    with OperationTimes().span("sample"):
        assert spans == ["begin tinsmith.sample"]
    assert spans == ["begin tinsmith.sample", "end tinsmith.sample"]


def test_without_opentelemetry_spans_cost_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "opentelemetry", None)
    metrics = OperationTimes()
    with metrics.span("sample"), metrics.span("sample"):
        pass


class Wire:
    """Keeps the batches that are sent, or refuses them."""

    def __init__(self, error: Exception | None = None) -> None:
        self.batches: list[Any] = []
        self.error = error

    async def call(self, route: Any, request: Any, **_: Any) -> None:
        if self.error is not None:
            raise self.error
        self.batches.append(request)


def test_events_are_sent_in_batches_in_order() -> None:
    wire = Wire()
    telemetry = Telemetry(wire, enabled=True)  # type: ignore[arg-type]
    for number in range(2 * BATCH + 1):
        telemetry.event("happened", {"number": number})
    asyncio.run(telemetry.flush())
    assert [len(batch.events) for batch in wire.batches] == [BATCH, BATCH, 1]
    assert [event.event_data["number"] for batch in wire.batches for event in batch.events] == list(
        range(2 * BATCH + 1)
    )
    assert [event.event_session_index for event in wire.batches[0].events] == list(range(BATCH))


def test_what_cannot_be_sent_is_bounded_and_the_oldest_go() -> None:
    telemetry = Telemetry(Wire(), enabled=True)  # type: ignore[arg-type]
    for number in range(MAX_QUEUED + 10):
        telemetry.event("happened", {"number": number})
    assert len(telemetry._events) == MAX_QUEUED
    assert telemetry._events[0].event_data == {"number": 10}  # type: ignore[union-attr]


def test_a_server_that_fails_again_and_again_is_left_alone() -> None:
    telemetry = Telemetry(Wire(APIConnectionError(None, "gone")), enabled=True)  # type: ignore[arg-type]
    for _ in range(MAX_FAILURES):
        telemetry.event("happened")
        asyncio.run(telemetry.flush())
    telemetry.event("happened")
    assert not telemetry._events


def test_a_server_without_telemetry_is_asked_once() -> None:
    info = ResponseInfo(404, {}, RequestInfo("POST", "http://127.0.0.1:1/api/v1/telemetry"), "")
    telemetry = Telemetry(Wire(NotFoundError("no such route", response=info, body=None)), enabled=True)  # type: ignore[arg-type]
    telemetry.event("happened")
    asyncio.run(telemetry.flush())
    telemetry.event("happened")
    assert not telemetry._events


def test_switched_off_it_keeps_nothing() -> None:
    telemetry = Telemetry(Wire(), enabled=False)  # type: ignore[arg-type]
    telemetry.event("happened")
    telemetry.exception(ValueError("no"))
    telemetry.session_started("s")
    assert not telemetry._events


def test_secrets_are_taken_out_at_every_depth() -> None:
    telemetry = Telemetry(Wire(), enabled=True)  # type: ignore[arg-type]
    telemetry.event("happened", {"tml-abcdefgh": ["eyJabcdefgh.x", {"a": "key tml-abcdefgh"}], "n": 1, "none": None})
    telemetry.exception(ValueError("tml-abcdefgh"))
    assert "abcdefgh" not in repr(list(telemetry._events))

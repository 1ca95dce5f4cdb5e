"""Metrics for Prometheus, in a registry of their own so that one process can run several servers."""

from __future__ import annotations

import asyncio
import time
from bisect import bisect_left
from collections.abc import Iterator, Sequence
from itertools import accumulate
from typing import NoReturn

import msgspec
from prometheus_client import CollectorRegistry, Counter, Gauge, generate_latest
from prometheus_client.core import CounterMetricFamily, HistogramMetricFamily
from prometheus_client.registry import Collector

LAG_EVERY_S = 0.1
"""Pause between two measurements of the loop's delay."""
BUCKETS = (0.001, 0.0025, 0.005, 0.01, 0.02, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 5.0, 30.0)


class Timing(msgspec.Struct, frozen=True, kw_only=True):
    """How long one stage of one kind of work has taken since the server started.

    A percentile is the upper edge of its histogram bucket; None if it lies beyond the widest one.
    """

    stage: str
    """`waiting` and `running` for jobs, `answering` for HTTP requests."""
    name: str
    """The kind of job, or the route."""
    count: int
    p50_s: float | None
    p95_s: float | None


class Times(Collector):
    """A histogram of seconds that one thread writes, without locks: every request is counted."""

    def __init__(self, name: str, help_text: str, labels: Sequence[str], registry: CollectorRegistry) -> None:
        self._name, self._help, self._labels = name, help_text, labels
        self._counts: dict[tuple[str, ...], list[int]] = {}
        self._sums: dict[tuple[str, ...], float] = {}
        registry.register(self)

    def observe(self, labels: tuple[str, ...], seconds: float) -> None:
        counts = self._counts.get(labels)
        if counts is None:
            counts = self._counts[labels] = [0] * (len(BUCKETS) + 1)
            self._sums[labels] = 0.0
        counts[bisect_left(BUCKETS, seconds)] += 1
        self._sums[labels] += seconds

    def percentiles(self, shares: Sequence[float]) -> dict[tuple[str, ...], tuple[int, list[float | None]]]:
        """Return the count and the percentiles of each label set."""
        found = {}
        for labels, counts in list(self._counts.items()):
            totals = list(accumulate(list(counts)))
            edges = [bisect_left(totals, share * totals[-1]) for share in shares]
            found[labels] = (totals[-1], [BUCKETS[edge] if edge < len(BUCKETS) else None for edge in edges])
        return found

    def collect(self) -> Iterator[HistogramMetricFamily]:
        family = HistogramMetricFamily(self._name, self._help, labels=self._labels)
        bounds = [*map(str, BUCKETS), "+Inf"]
        for labels, counts in list(self._counts.items()):
            family.add_metric(labels, list(zip(bounds, accumulate(list(counts)), strict=True)), self._sums[labels])
        yield family


class Counts(Collector):
    """Counters that one thread writes, without locks."""

    def __init__(self, name: str, help_text: str, labels: Sequence[str], registry: CollectorRegistry) -> None:
        self._name, self._help, self._labels = name, help_text, labels
        self._counts: dict[tuple[str | int, ...], int] = {}
        registry.register(self)

    def add(self, labels: tuple[str | int, ...]) -> None:
        self._counts[labels] = self._counts.get(labels, 0) + 1

    def collect(self) -> Iterator[CounterMetricFamily]:
        family = CounterMetricFamily(self._name, self._help, labels=self._labels)
        for labels, count in list(self._counts.items()):
            family.add_metric([str(label) for label in labels], count)
        yield family


class Metrics:
    """Everything that the server counts."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self._requests = Counts(
            "tinsmith_requests_total", "Requests by route and status", ["route", "status"], self.registry
        )
        self._seconds = Times("tinsmith_request_seconds", "Time to answer", ["route"], self.registry)
        self._jobs = Counts("tinsmith_jobs_total", "Finished jobs by kind and state", ["kind", "state"], self.registry)
        self._stages = Times(
            "tinsmith_job_seconds",
            "Time of jobs by stage: waiting for their turn, running",
            ["kind", "stage"],
            self.registry,
        )
        self._lag = Times(
            "tinsmith_loop_lag_seconds",
            "Delay of the server's event loop, which adds to the time of every request",
            [],
            self.registry,
        )
        self._lag.observe((), 0.0)
        self.pending = Gauge("tinsmith_pending_jobs", "Accepted jobs without a result", registry=self.registry)
        self.sessions = Gauge("tinsmith_active_sessions", "Active sessions", registry=self.registry)
        self.models = Gauge("tinsmith_live_models", "Models in use", registry=self.registry)
        self.faults = Gauge("tinsmith_marked_runs", "Runs whose replay gave different results", registry=self.registry)
        self.moved = Gauge(
            "tinsmith_moved_runs", "Runs that were computed on more than one machine", registry=self.registry
        )
        self.snapshots = Counter(
            "tinsmith_snapshots_total", "Snapshots of runs by how they ended", ["end"], registry=self.registry
        )
        self._snapshot_seconds = Counter(
            "tinsmith_snapshot_seconds_total", "Time that engines spent on snapshots", registry=self.registry
        )
        self.replayed = Counter(
            "tinsmith_replayed_operations_total",
            "Operations replayed after an engine lost its state",
            registry=self.registry,
        )
        self.disk_free = Gauge(
            "tinsmith_disk_free_bytes", "Free space on the disk of the data directory", registry=self.registry
        )
        self.ready = Gauge("tinsmith_ready", "1 while the engine accepts work", registry=self.registry)
        self.last_request = time.monotonic()
        """When the last answer was sent, by the monotonic clock."""

    def request(self, route: str, status: int, seconds: float) -> None:
        """Count an answer."""
        self.last_request = time.monotonic()
        self._requests.add((route, status))
        self._seconds.observe((route,), seconds)

    async def watch_loop(self, every_s: float = LAG_EVERY_S) -> NoReturn:
        """Measure repeatedly how late the event loop is."""
        loop = asyncio.get_running_loop()
        while True:
            due = loop.time() + every_s
            await asyncio.sleep(every_s)
            self._lag.observe((), max(0.0, loop.time() - due))

    def snapshot(self, end: str, seconds: float) -> None:
        """Count a snapshot that was kept, failed or dropped, and its engine time."""
        self.snapshots.labels(end).inc()
        self._snapshot_seconds.inc(seconds)

    def job(self, kind: str, state: str, waiting_s: float, running_s: float) -> None:
        """Count a job that has ended."""
        self._jobs.add((kind, state))
        self._stages.observe((kind, "waiting"), waiting_s)
        self._stages.observe((kind, "running"), running_s)

    def timings(self) -> list[Timing]:
        """Return the median and the 95th percentile of every stage: waiting, running, then answering, each by name."""
        shares = (0.5, 0.95)
        found = [((stage, kind), times) for (kind, stage), times in self._stages.percentiles(shares).items()]
        found += [(("answering", route), times) for (route,), times in self._seconds.percentiles(shares).items()]
        return [
            Timing(stage=stage, name=name, count=count, p50_s=p50_s, p95_s=p95_s)
            for (stage, name), (count, (p50_s, p95_s)) in sorted(found, key=_stage_order)
        ]

    def text(self) -> bytes:
        """Return all metrics in Prometheus' text format."""
        return generate_latest(self.registry)


_STAGES = ("waiting", "running", "answering")


def _stage_order(item: tuple[tuple[str, str], object]) -> tuple[int, str]:
    stage, name = item[0]
    return _STAGES.index(stage), name

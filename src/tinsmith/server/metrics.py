"""Figures for Prometheus, in a registry of their own so that several servers fit in one process."""

from __future__ import annotations

import time

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

BUCKETS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 5.0, 30.0)


class Metrics:
    """What the server counts."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self._requests = Counter(
            "tinsmith_requests_total", "Requests by route and status", ["route", "status"], registry=self.registry
        )
        self._seconds = Histogram(
            "tinsmith_request_seconds", "Time to answer", ["route"], buckets=BUCKETS, registry=self.registry
        )
        self.jobs = Counter(
            "tinsmith_jobs_total", "Finished jobs by kind and state", ["kind", "state"], registry=self.registry
        )
        self._stages = Histogram(
            "tinsmith_job_seconds",
            "Time of jobs by stage: waiting for their turn, running",
            ["kind", "stage"],
            buckets=BUCKETS,
            registry=self.registry,
        )
        self.pending = Gauge("tinsmith_pending_jobs", "Accepted jobs without a result", registry=self.registry)
        self.sessions = Gauge("tinsmith_active_sessions", "Sessions with heartbeats", registry=self.registry)
        self.models = Gauge("tinsmith_live_models", "Models in use", registry=self.registry)
        self.faults = Gauge("tinsmith_marked_runs", "Runs whose replay gave other results", registry=self.registry)
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
            "tinsmith_replayed_operations_total", "Operations computed again after a loss", registry=self.registry
        )
        self.disk_free = Gauge("tinsmith_disk_free_bytes", "Free room in the data directory", registry=self.registry)
        self.ready = Gauge("tinsmith_ready", "1 while the engine takes work", registry=self.registry)
        self.last_request = time.monotonic()
        """When the last answer went out, by the monotonic clock."""
        self._children: dict[tuple[str, int], Counter] = {}
        self._timers: dict[str, Histogram] = {}

    def request(self, route: str, status: int, seconds: float) -> None:
        """One answer."""
        self.last_request = time.monotonic()
        counter = self._children.get((route, status))
        if counter is None:
            counter = self._children[route, status] = self._requests.labels(route, str(status))
        counter.inc()
        timer = self._timers.get(route)
        if timer is None:
            timer = self._timers[route] = self._seconds.labels(route)
        timer.observe(seconds)

    def snapshot(self, end: str, seconds: float) -> None:
        """One snapshot of a run that was kept, failed or dropped, and what it took the engine."""
        self.snapshots.labels(end).inc()
        self._snapshot_seconds.inc(seconds)

    def job(self, kind: str, state: str, waiting_s: float, running_s: float) -> None:
        """One job that has ended."""
        self.jobs.labels(kind, state).inc()
        self._stages.labels(kind, "waiting").observe(waiting_s)
        self._stages.labels(kind, "running").observe(running_s)

    def text(self) -> bytes:
        """The exposition."""
        return generate_latest(self.registry)

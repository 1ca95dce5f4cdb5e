"""Who has the device next: a fair share for every tenant, training and sampling interleaved.

Owns: deficit round-robin over tenants, the order of one tenant's jobs, and what is said to those who wait.
Does not know: torch, clocks, what a job computes. Pure: the caller asks for a turn, runs it, and says what it cost.

A turn is short: one training micro-batch, or one step of the sampler. Each active tenant gets a quantum of device
seconds per round; a tenant whose turns cost more starts the next round in debt. A sampler step serves several tenants
at once, each of which pays for its part; those without credit sit it out while somebody waits to train, and when nobody
does all samples run and nothing is counted. Within a tenant, higher priority goes first, then arrival; training and
sampling take turns by time used. Jobs of one lane (a model) run in their order, one at a time.
"""

from __future__ import annotations

import bisect
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal, TypeAlias

Kind: TypeAlias = Literal["train", "sample"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """Work that waits for the device."""

    id: str
    tenant: str
    kind: Kind
    lane: str = ""
    """Jobs of the same lane run one after another; empty: independent."""
    priority: int = 0


@dataclass(frozen=True, slots=True)
class Turn:
    """What to run now: one micro-batch of a training job, or one sampler step."""

    kind: Kind
    job_id: str | None
    """The training job; None for a sampler step."""
    tenants: frozenset[str]
    """Whose work it may do."""


@dataclass(frozen=True, slots=True)
class Standing:
    """Where a job stands, for those who wait."""

    position: int
    """Jobs before it; 0 when its work is under way."""
    reason: str


@dataclass(slots=True, eq=False)
class _Tenant:
    name: str
    credit: float = 0.0
    used: dict[Kind, float] = field(default_factory=lambda: {"train": 0.0, "sample": 0.0})
    jobs: dict[Kind, list[tuple[int, int, Job]]] = field(default_factory=lambda: {"train": [], "sample": []})

    @property
    def is_active(self) -> bool:
        return bool(self.jobs["train"] or self.jobs["sample"])


class Scheduler:
    """Fair turns over tenants."""

    def __init__(self, quantum_s: float = 0.1) -> None:
        """`quantum_s`: device seconds per tenant and round; about the length of a turn."""
        self._quantum_s = quantum_s
        self._tenants: dict[str, _Tenant] = {}
        self._ring: list[str] = []
        self._jobs: dict[str, Job] = {}
        self._ranks: dict[str, tuple[int, int]] = {}
        self._started: set[str] = set()
        self._arrivals = 0

    @property
    def _is_contended(self) -> bool:
        """Whether a turn for one is a turn taken from another: samples alone run together."""
        return any(self._tenants[name].jobs["train"] for name in self._ring)

    def add(self, job: Job) -> None:
        """A job is ready to run."""
        assert job.id not in self._jobs
        tenant = self._tenants.setdefault(job.tenant, _Tenant(job.tenant))
        if not tenant.is_active:
            self._ring.append(job.tenant)
            tenant.used = {"train": 0.0, "sample": 0.0}
        self._jobs[job.id] = job
        self._arrivals += 1
        self._ranks[job.id] = (-job.priority, self._arrivals)
        bisect.insort(tenant.jobs[job.kind], (*self._ranks[job.id], job))  # ranks differ, so jobs are not compared

    def remove(self, job_id: str) -> None:
        """A job is done, failed or cancelled. Unknown ids are ignored: a cancel may come late."""
        job = self._jobs.pop(job_id, None)
        if job is None:
            return
        self._started.discard(job_id)
        tenant = self._tenants[job.tenant]
        entries = tenant.jobs[job.kind]
        del entries[bisect.bisect_left(entries, self._ranks.pop(job_id))]
        if not tenant.is_active:
            self._ring.remove(job.tenant)
            tenant.credit = min(tenant.credit, 0.0)  # a debt stays, an idle tenant saves nothing

    def next(self) -> Turn | None:
        """The turn to run now; None when there is no work."""
        if not self._ring:
            return None
        tenant = self._richest_in_turn()
        kind: Kind = min((k for k in tenant.jobs if tenant.jobs[k]), key=lambda k: tenant.used[k])
        if kind == "sample":
            return Turn(kind, None, self._samplers(tenant))
        job = self._first_runnable(tenant)
        self._started.add(job.id)
        return Turn(kind, job.id, frozenset({tenant.name}))

    def charge(self, kind: Kind, costs: Mapping[str, float]) -> None:
        """What a turn cost each tenant, in device seconds, said before its jobs are removed.

        A sampler step is shared out by the tokens of each.
        """
        for name, cost_s in costs.items():
            tenant = self._tenants[name]
            tenant.used[kind] += cost_s
            if self._is_contended:
                tenant.credit -= cost_s

    def standing(self, job_id: str) -> Standing:
        """Position and reason for a job's `queue_state`."""
        job = self._jobs[job_id]
        tenant = self._tenants[job.tenant]
        others = len(self._ring) - 1
        shared = f"; the device is shared with {others} other tenant{'s' if others > 1 else ''}" if others else ""
        if job.kind == "sample" or job_id in self._started:
            return Standing(0, f"running{shared}")
        ahead = [entry[2] for entry in tenant.jobs[job.kind]]
        ahead = ahead[: ahead.index(job)]
        same_lane = sum(bool(job.lane) and other.lane == job.lane for other in ahead)
        if same_lane:
            return Standing(len(ahead), f"waiting for {same_lane} earlier on the same model{shared}")
        if ahead:
            return Standing(len(ahead), f"waiting for {len(ahead)} earlier of the same tenant{shared}")
        return Standing(0, f"next of this tenant{shared}")

    def _richest_in_turn(self) -> _Tenant:
        """The first tenant in the ring with credit; when none has any, everyone gets as many quanta as it takes."""
        active = [self._tenants[name] for name in self._ring]
        richest = max(tenant.credit for tenant in active)
        if richest <= 0:
            rounds = int(-richest // self._quantum_s) + 1
            for tenant in active:
                tenant.credit += rounds * self._quantum_s
        chosen = next(tenant for tenant in active if tenant.credit > 0)
        if chosen.credit <= self._quantum_s:  # its last turn of this round: the next tenant is looked at first
            self._ring.remove(chosen.name)
            self._ring.append(chosen.name)
        return chosen

    def _samplers(self, chosen: _Tenant) -> frozenset[str]:
        """Who takes part in a sampler step."""
        sampling = [self._tenants[name] for name in self._ring if self._tenants[name].jobs["sample"]]
        if self._is_contended:
            sampling = [tenant for tenant in sampling if tenant is chosen or tenant.credit > 0]
        return frozenset(tenant.name for tenant in sampling)

    def _first_runnable(self, tenant: _Tenant) -> Job:
        """In order of priority and arrival, but a lane's job that has begun is finished before its next begins."""
        entries = [entry[2] for entry in tenant.jobs["train"]]
        busy = {job.lane: job for job in entries if job.lane and job.id in self._started}
        return busy.get(entries[0].lane, entries[0])

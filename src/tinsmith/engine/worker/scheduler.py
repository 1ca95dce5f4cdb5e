"""Decides who uses the device next: a fair share for every tenant, with training and sampling interleaved.

The trick is deficit round-robin. How long a turn takes is known only afterwards, and turns cannot be interrupted, so
turns cannot be fair; but the time can be, in the long run. Every tenant with work has a credit in device seconds.
Tenants take turns in a ring; a turn goes to the next one with credit and is paid for when it is over, which may put the
tenant into debt. When nobody has credit left, everybody gets another quantum: a tenant whose turn took five quanta then
sits out rounds until its debt is paid. Credit cannot be saved up: a tenant that becomes idle keeps only its debt.

A turn is one training micro-batch or one sampler step. A sampler step serves several tenants at once, and each pays for
its tokens. While somebody waits to train, tenants without credit do not take part in sampler steps; while nobody does,
all samples run together and nothing is charged, because no one is kept from anything.

Within a tenant, training and sampling alternate by the time they have used. Training jobs run in order of arrival, one
at a time, so the jobs of a model stay in order.

The scheduler has no clock and runs nothing: the caller asks for a turn, runs it, and reports what it cost.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal, TypeAlias

Kind: TypeAlias = Literal["train", "sample"]


@dataclass(frozen=True, slots=True, kw_only=True)
class QueuedJob:
    """Work that waits for the device."""

    id: str
    tenant: str
    kind: Kind


@dataclass(frozen=True, slots=True)
class Turn:
    """What to run now: one micro-batch of a training job, or one sampler step."""

    kind: Kind
    job_id: str | None
    """The training job; None for a sampler step."""
    tenants: frozenset[str]
    """The tenants that take part."""


@dataclass(slots=True, eq=False)
class _Tenant:
    name: str
    credit: float = 0.0
    used: dict[Kind, float] = field(default_factory=lambda: {"train": 0.0, "sample": 0.0})
    jobs: dict[Kind, dict[str, None]] = field(default_factory=lambda: {"train": {}, "sample": {}})
    """Ids in order of arrival."""

    @property
    def is_active(self) -> bool:
        return bool(self.jobs["train"] or self.jobs["sample"])


class Scheduler:
    """Deficit round-robin over tenants."""

    def __init__(self, quantum_s: float) -> None:
        """`quantum_s` is the device time per tenant and round; it should be about the length of a turn."""
        self._quantum_s = quantum_s
        self._tenants: dict[str, _Tenant] = {}
        self._ring: list[str] = []
        self._jobs: dict[str, QueuedJob] = {}

    @property
    def _is_contended(self) -> bool:
        """Whether tenants compete for the device. Samples alone do not: they run together."""
        return any(self._tenants[name].jobs["train"] for name in self._ring)

    def add(self, job: QueuedJob) -> None:
        """Add a job that is ready to run."""
        assert job.id not in self._jobs
        tenant = self._tenants.setdefault(job.tenant, _Tenant(job.tenant))
        if not tenant.is_active:
            self._ring.append(job.tenant)
            tenant.used = {"train": 0.0, "sample": 0.0}
        self._jobs[job.id] = job
        tenant.jobs[job.kind][job.id] = None

    def remove(self, job_id: str) -> None:
        """Remove a finished, failed or cancelled job. Unknown ids are ignored: a cancel may come late."""
        job = self._jobs.pop(job_id, None)
        if job is None:
            return
        tenant = self._tenants[job.tenant]
        del tenant.jobs[job.kind][job_id]
        if not tenant.is_active:
            self._ring.remove(job.tenant)
            tenant.credit = min(tenant.credit, 0.0)  # debt stays, credit does not

    def next(self) -> Turn | None:
        """Return the turn to run now; None if there is no work."""
        if not self._ring:
            return None
        tenant = self._richest_in_turn()
        kind: Kind = min((k for k in tenant.jobs if tenant.jobs[k]), key=lambda k: tenant.used[k])
        if kind == "sample":
            return Turn(kind, None, self._samplers(tenant))
        return Turn(kind, next(iter(tenant.jobs["train"])), frozenset({tenant.name}))

    def charge(self, kind: Kind, costs: Mapping[str, float]) -> None:
        """Charge each tenant for a turn, in device seconds; call this before removing the jobs that it finished.

        The caller divides the cost of a sampler step by the tokens of each tenant.
        """
        for name, cost_s in costs.items():
            tenant = self._tenants[name]
            tenant.used[kind] += cost_s
            if self._is_contended:
                tenant.credit -= cost_s

    def _richest_in_turn(self) -> _Tenant:
        """Return the first tenant in the ring with credit; if nobody has any, hand out as many quanta as it takes."""
        active = [self._tenants[name] for name in self._ring]
        richest = max(tenant.credit for tenant in active)
        if richest <= 0:
            rounds = int(-richest // self._quantum_s) + 1
            rounds += richest + rounds * self._quantum_s <= 0  # if the division was rounded down
            for tenant in active:
                tenant.credit += rounds * self._quantum_s
        chosen = next(tenant for tenant in active if tenant.credit > 0)
        if chosen.credit <= self._quantum_s:  # probably its last turn of this round, so the others go first next time
            self._ring.remove(chosen.name)
            self._ring.append(chosen.name)
        return chosen

    def _samplers(self, chosen: _Tenant) -> frozenset[str]:
        """Return who takes part in a sampler step."""
        sampling = [self._tenants[name] for name in self._ring if self._tenants[name].jobs["sample"]]
        if self._is_contended:
            sampling = [tenant for tenant in sampling if tenant is chosen or tenant.credit > 0]
        return frozenset(tenant.name for tenant in sampling)

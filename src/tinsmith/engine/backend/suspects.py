"""Finds the job that kills the engine, without blaming the jobs that happened to run beside it.

The problem. Many tenants' jobs run in one engine process. One of them may crash it every time (a bug in a kernel, a
request that needs too much memory). The jobs are simply submitted again after a restart, so that job would kill the
engine forever; but failing all jobs that were running would punish innocent tenants, and let one tenant kill others'
work on purpose.

The trick is a search by halves. Each death is evidence against the jobs that were running at that time. Such suspects
are tried apart from everything else: first all suspects of a tenant together, then half of those with which the engine
died again, and so on. A group that survives is cleared, and in the end a culprit is alone. Only a death with nothing
else running condemns a job, and how many such deaths it takes depends on how the engine died, because not every death
is a job's doing:

| How the engine died                                       | suspect after | condemned after               |
|-----------------------------------------------------------|---------------|-------------------------------|
| it crashed (SIGSEGV, SIGABRT, an exit code)               | 1 death       | 2 deaths, the last one alone  |
| it was killed because memory ran out                      | 1 death       | 3 deaths alone                |
| it was killed from outside (by a person or a test)        | 4 deaths      | 10 deaths alone               |

A tenant with several deaths (strikes) from which its jobs have not been cleared is in quarantine: all of its jobs are
tried apart from those of others, and wait longer after each further death.

This only keeps the records; `job_queue` decides what to send, and passes in the time.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import Literal, TypeAlias

from tinsmith.engine.protocol import AnyJob

Cause: TypeAlias = Literal["crash", "memory", "killed"]
"""How an engine died: it crashed, memory ran out, or a signal came from outside."""

CRASHES_IN_ALL = 2
MEMORY_ALONE = 3
KILLED_ALONE = 10
KILLED_SUSPECT = 4
MAX_REMEMBERED = 10_000
"""Suspects that are remembered. Beyond that, the oldest of the tenant with the most is dropped."""
STRIKES = 3
"""Deaths that put a tenant into quarantine, unless its jobs involved have finished successfully since."""
STRIKE_S = 3600.0
"""After this long a death no longer counts against a tenant."""
MAX_PENANCE_S = 300.0
MOST_TOGETHER = 64
"""Jobs of a tenant in quarantine that are tried at the same time."""
ALONE_S = 5.0
"""How long a suspect has the engine to itself after its first death; doubled for each further one."""
MAX_ALONE_S = 300.0


@dataclass(slots=True)
class Suspicion:
    """The evidence against one job."""

    crashes: int = 0
    memory: int = 0
    memory_alone: int = 0
    kills: int = 0
    kills_alone: int = 0
    together: int = 1
    """How many suspects of its tenant, including itself, may be tried together."""
    death: int = 0
    """The number of the last death in which it was involved."""
    is_condemned: bool = False
    """Whether this job is known to kill the engine; it is not tried again."""

    @property
    def deaths(self) -> int:
        return self.crashes + self.memory + self.kills

    @property
    def is_suspect(self) -> bool:
        return bool(self.crashes or self.memory or self.kills >= KILLED_SUSPECT)

    def add(self, cause: Cause, is_alone: bool) -> None:
        """Record a death. Only one with nothing else running can condemn the job."""
        if cause == "crash":
            self.crashes += 1
            is_proven = self.crashes >= CRASHES_IN_ALL
        elif cause == "memory":
            self.memory += 1
            self.memory_alone += is_alone
            is_proven = self.memory_alone >= MEMORY_ALONE
        else:
            self.kills += 1
            self.kills_alone += is_alone
            is_proven = self.kills_alone >= KILLED_ALONE
        self.is_condemned = self.is_condemned or (is_alone and is_proven)


@dataclass(slots=True)
class Strike:
    """A death that counts against a tenant."""

    at: float
    uncleared: int = 0
    """Jobs of the tenant that were involved and have not finished successfully since."""


class Suspects:
    """The suspects of one engine, by tenant."""

    def __init__(self) -> None:
        self._jobs: dict[str, dict[str, Suspicion]] = {}
        self._count = 0
        self._strikes: dict[str, dict[int, Strike]] = {}
        self._deaths = 0

    def __len__(self) -> int:
        return self._count

    @property
    def is_quiet(self) -> bool:
        """Return whether there is no evidence against anybody."""
        return not self._count and not self._strikes

    def died(self, jobs: Collection[AnyJob], leaving: Collection[str], cause: Cause, now: float) -> None:
        """Record that the engine died while these jobs were running. `leaving`: tenants of jobs being cancelled.

        Without `jobs` nobody can be blamed; a single job was alone only if none was being cancelled either.
        """
        self._deaths += 1
        tenants = {job.tenant for job in jobs} | set(leaving)
        is_alone = len(jobs) == 1 and not leaving
        sizes: dict[str, int] = {}
        for job in jobs:
            sizes[job.tenant] = sizes.get(job.tenant, 0) + 1
        for job in jobs:
            size = sizes[job.tenant]
            suspicion = self._suspicion(job)
            suspicion.add(cause, is_alone)
            suspicion.together = size if len(tenants) > 1 else (size + 1) // 2
            self._move(job.tenant, suspicion, now, cause)
        if cause != "killed":
            for tenant in leaving:
                self._strike(tenant, now).uncleared += 1
        self._forget_old(now)

    def _suspicion(self, job: AnyJob) -> Suspicion:
        """Return the evidence against a job, and make it the newest of its tenant."""
        of_tenant = self._jobs.setdefault(job.tenant, {})
        suspicion = of_tenant.pop(job.job_id, None)
        if suspicion is None:
            suspicion = Suspicion()
            self._count += 1
        of_tenant[job.job_id] = suspicion
        return suspicion

    def _move(self, tenant: str, suspicion: Suspicion, now: float, cause: Cause) -> None:
        """Move a job's strike to the last death in which it was involved."""
        if cause == "killed":
            return
        self._unstrike(tenant, suspicion.death)
        suspicion.death = self._deaths
        self._strike(tenant, now).uncleared += 1

    def _strike(self, tenant: str, now: float) -> Strike:
        return self._strikes.setdefault(tenant, {}).setdefault(self._deaths, Strike(now))

    def _unstrike(self, tenant: str, death: int) -> None:
        strikes = self._strikes.get(tenant, {})
        if death not in strikes:
            return
        strikes[death].uncleared -= 1
        if not strikes[death].uncleared:
            del strikes[death]
            if not strikes:
                del self._strikes[tenant]

    def _forget_old(self, now: float) -> None:
        for tenant, strikes in list(self._strikes.items()):
            for death, strike in list(strikes.items()):
                if now - strike.at >= STRIKE_S:
                    del strikes[death]
            if not strikes:
                del self._strikes[tenant]
        while self._count > MAX_REMEMBERED:
            tenant = max(self._jobs, key=lambda name: len(self._jobs[name]))
            self._remove(tenant, next(iter(self._jobs[tenant])))

    def _remove(self, tenant: str, job_id: str) -> Suspicion | None:
        of_tenant = self._jobs.get(tenant, {})
        suspicion = of_tenant.pop(job_id, None)
        if suspicion is not None:
            self._count -= 1
            if not of_tenant:
                del self._jobs[tenant]
        return suspicion

    def clear(self, job: AnyJob) -> None:
        """Clear a job: it finished, and the engine is alive."""
        suspicion = self._remove(job.tenant, job.job_id)
        if suspicion is not None:
            self._unstrike(job.tenant, suspicion.death)

    def forget(self, job: AnyJob) -> None:
        """Drop a job that will not be tried again. Its guilt stays unknown, so its tenant keeps the strike."""
        self._remove(job.tenant, job.job_id)

    def _of(self, job: AnyJob) -> Suspicion | None:
        return self._jobs.get(job.tenant, {}).get(job.job_id)

    def is_suspect(self, job: AnyJob) -> bool:
        suspicion = self._of(job)
        return suspicion is not None and suspicion.is_suspect

    def is_condemned(self, job: AnyJob) -> bool:
        suspicion = self._of(job)
        return suspicion is not None and suspicion.is_condemned

    def deaths_of(self, job: AnyJob) -> int:
        suspicion = self._of(job)
        return 0 if suspicion is None else suspicion.deaths

    def together(self, job: AnyJob) -> int:
        """Return how many jobs of its tenant, including itself, a job that goes apart may be tried with."""
        suspicion = self._of(job)
        return suspicion.together if suspicion is not None and suspicion.is_suspect else MOST_TOGETHER

    def alone_s(self, job: AnyJob) -> float:
        """Return how long this job has the engine to itself; if it survives that, it continues beside others."""
        return min(MAX_ALONE_S, ALONE_S * 2.0 ** max(0, self.deaths_of(job) - 1))

    def strikes(self, tenant: str, now: float) -> int:
        return sum(now - strike.at < STRIKE_S for strike in self._strikes.get(tenant, {}).values())

    def is_quarantined(self, tenant: str, now: float) -> bool:
        return self.strikes(tenant, now) >= STRIKES

    def not_before(self, tenant: str, now: float) -> float:
        """Return when jobs of this tenant that go apart may be tried again; in quarantine, later with each death."""
        strikes = self.strikes(tenant, now)
        if strikes < STRIKES:
            return 0.0
        last = max(strike.at for strike in self._strikes[tenant].values())
        return last + min(MAX_PENANCE_S, 2.0 ** (strikes - STRIKES + 1))

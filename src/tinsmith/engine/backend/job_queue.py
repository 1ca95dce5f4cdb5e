"""The queue of jobs between the server and the engine of one base model: what to send, and when.

- Jobs of one model keep their order, and at most `WINDOW` of them are at the engine; the others can still be cancelled.
- A job that may have killed the engine (`suspects`) runs apart: it is sent when nothing else is at the engine, and
  nothing else is sent until it has finished, or has had the engine to itself for long enough. Then all other jobs have
  the engine for at least as long, and after a death for as long as the engine was away. Tenants without any suspicion
  come first.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from itertools import chain, islice
from typing import Literal

from tinsmith.engine.backend.suspects import Cause, Suspects
from tinsmith.engine.protocol import AnyJob, Done, OnTokens, Sample

WINDOW = 2
"""One job to run and one to continue with, without waiting for the pipe."""
PATIENCE_S = 2.0
"""How long other jobs are held back so that the engine becomes empty for a suspect; doubled if that was not enough."""
MAX_PATIENCE_S = 60.0
MAX_REST_S = 60.0
"""How long suspects wait for the other jobs after a restart, at most."""
MAX_GROUP = 512
"""Suspects that are tried at the same time, at most."""


@dataclass(eq=False, slots=True)
class Entry:
    """A job that has not ended."""

    job: AnyJob
    future: asyncio.Future[Done]
    on_tokens: OnTokens | None
    number: int = 0
    stage: Literal["waiting", "sent", "begun"] = "waiting"
    since: float = 0.0
    """When it was added."""
    is_suspect: bool = False
    """Whether it runs apart; this does not change before it ends."""

    @property
    def model_id(self) -> str | None:
        """The model whose state it changes or reads; a sample has none."""
        return None if isinstance(self.job, Sample) else self.job.model_id


class SoloTrial:
    """Who has the engine to themselves: nobody, some suspects, or all other jobs first."""

    def __init__(self) -> None:
        self.job_ids: set[str] = set()
        """The jobs that have the engine to themselves now."""
        self.until = 0.0
        """When other jobs may join them all the same."""
        self.began_at = 0.0
        self.rest_until = 0.0
        """Until then, the engine belongs to the other jobs."""
        self.emptying_since: float | None = None
        """Since when nothing has been sent, so that the engine becomes empty."""
        self.patience_s = PATIENCE_S
        self.lost_at: float | None = None
        """When the last engine died; None once the next one takes jobs."""
        self.last_by_tenant: dict[str, float] = {}

    def begin(self, entries: list[Entry], tenant: str, now: float, alone_s: float) -> None:
        self.job_ids = {entry.job.job_id for entry in entries}
        self.began_at = now if self.emptying_since is None else self.emptying_since
        self.until = now + alone_s
        self.emptying_since, self.patience_s = None, PATIENCE_S
        self.last_by_tenant[tenant] = now

    def leave(self, job_id: str, now: float) -> None:
        if job_id in self.job_ids:
            self.job_ids.discard(job_id)
            if not self.job_ids:
                self.rest(now, self.began_at)

    def lift(self, now: float) -> None:
        """End the trial: its jobs have survived for long enough."""
        self.job_ids = set()
        self.rest(now, self.began_at)

    def give_up(self, now: float) -> None:
        """Stop waiting: the engine did not become empty in time."""
        assert self.emptying_since is not None
        self.rest(now, self.emptying_since)
        self.emptying_since, self.patience_s = None, min(MAX_PATIENCE_S, 2 * self.patience_s)

    def rest(self, now: float, since: float) -> None:
        self.rest_until = now + (now - since)

    def lose(self, now: float) -> None:
        """Reset the state: the engine is gone, and the next one starts empty."""
        self.job_ids = set()
        self.lost_at, self.emptying_since, self.patience_s = now, None, PATIENCE_S

    def come_back(self, now: float) -> None:
        if self.lost_at is not None:
            self.rest_until = now + min(MAX_REST_S, now - self.lost_at)
            self.lost_at = None


class JobQueue:
    """All jobs of one base model that have not ended."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.suspects = Suspects()
        self._clock = clock
        self._entries: dict[str, Entry] = {}
        self._models: dict[str, deque[Entry]] = {}
        self._touched: set[str] = set()
        self._samples: dict[str, dict[str, Entry]] = {}
        """Waiting samples that need not run apart (unless their tenant is in quarantine), by tenant."""
        self._suspect_samples: dict[str, dict[str, Entry]] = {}
        self._was_quiet = True
        self._out: dict[str, str] = {}
        """Tenants of the jobs at the engine, including cancelled ones until the engine confirms."""
        self._operations_out: dict[str, str] = {}
        """The operations among those."""
        self._trial = SoloTrial()
        self._sample_count = 0
        self._samples_begun = 0

    def __len__(self) -> int:
        return len(self._entries)

    def __contains__(self, job_id: object) -> bool:
        return job_id in self._entries

    def get(self, job_id: str) -> Entry | None:
        return self._entries.get(job_id)

    def add(self, entry: Entry) -> None:
        assert entry.job.job_id not in self._entries, f"job {entry.job.job_id} was already submitted"
        self._entries[entry.job.job_id] = entry
        entry.since = self._clock()
        entry.is_suspect = self.suspects.is_suspect(entry.job)
        if entry.model_id is None:
            entry.number = self._sample_count
            self._sample_count += 1
            self._line_of(entry).setdefault(entry.job.tenant, {})[entry.job.job_id] = entry
        else:
            self._models.setdefault(entry.model_id, deque()).append(entry)
            self._touched.add(entry.model_id)

    def _line_of(self, sample: Entry) -> dict[str, dict[str, Entry]]:
        return self._suspect_samples if sample.is_suspect else self._samples

    # sending

    def take_sendable(self) -> list[Entry]:
        """Return the jobs that may be sent to the engine now, and count them as sent."""
        now, trial = self._clock(), self._trial
        trial.come_back(now)
        if self.suspects.is_quiet:
            models, self._was_quiet = list(self._touched if self._was_quiet else self._models), True
            return self._take_ordinary(models, now)
        self._was_quiet = False
        if trial.job_ids:
            if now < trial.until:
                return []
            trial.lift(now)
        if trial.emptying_since is not None and self._out:
            if now < trial.emptying_since + trial.patience_s or not self._operations_out:
                return []  # samples are taken back in this case, see `take_back`
            trial.give_up(now)
        apart = self._next_apart(now)
        if not apart or (now < trial.rest_until and (self._out or self._has_ordinary(now))):
            trial.emptying_since = None
            return self._take_ordinary(list(self._models), now)
        if self._out:
            trial.emptying_since = now if trial.emptying_since is None else trial.emptying_since
            return []
        alone_s = max(self.suspects.alone_s(entry.job) for entry in apart)
        trial.begin(apart, apart[0].job.tenant, now, alone_s)
        return [self._sent(entry) for entry in apart]

    def _take_ordinary(self, models: list[str], now: float) -> list[Entry]:
        """Return all jobs that need not run apart."""
        sendable = [entry for model_id in models for entry in self._next_of(model_id, now)]
        self._touched = set()
        for tenant, waiting in self._samples.items():
            if not self.suspects.is_quarantined(tenant, now):
                sendable += [entry for job_id, entry in waiting.items() if job_id not in self._out]
        return [self._sent(entry) for entry in sendable]

    def _sent(self, entry: Entry) -> Entry:
        entry.stage = "sent"
        self._out[entry.job.job_id] = entry.job.tenant
        if entry.model_id is not None:
            self._operations_out[entry.job.job_id] = entry.job.tenant
        self._leave_samples(entry)
        return entry

    def _leave_samples(self, entry: Entry) -> None:
        line, tenant = self._line_of(entry), entry.job.tenant
        if entry.model_id is None and tenant in line:
            line[tenant].pop(entry.job.job_id, None)
            if not line[tenant]:
                del line[tenant]

    def _next_of(self, model_id: str, now: float) -> list[Entry]:
        taken = []
        for entry in list(self._models.get(model_id, ()))[:WINDOW]:
            if entry.stage == "waiting":
                if self._goes_apart(entry, now):
                    break
                taken.append(entry)
        return taken

    def _goes_apart(self, entry: Entry, now: float) -> bool:
        return entry.is_suspect or self.suspects.is_quarantined(entry.job.tenant, now)

    def _first_operations(self) -> Iterable[Entry]:
        """Return each model's first operation that is not at the engine."""
        firsts = (next((entry for entry in queue if entry.stage == "waiting"), None) for queue in self._models.values())
        return (entry for entry in firsts if entry is not None)

    def _has_ordinary(self, now: float) -> bool:
        """Return whether a job waits that need not run apart."""
        if any(not self.suspects.is_quarantined(tenant, now) for tenant in self._samples):
            return True
        return any(not self._goes_apart(entry, now) for entry in self._first_operations())

    def _tenants_apart(self, now: float) -> dict[str, list[Entry]]:
        """Return the tenants with jobs that wait to run apart, and the operations among these.

        A tenant whose own operations are at the engine waits for these first; no other job is held back for it.
        """
        found: dict[str, list[Entry]] = {tenant: [] for tenant in self._suspect_samples}
        found |= {tenant: [] for tenant in self._samples if self.suspects.is_quarantined(tenant, now)}
        for entry in self._first_operations():
            if self._goes_apart(entry, now):
                found.setdefault(entry.job.tenant, []).append(entry)
        for tenant in self._operations_out.values():
            found.pop(tenant, None)
        return found

    def _next_apart(self, now: float) -> list[Entry]:
        """Return the next jobs to have the engine to themselves, all of one tenant."""
        tenants = self._tenants_apart(now)
        ready = [tenant for tenant in tenants if self.suspects.not_before(tenant, now) <= now]
        if not ready:
            return []
        last = self._trial.last_by_tenant
        tenant = min(ready, key=lambda name: (self.suspects.strikes(name, now), last.get(name, 0.0)))
        ordinary = self._samples.get(tenant, {}) if self.suspects.is_quarantined(tenant, now) else {}
        samples = chain(self._suspect_samples.get(tenant, {}).values(), ordinary.values())
        waiting = [entry for entry in islice(samples, MAX_GROUP) if entry.job.job_id not in self._out]
        return self._group([*tenants[tenant], *waiting])

    def _group(self, entries: list[Entry]) -> list[Entry]:
        """Return as many jobs as each of them may be tried with; those with the most deaths come last."""
        entries.sort(key=lambda entry: (self.suspects.deaths_of(entry.job), entry.since, entry.number))
        group: list[Entry] = []
        limit = MAX_GROUP
        for entry in entries:
            limit = min(limit, self.suspects.together(entry.job))
            if len(group) >= limit:
                break
            group.append(entry)
        return group

    def take_back(self) -> list[Entry]:
        """Remove and return samples that the engine must give up, because a suspect has waited long enough.

        The caller cancels them at the engine, and their owners submit them again.
        """
        trial = self._trial
        if trial.emptying_since is None or self._clock() < trial.emptying_since + trial.patience_s:
            return []
        if self._operations_out:  # operations are not taken back
            return []
        taken = [entry for job_id in list(self._out) if (entry := self._entries.get(job_id)) is not None]
        for entry in taken:
            self.drop(entry.job.job_id)
        return taken

    def look_again_at(self) -> float | None:
        """Return when something may be sent even if no job ends before; None if there is no such time."""
        if self.suspects.is_quiet or not self._entries:
            return None
        now, trial = self._clock(), self._trial
        if trial.job_ids:
            return trial.until
        if trial.emptying_since is not None:
            return trial.emptying_since + trial.patience_s
        tenants = self._tenants_apart(now)
        return min((max(trial.rest_until, self.suspects.not_before(tenant, now)) for tenant in tenants), default=None)

    # the life of jobs

    def begin(self, job_ids: Iterable[str]) -> None:
        for job_id in job_ids:
            entry = self._entries.get(job_id)
            if entry is not None and entry.stage == "sent":
                entry.stage = "begun"
                self._samples_begun += entry.model_id is None

    def end(self, job_id: str) -> Entry | None:
        """Remove a job that the engine has finished, and clear it of suspicion."""
        self.gone(job_id)
        entry = self._remove(job_id)
        if entry is not None:
            self.suspects.clear(entry.job)
        return entry

    def gone(self, job_id: str) -> None:
        """Record that a job is no longer at the engine."""
        self._out.pop(job_id, None)
        self._operations_out.pop(job_id, None)

    def drop(self, job_id: str) -> Entry | None:
        """Remove a cancelled job. If it is at the engine, it counts as being there until the engine confirms."""
        entry = self._remove(job_id)
        if entry is not None and entry.stage == "waiting":
            self.suspects.forget(entry.job)
        return entry

    def _remove(self, job_id: str) -> Entry | None:
        self._trial.leave(job_id, self._clock())
        entry = self._entries.pop(job_id, None)
        if entry is not None:
            self._leave_line(entry)
        return entry

    def _leave_line(self, entry: Entry) -> None:
        if entry.model_id is None:
            self._leave_samples(entry)
            self._samples_begun += entry.stage != "begun"
            return
        queue = self._models[entry.model_id]
        queue.remove(entry)
        self._touched.add(entry.model_id)
        if not queue:
            del self._models[entry.model_id]

    def lose(self, cause: Cause | None) -> list[tuple[Entry, bool]]:
        """Remove and return all jobs in order, and whether each is condemned. If there is a cause, the engine died."""
        lost = list(self._entries.values())
        begun = [entry.job for entry in lost if entry.stage == "begun"]
        if cause is not None:
            leaving = [tenant for job_id, tenant in self._out.items() if job_id not in self._entries]
            self.suspects.died(begun, leaving, cause, self._clock())
        self._trial.lose(self._clock())
        for held in (self._entries, self._models, self._samples, self._suspect_samples):
            held.clear()
        self._out.clear()
        self._operations_out.clear()
        self._touched.clear()
        self._samples_begun = self._sample_count
        return [
            (entry, cause is not None and entry.stage == "begun" and self.suspects.is_condemned(entry.job))
            for entry in lost
        ]

    def expired(self, before: float) -> list[Entry]:
        """Remove and return the jobs that were added before a time."""
        old = [entry for entry in self._entries.values() if entry.since <= before]
        for entry in old:
            self._remove(entry.job.job_id)
        return old

    # where jobs stand

    def ahead(self, entry: Entry) -> int:
        """Return the number of jobs ahead: of the same model, or earlier samples that have not started."""
        if entry.stage == "begun":
            return 0
        if entry.model_id is None:
            return max(0, entry.number - self._samples_begun)
        return self._models[entry.model_id].index(entry)

    def why_held(self, entry: Entry) -> str | None:
        """Return why a job waits although it is next; None if that has nothing to do with suspects."""
        if entry.stage != "waiting" or self.suspects.is_quiet:
            return None
        now = self._clock()
        if entry.is_suspect:
            return "waits to run alone, because the engine died while this request was running"
        if self.suspects.is_quarantined(entry.job.tenant, now):
            return "waits to run separately, because requests of this organisation killed the engine repeatedly"
        if self._trial.job_ids or self._trial.emptying_since is not None:
            return "waits while a request during which the engine died runs alone"
        return None

    def running(self) -> tuple[int, int]:
        """Return how many operations and how many samples are running."""
        begun = [entry.model_id is None for entry in self._entries.values() if entry.stage == "begun"]
        return len(begun) - sum(begun), sum(begun)

"""The jobs of one base model between the server and its engine: which may be sent, where each stands, who is suspect.

- Jobs of one model keep their order, and at most `WINDOW` of them are at the engine; the rest can still be dropped.
- A job that was being computed when the engine died is a suspect: it is sent again only while no other suspect is at
  the engine, so that the next death names the culprit. After `MAX_DEATHS` it is not sent any more.

Does not know: clocks, processes, frames.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

from tinsmith.engine.base import AnyJob, Done, OnTokens, Sample

WINDOW = 2
"""One to compute and one to go on with, without waiting for the pipe."""
MAX_DEATHS = 2
MAX_REMEMBERED = 10_000
"""Suspects that are remembered; the oldest are forgiven."""


@dataclass(eq=False, slots=True)
class Entry:
    """A job under way."""

    job: AnyJob
    future: asyncio.Future[Done]
    on_tokens: OnTokens | None
    number: int = 0
    stage: Literal["waiting", "sent", "begun"] = "waiting"

    @property
    def model_id(self) -> str | None:
        """The model whose state it changes or reads; a sample has none."""
        return None if isinstance(self.job, Sample) else self.job.model_id


class JobQueue:
    """All jobs of one base model that have not ended."""

    def __init__(self) -> None:
        self._entries: dict[str, Entry] = {}
        self._models: dict[str, deque[Entry]] = {}
        self._touched: set[str] = set()
        self._samples: dict[str, Entry] = {}
        self._deaths: dict[str, int] = {}
        self._sample_count = 0
        self._samples_begun = 0

    def __len__(self) -> int:
        return len(self._entries)

    def __contains__(self, job_id: object) -> bool:
        return job_id in self._entries

    def get(self, job_id: str) -> Entry | None:
        return self._entries.get(job_id)

    def add(self, entry: Entry) -> None:
        assert entry.job.job_id not in self._entries, f"job {entry.job.job_id} is under way already"
        self._entries[entry.job.job_id] = entry
        if entry.model_id is None:
            entry.number = self._sample_count
            self._sample_count += 1
            self._samples[entry.job.job_id] = entry
        else:
            self._models.setdefault(entry.model_id, deque()).append(entry)
            self._touched.add(entry.model_id)

    def is_condemned(self, job_id: str) -> bool:
        """Whether the engine died of this job too often to try again."""
        return self._deaths.get(job_id, 0) >= MAX_DEATHS

    def take_sendable(self) -> list[Entry]:
        """The jobs that may go to the engine now; they count as sent."""
        models = list(self._models) if self._deaths else self._touched
        sendable = [entry for model_id in models for entry in self._next_of(model_id)]
        self._touched = set()
        for entry in list(self._samples.values()):
            if self._may_go(entry):
                del self._samples[entry.job.job_id]
                entry.stage = "sent"
                sendable.append(entry)
        return sendable

    def _next_of(self, model_id: str) -> list[Entry]:
        taken = []
        for entry in list(self._models.get(model_id, ()))[:WINDOW]:
            if entry.stage == "waiting":
                if not self._may_go(entry):
                    break
                entry.stage = "sent"
                taken.append(entry)
        return taken

    def _may_go(self, entry: Entry) -> bool:
        if entry.job.job_id not in self._deaths:
            return True
        suspects = (self._entries.get(job_id) for job_id in self._deaths)
        return all(other is None or other.stage == "waiting" for other in suspects)

    def begin(self, job_ids: Iterable[str]) -> None:
        for job_id in job_ids:
            entry = self._entries.get(job_id)
            if entry is not None and entry.stage != "begun":
                entry.stage = "begun"
                self._samples_begun += entry.model_id is None

    def end(self, job_id: str) -> Entry | None:
        """A job came to its end, whichever; it is no longer under way, and no suspect."""
        self._deaths.pop(job_id, None)
        entry = self._entries.pop(job_id, None)
        if entry is not None:
            self._forget(entry)
        return entry

    def _forget(self, entry: Entry) -> None:
        if entry.model_id is None:
            self._samples.pop(entry.job.job_id, None)
            self._samples_begun += entry.stage != "begun"
            return
        queue = self._models[entry.model_id]
        queue.remove(entry)
        self._touched.add(entry.model_id)
        if not queue:
            del self._models[entry.model_id]

    def lose(self, *, blame: bool) -> list[tuple[Entry, bool]]:
        """Everything ends: all jobs in order, and whether each is condemned by it. With `blame` the engine died."""
        lost = list(self._entries.values())
        if blame:
            for entry in lost:
                if entry.stage == "begun":
                    self._deaths[entry.job.job_id] = self._deaths.pop(entry.job.job_id, 0) + 1
            for job_id in list(self._deaths)[: max(0, len(self._deaths) - MAX_REMEMBERED)]:
                del self._deaths[job_id]
        self._entries.clear()
        self._models.clear()
        self._samples.clear()
        self._touched.clear()
        self._samples_begun = self._sample_count
        return [(entry, blame and entry.stage == "begun" and self.is_condemned(entry.job.job_id)) for entry in lost]

    def ahead(self, entry: Entry) -> int:
        """Jobs that come first: of the same model, or samples that were asked for earlier and have not begun."""
        if entry.stage == "begun":
            return 0
        if entry.model_id is None:
            return max(0, entry.number - self._samples_begun)
        return self._models[entry.model_id].index(entry)

    def running(self) -> tuple[int, int]:
        """How many operations and how many samples are being computed."""
        begun = [entry.model_id is None for entry in self._entries.values() if entry.stage == "begun"]
        return len(begun) - sum(begun), sum(begun)

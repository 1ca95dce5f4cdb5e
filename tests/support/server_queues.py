"""The order of one model's jobs: by sequence number, each number once. Pure: no clock, no socket."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

J = TypeVar("J")

FIRST_SEQ_ID = 1


class SequenceError(Exception):
    """A request breaks the order: its number was used for something else, or its turn has passed."""


@dataclass
class JobQueue(Generic[J]):
    """Jobs wait for all lower numbers; a number that was refused for good is passed over."""

    next_seq_id: int = FIRST_SEQ_ID
    _jobs: dict[int, tuple[J, Any]] = field(default_factory=dict)
    _waiting: dict[int, J] = field(default_factory=dict)
    _refused: set[int] = field(default_factory=set)
    _unnumbered: list[J] = field(default_factory=list)

    def known(self, seq_id: int | None, content: Any) -> J | None:
        """The job that already has this number, if its content is the same."""
        if seq_id is None or seq_id not in self._jobs:
            return None
        job, before = self._jobs[seq_id]
        if before != content:
            raise SequenceError(f"seq_id {seq_id} came twice with different content")
        return job

    def add(self, seq_id: int | None, content: Any, job: J) -> None:
        if seq_id is None:
            self._unnumbered.append(job)
            return
        if seq_id < self.next_seq_id:
            raise SequenceError(f"seq_id {seq_id} came after {self.next_seq_id - 1} had run")
        self._jobs[seq_id] = (job, content)
        self._waiting[seq_id] = job
        self._refused.discard(seq_id)

    def refuse(self, seq_id: int) -> None:
        """This number's request was turned down; do not wait for it."""
        if seq_id >= self.next_seq_id and seq_id not in self._waiting:
            self._refused.add(seq_id)

    def take_ready(self) -> list[J]:
        """The jobs whose turn has come, in order."""
        ready, self._unnumbered = self._unnumbered, []
        while self._waiting:
            if self.next_seq_id in self._waiting:
                ready.append(self._waiting.pop(self.next_seq_id))
            elif self.next_seq_id not in self._refused:
                break
            self.next_seq_id += 1
        return ready

    @property
    def stuck(self) -> list[int]:
        """Numbers that wait for a lower one."""
        return sorted(self._waiting)

"""When a snapshot of a run is worth its cost: bookkeeping of what a replay would cost, without I/O.

A snapshot is taken after an `optim_step`, when a run has no accumulated gradients. Its cost is the engine time that it
takes, without writing to the disk; what it saves is the time to recompute everything since the last one.
"""

from __future__ import annotations

from dataclasses import dataclass, field

OVERHEAD_S = 0.002
"""What replaying an operation costs besides device time: reading, decoding, the way to the engine."""
MAX_JOURNAL_BYTES = 256 * 1024 * 1024
"""Journalled bytes since the last snapshot that make another one due, however fast they were computed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SnapshotPolicy:
    """How long a replay may take, and what share of a run's time snapshots may take. If they conflict the share
    wins: replays are rare, training is not."""

    max_replay_s: float = 30.0
    max_share: float = 0.05
    max_journal_bytes: int = MAX_JOURNAL_BYTES

    def is_due(self, *, replay_s: float, journal_bytes: int, snapshot_s: float) -> bool:
        """Whether to take one after this step: at half the limit, so that the steps until the next one fit in, too."""
        is_wanted = replay_s >= self.max_replay_s / 2 or journal_bytes >= self.max_journal_bytes
        return is_wanted and snapshot_s <= self.max_share * replay_s


@dataclass(slots=True)
class _Stretch:
    """What happened between two snapshots."""

    seconds: float = 0.0
    bytes: int = 0


@dataclass(slots=True)
class ReplayCost:
    """What a replay of a run would cost now, and what a snapshot costs. One snapshot is taken at a time."""

    snapshot_s: float = 0.0
    """What the last one took; 0 before the first."""
    not_before_s: float = 0.0
    """After one that failed: how costly a replay must get before the next is tried."""
    _before: _Stretch = field(default_factory=_Stretch)
    """What the snapshot that is being taken contains."""
    _since: _Stretch = field(default_factory=_Stretch)
    _under_way: dict[str, tuple[str, _Stretch]] = field(default_factory=dict)
    _usual_s: dict[str, float] = field(default_factory=dict)
    """What the last operation of each kind took; the estimate for those that are running."""

    @property
    def replay_s(self) -> float:
        expected = sum(self._usual_s.get(kind, 0.0) for kind, _ in self._under_way.values())
        return self._before.seconds + self._since.seconds + expected

    @property
    def journal_bytes(self) -> int:
        return self._before.bytes + self._since.bytes

    def is_due(self, policy: SnapshotPolicy) -> bool:
        replay_s = self.replay_s
        return replay_s >= self.not_before_s and policy.is_due(
            replay_s=replay_s, journal_bytes=self.journal_bytes, snapshot_s=self.snapshot_s
        )

    def begin(self, job_id: str, kind: str, size_bytes: int) -> None:
        """Count an operation that changes the run's state and was submitted."""
        self._since.bytes += size_bytes
        self._under_way[job_id] = (kind, self._since)

    def end(self, job_id: str, seconds: float | None) -> None:
        """Count its time; None if it changed nothing."""
        found = self._under_way.pop(job_id, None)
        if found is not None and seconds is not None:
            kind, stretch = found
            stretch.seconds += seconds + OVERHEAD_S
            self._usual_s[kind] = seconds + OVERHEAD_S

    def cut(self) -> None:
        """A snapshot was submitted: it will contain everything up to here."""
        self._before, self._since = self._merged(), _Stretch()
        self._under_way = {job_id: (kind, self._before) for job_id, (kind, _) in self._under_way.items()}

    def kept(self, seconds: float) -> None:
        """The snapshot was kept, and took this long."""
        self._before = _Stretch()
        self.snapshot_s = seconds
        self.not_before_s = 0.0

    def failed(self) -> None:
        """The snapshot failed: what it would have contained counts again, and the next one waits."""
        self._since, self._before = self._merged(), _Stretch()
        self._under_way = {job_id: (kind, self._since) for job_id, (kind, _) in self._under_way.items()}
        self.not_before_s = 2 * self.replay_s

    def restart(self) -> None:
        """The state was lost: what a replay applies again is counted as it comes."""
        self._before, self._since = _Stretch(), _Stretch()
        self._under_way.clear()
        self.not_before_s = 0.0

    def _merged(self) -> _Stretch:
        return _Stretch(self._before.seconds + self._since.seconds, self._before.bytes + self._since.bytes)

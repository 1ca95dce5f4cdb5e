"""Replay: compute a run's state again from its journal, and compare each result with the one that was delivered.

The journal is the `jobs` table: every accepted request of a run (its lane), in the order of their numbers, with its
payload. An operation was applied if and only if its row says `done`, even if its client got an error afterwards (for
example because the result could not be stored). One that failed, was cancelled, exceeded its budget or was condemned
left the model unchanged (`Executor.train`), and is not replayed. Jobs that only read, such as saves and forward passes,
are skipped. What remains runs in the same order on the same weights, and gives the same bits.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import TypeVar

import msgspec

from tinsmith.engine.protocol import (
    AnyJob,
    Backend,
    Created,
    CreateModel,
    Done,
    ForwardBackward,
    LoadState,
    OptimStep,
    decode_job,
)
from tinsmith.errors import StoreError
from tinsmith.server.jobs.job import digest_of
from tinsmith.store.base import Row, RowT, Store
from tinsmith.store.rows import CountRow, ModelRow
from tinsmith.wire.codecs.proto_outputs import without_metric
from tinsmith.wire.rules.optim_metrics import body_with_former_names

logger = logging.getLogger(__name__)

T = TypeVar("T")

REPLAY_PAGE = 8
"""Journal rows read at a time; each is as large as its request."""
AT_ONCE = 3
"""Operations of a replay that are at the backend at once, so that it need not wait for the next one."""
RETRY_S = (0.1, 0.5, 1.0, 2.0, 5.0)
"""Pauses between attempts; the last one repeats."""


class NumberRow(Row, frozen=True, kw_only=True):
    """A number of a lane, and the state of its request."""

    seq: int
    state: str


class ReplayRow(Row, frozen=True, kw_only=True):
    """A finished job of the journal, with the digest of its result."""

    seq: int
    job: bytes
    digest: str


@dataclass(frozen=True, slots=True)
class Origin:
    """Where a run's state begins: a new adapter, or a snapshot that contains the journal up to `seq`."""

    create: CreateModel
    seq: int = 0

    @classmethod
    def of(cls, row: ModelRow, create: CreateModel) -> Origin:
        """Return where a run begins according to its row."""
        if row.snapshot_directory is None:
            return cls(create)
        return cls(create, 0).at(row.snapshot_directory, row.snapshot_seq)

    def at(self, directory: str, seq: int) -> Origin:
        """Return the same run, beginning at a snapshot."""
        return Origin(msgspec.structs.replace(self.create, directory=directory, optimizer=True), seq)


@dataclass(frozen=True, slots=True)
class Replayed:
    """One step of a replay. `done` is None if the operation changes nothing and was skipped."""

    row: ReplayRow
    job: AnyJob
    done: Done | None

    @property
    def is_same(self) -> bool:
        if self.done is None or digest_of(self.done.body) == self.row.digest:
            return True
        former = _former_body(self.job, self.done.body)
        return former is not None and digest_of(former) == self.row.digest


def _former_body(job: AnyJob, body: bytes) -> bytes | None:
    """Return a result as earlier versions wrote it: the journal may be older than this version."""
    if isinstance(job, OptimStep):
        return body_with_former_names(body)
    if isinstance(job, ForwardBackward):
        return without_metric(body, "weights:min")
    return None


async def for_sure(act: Callable[[], Awaitable[T]], what: str) -> T:
    """Use the store, retrying until it succeeds: there is nobody to report a failure to."""
    attempt = 0
    while True:
        try:
            return await act()
        except StoreError as error:
            logger.error("%s, retrying until it can: %s", what, error)
            await asyncio.sleep(pause_s(attempt))
            attempt += 1


class Journal:
    """The finished operations of all lanes."""

    def __init__(self, store: Store) -> None:
        self._store = store

    async def length(self, lane: str, after: int) -> int:
        return (await self._read(CountRow, "journal_length", lane=lane, after=after))[0].count

    async def page(self, lane: str, after: int) -> list[ReplayRow]:
        return await self._read(ReplayRow, "journal", lane=lane, after=after, limit=REPLAY_PAGE)

    async def _read(self, row_type: type[RowT], query: str, **parameters: str | int) -> list[RowT]:
        return await for_sure(lambda: self._store.read(row_type, query, **parameters), "the journal cannot be read")


async def replay(journal: Journal, backend: Backend, lane: str, after: int) -> AsyncIterator[Replayed]:
    """Apply the jobs that finished after a number again, in order; raises what the backend raises."""
    waiting: deque[tuple[ReplayRow, AnyJob, asyncio.Future[Done] | None]] = deque()
    try:
        while page := await journal.page(lane, after):
            for row in page:
                job = decode_job(row.job)
                waiting.append((row, job, backend.submit(replace_id(job)) if changes_state(job) else None))
                if len(waiting) >= AT_ONCE:
                    yield await _replayed(*waiting.popleft())
            after = page[-1].seq
        while waiting:
            yield await _replayed(*waiting.popleft())
    finally:
        for _, _, future in waiting:  # what was submitted after one that failed
            if future is not None:
                future.add_done_callback(_seen)


async def _replayed(row: ReplayRow, job: AnyJob, future: asyncio.Future[Done] | None) -> Replayed:
    return Replayed(row, job, None if future is None else await future)


def _seen(future: asyncio.Future[Done]) -> None:
    """Mark an exception as retrieved: nobody else waits for it."""
    if not future.cancelled():
        future.exception()


def pause_s(attempt: int) -> float:
    return RETRY_S[min(attempt, len(RETRY_S) - 1)]


def changes_state(job: AnyJob) -> bool:
    """Whether a job changes the model; saves and forward passes do not."""
    if isinstance(job, ForwardBackward):
        return not job.is_forward
    return isinstance(job, (OptimStep, LoadState))


def replace_id(job: AnyJob) -> AnyJob:
    """Return the job under another id, so that a backend never sees one id twice, and without its time limits: what
    finished once must finish again, on however slow a machine."""
    if isinstance(job, ForwardBackward):
        job = msgspec.structs.replace(job, max_device_s=None, max_loss_device_s=None)
    return msgspec.structs.replace(job, job_id=f"replay-{job.job_id}")


def fingerprint_in(done: Done) -> dict[str, str]:
    """Return the fingerprint of the engine that created a model."""
    return msgspec.json.decode(done.body, type=Created).fingerprint


def fingerprint_text(fingerprint: Mapping[str, str]) -> str | None:
    """Return a fingerprint as rows hold it; None if nothing is known."""
    return msgspec.json.encode(fingerprint, order="sorted").decode() if fingerprint else None


def machine_change(before: str | None, now: Mapping[str, str]) -> str | None:
    """Describe how an engine differs from the one that computed a run before; None if it does not, or is unknown."""
    known: dict[str, str] = msgspec.json.decode(before) if before is not None else {}
    changes = [f"{name} {known[name]} -> {now[name]}" for name in sorted(known) if known[name] != now.get(name, "")]
    if not changes or not now:
        return None
    return f"computed on a different machine than before, results may differ in the last bits: {', '.join(changes)}"

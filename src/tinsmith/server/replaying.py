"""Replays: a run's state computed again from its journal, each result compared with what was delivered.

Does not know: when a replay is needed (`runs`), how snapshots come about (`snapshotting`).
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import TypeVar

import msgspec

from tinsmith.engine.base import (
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
from tinsmith.server.work import digest_of
from tinsmith.store.base import Row, RowT, Store
from tinsmith.store.rows import CountRow, ModelRow

logger = logging.getLogger(__name__)

T = TypeVar("T")

REPLAY_PAGE = 8
"""Journal rows read at a time; each can be as large as a request."""
AT_ONCE = 3
"""Operations of a replay at the backend."""
RETRY_S = (0.1, 0.5, 1.0, 2.0, 5.0)
"""Pauses between tries; the last one repeats."""


class NumberRow(Row, frozen=True, kw_only=True):
    """A number of a lane, and what became of it."""

    seq: int
    state: str


class ReplayRow(Row, frozen=True, kw_only=True):
    """A finished job of the journal, with the digest of what it gave."""

    seq: int
    job: bytes
    digest: str


@dataclass(frozen=True, slots=True)
class Origin:
    """How a run's state begins: a new adapter, or a snapshot that contains the journal up to `seq`."""

    create: CreateModel
    seq: int = 0

    @classmethod
    def of(cls, row: ModelRow, create: CreateModel) -> Origin:
        """Where a run begins according to its row."""
        if row.snapshot_directory is None:
            return cls(create)
        return cls(create, 0).at(row.snapshot_directory, row.snapshot_seq)

    def at(self, directory: str, seq: int) -> Origin:
        """The same run from a snapshot on."""
        return Origin(msgspec.structs.replace(self.create, directory=directory, optimizer=True), seq)


@dataclass(frozen=True, slots=True)
class Replayed:
    """One step of a replay. `done` is None where the journal's operation left no trace and was skipped."""

    row: ReplayRow
    job: AnyJob
    done: Done | None

    @property
    def is_same(self) -> bool:
        return self.done is None or digest_of(self.done.body) == self.row.digest


async def for_sure(act: Callable[[], Awaitable[T]], what: str) -> T:
    """Use the store however long it takes: nobody could be told of a failure."""
    attempt = 0
    while True:
        try:
            return await act()
        except StoreError as error:
            logger.error("%s, trying again until it can: %s", what, error)
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
    """Apply what finished behind a number again, in order. Raises what the backend says to an operation.

    A few operations are at the backend at a time, so that it need not wait for the next one.
    """
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
        for _, _, future in waiting:  # what was handed over behind one that failed
            if future is not None:
                future.add_done_callback(_seen)


async def _replayed(row: ReplayRow, job: AnyJob, future: asyncio.Future[Done] | None) -> Replayed:
    return Replayed(row, job, None if future is None else await future)


def _seen(future: asyncio.Future[Done]) -> None:
    """Marks an exception as looked at: nobody else waits for it."""
    if not future.cancelled():
        future.exception()


def pause_s(attempt: int) -> float:
    return RETRY_S[min(attempt, len(RETRY_S) - 1)]


def changes_state(job: AnyJob) -> bool:
    """Whether a replay needs the job; a save or a forward pass leaves no trace."""
    if isinstance(job, ForwardBackward):
        return not job.is_forward
    return isinstance(job, (OptimStep, LoadState))


def replace_id(job: AnyJob) -> AnyJob:
    """The same job under another id, so that a backend never sees one id twice."""
    return msgspec.structs.replace(job, job_id=f"replay-{job.job_id}")


def fingerprint_in(done: Done) -> dict[str, str]:
    """What the engine that made a model says of itself."""
    return msgspec.json.decode(done.body, type=Created).fingerprint


def fingerprint_text(fingerprint: Mapping[str, str]) -> str | None:
    """As rows keep it; None where nothing is known."""
    return msgspec.json.encode(fingerprint, order="sorted").decode() if fingerprint else None


def machine_change(before: str | None, now: Mapping[str, str]) -> str | None:
    """In what an engine differs from the one that computed a run before; None: not at all, or one is not known."""
    known: dict[str, str] = msgspec.json.decode(before) if before is not None else {}
    changes = [f"{name} {known[name]} -> {now[name]}" for name in sorted(known) if known[name] != now.get(name, "")]
    if not changes or not now:
        return None
    return f"computed on another machine than before, results may differ in the last bits: {', '.join(changes)}"

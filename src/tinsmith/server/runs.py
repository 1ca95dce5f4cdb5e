"""Training runs: each model's jobs in order to the backend, and its state rebuilt when the backend lost it.

A run is a function of its journal: creating the model and applying the finished jobs again, in order, gives the same
state. So when the backend's epoch changes, the run is restored (from its snapshot, if it has one, and the journal
behind it), what was under way is submitted again, and no client notices more than the wait. Results are compared with
what was delivered; a difference marks the run.
Does not know: HTTP, how results are kept (`jobs`).
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from tinsmith.engine.base import (
    AnyJob,
    Backend,
    BackendLostError,
    CreateModel,
    Done,
    ForwardBackward,
    JobCancelledError,
    JobFailedError,
    LoadState,
    OptimStep,
    Position,
    SaveState,
    Unload,
    decode_job,
)
from tinsmith.errors import StoreError
from tinsmith.server.files import remove_tree
from tinsmith.server.jobs import Jobs
from tinsmith.server.lanes import Lane
from tinsmith.server.work import Work, digest_of
from tinsmith.store.base import Row, RowT, Store, statement
from tinsmith.store.rows import CountRow, JobRow, ModelRow

logger = logging.getLogger(__name__)

REPLAY_PAGE = 64
"""Journal rows read at a time."""
RETRY_S = (0.1, 0.5, 1.0, 2.0, 5.0)
"""Pauses between tries to restore; the last one repeats."""
OVER = "the session is over"


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


class Run:
    """One model. All methods are called on the server's loop."""

    def __init__(self, row: ModelRow, origin: Origin, lane: Lane[Work], runs: Runs) -> None:
        self.row = row
        self.origin = origin
        self.lane = lane
        self.reason = ""
        self._runs = runs
        self._under_way: deque[Work] = deque()
        self._create: Work | None = None
        self._epoch: int | None = None
        self._restoring: asyncio.Task[None] | None = None
        self.is_closed = False
        self.failure: JobFailedError | None = None
        """Why the model could not be made."""

    def create(self, work: Work) -> None:
        """The request that makes the model; its result is due when the model is there."""
        self._create = work
        self.pump()

    def put(self, work: Work) -> None:
        """Queue a request under its number."""
        if self.is_closed:
            self._runs.jobs.finish(work, JobCancelledError(OVER))
            return
        self.lane.put(work.row.seq, work)
        self.pump()

    def close_number(self, number: int) -> None:
        self.lane.close(number)
        self.pump()

    def pump(self) -> None:
        """Hand everything whose turn it is to the backend."""
        if self._restoring is not None or self.is_closed or self._runs.is_stopped:
            return
        if self._epoch != self._runs.backend.epoch_of(self.row.base_model):
            self._restoring = asyncio.get_running_loop().create_task(self._restore())
            return
        for work in self.lane.ready():
            self._submit(work)

    def cancel(self, request_id: str) -> bool:
        """Drop a request that waits for its turn, or ask the backend to drop it."""
        for work in self.lane.waiting():
            if work.row.request_id == request_id:
                self.lane.remove(work.row.seq)
                self._runs.jobs.finish(work, JobCancelledError("cancelled"))
                self.pump()
                return True
        self._runs.backend.cancel(request_id)
        return any(work.row.request_id == request_id for work in self._under_way)

    def position(self, request_id: str) -> Position:
        """Where a request stands, for the one who waits."""
        if self._restoring is not None:
            return Position(ahead=len(self._under_way), reason=self.reason or "the run is being prepared")
        for index, work in enumerate(self.lane.waiting()):
            if work.row.request_id == request_id:
                missing = self.lane.missing()
                return Position(
                    ahead=len(self._under_way) + index,
                    reason=f"waiting for request number {missing} of {self.row.model_id}, which has not arrived",
                )
        return self._runs.backend.position(request_id)

    async def close(self) -> None:
        """Forget the model in the backend. What still waits is cancelled."""
        self.is_closed = True
        was_restoring = await self.stop()
        for work in self._under_way:
            self._runs.backend.cancel(work.row.request_id)
        over = [*self.lane.waiting(), *([self._create] if self._create is not None else [])]
        for work in self.lane.waiting():
            self.lane.remove(work.row.seq)
        if was_restoring:  # then the backend has nothing of what is under way
            over += self._under_way
            self._under_way.clear()
        for work in over:
            self._runs.jobs.finish(work, JobCancelledError(OVER))
        self._create = None
        if was_restoring or self._epoch == self._runs.backend.epoch_of(self.row.base_model):
            job = Unload(
                job_id=f"unload-{self.row.model_id}",
                tenant=self.row.org_id,
                base_model=self.row.base_model,
                model_id=self.row.model_id,
            )
            try:
                await self._runs.backend.submit(job)
            except (JobFailedError, JobCancelledError, BackendLostError) as error:
                logger.debug("unloading %s: %s", self.row.model_id, error)

    async def stop(self) -> bool:
        """Give up restoring; returns whether that was under way."""
        restoring, self._restoring = self._restoring, None
        if restoring is None:
            return False
        restoring.cancel()
        await asyncio.gather(restoring, return_exceptions=True)
        return True

    def _submit(self, work: Work) -> None:
        work.started_at = work.started_at or self._runs.clock()
        self._under_way.append(work)
        if self.failure is not None:
            self._end(work, self.failure)
            return
        if isinstance(work.job, SaveState):  # what an earlier try wrote was never told to anyone
            remove_tree(Path(work.job.directory))
        future = self._runs.backend.submit(work.job, work.on_tokens)
        future.add_done_callback(lambda done: self._done(work, done))

    def _done(self, work: Work, future: asyncio.Future[Done]) -> None:
        error = asyncio.CancelledError() if future.cancelled() else future.exception()
        if isinstance(error, (BackendLostError, asyncio.CancelledError)):
            self._epoch = None
            self.pump()
            return
        self._end(work, error if error is not None else future.result())

    def _end(self, work: Work, result: Done | BaseException) -> None:
        if work in self._under_way:  # else an answer from a time before the loss
            self._under_way.remove(work)
            self._runs.jobs.finish(work, result)

    async def _restore(self) -> None:
        """Bring the model back (or make it for the first time), then hand over what waits."""
        attempt = 0
        while not self.is_closed:
            try:
                await self._runs.ready(self.row.base_model)
                epoch = self._runs.backend.epoch_of(self.row.base_model)
                await self._rebuild()
                self._epoch = epoch
                break
            except BackendLostError as error:
                self.reason = f"the engine stopped while the run was being restored, trying again: {error}"
                await asyncio.sleep(RETRY_S[min(attempt, len(RETRY_S) - 1)])
                attempt += 1
            except JobFailedError as error:
                self._fail(error)
                break
        self._restoring = None
        self.reason = ""
        again, self._under_way = list(self._under_way), deque()
        for work in again:
            self._submit(work)
        self.pump()

    async def _rebuild(self) -> None:
        backend = self._runs.backend
        self.reason = f"loading {self.row.base_model}"
        is_new = self._create is not None
        made = await backend.submit(self.origin.create if is_new else replace_id(self.origin.create))
        if self._create is not None:
            create, self._create = self._create, None
            self._runs.jobs.finish(create, made)
            return
        await self._replay()

    async def _replay(self) -> None:
        await self._runs.jobs.kept(self.row.model_id)
        total = await self._runs.journal_length(self.row.model_id, self.origin.seq)
        if total:
            logger.info("restoring %s: %d operations to replay", self.row.model_id, total)
        done, after = 0, self.origin.seq
        while True:
            page = await self._runs.journal(self.row.model_id, after)
            if not page:
                return
            for row in page:
                self.reason = f"restoring run after restart: {done} of {total} operations replayed"
                job = decode_job(row.job)
                if changes_state(job):
                    result = await self._runs.backend.submit(replace_id(job))
                    if digest_of(result.body) != row.digest:
                        await self._mark(f"request {row.seq} gave another result when it was replayed")
                done += 1
                after = row.seq

    async def _mark(self, fault: str) -> None:
        """The run is not what it was: say so wherever it is shown."""
        logger.error("run %s: %s", self.row.model_id, fault)
        if self.row.fault is None:
            self.row = ModelRow(**{**self.row.parameters(), "fault": fault})  # type: ignore[arg-type]
            await self._runs.store.write(statement("set_model_fault", model_id=self.row.model_id, fault=fault))

    def _fail(self, error: JobFailedError) -> None:
        self.failure = JobFailedError(f"{self.row.model_id} could not be made: {error}", error.category)
        self._epoch = self._runs.backend.epoch_of(self.row.base_model)
        if self._create is not None:
            create, self._create = self._create, None
            self._runs.jobs.finish(create, error)


class Runs:
    """All runs that this process has touched."""

    def __init__(self, store: Store, backend: Backend, jobs: Jobs, *, clock: Callable[[], float] = time.time) -> None:
        self.store = store
        self.backend = backend
        self.jobs = jobs
        self.clock = clock
        self.is_stopped = False
        self._runs: dict[str, Run] = {}
        self._loading: dict[str, asyncio.Future[Run | None]] = {}
        self._forgetting: set[asyncio.Task[None]] = set()

    def add(self, row: ModelRow, create: CreateModel) -> Run:
        """A run that was just accepted."""
        run = self._runs[row.model_id] = Run(row, Origin(create), Lane(), self)
        return run

    def known(self, model_id: str) -> Run | None:
        return self._runs.get(model_id)

    def all(self) -> list[Run]:
        return list(self._runs.values())

    async def get(self, row: ModelRow) -> Run:
        """The run of a model; from the store if this process has not seen it."""
        run = self._runs.get(row.model_id)
        if run is not None:
            return run
        loading = self._loading.get(row.model_id)
        if loading is None:
            loading = self._loading[row.model_id] = asyncio.ensure_future(self._load(row))
            loading.add_done_callback(lambda _: self._loading.pop(row.model_id, None))
        loaded = await asyncio.shield(loading)
        assert loaded is not None
        return loaded

    async def forget(self, model_id: str) -> None:
        """Unload a model and drop its run."""
        run = self._runs.pop(model_id, None)
        if run is not None:
            await run.close()

    def forget_soon(self, model_id: str) -> None:
        """The same for those who cannot wait for it; `stop` does."""
        task = asyncio.get_running_loop().create_task(self.forget(model_id))
        self._forgetting.add(task)
        task.add_done_callback(self._forgetting.discard)

    async def ready(self, base_model: str) -> None:
        """Wait until the backend takes jobs."""
        attempt = 0
        while self.backend.status.state in ("starting", "restarting"):
            await asyncio.sleep(RETRY_S[min(attempt, 1)])
            attempt += 1

    async def stop(self) -> None:
        """The server goes down: what is being restored waits in the journal for the next start."""
        self.is_stopped = True
        for run in self.all():
            await run.stop()
        await asyncio.gather(*self._forgetting, return_exceptions=True)

    async def journal(self, lane: str, after: int) -> list[ReplayRow]:
        return await self._read(ReplayRow, "journal", lane=lane, after=after, limit=REPLAY_PAGE)

    async def journal_length(self, lane: str, after: int) -> int:
        return (await self._read(CountRow, "journal_length", lane=lane, after=after))[0].count

    async def _read(self, row_type: type[RowT], query: str, **parameters: str | int) -> list[RowT]:
        """Read however long it takes: a restore that is half done has nobody to tell of it."""
        attempt = 0
        while True:
            try:
                return await self.store.read(row_type, query, **parameters)
            except StoreError as error:
                logger.error("the journal cannot be read, trying again until it can: %s", error)
                await asyncio.sleep(RETRY_S[min(attempt, len(RETRY_S) - 1)])
                attempt += 1

    async def _load(self, row: ModelRow) -> Run:
        await self.jobs.kept(row.model_id)
        creation = await self.store.read(JobRow, "job_by_number", **creation_number(row.model_id))
        numbers = await self.store.read(NumberRow, "lane_numbers", lane=row.model_id)
        queued = await self.store.read(JobRow, "queued_of_lane", lane=row.model_id)
        create = Work.from_row(creation[0])
        assert isinstance(create.job, CreateModel)
        lane: Lane[Work] = Lane(
            (number.seq for number in numbers if number.state != "queued"), first=row.snapshot_seq + 1 or 1
        )
        run = Run(row, self._origin(row, create.job), lane, self)
        self._runs[row.model_id] = run
        if creation[0].state == "queued":
            self.jobs.reopen(create)
            run.create(create)
        elif creation[0].state == "failed":
            run.failure = JobFailedError(f"{row.model_id} could not be made", "server")
        for job_row in queued:
            work = Work.from_row(job_row)
            self.jobs.reopen(work)
            run.put(work)
        return run

    @staticmethod
    def _origin(row: ModelRow, create: CreateModel) -> Origin:
        if row.snapshot_directory is None:
            return Origin(create)
        return Origin(
            CreateModel(
                job_id=create.job_id,
                tenant=create.tenant,
                base_model=create.base_model,
                model_id=create.model_id,
                lora=create.lora,
                directory=row.snapshot_directory,
                optimizer=True,
            ),
            row.snapshot_seq,
        )


def creation_lane(session_id: str) -> str:
    """Where a session's models are numbered."""
    return f"{session_id}/models"


def creation_number(model_id: str) -> dict[str, str | int]:
    session_id, _, number = model_id.rpartition(":train:")
    return {"lane": creation_lane(session_id), "seq": int(number)}


def changes_state(job: AnyJob) -> bool:
    """Whether a replay needs the job; a save or a forward pass leaves no trace."""
    if isinstance(job, ForwardBackward):
        return not job.is_forward
    return isinstance(job, (OptimStep, LoadState))


def replace_id(job: AnyJob) -> AnyJob:
    """The same job under another id, so that a backend never sees one id twice."""
    return type(job)(**{**{f: getattr(job, f) for f in job.__struct_fields__}, "job_id": f"replay-{job.job_id}"})

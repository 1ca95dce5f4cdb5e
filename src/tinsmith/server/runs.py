"""Training runs: each model's jobs in order to the backend, and its state rebuilt when the backend lost it.

A run is a function of its journal: creating the model and applying the finished jobs again, in order, gives the same
state. So when the backend's epoch changes, the run is restored (from its snapshot, if it has one, and the journal
behind it), what was under way is submitted again, and no client notices more than the wait. Results are compared with
what was delivered; a difference marks the run.
Does not know: HTTP, how results are kept (`jobs`), how a replay goes (`replaying`), when snapshots are taken
(`snapshots`).
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import Awaitable, Callable
from pathlib import Path

from tinsmith.engine.base import (
    Backend,
    BackendLostError,
    CreateModel,
    Done,
    EngineDownError,
    JobCancelledError,
    JobFailedError,
    OptimStep,
    Position,
    SaveState,
    Unload,
)
from tinsmith.server.files import remove_tree
from tinsmith.server.jobs import Jobs
from tinsmith.server.lanes import Lane
from tinsmith.server.replaying import (
    RETRY_S,
    Journal,
    NumberRow,
    Origin,
    changes_state,
    fingerprint_in,
    fingerprint_text,
    for_sure,
    machine_change,
    pause_s,
    replace_id,
    replay,
)
from tinsmith.server.snapshotting import Snapshots, SnapshotTools
from tinsmith.server.work import Work
from tinsmith.store.base import Statement, Store, statement
from tinsmith.store.rows import JobRow, ModelRow

logger = logging.getLogger(__name__)

AHEAD = 8
"""Requests of one run that are at the backend: enough to keep it busy, few enough to take a snapshot between them."""
OVER = "the session is over"


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
        self._snapshots = Snapshots(runs.tools, row, self._begin_at)
        self.is_closed = False
        self.is_unmade = False
        """The model could not be made, and nobody waits for it any more."""
        self.failure: JobFailedError | None = None
        """Why the model could not be made or restored."""

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
        if self._epoch != self._runs.backend.epoch_of(self.row.base_model) and not self.is_unmade:
            self._restoring = asyncio.get_running_loop().create_task(self._restore())
            return
        while len(self._under_way) < AHEAD and (work := self.lane.take()) is not None:
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
                ahead, missing = len(self._under_way) + index, self.lane.missing()
                if missing is None:
                    return Position(ahead=ahead, reason=f"waits for {ahead} earlier operations of the same model")
                reason = f"waiting for request number {missing} of {self.row.model_id}, which has not arrived"
                return Position(ahead=ahead, reason=reason)
        return self._runs.backend.position(request_id)

    async def close(self) -> None:
        """Forget the model in the backend. What still waits is cancelled."""
        self.is_closed = True
        was_restoring = await self._stop_restoring()
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
            await self._unload()
        await self._snapshots.settled()  # whoever loads the run next must see what it comes to

    async def stop(self) -> None:
        """The server goes down: what is being restored waits in the journal for the next start."""
        await self._stop_restoring()
        await self._snapshots.stop()

    async def _stop_restoring(self) -> bool:
        """Give up restoring; returns whether that was under way."""
        restoring, self._restoring = self._restoring, None
        if restoring is None:
            return False
        restoring.cancel()
        await asyncio.gather(restoring, return_exceptions=True)
        return True

    async def _unload(self) -> None:
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

    def _submit(self, work: Work) -> None:
        work.started_at = work.started_at or self._runs.clock()
        if self.failure is not None:
            self._runs.jobs.finish(work, self.failure)
            return
        self._under_way.append(work)
        if isinstance(work.job, SaveState):  # what an earlier try wrote was never told to anyone
            remove_tree(Path(work.job.directory))
        if changes_state(work.job):
            self._snapshots.cost.begin(work.job.job_id, work.row.kind, len(work.row.job))
        future = self._runs.backend.submit(work.job, work.on_tokens)
        future.add_done_callback(lambda done: self._done(work, done))
        if isinstance(work.job, OptimStep):
            self._snapshots.consider(work.row.seq, future)

    def _done(self, work: Work, future: asyncio.Future[Done]) -> None:
        error = asyncio.CancelledError() if future.cancelled() else future.exception()
        if isinstance(error, (BackendLostError, EngineDownError, asyncio.CancelledError)):
            self._epoch = None
        elif work in self._under_way:  # else an answer from a time before the loss
            self._under_way.remove(work)
            self._snapshots.cost.end(work.job.job_id, future.result().device_s if error is None else None)
            self._runs.jobs.finish(work, error if error is not None else future.result())
        self.pump()

    async def _restore(self) -> None:
        """Bring the model back (or make it for the first time), then hand over what waits."""
        await self._snapshots.settled()
        attempt = 0
        while not self.is_closed:
            is_new = self._create is not None
            try:
                await self._runs.ready(self.row.base_model)
                epoch = self._runs.backend.epoch_of(self.row.base_model)
                await self._rebuild()
                self._epoch, self.failure = epoch, None
                break
            except BackendLostError as error:
                self.reason = f"the engine stopped while the run was being restored, trying again: {error}"
            except JobFailedError as error:
                is_waiting = isinstance(error, EngineDownError)
                if is_new or (not is_waiting and attempt >= len(RETRY_S)):
                    await self._fail(error)
                    break
                was, self.reason = self.reason, f"the run cannot be restored yet, trying again: {error}"
                if was != self.reason:
                    logger.warning("%s: %s", self.row.model_id, self.reason, extra={"event": "restore_delayed"})
                if not is_waiting:
                    await self._unload()  # what was made of it half
            await asyncio.sleep(pause_s(attempt))
            attempt += 1
        self._restoring = None
        self.reason = ""
        again, self._under_way = list(self._under_way), deque()
        for work in again:
            self._submit(work)
        self.pump()

    async def _rebuild(self) -> None:
        self.reason = f"loading {self.row.base_model}"
        self._snapshots.cost.restart()
        is_new = self._create is not None
        made = await self._runs.backend.submit(self.origin.create if is_new else replace_id(self.origin.create))
        self._snapshots.fingerprint = fingerprint_in(made)
        if self._create is not None:
            create, self._create = self._create, None
            self.row = replaced(self.row, fingerprint=fingerprint_text(self._snapshots.fingerprint))
            self._runs.jobs.finish(create, made)
            return
        await self._compare_machines()
        await self._replay()

    async def _replay(self) -> None:
        """Apply what finished behind the origin again, and look whether it gives the same."""
        lane = self.row.model_id
        await self._runs.jobs.kept(lane)
        total, number = await self._runs.journal.length(lane, self.origin.seq), 0
        self.reason = f"restoring run after restart: 0 of {total} operations replayed"
        if total:
            logger.info("restoring %s: %d operations to replay", lane, total, extra={"event": "restoring"})
        async for step in replay(self._runs.journal, self._runs.backend, lane, self.origin.seq):
            number += 1
            self.reason = f"restoring run after restart: {number} of {total} operations replayed"
            if step.done is not None:
                self._runs.count_replayed()
                self._snapshots.cost.begin(step.job.job_id, type(step.job).__name__, len(step.row.job))
                self._snapshots.cost.end(step.job.job_id, step.done.device_s)
            if not step.is_same:
                await self._mark(f"request {step.row.seq} gave another result when it was replayed")

    def _begin_at(self, directory: str, seq: int) -> None:
        """A snapshot counts: from now on a restore begins there."""
        self.origin = self.origin.at(directory, seq)
        fingerprint = fingerprint_text(self._snapshots.fingerprint)
        self.row = replaced(self.row, snapshot_directory=directory, snapshot_seq=seq, fingerprint=fingerprint)

    async def _compare_machines(self) -> None:
        """Say if the engine is not the one that computed the run before; it goes on all the same."""
        notice = machine_change(self.row.fingerprint, self._snapshots.fingerprint)
        if notice is not None and notice != self.row.notice:
            logger.warning("run %s: %s", self.row.model_id, notice, extra={"event": "machine_changed"})
            self.row = replaced(self.row, notice=notice)
            await self._runs.write(statement("set_model_notice", model_id=self.row.model_id, notice=notice))

    async def _mark(self, fault: str) -> None:
        """The run is not what it was: say so wherever it is shown."""
        logger.error("run %s: %s", self.row.model_id, fault)
        if self.row.fault is None:
            self.row = replaced(self.row, fault=fault)
            await self._runs.write(statement("set_model_fault", model_id=self.row.model_id, fault=fault))

    async def _fail(self, error: JobFailedError) -> None:
        if self._create is not None:
            create, self._create, self.is_unmade = self._create, None, True
            self._runs.jobs.finish(create, error)
            text = f"{self.row.model_id} could not be made: {error}"
        else:
            text = f"{self.row.model_id} could not be restored: {error}; {await self._runs.advise(self.row.model_id)}"
            logger.error("run %s", text, extra={"event": "restore_failed"})
        self.failure = JobFailedError(text, error.category)
        self._epoch = self._runs.backend.epoch_of(self.row.base_model)


async def no_advice(model_id: str) -> str:
    return "go on from a checkpoint"


class Runs:
    """All runs that this process has touched."""

    def __init__(
        self,
        tools: SnapshotTools,
        *,
        clock: Callable[[], float] = time.time,
        advise: Callable[[str], Awaitable[str]] = no_advice,
        count_replayed: Callable[[], None] = lambda: None,
    ) -> None:
        """`advise` says what the owner of a run that is lost can go on with."""
        self.tools = tools
        self.store: Store = tools.store
        self.backend: Backend = tools.backend
        self.jobs: Jobs = tools.jobs
        self.journal = Journal(tools.store)
        self.clock = clock
        self.advise = advise
        self.count_replayed = count_replayed
        self.is_stopped = False
        self._runs: dict[str, Run] = {}
        self._loading: dict[str, asyncio.Future[Run | None]] = {}

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

    async def ready(self, base_model: str) -> None:
        """Wait until the backend takes jobs."""
        attempt = 0
        while self.backend.status.state in ("starting", "restarting"):
            await asyncio.sleep(pause_s(min(attempt, 1)))
            attempt += 1

    async def stop(self) -> None:
        """The server goes down: what is being restored waits in the journal for the next start."""
        self.is_stopped = True
        for run in self.all():
            await run.stop()

    async def write(self, *statements: Statement) -> None:
        """Write what a restore found; it has nobody to tell of a failure."""
        await for_sure(lambda: self.store.write(*statements), "what became of a run cannot be written")

    async def _load(self, row: ModelRow) -> Run:
        await self.jobs.kept(row.model_id)
        row = (await self.store.read(ModelRow, "model", model_id=row.model_id))[0]  # with its newest snapshot
        creation = await self.store.read(JobRow, "job_by_number", **creation_number(row.model_id))
        numbers = await self.store.read(NumberRow, "lane_numbers", lane=row.model_id)
        queued = await self.store.read(JobRow, "queued_of_lane", lane=row.model_id)
        create = Work.from_row(creation[0])
        assert isinstance(create.job, CreateModel)
        lane: Lane[Work] = Lane(
            (number.seq for number in numbers if number.state != "queued"), first=row.snapshot_seq + 1 or 1
        )
        run = Run(row, Origin.of(row, create.job), lane, self)
        self._runs[row.model_id] = run
        if creation[0].state == "queued":
            self.jobs.reopen(create)
            run.create(create)
        elif creation[0].state == "failed":
            run.failure, run.is_unmade = JobFailedError(f"{row.model_id} could not be made", "server"), True
        for job_row in queued:
            work = Work.from_row(job_row)
            self.jobs.reopen(work)
            run.put(work)
        return run


def creation_lane(session_id: str) -> str:
    """Where a session's models are numbered."""
    return f"{session_id}/models"


def creation_number(model_id: str) -> dict[str, str | int]:
    session_id, _, number = model_id.rpartition(":train:")
    return {"lane": creation_lane(session_id), "seq": int(number)}


def replaced(row: ModelRow, **fields: str | int | None) -> ModelRow:
    """A row with other values in some columns."""
    return ModelRow(**{**row.parameters(), **fields})  # type: ignore[arg-type]

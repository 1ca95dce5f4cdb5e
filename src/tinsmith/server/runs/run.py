"""One training run: hands its jobs to the backend in order, and rebuilds its state if the backend loses it.

A run's state is a function of its journal: creating the model and applying its finished jobs again, in order, gives the
same weights, bit for bit. The backend has an epoch for each base model, which changes when the engine process dies and
its memory with it. When a run sees a new epoch it restores itself: it loads its last snapshot (or creates the model
anew), replays the journal after that point (`replay`), and submits again what had no result yet. Clients notice only
the wait. Replayed results are compared with those that were delivered, and a difference marks the run as faulty.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Protocol

from tinsmith.engine.protocol import (
    AnyJob,
    Backend,
    BackendLostError,
    Done,
    EngineDownError,
    JobCancelledError,
    JobFailedError,
    OptimStep,
    Position,
    SaveState,
    Unload,
)
from tinsmith.server.data_dir import remove_tree
from tinsmith.server.jobs.job import Work, readable
from tinsmith.server.jobs.lifecycle import Jobs, in_turns
from tinsmith.server.runs.curves import Curve
from tinsmith.server.runs.order import Lane
from tinsmith.server.runs.replay import (
    RETRY_S,
    Journal,
    Origin,
    changes_state,
    fingerprint_in,
    fingerprint_text,
    machine_change,
    pause_s,
    replace_id,
    replay,
)
from tinsmith.server.runs.snapshots import Snapshots, SnapshotTools
from tinsmith.store.base import Statement, statement
from tinsmith.store.rows import ModelRow

logger = logging.getLogger(__name__)

AHEAD = 8
"""How many of a run's requests may be at the backend at once.

The lane releases requests in order, and could release hundreds at once. A snapshot can only be taken after what the
backend already has, and a cancelled request can only be taken back before it is there, so few are handed over: enough
that the engine never waits for the server between two of them. (The engine's scheduler then shares the device between
tenants; it never reorders one run's jobs.)"""
OVER = "the session is over"


class RunHost(Protocol):
    """What a run needs from the server; `registry.Runs` provides it."""

    tools: SnapshotTools
    backend: Backend
    jobs: Jobs
    journal: Journal
    clock: Callable[[], float]
    advise: Callable[[str], Awaitable[str]]
    count_replayed: Callable[[], None]
    is_stopped: bool

    async def write(self, *statements: Statement) -> None: ...


class Run:
    """One model's run. All methods are called on the server's event loop."""

    def __init__(self, row: ModelRow, origin: Origin, lane: Lane[Work], runs: RunHost, curve: Curve) -> None:
        self.row = row
        self.curve = curve
        self.origin = origin
        self.lane = lane
        self.reason = ""
        self._runs = runs
        self._under_way: deque[Work] = deque()
        self._numbers: dict[str, int] = {}
        """The numbers of the requests in the lane, by request id."""
        self._create: Work | None = None
        self._epoch: int | None = None
        self._restoring: asyncio.Task[None] | None = None
        self._making: str | None = None
        """The id of the job that creates the model, while the backend has it."""
        self._snapshots = Snapshots(runs.tools, row, self._begin_at)
        self.is_closed = False
        self.is_unmade = False
        """Whether creating the model failed; there is nothing to restore then."""
        self.failure: JobFailedError | None = None
        """Why the model could not be created or restored."""

    def create(self, work: Work) -> None:
        """Create the model; the request gets its result when the backend has the model."""
        self._create = work
        self.pump()

    def put(self, work: Work) -> None:
        """Queue a request under its number."""
        if self.is_closed:
            self._runs.jobs.finish(work, JobCancelledError(OVER))
            return
        self.lane.put(work.row.seq, work)
        self._numbers[work.row.request_id] = work.row.seq
        self.pump()

    def close_number(self, number: int) -> None:
        self.lane.close(number)
        self.pump()

    def pump(self) -> None:
        """Hand the requests whose turn it is to the backend, or restore the run first if the backend lost it."""
        if self._restoring is not None or self.is_closed or self._runs.is_stopped:
            return
        if self._epoch != self._runs.backend.epoch_of(self.row.base_model) and not self.is_unmade:
            self._restoring = asyncio.get_running_loop().create_task(self._restore())
            return
        while len(self._under_way) < AHEAD and (work := self.lane.take()) is not None:
            self._numbers.pop(work.row.request_id, None)
            self._submit(work)

    def cancel(self, request_id: str) -> bool | None:
        """Cancel a request that waits for its turn, or ask the backend to; None if the backend decides."""
        number = self._numbers.pop(request_id, None)
        if number is not None and (work := self.lane.remove(number)) is not None:
            self._runs.jobs.finish(work, JobCancelledError("cancelled"))
            self.pump()
            return True
        self._runs.backend.cancel(request_id)
        return None if any(work.row.request_id == request_id for work in self._under_way) else False

    def position(self, request_id: str) -> Position:
        """Return a request's position in the queue, and what it waits for."""
        if self._restoring is not None:
            reason = self.reason or "preparing the run"
            if self._making is not None:
                reason = f"{reason}: {self._runs.backend.position(self._making).reason}"
            return Position(ahead=len(self._under_way), reason=reason)
        number = self._numbers.get(request_id)
        if number is not None:
            ahead, missing = len(self._under_way) + number - self.lane.next, self.lane.missing()
            if missing is None:
                return Position(ahead=ahead, reason=f"waiting for {ahead} earlier operations of the same model")
            reason = f"waiting for request number {missing} of {self.row.model_id}, which has not arrived"
            return Position(ahead=ahead, reason=reason)
        return self._runs.backend.position(request_id)

    async def close(self) -> None:
        """Unload the model from the backend, and cancel what still waits."""
        self.is_closed = True
        was_restoring = await self._stop_restoring()
        for work in self._under_way:
            self._runs.backend.cancel(work.row.request_id)
        over = [*self.lane.waiting(), *([self._create] if self._create is not None else [])]
        for work in self.lane.waiting():
            self.lane.remove(work.row.seq)
        self._numbers.clear()
        if was_restoring:  # then the backend has none of them
            over += self._under_way
            self._under_way.clear()
        self._create = None
        async for work in in_turns(over):
            self._runs.jobs.finish(work, JobCancelledError(OVER))
        if was_restoring or self._epoch == self._runs.backend.epoch_of(self.row.base_model):
            await self._unload()
        await self._snapshots.settled()  # whoever loads the run next must see its outcome

    async def stop(self) -> None:
        """Stop restoring: what has no result stays in the journal for the next start."""
        await self._stop_restoring()
        await self._snapshots.stop()

    async def _stop_restoring(self) -> bool:
        """Stop restoring; return whether the run was being restored."""
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
        if isinstance(work.job, SaveState):  # no client has seen what an earlier attempt wrote
            remove_tree(Path(work.job.directory))
        if changes_state(work.job):
            self._snapshots.cost.begin(work.job.job_id, work.row.kind, len(work.row.job))
        future = self._runs.backend.submit(work.job)
        future.add_done_callback(lambda done: self._done(work, done))
        if isinstance(work.job, OptimStep):
            self._snapshots.consider(work.row.seq, future)

    def _done(self, work: Work, future: asyncio.Future[Done]) -> None:
        error = asyncio.CancelledError() if future.cancelled() else future.exception()
        if isinstance(error, (BackendLostError, EngineDownError, asyncio.CancelledError)):
            self._epoch = None
        elif work in self._under_way:  # else an answer from before the loss
            self._under_way.remove(work)
            self._snapshots.cost.end(work.job.job_id, future.result().device_s if error is None else None)
            if error is None:
                work.beside = self.curve.finished(work, future.result(), self._runs.clock())
            self._runs.jobs.finish(work, error if error is not None else future.result())
        self.pump()

    async def _restore(self) -> None:
        """Restore the model (or create it for the first time), then submit what waits."""
        await self._snapshots.settled()
        attempt = failures = 0
        while not self.is_closed:
            is_new = self._create is not None
            try:
                epoch = self._runs.backend.epoch_of(self.row.base_model)
                await self._rebuild()
                if self._is_lost_since(epoch):
                    raise BackendLostError("its state was lost again")  # perhaps while it had no job at the backend
                self._epoch, self.failure = epoch, None
                break
            except BackendLostError as error:
                self._note_loss(error)
            except JobFailedError as error:
                is_waiting = isinstance(error, EngineDownError)
                if not is_new and not is_waiting and self._is_lost_since(epoch):
                    self._note_loss(error)  # the engine that was asked had lost the model
                    continue
                failures += not is_waiting
                if is_new or failures > len(RETRY_S):
                    await self._fail(error)
                    break
                was, self.reason = self.reason, f"the run cannot be restored yet, retrying: {error}"
                if was != self.reason:
                    logger.warning("%s: %s", self.row.model_id, self.reason, extra={"event": "restore_delayed"})
                if not is_waiting:
                    await self._unload()  # a half-restored model
            await asyncio.sleep(pause_s(attempt))
            attempt += 1
        self._restoring = None
        self.reason = ""
        again, self._under_way = list(self._under_way), deque()
        for work in again:
            self._submit(work)
        self.pump()

    def _is_lost_since(self, epoch: int) -> bool:
        return self._runs.backend.epoch_of(self.row.base_model) != epoch

    def _note_loss(self, error: Exception) -> None:
        self.reason = f"the engine stopped while restoring the run, retrying: {error}"

    async def _rebuild(self) -> None:
        self.reason = f"loading {self.row.base_model}"
        self._snapshots.cost.restart()
        is_new = self._create is not None
        made = await self._make(self.origin.create if is_new else replace_id(self.origin.create))
        self._snapshots.fingerprint = fingerprint_in(made)
        if self._create is not None:
            create, self._create = self._create, None
            self.row = replaced(self.row, fingerprint=fingerprint_text(self._snapshots.fingerprint))
            self._runs.jobs.finish(create, made)
            return
        await self._compare_machines()
        await self._replay()

    async def _make(self, job: AnyJob) -> Done:
        self._making = job.job_id
        try:
            return await self._runs.backend.submit(job)
        finally:
            self._making = None

    async def _replay(self) -> None:
        """Apply the jobs that finished after the origin again, and compare their results."""
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
                await self._mark(f"request {step.row.seq} gave a different result when it was replayed")

    def _begin_at(self, directory: str, seq: int) -> None:
        """Restore from this snapshot from now on."""
        self.origin = self.origin.at(directory, seq)
        fingerprint = fingerprint_text(self._snapshots.fingerprint)
        self.row = replaced(self.row, snapshot_directory=directory, snapshot_seq=seq, fingerprint=fingerprint)

    async def _compare_machines(self) -> None:
        """Record it if the run was computed on another machine before; the run continues."""
        notice = machine_change(self.row.fingerprint, self._snapshots.fingerprint)
        if notice is not None and notice != self.row.notice:
            logger.warning("run %s: %s", self.row.model_id, notice, extra={"event": "machine_changed"})
            self.row = replaced(self.row, notice=notice)
            await self._runs.write(statement("set_model_notice", model_id=self.row.model_id, notice=notice))

    async def _mark(self, fault: str) -> None:
        """Mark the run as faulty wherever it is shown."""
        fault = readable(fault)
        logger.error("run %s: %s", self.row.model_id, fault)
        if self.row.fault is None:
            self.row = replaced(self.row, fault=fault)
            await self._runs.write(statement("set_model_fault", model_id=self.row.model_id, fault=fault))

    async def _fail(self, error: JobFailedError) -> None:
        if self._create is not None:
            create, self._create, self.is_unmade = self._create, None, True
            self._runs.jobs.finish(create, error)
            text = f"{self.row.model_id} could not be created: {error}"
        else:
            text = f"{self.row.model_id} could not be restored: {error}; {await self._runs.advise(self.row.model_id)}"
            logger.error("run %s", text, extra={"event": "restore_failed"})
        self.failure = JobFailedError(text, error.category)
        self._epoch = self._runs.backend.epoch_of(self.row.base_model)


def replaced(row: ModelRow, **fields: str | int | None) -> ModelRow:
    """Return a row with new values in some columns."""
    return ModelRow(**{**row.parameters(), **fields})  # type: ignore[arg-type]

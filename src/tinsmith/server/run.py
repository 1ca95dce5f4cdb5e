"""One training run: its jobs in order to the backend, and its state rebuilt when the backend lost it.

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
from collections import deque
from pathlib import Path
from typing import TYPE_CHECKING

from tinsmith.engine.base import (
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
from tinsmith.server.curves import Curve
from tinsmith.server.files import remove_tree
from tinsmith.server.lanes import Lane
from tinsmith.server.replaying import (
    RETRY_S,
    Origin,
    changes_state,
    fingerprint_in,
    fingerprint_text,
    machine_change,
    pause_s,
    replace_id,
    replay,
)
from tinsmith.server.snapshotting import Snapshots
from tinsmith.server.work import Work
from tinsmith.store.base import statement
from tinsmith.store.rows import ModelRow

if TYPE_CHECKING:
    from tinsmith.server.runs import Runs

logger = logging.getLogger(__name__)

AHEAD = 8
"""Requests of one run that are at the backend: enough to keep it busy, few enough to take a snapshot between them."""
OVER = "the session is over"


class Run:
    """One model. All methods are called on the server's loop."""

    def __init__(self, row: ModelRow, origin: Origin, lane: Lane[Work], runs: Runs, curve: Curve) -> None:
        self.row = row
        self.curve = curve
        self.origin = origin
        self.lane = lane
        self.reason = ""
        self._runs = runs
        self._under_way: deque[Work] = deque()
        self._numbers: dict[str, int] = {}
        """Numbers of the requests in the lane, by their ids."""
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
        self._numbers[work.row.request_id] = work.row.seq
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
            self._numbers.pop(work.row.request_id, None)
            self._submit(work)

    def cancel(self, request_id: str) -> bool:
        """Drop a request that waits for its turn, or ask the backend to drop it."""
        number = self._numbers.pop(request_id, None)
        if number is not None and (work := self.lane.remove(number)) is not None:
            self._runs.jobs.finish(work, JobCancelledError("cancelled"))
            self.pump()
            return True
        self._runs.backend.cancel(request_id)
        return any(work.row.request_id == request_id for work in self._under_way)

    def position(self, request_id: str) -> Position:
        """Where a request stands, for the one who waits."""
        if self._restoring is not None:
            return Position(ahead=len(self._under_way), reason=self.reason or "the run is being prepared")
        number = self._numbers.get(request_id)
        if number is not None:
            ahead, missing = len(self._under_way) + number - self.lane.next, self.lane.missing()
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
        self._numbers.clear()
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
        future = self._runs.backend.submit(work.job)
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
            if error is None:
                work.beside = self.curve.finished(work, future.result(), self._runs.clock())
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


def replaced(row: ModelRow, **fields: str | int | None) -> ModelRow:
    """A row with other values in some columns."""
    return ModelRow(**{**row.parameters(), **fields})  # type: ignore[arg-type]

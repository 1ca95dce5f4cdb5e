"""The training runs that are in memory: looked up, loaded from the store, unloaded. `run` is one of them."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable

from tinsmith.engine.protocol import Backend, CreateModel, JobFailedError
from tinsmith.server.jobs.job import Work
from tinsmith.server.jobs.lifecycle import Jobs
from tinsmith.server.runs.curves import Curve, load_curve
from tinsmith.server.runs.order import Lane
from tinsmith.server.runs.replay import Journal, NumberRow, Origin, for_sure
from tinsmith.server.runs.run import Run as Run
from tinsmith.server.runs.snapshots import SnapshotTools
from tinsmith.store.base import Statement, Store
from tinsmith.store.rows import JobRow, ModelRow


async def no_advice(model_id: str) -> str:
    return "resume from a checkpoint"


class Runs:
    """The runs that this process has loaded."""

    def __init__(
        self,
        tools: SnapshotTools,
        *,
        clock: Callable[[], float] = time.time,
        advise: Callable[[str], Awaitable[str]] = no_advice,
        count_replayed: Callable[[], None] = lambda: None,
    ) -> None:
        """`advise` returns what the owner of a lost run can resume from."""
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
        self._forgetting: set[asyncio.Task[None]] = set()
        self._closing: dict[str, asyncio.Event] = {}
        """Runs that are being unloaded; each is set when that is done."""

    def add(self, row: ModelRow, create: CreateModel) -> Run:
        """Add a run that was just accepted."""
        run = self._runs[row.model_id] = Run(row, Origin(create), Lane(), self, Curve(row.model_id))
        return run

    def known(self, model_id: str) -> Run | None:
        return self._runs.get(model_id)

    def all(self) -> list[Run]:
        return list(self._runs.values())

    async def get(self, row: ModelRow) -> Run:
        """Return the run of a model, loaded from the store if it is not in memory."""
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
        """Unload a model and forget its run; if somebody else does, wait until it is done."""
        run = self._runs.pop(model_id, None)
        if run is None:
            if (closed := self._closing.get(model_id)) is not None:
                await closed.wait()
            return
        closed = self._closing[model_id] = asyncio.Event()
        try:
            await run.close()
        finally:
            closed.set()
            if self._closing[model_id] is closed:
                del self._closing[model_id]

    def forget_soon(self, model_id: str) -> None:
        """Forget a run in the background; `stop` waits for it."""
        task = asyncio.get_running_loop().create_task(self.forget(model_id))
        self._forgetting.add(task)
        task.add_done_callback(self._forgetting.discard)

    async def stop(self) -> None:
        """Stop all runs: what has no result stays in the journal for the next start."""
        self.is_stopped = True
        for run in self.all():
            await run.stop()
        await asyncio.gather(*self._forgetting, return_exceptions=True)

    async def write(self, *statements: Statement) -> None:
        """Write what a restore found, retrying until it succeeds: there is nobody to report a failure to."""
        await for_sure(lambda: self.store.write(*statements), "the state of a run cannot be written")

    async def _load(self, row: ModelRow) -> Run:
        await self.jobs.kept(row.model_id)
        row = (await self.store.read(ModelRow, "model", model_id=row.model_id))[0]  # with its newest snapshot
        creation = await self.store.read(JobRow, "job_by_number", **creation_number(row.model_id))
        numbers = await self.store.read(NumberRow, "lane_numbers", lane=row.model_id)
        queued = await self.store.read(JobRow, "queued_of_lane", lane=row.model_id)
        curve = await load_curve(self.store, row.model_id)
        create = Work.from_row(creation[0])
        assert isinstance(create.job, CreateModel)
        lane: Lane[Work] = Lane(
            (number.seq for number in numbers if number.state != "queued"), first=row.snapshot_seq + 1 or 1
        )
        run = Run(row, Origin.of(row, create.job), lane, self, curve)
        self._runs[row.model_id] = run
        if creation[0].state == "queued":
            self.jobs.reopen(create)
            run.create(create)
        elif creation[0].state == "failed":
            run.failure, run.is_unmade = JobFailedError(f"{row.model_id} could not be created", "server"), True
        for job_row in queued:
            work = Work.from_row(job_row)
            self.jobs.reopen(work)
            run.put(work)
        return run


def loss_lane(session_id: str) -> str:
    """Return the lane in which a session's uploaded losses are numbered."""
    return f"{session_id}/losses"


def creation_lane(session_id: str) -> str:
    """Return the lane in which a session's models are numbered."""
    return f"{session_id}/models"


def creation_number(model_id: str) -> dict[str, str | int]:
    session_id, _, number = model_id.rpartition(":train:")
    return {"lane": creation_lane(session_id), "seq": int(number)}

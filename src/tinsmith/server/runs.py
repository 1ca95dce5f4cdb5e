"""All training runs of a server: found, loaded from the store, forgotten.

Does not know: HTTP, how a run goes (`run`).
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable

from tinsmith.engine.base import Backend, CreateModel, JobFailedError
from tinsmith.server.curves import Curve, load_curve
from tinsmith.server.jobs import Jobs
from tinsmith.server.lanes import Lane
from tinsmith.server.replaying import Journal, NumberRow, Origin, for_sure, pause_s
from tinsmith.server.run import Run as Run
from tinsmith.server.snapshotting import SnapshotTools
from tinsmith.server.work import Work
from tinsmith.store.base import Statement, Store
from tinsmith.store.rows import JobRow, ModelRow


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
        self._forgetting: set[asyncio.Task[None]] = set()

    def add(self, row: ModelRow, create: CreateModel) -> Run:
        """A run that was just accepted."""
        run = self._runs[row.model_id] = Run(row, Origin(create), Lane(), self, Curve(row.model_id))
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
            await asyncio.sleep(pause_s(min(attempt, 1)))
            attempt += 1

    async def stop(self) -> None:
        """The server goes down: what is being restored waits in the journal for the next start."""
        self.is_stopped = True
        for run in self.all():
            await run.stop()
        await asyncio.gather(*self._forgetting, return_exceptions=True)

    async def write(self, *statements: Statement) -> None:
        """Write what a restore found; it has nobody to tell of a failure."""
        await for_sure(lambda: self.store.write(*statements), "what became of a run cannot be written")

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

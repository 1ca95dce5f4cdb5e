"""Expiry: ends sessions that finish or time out, deletes results and files that nobody can ask for any more.

The sweeper is one task that runs every few seconds. Files are deleted after their rows, so a crash leaves at most a
directory that nothing refers to. `retention` decides which checkpoints are deleted.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence

from tinsmith.errors import StoreError
from tinsmith.server.checkpoints.retention import Retention
from tinsmith.server.checkpoints.upload_parts import forget_stale
from tinsmith.server.data_dir import Files, remove_tree
from tinsmith.server.jobs.pruning import delete_in_pieces, delete_requests
from tinsmith.server.ops.usage import storage_usage
from tinsmith.server.runs.curves import catch_up
from tinsmith.server.runs.registry import creation_lane, loss_lane
from tinsmith.server.services import Services
from tinsmith.store.base import Row, Statement, Store, statement
from tinsmith.store.rows import ModelRow, SamplerRow, SessionRow

logger = logging.getLogger(__name__)

BATCH = 500
STORAGE_EVERY_S = 3600.0


async def end_session(
    services: Services, row: SessionRow, status: str, *, status_detail: str | None = None, detail: str | None = None
) -> None:
    """End a session: its models are unloaded, its checkpoints stay."""
    ended = statement(
        "set_session_status",
        session_id=row.session_id,
        status=status,
        status_detail=status_detail,
        detail=detail,
        ended_at=services.clock(),
    )
    await services.store.write(ended, statement("unload_models_of_session", session_id=row.session_id))
    services.activity.heartbeats.pop(row.session_id, None)
    models = await services.store.read(ModelRow, "models_of_session", session_id=row.session_id)
    samplers = await services.store.read(SamplerRow, "samplers_of_session", session_id=row.session_id)
    services.access.forget_session(row.session_id)
    await services.samples.cancel_lanes({sampler.sampler_id for sampler in samplers})
    for model in models:
        await services.runs.forget(model.model_id)
    made = (creation_lane(row.session_id), loss_lane(row.session_id))
    services.broker.forget(
        [*made, *(model.model_id for model in models), *(sampler.sampler_id for sampler in samplers)]
    )
    logger.info("session %s ended: %s", row.session_id, status, extra={"event": "session_end"})


async def prune_session(store: Store, files: Files, session_id: str, *statements: Statement) -> None:
    """Delete the journal, the results and the files of a session that is over; checkpoints and curves stay.

    The session is marked first, together with `statements`, so that its client cannot come back to half of it. If the
    server is killed before everything is deleted, the next one continues.
    """
    samplers = await store.read(SamplerRow, "samplers_of_session", session_id=session_id)
    models = await store.read(ModelRow, "models_of_session", session_id=session_id)
    for model in models:
        await catch_up(store, model.model_id)  # for databases older than curves
    places = [files.sampler(row.sampler_id) for row in samplers]
    places += [files.loads(row.model_id) for row in models]
    places += [files.snapshots(row.model_id) for row in models]
    files.trace(session_id).unlink(missing_ok=True)
    await store.write(*statements, statement("set_session_pruned", session_id=session_id))
    await delete_requests(store, "stored_of_session", session_id=session_id)
    await delete_in_pieces(store, "losses_of_session", "delete_custom_loss", session_id=session_id)
    for place in places:
        await asyncio.to_thread(remove_tree, place)


class Sweeper:
    """The background task."""

    def __init__(self, services: Services) -> None:
        self._services = services
        self._task: asyncio.Task[None] | None = None
        self._storage_at = services.clock()
        self._retention = Retention(services)
        self._has_continued = False
        """Whether the pruning that an earlier process began was finished."""

    async def __aenter__(self) -> Sweeper:
        self._task = asyncio.get_running_loop().create_task(self._rounds())
        return self

    async def __aexit__(self, *_: object) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
        try:
            await self.flush()
        except StoreError as error:
            logger.error("could not write the last heartbeats: %s", error)

    async def _rounds(self) -> None:
        while True:
            await asyncio.sleep(self._services.config.sweep_s)
            try:
                await self.round()
            except StoreError as error:
                logger.error("the sweeper cannot reach the database: %s", error)
            except Exception:
                logger.exception("a round of the sweeper failed")

    async def round(self) -> None:
        """Do everything that is due now."""
        services = self._services
        await self.flush()
        services.broker.forget_old()
        for row in services.caller_sessions.sweep(services.samples.sessions()):
            await end_session(services, row, "finished", status_detail="success")
        await self._expire_sessions()
        await self._retention.round()
        await self._prune()
        await self._hourly()
        await services.disk.measure()
        if services.installation is not None:
            await services.installation.advance()
        services.metrics.pending.set(services.broker.count())
        services.metrics.sessions.set(len(services.access.sessions))
        services.metrics.models.set(len(services.runs.all()))
        services.metrics.faults.set(sum(run.row.fault is not None for run in services.runs.all()))
        services.metrics.moved.set(sum(run.row.notice is not None for run in services.runs.all()))
        services.metrics.disk_free.set(services.files.free_bytes())
        services.metrics.ready.set(services.backend.status.state == "ready")

    async def flush(self) -> None:
        """Write last-used times and telemetry."""
        for group in _groups(self._services.activity.take_statements()):
            await self._services.store.write(*group)

    async def _expire_sessions(self) -> None:
        services = self._services
        limit = services.clock() - services.config.session_timeout_s
        for session_id, row in services.access.sessions.items():  # a revived session may never send a heartbeat
            services.activity.heartbeats.setdefault(session_id, row.heartbeat_at)
        for session_id, at in list(services.activity.heartbeats.items()):
            if at < limit:
                rows = await services.store.read(SessionRow, "session", session_id=session_id)
                services.activity.heartbeats.pop(session_id, None)
                if rows and rows[0].status == "active":
                    silent = f"no heartbeat for {services.config.session_timeout_s:g} s"
                    await end_session(services, rows[0], "expired", detail=silent)

    async def _prune(self) -> None:
        services = self._services
        before = services.clock() - services.config.result_grace_s
        over = await services.store.read(SessionIdRow, "sessions_to_prune", before=before, limit=20)
        if not self._has_continued:
            over += await services.store.read(SessionIdRow, "sessions_half_pruned")
        for session in over:
            await prune_session(services.store, services.files, session.session_id)
        self._has_continued = True

    async def _hourly(self) -> None:
        now = self._services.clock()
        if now - self._storage_at < STORAGE_EVERY_S:
            return
        hours, self._storage_at = (now - self._storage_at) / 3600, now
        await self._count_storage(now, hours)
        await self._forget_curves(now)
        await asyncio.to_thread(forget_stale, self._services.files.root)

    async def _count_storage(self, now: float, hours: float) -> None:
        """Count the byte hours of checkpoints."""
        services = self._services
        rows = await services.store.read(OwnedStorageRow, "storage_by_owner")
        statements = [
            storage_usage(
                now=now,
                org_id=row.org_id,
                user_id=row.user_id,
                project_id=row.project_id,
                size_bytes=row.size_bytes,
                hours=hours,
            )
            for row in rows
        ]
        for group in _groups(statements):
            await services.store.write(*group)

    async def _forget_curves(self, now: float) -> None:
        """Delete the curves of runs of which nothing else is left."""
        store, before = self._services.store, now - self._services.config.curve_grace_s
        while runs := await store.read(ModelIdRow, "runs_to_forget", before=before, limit=BATCH):
            await store.write(*(statement("delete_steps", model_id=run.model_id) for run in runs))


class ModelIdRow(Row, frozen=True, kw_only=True):
    """A run by its id alone."""

    model_id: str


class SessionIdRow(Row, frozen=True, kw_only=True):
    """A session by its id alone."""

    session_id: str


class OwnedStorageRow(Row, frozen=True, kw_only=True):
    """How many bytes one user's checkpoints use."""

    org_id: str
    user_id: str
    project_id: str | None = None
    size_bytes: int


def _groups(statements: Sequence[Statement]) -> list[Sequence[Statement]]:
    return [statements[start : start + BATCH] for start in range(0, len(statements), BATCH)]

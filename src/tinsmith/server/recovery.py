"""What a restarted server goes on with: everything that was accepted and has no result.

What a crash left half written is removed first; nothing else writes yet.
"""

from __future__ import annotations

import asyncio
import logging

from tinsmith.engine.base import CreateModel, SaveState
from tinsmith.server.services import Services
from tinsmith.server.work import Work
from tinsmith.store.base import Row
from tinsmith.store.rows import JobRow, ModelRow, SessionRow

logger = logging.getLogger(__name__)


async def recover(services: Services) -> None:
    """Queue again what the last process left, in order; sessions get time to be heard of."""
    now = services.clock()
    await _tidy(services)
    for session in await services.store.read(SessionRow, "sessions_active"):
        services.access.sessions[session.session_id] = session
        services.heartbeats[session.session_id] = now
    queued = await services.store.read(JobRow, "jobs_queued")
    models: dict[str, None] = {}
    for row in queued:
        work = Work.from_row(row)
        if row.kind == "sample":
            services.jobs.reopen(work)
            services.samples.put(work)
            continue
        models[work.job.model_id if isinstance(work.job, CreateModel) else row.lane] = None
        if work.context.get("path") is not None and isinstance(work.job, SaveState):
            services.saving.setdefault(work.context["path"], []).append(work.job.directory)
    for model_id in models:
        rows = await services.store.read(ModelRow, "model", model_id=model_id)
        if rows:
            services.access.models[model_id] = rows[0]
            await services.runs.get(rows[0])
    if queued:
        logger.info("going on with %d requests of before", len(queued), extra={"event": "recovered"})


class SnapshotRow(Row, frozen=True, kw_only=True):
    """Where a run's snapshot is."""

    snapshot_directory: str


async def _tidy(services: Services) -> None:
    rows = await services.store.read(SnapshotRow, "snapshot_directories")
    named = {row.snapshot_directory for row in rows}
    left = await asyncio.to_thread(services.files.remove_leftovers, named)
    if left:
        logger.info("removed %d directories that were being written when the server ended", len(left))

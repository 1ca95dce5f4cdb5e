"""What a restarted server resumes: everything that was accepted and has no result.

Files that a crash left half written are removed first, while nothing else writes.
"""

from __future__ import annotations

import asyncio
import logging

from tinsmith.engine.protocol import CreateModel, SaveState
from tinsmith.server.jobs.job import Work
from tinsmith.server.services import Services
from tinsmith.store.base import Row
from tinsmith.store.rows import JobRow, ModelRow, SessionRow

logger = logging.getLogger(__name__)


async def recover(services: Services) -> None:
    """Queue again what the last process left, in order; sessions get a full timeout to reconnect."""
    now = services.clock()
    await _tidy(services)
    for session in await services.store.read(SessionRow, "sessions_active"):
        services.access.sessions[session.session_id] = session
        services.activity.heartbeats[session.session_id] = now
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
            services.saves.begin(work.context["path"], work.job.directory)
    for model_id in models:
        rows = await services.store.read(ModelRow, "model", model_id=model_id)
        if rows:
            services.access.models[model_id] = rows[0]
            await services.runs.get(rows[0])
    if queued:
        logger.info(
            "resuming %d requests that were accepted before the restart", len(queued), extra={"event": "recovered"}
        )


class SnapshotRow(Row, frozen=True, kw_only=True):
    """A run and the directory of its snapshot."""

    model_id: str
    snapshot_directory: str | None = None


async def _tidy(services: Services) -> None:
    rows = await services.store.read(SnapshotRow, "snapshot_directories")
    named = {row.snapshot_directory for row in rows if row.snapshot_directory is not None}
    left = await asyncio.to_thread(services.files.remove_leftovers, named, [row.model_id for row in rows])
    if left:
        logger.info("removed %d directories that were being written when the server stopped", len(left))

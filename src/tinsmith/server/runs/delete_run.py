"""Deleting a run for its owner: its checkpoints, snapshots, loaded files, journal, results and curve, and its row.

Usage and the audit log stay, and so do samplers made from its weights, which belong to their session. Rows are deleted
before files, so a crash leaves at most a directory that nothing refers to; the call can be repeated.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping

import msgspec

from tinsmith.errors import InvalidInputError
from tinsmith.server.auth.identity import Caller
from tinsmith.server.checkpoints.retention import BATCH, delete_checkpoint
from tinsmith.server.data_dir import remove_tree
from tinsmith.server.jobs.pruning import delete_requests
from tinsmith.server.refusals import NotReadyError
from tinsmith.server.services import Services
from tinsmith.store.base import Statement, statement
from tinsmith.store.rows import AuditRow, CheckpointRow, CountRow, ModelRow
from tinsmith.wire.routes.own import DeletedRun

logger = logging.getLogger(__name__)


async def delete_ended_run(services: Services, caller: Caller, model_id: str) -> DeletedRun:
    """Delete a run of the caller; refuse it while the run can take work."""
    row = await services.access.model(caller, model_id)
    await _close(services, row)
    checkpoints = await _delete_checkpoints(services, caller, model_id)
    size_bytes = sum(checkpoint.size_bytes for checkpoint in checkpoints)
    details = {"checkpoints": len(checkpoints), "size_bytes": size_bytes}
    await delete_requests(services.store, "stored_of_lane", lane=model_id)
    await services.store.write(
        statement("delete_steps", model_id=model_id),
        statement("delete_model", model_id=model_id),
        _audited(services, caller, row, "training_run_deleted", details),
    )
    services.access.models.pop(model_id, None)
    services.broker.forget([model_id])
    for place in (services.files.snapshots(model_id), services.files.loads(model_id)):
        await asyncio.to_thread(remove_tree, place)
    logger.info("run %s deleted by its owner", model_id, extra={"event": "run_deleted"})
    return DeletedRun(training_run_id=model_id, checkpoints=len(checkpoints), size_bytes=size_bytes)


async def _close(services: Services, row: ModelRow) -> None:
    """Make sure that the run takes no more work: a parked one would come back with its session."""
    if not await services.store.write(statement("close_model", model_id=row.model_id)):
        raise InvalidInputError(
            f"training_run_id: {row.model_id} has not ended; end it first (tinsmith run kill {row.model_id})",
            field="training_run_id",
        )
    await services.runs.forget(row.model_id)
    await services.jobs.kept(row.model_id)
    queued = await services.store.read(CountRow, "count_queued_of_lane", lane=row.model_id)
    if queued[0].count:
        raise NotReadyError(f"{queued[0].count} requests of {row.model_id} have not finished yet; try again")


async def _delete_checkpoints(services: Services, caller: Caller, model_id: str) -> list[CheckpointRow]:
    deleted: list[CheckpointRow] = []
    while rows := await services.store.read(
        CheckpointRow, "first_checkpoints_of_model", model_id=model_id, limit=BATCH
    ):
        for row in rows:
            details = {"size_bytes": row.size_bytes, "reason": "its run was deleted"}
            await delete_checkpoint(services, row, _audited(services, caller, row, "checkpoint_deleted", details))
        deleted += rows
    return deleted


def _audited(
    services: Services, caller: Caller, row: ModelRow | CheckpointRow, event: str, details: Mapping[str, object]
) -> Statement:
    entry = AuditRow(
        at=services.clock(),
        org_id=row.org_id,
        user_id=caller.user_id,
        event=event,
        group_name="checkpoints",
        details=msgspec.json.encode(details).decode(),
        model_id=row.model_id,
        tinker_path=row.path if isinstance(row, CheckpointRow) else None,
        project_id=row.project_id,
    )
    return statement("insert_audit", entry)

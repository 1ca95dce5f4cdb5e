"""Which checkpoints are deleted, and how: expired ones, those beyond a run's limit, and those over the disk cap.

A checkpoint with a ttl is deleted when it expires, and not earlier. Of the others, only unpublished training
checkpoints can be deleted, only by settings that are off by default, and never the newest of a run. The row is deleted
before the files, and only if it has not changed since, so a crash leaves at most a directory that nothing refers to.
"""

from __future__ import annotations

import asyncio
import logging

import msgspec

from tinsmith.errors import InvalidInputError
from tinsmith.server.services import Services
from tinsmith.store.base import Statement, Store, statement
from tinsmith.store.rows import AuditRow, CheckpointRow, SizeRow

logger = logging.getLogger(__name__)

BATCH = 500
"""How many checkpoints one query returns."""
ALL = 2**62
"""More checkpoints than any run has."""


async def checkpoint_bytes(store: Store) -> int:
    """Return how many bytes all checkpoints take."""
    return (await store.read(SizeRow, "checkpoint_bytes"))[0].size_bytes


async def delete_checkpoint(services: Services, row: CheckpointRow, *statements: Statement) -> None:
    """Delete a checkpoint for its owner: the row first, together with `statements`, then the files.

    If it was deleted or replaced since `row` was read, its space was freed by whoever did that, and is counted once.
    """
    deletion = statement("delete_checkpoint", path=row.path, directory=row.directory)
    if await services.store.write(deletion, *statements) <= len(statements):
        return
    services.disk.add(row.org_id, -row.size_bytes)
    await asyncio.to_thread(services.files.remove, row.directory)


class Retention:
    """The sweeper's work on checkpoints."""

    def __init__(self, services: Services) -> None:
        self._services = services
        self._was_full = False
        """Whether the cap was reached at the last round, and nothing could be deleted."""

    async def round(self) -> None:
        """Delete what is due. The cap comes last: deleting the others may be enough."""
        await self._expire()
        await self._keep_some()
        used, cap = await make_room(self._services), self._services.config.disk_cap_bytes
        is_full = cap is not None and used >= cap
        if is_full and not self._was_full:
            text = "checkpoints use %d bytes, the disk cap is %s, and nothing more may be deleted: refusing saves"
            logger.warning(text, used, cap, extra={"event": "disk_cap"})
        self._was_full = is_full

    async def _expire(self) -> None:
        services = self._services
        rows = await services.store.read(CheckpointRow, "checkpoints_expired", before=services.clock(), limit=BATCH)
        for row in rows:
            await _delete(services, row, "its ttl has expired")

    async def _keep_some(self) -> None:
        config, now = self._services.config, self._services.clock()
        most, age_s = config.max_run_checkpoints, config.checkpoint_retention_s
        if most is None and age_s is None:
            return
        before = now - age_s if age_s is not None else 0.0
        for row in await _deletable(self._services, most or ALL, before):
            why = f"older than {age_s:g} s" if row.created_at < before else f"its run has {most} newer ones"
            await _delete(self._services, row, f"{why} (the server's retention settings)")


async def make_room(services: Services) -> int:
    """Delete checkpoints until they are below the cap, if that is allowed; return their bytes, 0 without a cap."""
    cap = services.config.disk_cap_bytes
    if cap is None:
        return 0
    used = await checkpoint_bytes(services.store)
    if used < cap or services.config.disk_cap_action != "delete":
        return used
    for row in await _deletable(services, 1, 0.0):
        await _delete(services, row, f"checkpoints use {used} bytes, the disk cap is {cap}")
        used = await checkpoint_bytes(services.store)  # others may make room at the same time
        if used < cap:
            break
    return used


async def _deletable(services: Services, keep: int, before: float) -> list[CheckpointRow]:
    """Return those that may be deleted, oldest first: beyond the newest `keep` of their run, or older than a time."""
    return await services.store.read(CheckpointRow, "checkpoints_beyond", keep=keep, before=before, limit=BATCH)


async def _delete(services: Services, row: CheckpointRow, why: str) -> None:
    """Delete a checkpoint unless its owner has changed it meanwhile."""
    end = row.expires_at if row.expires_at is not None else -1.0
    if not await services.store.write(statement("delete_checkpoint_as_it_was", row, ends_at=end)):
        return
    services.disk.add(row.org_id, -row.size_bytes)
    await services.store.write(audit_deletion(row, why, services.clock()))
    await asyncio.to_thread(services.files.remove, row.directory)
    logger.info(
        "checkpoint %s (%d bytes) deleted: %s", row.path, row.size_bytes, why, extra={"event": "checkpoint_deleted"}
    )


def audit_deletion(row: CheckpointRow, why: str, now: float) -> Statement:
    """Return the entry of the audit log for a checkpoint that its owner did not delete one by one."""
    return statement(
        "insert_audit",
        AuditRow(
            at=now,
            org_id=row.org_id,
            user_id=row.user_id,
            event="checkpoint_deleted",
            group_name="checkpoints",
            details=msgspec.json.encode({"size_bytes": row.size_bytes, "reason": why}).decode(),
            model_id=row.model_id,
            tinker_path=row.path,
            project_id=row.project_id,
        ),
    )


async def check_disk_cap(services: Services) -> None:
    """Refuse another checkpoint if the disk cap is reached and nothing may be deleted."""
    cap = services.config.disk_cap_bytes
    used = await make_room(services)
    if cap is not None and used >= cap:
        raise InvalidInputError(
            f"checkpoints use {used // 2**20} MB, and this server allows {cap // 2**20} MB (disk_cap_bytes); "
            "delete some or give them a ttl",
            field="path",
        )

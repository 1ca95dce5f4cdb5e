"""Which checkpoints go, and how: past their time, beyond what is kept of a run, over the disk cap.

A checkpoint with a ttl goes when that is over, and not before. Of the others only training checkpoints that are not
published can go, only by settings that are off by default, and never the newest of a run. A row goes before its files,
and only if it is still what was judged, so a crash leaves at most a directory that nothing refers to.
Does not know: HTTP, when a round is due.
"""

from __future__ import annotations

import asyncio
import logging
from pathlib import Path

import msgspec

from tinsmith.server.files import remove_tree
from tinsmith.server.services import Services
from tinsmith.store.base import Statement, statement
from tinsmith.store.rows import AuditRow, CheckpointRow

logger = logging.getLogger(__name__)

BATCH = 500
"""Checkpoints of one kind that go in one round."""
ALL = 2**62
"""More checkpoints than any run has."""


async def delete_checkpoint(services: Services, row: CheckpointRow, *statements: Statement) -> None:
    """As its owner asked: the row first, with what is written beside, then the files."""
    await services.store.write(statement("delete_checkpoint", path=row.path), *statements)
    await asyncio.to_thread(remove_tree, Path(row.directory))


class Retention:
    """Does the sweeper's part about checkpoints."""

    def __init__(self, services: Services) -> None:
        self._services = services
        self._was_full = False
        """Whether there was no room under the cap, and nothing to be done about it, at the last round."""

    async def round(self) -> None:
        """Delete what is due. The cap comes last: what goes anyway may be enough."""
        await self._expire()
        await self._keep_some()
        used, cap = await make_room(self._services), self._services.config.disk_cap_bytes
        is_full = cap is not None and used >= cap
        if is_full and not self._was_full:
            text = "checkpoints take %d bytes, the disk cap is %s, and nothing more may be deleted: saves are refused"
            logger.warning(text, used, cap, extra={"event": "disk_cap"})
        self._was_full = is_full

    async def _expire(self) -> None:
        services = self._services
        rows = await services.store.read(CheckpointRow, "checkpoints_expired", before=services.clock(), limit=BATCH)
        for row in rows:
            await _delete(services, row, "its ttl is over")

    async def _keep_some(self) -> None:
        config, now = self._services.config, self._services.clock()
        most, age_s = config.max_run_checkpoints, config.checkpoint_retention_s
        if most is None and age_s is None:
            return
        before = now - age_s if age_s is not None else 0.0
        for row in await _deletable(self._services, most or ALL, before):
            why = f"is older than {age_s:g} s" if row.created_at < before else f"its run has {most} newer ones"
            await _delete(self._services, row, f"{why}, by the server's retention")


async def make_room(services: Services) -> int:
    """Bring checkpoints below the cap, where they may be deleted for it; returns what they take, 0 without a cap."""
    cap = services.config.disk_cap_bytes
    if cap is None:
        return 0
    used = await services.checkpoint_bytes()
    if used < cap or services.config.disk_cap_action != "delete":
        return used
    for row in await _deletable(services, 1, 0.0):
        await _delete(services, row, f"checkpoints take {used} bytes, the disk cap is {cap}")
        used = await services.checkpoint_bytes()  # others may make room at the same time
        if used < cap:
            break
    return used


async def _deletable(services: Services, keep: int, before: float) -> list[CheckpointRow]:
    """Those that may go, oldest first: beyond the newest `keep` of their run, or made before a time."""
    return await services.store.read(CheckpointRow, "checkpoints_beyond", keep=keep, before=before, limit=BATCH)


async def _delete(services: Services, row: CheckpointRow, why: str) -> None:
    """Delete it if it is what it was; its owner may have changed it meanwhile."""
    end = row.expires_at if row.expires_at is not None else -1.0
    if not await services.store.write(statement("delete_checkpoint_as_it_was", row, ends_at=end)):
        return
    await services.store.write(_audit(row, why, services.clock()))
    await asyncio.to_thread(remove_tree, Path(row.directory))
    logger.info(
        "checkpoint %s (%d bytes) deleted: %s", row.path, row.size_bytes, why, extra={"event": "checkpoint_deleted"}
    )


def _audit(row: CheckpointRow, why: str, now: float) -> Statement:
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
        ),
    )

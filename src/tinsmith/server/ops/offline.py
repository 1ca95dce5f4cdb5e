"""Deleting what a data directory holds while no server uses it (`tinsmith clean`).

As in a running server, rows are deleted before files. What a program could still come back for is kept.
"""

from __future__ import annotations

import asyncio
from collections.abc import Collection
from pathlib import Path

from tinsmith.server.checkpoints.retention import BATCH, audit_deletion
from tinsmith.server.data_dir import Files, remove_tree, run_places, session_of
from tinsmith.server.ops.sweeper import prune_session
from tinsmith.store.base import Statement, Store, statement
from tinsmith.store.rows import CheckpointRow, SessionRow

WHY = "deleted with tinsmith clean"


def can_come_back(row: SessionRow, now: float, grace_s: float) -> bool:
    """Whether a session's program may still continue: a server would keep its journal and its files, too."""
    last = row.ended_at if row.ended_at is not None else row.heartbeat_at
    return row.status in ("active", "expired") and now - last < grace_s


async def sessions_to_keep(store: Store, now: float, grace_s: float) -> frozenset[str]:
    """Return the sessions whose runs can still be resumed."""
    rows = await store.read(SessionRow, "sessions_unpruned")
    return frozenset(row.session_id for row in rows if can_come_back(row, now, grace_s))


def places_of_ended(data_dir: Path, kept: Collection[str]) -> list[Path]:
    """Return the directories of all sessions but those to keep."""
    return [place for place in run_places(data_dir) if session_of(place) not in kept]


async def delete_ended(store: Store, files: Files, kept: Collection[str], now: float) -> None:
    """Delete the journals, results and files of all sessions but those to keep, and files that no session has."""
    for row in await store.read(SessionRow, "sessions_unpruned"):
        if row.session_id not in kept:
            await prune_session(store, files, row.session_id, *(_ended(row, now) if row.status == "active" else ()))
    for place in places_of_ended(files.root, kept):
        await asyncio.to_thread(remove_tree, place)


def _ended(row: SessionRow, now: float) -> tuple[Statement, ...]:
    """Return what ends a session that was active when the server stopped, and did not come back."""
    fields = {"session_id": row.session_id, "status": "expired", "status_detail": None, "detail": WHY, "ended_at": now}
    return (
        statement("set_session_status", None, **fields),
        statement("unload_models_of_session", session_id=row.session_id),
    )


async def delete_checkpoints(store: Store, files: Files, now: float) -> int:
    """Delete all checkpoints, and files that no checkpoint has; return how many there were."""
    count = 0
    while rows := await store.read(CheckpointRow, "first_checkpoints", limit=BATCH):
        for row in rows:
            deletion = statement("delete_checkpoint", path=row.path, directory=row.directory)
            await store.write(deletion, audit_deletion(row, WHY, now))
        count += len(rows)
    for place in (files.root / "checkpoints").glob("*"):
        await asyncio.to_thread(remove_tree, place)
    return count

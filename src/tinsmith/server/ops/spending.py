"""Usage by run, project, model, session, user or day, with device time, which the protocol does not have.

A key with the scope `admin` sees its organisation, others see their own, and a key of a project sees that project only.
`usage` counts it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime
from typing import Any

import msgspec

from tinsmith.errors import InvalidInputError
from tinsmith.server.auth.identity import Caller
from tinsmith.server.call import encoded_items
from tinsmith.server.ops.usage import GB, HOUR_S, usage_of
from tinsmith.server.services import Services
from tinsmith.store.base import Row
from tinsmith.store.rows import UsageRow
from tinsmith.wire.routes.own import UsageQuery

GROUPS: Mapping[str, Callable[[Any], str]] = {
    "run": lambda row: row.run_id,
    "project": lambda row: row.project_id,
    "model": lambda row: row.base_model,
    "session": lambda row: row.session_id,
    "user": lambda row: row.user_id,
    "day": lambda row: datetime.fromtimestamp(row.hour * HOUR_S, UTC).date().isoformat(),
}
TOKENS = ("training", "prefill", "prefill_cached", "sampled", "checkpoints", "jobs")
"""Columns that are reported as they are."""


class StoredRow(Row, frozen=True, kw_only=True):
    """How many bytes the checkpoints of one run use now."""

    run_id: str
    session_id: str
    base_model: str
    project_id: str
    user_id: str
    size_bytes: int


async def spent(services: Services, caller: Caller, query: UsageQuery) -> dict[str, Any]:
    """Return the groups in order, and what each stores now; what belongs to none has an empty name."""
    if query.by not in GROUPS:
        raise InvalidInputError(f"by: {query.by[:40]!r} is not one of {', '.join(GROUPS)}", field="by")
    rows = await usage_of(services.store, "usage_by_run", caller.org_id, query.starting_on, query.ending_before)
    stored: Sequence[StoredRow] = ()
    if query.by != "day":
        stored = await services.store.read(StoredRow, "storage_of_runs", org_id=caller.org_id)
    return await asyncio.to_thread(_grouped, caller, rows, stored, query.by)


def _grouped(caller: Caller, rows: Sequence[UsageRow], stored: Sequence[StoredRow], by: str) -> dict[str, Any]:
    """Return the answer, with what may be long already encoded."""
    used = [row for row in rows if caller.owns(row.org_id, row.user_id, row.project_id)]
    kept = [row for row in stored if caller.owns(caller.org_id, row.user_id, row.project_id)]
    stored_bytes = msgspec.Raw(msgspec.json.encode(_stored(kept, by)))
    return {"by": by, "groups": encoded_items(summed(used, by)), "stored_bytes": stored_bytes}


def summed(rows: Sequence[UsageRow], by: str) -> list[dict[str, Any]]:
    """Sum up usage for each value."""
    groups: dict[str, dict[str, Any]] = {}
    for row in rows:
        name = GROUPS[by](row)
        group = groups.setdefault(name, {by: name, **dict.fromkeys(TOKENS, 0), "storage": 0, "device_us": 0})
        for column in (*TOKENS, "storage", "device_us"):
            group[column] += getattr(row, column)
    return [_reported(groups[name]) for name in sorted(groups)]


def _reported(group: dict[str, Any]) -> dict[str, Any]:
    storage, device_us = group.pop("storage"), group.pop("device_us")
    return {**group, "gigabyte_hours": storage / GB, "device_s": device_us / 1e6}


def _stored(rows: Sequence[StoredRow], by: str) -> dict[str, int]:
    stored: dict[str, int] = {}
    for row in rows:
        name = GROUPS[by](row)
        stored[name] = stored.get(name, 0) + row.size_bytes
    return stored

"""Usage summed up by run, project, model, session, user or day, device time included, which the protocol has not.

A key with the scope `admin` sees its organisation, others see themselves.
Does not know: HTTP, how usage is counted (`usage`).
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime
from typing import Any

import msgspec

from tinsmith.errors import InvalidInputError
from tinsmith.server.identity import Caller
from tinsmith.server.routes.administration import GB, hours_of
from tinsmith.server.services import Services
from tinsmith.server.usage import HOUR_S
from tinsmith.store.base import Row
from tinsmith.store.rows import UsageRow

GROUPS: Mapping[str, Callable[[Any], str]] = {
    "run": lambda row: row.run_id,
    "project": lambda row: row.project_id,
    "model": lambda row: row.base_model,
    "session": lambda row: row.session_id,
    "user": lambda row: row.user_id,
    "day": lambda row: datetime.fromtimestamp(row.hour * HOUR_S, UTC).date().isoformat(),
}
TOKENS = ("training", "prefill", "prefill_cached", "sampled", "checkpoints", "jobs")
"""Columns that are told as they are."""


class SpendingQuery(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What is asked: a period of whole UTC hours, at most 14 days, and by what."""

    starting_on: datetime
    ending_before: datetime
    by: str = "run"


class StoredRow(Row, frozen=True, kw_only=True):
    """What the checkpoints of one run take now."""

    run_id: str
    session_id: str
    base_model: str
    project_id: str
    user_id: str
    size_bytes: int


def read_query(parameters: Mapping[str, str]) -> SpendingQuery:
    try:
        query = msgspec.convert(dict(parameters), SpendingQuery)
    except msgspec.ValidationError as error:
        raise InvalidInputError(f"usage: {error}") from None
    if query.by not in GROUPS:
        raise InvalidInputError(f"by: {query.by[:40]!r} is not one of {', '.join(GROUPS)}", field="by")
    return query


async def spent(services: Services, caller: Caller, query: SpendingQuery) -> dict[str, Any]:
    """The groups in their order, and what each has stored now; what belongs to no group has an empty name."""
    since, until = hours_of(query.starting_on, query.ending_before)
    rows = await services.store.read(UsageRow, "usage_by_run", org_id=caller.org_id, since_hour=since, until_hour=until)
    stored: Sequence[StoredRow] = ()
    if query.by != "day":
        stored = await services.store.read(StoredRow, "storage_of_runs", org_id=caller.org_id)
    return {
        "by": query.by,
        "groups": await asyncio.to_thread(
            summed, [row for row in rows if caller.owns(row.org_id, row.user_id)], query.by
        ),
        "stored_bytes": _stored([row for row in stored if caller.owns(caller.org_id, row.user_id)], query.by),
    }


def summed(rows: Sequence[UsageRow], by: str) -> list[dict[str, Any]]:
    """A group for each value."""
    groups: dict[str, dict[str, Any]] = {}
    for row in rows:
        name = GROUPS[by](row)
        group = groups.setdefault(name, {by: name, **dict.fromkeys(TOKENS, 0), "storage": 0, "device_us": 0})
        for column in (*TOKENS, "storage", "device_us"):
            group[column] += getattr(row, column)
    return [_told(groups[name]) for name in sorted(groups)]


def _told(group: dict[str, Any]) -> dict[str, Any]:
    storage, device_us = group.pop("storage"), group.pop("device_us")
    return {**group, "gigabyte_hours": storage / GB, "device_s": device_us / 1e6}


def _stored(rows: Sequence[StoredRow], by: str) -> dict[str, int]:
    stored: dict[str, int] = {}
    for row in rows:
        name = GROUPS[by](row)
        stored[name] = stored.get(name, 0) + row.size_bytes
    return stored

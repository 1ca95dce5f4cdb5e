"""Usage, storage and audit. A key with the scope `admin` sees its organisation, others see their own, and a key of a
project sees that project only."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from datetime import UTC, date, datetime
from typing import Any, TypeVar

import msgspec

from tinsmith.errors import InvalidInputError
from tinsmith.server.auth.admission import DAY_S
from tinsmith.server.auth.identity import Caller
from tinsmith.server.call import Answer, Call, Handlers, reply, reply_long
from tinsmith.server.ops.usage import GB, HOUR_S, usage_of
from tinsmith.server.routes.sessions import check_page, texts
from tinsmith.server.services import Services
from tinsmith.store.rows import AuditRow, SessionRow, StorageRow, UsageRow, UserRow
from tinsmith.wire.messages import admin as wire

RowT = TypeVar("RowT", UsageRow, AuditRow)

MAX_ENTRIES = 10_000


async def get_billing_usage(services: Services, call: Call) -> Answer:
    query: wire.GetBillingUsageRequest = call.query
    rows = await usage_of(services.store, "usage_of_org", call.caller.org_id, query.starting_on, query.ending_before)
    mine = await asyncio.to_thread(_owned, call.caller, rows)
    metadata: dict[str, str] = {}
    for session_id in sorted({row.session_id for row in mine if row.session_id}):
        found = await services.store.read(SessionRow, "session", session_id=session_id)
        if found and call.caller.sees(found[0].org_id, found[0].project_id):
            metadata[session_id] = found[0].user_metadata
            check_page(metadata.values(), "starting_on")
    return await reply_long(lambda: _billed(mine, metadata))


def _billed(rows: Sequence[UsageRow], metadata: Mapping[str, str]) -> wire.BillingUsageResponse:
    sessions = {name: wire.BillingUsageSession(user_metadata=texts(text)) for name, text in metadata.items()}
    return wire.BillingUsageResponse(data=[event for row in rows for event in _events(row)], sessions=sessions)


def _owned(caller: Caller, rows: Sequence[RowT]) -> list[RowT]:
    return [row for row in rows if caller.owns(row.org_id, row.user_id, row.project_id)]


def _events(row: UsageRow) -> list[wire.BillingUsageEvent]:
    """Return an event for each kind of usage that is not zero."""
    infos: list[tuple[int, Any]] = [
        (row.checkpoints, wire.CheckpointBillingEvent(count=row.checkpoints)),
        (row.prefill, wire.SamplingPrefillBillingEvent(cached=False, token_count=row.prefill)),
        (row.prefill_cached, wire.SamplingPrefillBillingEvent(cached=True, token_count=row.prefill_cached)),
        (row.sampled, wire.SamplingSampleBillingEvent(token_count=row.sampled)),
        (row.storage, wire.StorageBillingEvent(gigabyte_hours=row.storage / GB)),
        (row.training, wire.TrainingBillingEvent(token_count=row.training)),
    ]
    known: dict[str, Any] = {
        "base_model": row.base_model,
        "user_id": row.user_id,
        "session_id": row.session_id,
        "project_id": row.project_id,
    }
    return [
        wire.BillingUsageEvent(
            bucket_start=datetime.fromtimestamp(row.hour * HOUR_S, UTC),
            bucket_end=datetime.fromtimestamp((row.hour + 1) * HOUR_S, UTC),
            event_info=info,
            **{name: value for name, value in known.items() if value},
        )
        for amount, info in infos
        if amount
    ]


async def get_current_checkpoint_storage_usage(services: Services, call: Call) -> Answer:
    org_id, project_id = call.caller.org_id, call.query.project_id
    if project_id is None:
        rows = await services.store.read(StorageRow, "storage_of_org", org_id=org_id)
    else:
        rows = await services.store.read(StorageRow, "storage_of_project", org_id=org_id, project_id=project_id)
    items = []
    for row in rows:
        if call.caller.owns(org_id, row.user_id, row.project_id):
            users = await services.store.read(UserRow, "user", user_id=row.user_id)
            items.append(_storage(row, users[0] if users else None))
    return reply(wire.CurrentCheckpointStorageUsageResponse(data=items))


def _storage(row: StorageRow, user: UserRow | None) -> wire.CurrentCheckpointStorageUsageItem:
    known: dict[str, Any] = {
        "project_id": row.project_id,
        "user_name": user.name if user is not None else None,
        "user_email": user.email if user is not None else None,
        "org_user_urn": f"tml:organization_user:{user.org_id}:{user.user_id}" if user is not None else None,
    }
    return wire.CurrentCheckpointStorageUsageItem(
        checkpoint_count=row.count,
        size_bytes=row.size_bytes,
        size_gigabytes=row.size_bytes / GB,
        **{name: value for name, value in known.items() if value is not None},
    )


async def get_audit_log(services: Services, call: Call) -> Answer:
    query: wire.AuditLogQuery = call.query
    since, until = 0.0, services.clock() + 1
    if query.day is not None:
        try:
            day = date.fromisoformat(query.day)
        except ValueError:
            raise InvalidInputError(f"day: {query.day!r} is not YYYY-MM-DD", field="day") from None
        start = datetime(day.year, day.month, day.day, tzinfo=UTC)
        since, until = start.timestamp(), start.timestamp() + DAY_S
    period: dict[str, Any] = {"org_id": call.caller.org_id, "since": since, "until": until, "limit": MAX_ENTRIES}
    if query.event_type == "all":
        rows = await services.store.read(AuditRow, "audit_of_org", **period)
    else:
        rows = await services.store.read(AuditRow, "audit_of_group", group_name=query.event_type, **period)
    return await reply_long(lambda: wire.AuditLogResponse(entries=[_entry(row) for row in _owned(call.caller, rows)]))


def _entry(row: AuditRow) -> wire.AuditLogEntry:
    known: dict[str, Any] = {"model_id": row.model_id, "tinker_path": row.tinker_path, "purpose": row.purpose}
    return wire.AuditLogEntry(
        timestamp=datetime.fromtimestamp(row.at, UTC),
        event=row.event,
        event_details=msgspec.json.decode(row.details),
        **{name: value for name, value in known.items() if value is not None},
    )


HANDLERS: Handlers = {
    "get_billing_usage": get_billing_usage,
    "get_current_checkpoint_storage_usage": get_current_checkpoint_storage_usage,
    "get_audit_log": get_audit_log,
}

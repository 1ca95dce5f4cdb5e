"""Usage, storage and audit. A key with the scope `admin` sees its organisation, others see themselves."""

from __future__ import annotations

from datetime import UTC, date, datetime
from typing import Any

import msgspec

from tinsmith.errors import InvalidInputError
from tinsmith.server.admission import DAY_S
from tinsmith.server.calls import Answer, Call, Handlers, reply
from tinsmith.server.routes.sessions import texts
from tinsmith.server.services import Services
from tinsmith.server.usage import HOUR_S
from tinsmith.store.rows import AuditRow, SessionRow, StorageRow, UsageRow, UserRow
from tinsmith.wire import admin as wire

MAX_DAYS = 14
MAX_ENTRIES = 10_000
GB = 10**9


async def get_billing_usage(services: Services, call: Call) -> Answer:
    query: wire.GetBillingUsageRequest = call.query
    since, until = hours_of(query.starting_on, query.ending_before)
    rows = await services.store.read(
        UsageRow, "usage_of_org", org_id=call.caller.org_id, since_hour=since, until_hour=until
    )
    mine = [row for row in rows if call.caller.owns(row.org_id, row.user_id)]
    sessions = {}
    for session_id in sorted({row.session_id for row in mine if row.session_id}):
        found = await services.store.read(SessionRow, "session", session_id=session_id)
        if found:
            sessions[session_id] = wire.BillingUsageSession(user_metadata=texts(found[0].user_metadata))
    events = [event for row in mine for event in _events(row)]
    return reply(wire.BillingUsageResponse(data=events, sessions=sessions))


def hours_of(starting_on: datetime, ending_before: datetime) -> tuple[int, int]:
    """A period in hours since the epoch; refused where it is longer than one answer may be about."""
    since, until = _hours(starting_on, "starting_on"), _hours(ending_before, "ending_before")
    if not since < until <= since + MAX_DAYS * 24:
        raise InvalidInputError(
            f"ending_before: must be after starting_on and at most {MAX_DAYS} days later", field="ending_before"
        )
    return since, until


def _hours(moment: datetime, field: str) -> int:
    if moment.tzinfo is None:
        moment = moment.replace(tzinfo=UTC)
    seconds = moment.timestamp()
    if seconds % HOUR_S:
        raise InvalidInputError(f"{field}: {moment.isoformat()} is not a whole hour", field=field)
    return int(seconds // HOUR_S)


def _events(row: UsageRow) -> list[wire.BillingUsageEvent]:
    """What the protocol counts, an event for each kind of which there is any."""
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
        if call.caller.owns(org_id, row.user_id):
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
    mine = [row for row in rows if call.caller.owns(row.org_id, row.user_id)]
    return reply(wire.AuditLogResponse(entries=[_entry(row) for row in mine]))


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

"""Sessions: create, heartbeat, list, search, assign to a project, trace, finish."""

from __future__ import annotations

import asyncio
import math
import uuid
from collections.abc import Iterable
from datetime import UTC, datetime
from typing import Any

import msgspec

from tinsmith.errors import InvalidInputError
from tinsmith.server.auth.access import project_statement
from tinsmith.server.auth.identity import Caller
from tinsmith.server.call import NOTHING, Answer, Call, Handlers, reply, reply_long
from tinsmith.server.jobs.accept import check_open
from tinsmith.server.ops.sweeper import end_session
from tinsmith.server.ops.traces import write_trace
from tinsmith.server.refusals import OverLimitError
from tinsmith.server.services import Services
from tinsmith.store.base import statement
from tinsmith.store.rows import AuditRow, ModelRow, SamplerRow, SessionRow, StorageRow
from tinsmith.wire.messages import sessions as wire

MAX_METADATA_BYTES = 32 * 1024
"""Metadata of one session, run or checkpoint; less than a body may have, so that the error names the field."""
MAX_PAGE_BYTES = 16 * 1024 * 1024
"""Metadata in one answer."""
SEARCH_PAGE = 500
CURSOR_DIGIT_S = 1e-6
"""The precision of the time in a cursor."""
SEARCH_LIMIT = 20_000
"""Sessions that one search examines; its cursor continues after them."""


async def create_session(services: Services, call: Call) -> Answer:
    check_open(services)
    request: wire.CreateSessionRequest = call.message
    mine = sum(
        row.user_id == call.caller.user_id
        and row.status == "active"
        and not services.caller_sessions.holds(row.session_id)
        for row in services.access.sessions.values()
    )
    if mine >= services.config.max_sessions:
        raise OverLimitError(
            f"you have {mine} active sessions (limit {services.config.max_sessions}); finish some", retry_after_s=10
        )
    metadata = msgspec.json.encode(request.user_metadata or {}).decode()
    if len(metadata) > MAX_METADATA_BYTES:
        raise InvalidInputError(f"user_metadata: larger than {MAX_METADATA_BYTES} bytes", field="user_metadata")
    project_id = call.caller.project_for(request.project_id or None)
    now = services.clock()
    row = SessionRow(
        session_id=str(uuid.uuid4()),
        org_id=call.caller.org_id,
        user_id=call.caller.user_id,
        project_id=project_id,
        display_name=request.display_name,
        tags=msgspec.json.encode(request.tags).decode(),
        user_metadata=metadata,
        sdk_version=request.sdk_version,
        created_at=now,
        heartbeat_at=now,
    )
    await services.access.begin_session(row)
    services.activity.heartbeats[row.session_id] = now
    return reply(wire.CreateSessionResponse(session_id=row.session_id))


async def session_heartbeat(services: Services, call: Call) -> Answer:
    session_id = call.message.session_id
    await services.access.live_session(call.caller, session_id)
    services.activity.heartbeats[session_id] = services.clock()
    return reply(wire.SessionHeartbeatResponse())


async def finish_session(services: Services, call: Call) -> Answer:
    row = await services.access.session(call.caller, call.params["session_id"])
    if await services.store.read(ModelRow, "models_of_session", session_id=row.session_id):
        call.caller.need("train")
    if row.status in ("active", "expired"):
        request: wire.FinishSessionRequest = call.message
        await end_session(services, row, "finished", status_detail=request.reason.type, detail=request.detail)
    return NOTHING


async def get_session(services: Services, call: Call) -> Answer:
    row = await services.access.session(
        call.caller, call.params["session_id"], to_read=call.query.access_scope == "accessible"
    )
    models = await services.store.read(ModelRow, "models_of_session", session_id=row.session_id)
    samplers = await services.store.read(SamplerRow, "samplers_of_session", session_id=row.session_id)
    return await reply_long(
        lambda: wire.GetSessionResponse(
            training_run_ids=[model.model_id for model in models],
            sampler_ids=[sampler.sampler_id for sampler in samplers],
            user_metadata=texts(row.user_metadata),
            display_name=row.display_name,
        )
    )


async def list_sessions(services: Services, call: Call) -> Answer:
    caller, query = call.caller, call.query
    owner = {"org_id": caller.org_id, "project_id": caller.project_id}
    name = "sessions_of_org"
    if query.access_scope != "accessible":
        owner["user_id"], name = caller.user_id, "sessions_of_user"
    rows = await services.store.read(SessionRow, name, **owner, limit=min(query.limit, 1000), offset=query.offset)
    return reply(wire.ListSessionsResponse(sessions=[row.session_id for row in rows]))


async def assign_session_project(services: Services, call: Call) -> Answer:
    row = await services.access.session(call.caller, call.params["session_id"])
    project_id = call.caller.project_for(call.message.project_id)
    assert project_id is not None
    await services.store.write(
        project_statement(call.caller.org_id, project_id, services.clock()),
        statement("set_session_project", session_id=row.session_id, project_id=project_id),
        statement("set_models_project", session_id=row.session_id, project_id=project_id),
        statement("set_checkpoints_project", session_id=row.session_id, project_id=project_id),
        statement(
            "insert_audit",
            AuditRow(
                at=services.clock(),
                org_id=row.org_id,
                user_id=call.caller.user_id,
                event="session_assigned_to_project",
                group_name="projects",
                details=msgspec.json.encode({"session_id": row.session_id, "project_id": project_id}).decode(),
                project_id=project_id,
            ),
        ),
    )
    services.access.forget_session(row.session_id)
    return NOTHING


async def export_session_trace(services: Services, call: Call) -> Answer:
    row = await services.access.session(call.caller, call.params["session_id"])
    path = await write_trace(services.store, services.files, row)
    url, _ = services.signer.url(call.base_url, services.files.relative(path), services.config.download_ttl_s)
    return reply(wire.TraceExportResponse(status="ready", url=url))


async def search_sessions(services: Services, call: Call) -> Answer:
    request: wire.SessionSearchRequest = call.message
    found, stopped_at = await _found(services, call.caller, request)
    page = found[: request.limit]
    last = page[-1] if len(found) > request.limit else stopped_at
    cursor: Any = {}
    if last is not None:
        cursor = {
            "next_cursor": wire.SessionSearchCursor(
                last_created_at=datetime.fromtimestamp(last.created_at, UTC), last_session_id=last.session_id
            )
        }
    sessions = [await _summary(services, row) for row in page]
    return await reply_long(lambda: wire.SessionSearchResponse(sessions=sessions, **cursor))


async def _found(
    services: Services, caller: Caller, request: wire.SessionSearchRequest
) -> tuple[list[SessionRow], SessionRow | None]:
    """Return the matches, one more than requested if there is one, and the last session examined if others are left."""
    found: list[SessionRow] = []
    before = math.inf if request.cursor is None else request.cursor.last_created_at.timestamp() + CURSOR_DIGIT_S
    for offset in range(0, SEARCH_LIMIT, SEARCH_PAGE):
        rows = await services.store.read(
            SessionRow,
            "sessions_before",
            org_id=caller.org_id,
            project_id=caller.project_id,
            before=before,
            limit=SEARCH_PAGE,
            offset=offset,
        )
        found += await asyncio.to_thread(_matching, rows, request, caller)
        if len(rows) < SEARCH_PAGE or len(found) > request.limit:
            return found, None
    return found, rows[-1]


def _matching(rows: list[SessionRow], request: wire.SessionSearchRequest, caller: Caller) -> list[SessionRow]:
    return [row for row in rows if _matches(row, request, caller)]


def _matches(row: SessionRow, request: wire.SessionSearchRequest, caller: Caller) -> bool:
    owner = request.owner
    if isinstance(owner, wire.OwnSearchOwner) and row.user_id != caller.user_id:
        return False
    if isinstance(owner, wire.UserSearchOwner) and _urn(row) not in owner.owner_urns:
        return False
    if request.project_ids is not None and row.project_id not in request.project_ids:
        return False
    wanted = request.user_metadata
    if wanted and not wanted.items() <= texts(row.user_metadata).items():
        return False
    if request.statuses is not None and not any(_has_status(row, status) for status in request.statuses):
        return False
    if request.cursor is not None:
        place = (request.cursor.last_created_at, request.cursor.last_session_id)
        if (datetime.fromtimestamp(row.created_at, UTC), row.session_id) >= place:  # as exact as a cursor can be
            return False
    return _is_named(row, request)


def _is_named(row: SessionRow, request: wire.SessionSearchRequest) -> bool:
    """A session can be found by either of its names."""
    if request.session_id is None and request.display_name is None:
        return True
    by_id = request.session_id is not None and row.session_id == request.session_id
    words = (request.display_name or "").lower().split()
    name = (row.display_name or "").lower()
    return by_id or (bool(words) and all(word in name for word in words))


def _has_status(row: SessionRow, wanted: wire.SessionStatusQuery) -> bool:
    if isinstance(wanted, wire.ClientFinishedSessionStatusQuery):
        return row.status == "finished" and (wanted.reasons is None or row.status_detail in wanted.reasons)
    names = {"active": "active", "cancelled": "expired", "failed": "failed"}
    return row.status == names[wanted.type]


async def _summary(services: Services, row: SessionRow) -> wire.SessionSummary:
    storage = await services.store.read(StorageRow, "storage_of_session", session_id=row.session_id)
    return wire.SessionSummary(
        session_id=row.session_id,
        created_at=datetime.fromtimestamp(row.created_at, UTC),
        owner=_urn(row),
        project_id=row.project_id or "",
        checkpoints_count=storage[0].count,
        checkpoint_storage_bytes=storage[0].size_bytes,
        status=_status(row),
        display_name=row.display_name,
        user_metadata=texts(row.user_metadata),
    )


def _status(row: SessionRow) -> wire.SessionStatus:
    if row.status == "finished":
        reasons: dict[str, type[wire.ClientSessionFinishReason]] = {
            "success": wire.ClientSessionFinishSuccess,
            "errored": wire.ClientSessionFinishErrored,
            "interrupted": wire.ClientSessionFinishInterrupted,
        }
        return wire.ClientSessionFinished(reason=reasons[row.status_detail or "success"](), detail=row.detail)
    if row.status == "expired":
        return wire.SessionCancelled(detail=row.detail or "no heartbeat")
    return wire.SessionActive()


def _urn(row: SessionRow) -> str:
    return f"tml:organization_user:{row.org_id}:{row.user_id}"


def check_page(metadata: Iterable[str | None], field: str = "limit") -> None:
    """Refuse an answer with more metadata than one answer may hold."""
    size_bytes = sum(len(text) for text in metadata if text is not None)
    if size_bytes > MAX_PAGE_BYTES:
        raise InvalidInputError(
            f"{field}: these entries have {size_bytes // 2**20} MB of metadata, and one answer holds at most "
            f"{MAX_PAGE_BYTES // 2**20} MB; request fewer at a time",
            field=field,
        )


def texts(encoded: str | None) -> dict[str, str]:
    """Return metadata as clients read it: strings only."""
    values = msgspec.json.decode(encoded or "{}")
    return {
        key: value if isinstance(value, str) else msgspec.json.encode(value).decode() for key, value in values.items()
    }


HANDLERS: Handlers = {
    "create_session": create_session,
    "session_heartbeat": session_heartbeat,
    "finish_session": finish_session,
    "get_session": get_session,
    "list_sessions": list_sessions,
    "assign_session_project": assign_session_project,
    "export_session_trace": export_session_trace,
    "search_sessions": search_sessions,
}

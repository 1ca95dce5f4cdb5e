"""Sessions: their life, lists, search, project, trace."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from support.server_answers import RefusedError
from support.server_core import Call, Core, Handler, Result
from support.server_state import Session
from support.server_training import owned_session
from tinsmith.wire.messages.sessions import (
    ClientFinishedSessionStatusQuery,
    CreateSessionResponse,
    GetSessionResponse,
    ListSessionsResponse,
    OwnSearchOwner,
    SessionHeartbeatResponse,
    SessionSearchCursor,
    SessionSearchRequest,
    SessionSearchResponse,
    SessionSummary,
    TraceExportResponse,
    UserSearchOwner,
)
from tinsmith.wire.routes import table as routes

NO_PROJECT = "default-project"


async def create_session(core: Core, call: Call) -> CreateSessionResponse:
    state, request = core.state, call.request
    number = len(state.sessions) + 1
    session_id = f"session_{number:08x}" if core.vintage.has_plain_ids else f"session-{number:04d}"
    state.sessions[session_id] = Session(session_id, call.user, state.now(), request, request.project_id)
    return CreateSessionResponse.model_validate({"session_id": session_id, **core.settings.session_messages})


async def session_heartbeat(core: Core, call: Call) -> SessionHeartbeatResponse:
    session = owned_session(core, call.request.session_id, call.user)
    if session.is_gone:
        raise RefusedError(410, "the session is gone")
    session.heartbeats += 1
    return SessionHeartbeatResponse()


async def finish_session(core: Core, call: Call) -> Result:
    session = owned_session(core, call.parameters["session_id"], call.user)
    session.status = {"type": "client_finished", "reason": {"type": call.request.reason.type}}
    if call.request.detail is not None:
        session.status["detail"] = call.request.detail
    return None


async def get_session(core: Core, call: Call) -> GetSessionResponse:
    session = owned_session(core, call.parameters["session_id"], call.user)
    models = [model.model_id for model in core.state.models.values() if model.session_id == session.session_id]
    samplers = [s.sampler_id for s in core.state.samplers.values() if s.session_id == session.session_id]
    return GetSessionResponse(training_run_ids=models, sampler_ids=samplers, **_named(session))


def _named(session: Session) -> dict[str, Any]:
    given = {"user_metadata": session.request.user_metadata, "display_name": session.request.display_name}
    return {name: value for name, value in given.items() if value is not None}


async def list_sessions(core: Core, call: Call) -> ListSessionsResponse:
    owned = [session.session_id for session in reversed(core.state.sessions.values()) if session.owner == call.user]
    return ListSessionsResponse(sessions=owned[call.query.offset : call.query.offset + call.query.limit])


async def assign_session_project(core: Core, call: Call) -> Result:
    session = owned_session(core, call.parameters["session_id"], call.user)
    session.project_id = call.request.project_id
    details = {"session_id": session.session_id, "project_id": session.project_id}
    core.state.audit.append(
        {"timestamp": core.state.now(), "event": "project_assigned", "event_details": details, "purpose": "projects"}
    )
    return None


async def export_session_trace(core: Core, call: Call) -> TraceExportResponse:
    session = owned_session(core, call.parameters["session_id"], call.user)
    if core.settings.trace_pending > 0:
        core.settings.trace_pending -= 1
        return TraceExportResponse(status="pending")
    path = f"/files/traces/{session.session_id}.pftrace"
    core.files[path] = b"pftrace of " + session.session_id.encode()
    return TraceExportResponse(status="ready", url=core.url + path)


async def search_sessions(core: Core, call: Call) -> SessionSearchResponse:
    request: SessionSearchRequest = call.request
    found = [session for session in reversed(core.state.sessions.values()) if _is_match(session, request, call.user)]
    if request.cursor is not None:
        ids = [session.session_id for session in found]
        last = request.cursor.last_session_id
        found = found[ids.index(last) + 1 :] if last in ids else []
    page, rest = found[: request.limit], found[request.limit :]
    given = {}
    if rest:
        last_shown = page[-1]
        given["next_cursor"] = SessionSearchCursor(
            last_created_at=last_shown.created_at, last_session_id=last_shown.session_id
        )
    return SessionSearchResponse(sessions=[_summary(core, session) for session in page], **given)


def _is_match(session: Session, request: SessionSearchRequest, user: str) -> bool:
    owners = request.owner.owner_urns if isinstance(request.owner, UserSearchOwner) else [user]
    if (isinstance(request.owner, OwnSearchOwner) or owners) and session.owner not in owners:
        return False
    if request.project_ids is not None and (session.project_id or NO_PROJECT) not in request.project_ids:
        return False
    metadata = session.request.user_metadata or {}
    if any(metadata.get(key) != value for key, value in request.user_metadata.items()):
        return False
    if request.statuses is not None and not any(_has_status(session, wanted) for wanted in request.statuses):
        return False
    if request.session_id is None and request.display_name is None:
        return True
    shown = (session.request.display_name or "").lower()
    words = (request.display_name or "").lower().split()
    return session.session_id == request.session_id or (bool(words) and all(word in shown for word in words))


def _has_status(session: Session, wanted: Any) -> bool:
    if session.status["type"] != wanted.type:
        return False
    reasons = wanted.reasons if isinstance(wanted, ClientFinishedSessionStatusQuery) else None
    return reasons is None or session.status["reason"]["type"] in reasons


def _summary(core: Core, session: Session) -> SessionSummary:
    runs = {model.model_id for model in core.state.models.values() if model.session_id == session.session_id}
    checkpoints = [c for c in core.state.checkpoints.values() if c.run_id in runs and not c.is_ephemeral]
    return SessionSummary.model_validate(
        {
            "session_id": session.session_id,
            "created_at": session.created_at,
            "owner": session.owner,
            "project_id": session.project_id or NO_PROJECT,
            "checkpoints_count": len(checkpoints),
            "checkpoint_storage_bytes": sum(checkpoint.size_bytes for checkpoint in checkpoints),
            "status": session.status,
            **_named(session),
        }
    )


HANDLERS: Mapping[str, Handler] = {
    routes.CREATE_SESSION.name: create_session,
    routes.SESSION_HEARTBEAT.name: session_heartbeat,
    routes.FINISH_SESSION.name: finish_session,
    routes.GET_SESSION.name: get_session,
    routes.LIST_SESSIONS.name: list_sessions,
    routes.ASSIGN_SESSION_PROJECT.name: assign_session_project,
    routes.EXPORT_SESSION_TRACE.name: export_session_trace,
    routes.SEARCH_SESSIONS.name: search_sessions,
}

"""Sessions: creating, searching and finishing them."""

from __future__ import annotations

from datetime import datetime
from typing import Annotated, Literal, TypeAlias

import msgspec

from tinsmith.wire.limits import Id, JsonObject, Labels, Name, Note, ShortText, Tags
from tinsmith.wire.message import NOT_GIVEN, Count, Message, Tagged, since
from tinsmith.wire.messages.runs import AccessScope


class CreateSessionRequest(Message, frozen=True, kw_only=True):
    tags: Tags = []
    user_metadata: JsonObject | None = NOT_GIVEN
    sdk_version: ShortText = ""
    project_id: Annotated[Id | None, since("0.15")] = NOT_GIVEN
    display_name: Annotated[Name | None, since("0.34")] = NOT_GIVEN
    type: Literal["create_session"] = "create_session"


class CreateSessionResponse(Message, frozen=True, kw_only=True):
    """The answer to a new session; the client logs the three messages at their level."""

    session_id: str
    type: Literal["create_session"] = "create_session"
    info_message: str | None = NOT_GIVEN
    warning_message: str | None = NOT_GIVEN
    error_message: str | None = NOT_GIVEN


class SessionHeartbeatRequest(Message, frozen=True, kw_only=True):
    session_id: Id
    type: Literal["session_heartbeat"] = "session_heartbeat"


class SessionHeartbeatResponse(Message, frozen=True, kw_only=True):
    type: Literal["session_heartbeat"] = "session_heartbeat"


class ClientSessionFinishSuccess(Tagged, frozen=True, kw_only=True, tag="success"):
    """The program finished successfully."""


class ClientSessionFinishErrored(Tagged, frozen=True, kw_only=True, tag="errored"):
    """The program ended with an exception."""


class ClientSessionFinishInterrupted(Tagged, frozen=True, kw_only=True, tag="interrupted"):
    """The user stopped it."""


ClientSessionFinishReason: TypeAlias = (
    ClientSessionFinishSuccess | ClientSessionFinishErrored | ClientSessionFinishInterrupted
)
ClientSessionFinishReasonType: TypeAlias = Literal["success", "errored", "interrupted"]


class FinishSessionRequest(Message, frozen=True, kw_only=True):
    reason: ClientSessionFinishReason
    detail: Note | None = None


class GetSessionResponse(Message, frozen=True, kw_only=True):
    training_run_ids: list[str]
    sampler_ids: list[str]
    user_metadata: Annotated[dict[str, str] | None, since("0.26")] = NOT_GIVEN
    display_name: Annotated[str | None, since("0.34")] = NOT_GIVEN


class ListSessionsResponse(Message, frozen=True, kw_only=True):
    sessions: list[str]


class ListSessionsQuery(Message, frozen=True, kw_only=True):
    limit: Count = 20
    offset: Count = 0
    access_scope: AccessScope = "owned"


class AssignProjectRequest(Message, frozen=True, kw_only=True):
    project_id: Id


class TraceExportResponse(Message, frozen=True, kw_only=True):
    status: Literal["pending", "ready", "failed"]
    url: str | None = NOT_GIVEN
    error: str | None = NOT_GIVEN


class SessionActive(Tagged, frozen=True, kw_only=True, tag="active"):
    """A session whose client sends heartbeats."""


class SessionCancelled(Tagged, frozen=True, kw_only=True, tag="cancelled"):
    detail: str | None = NOT_GIVEN


class ClientSessionFinished(Tagged, frozen=True, kw_only=True, tag="client_finished"):
    reason: ClientSessionFinishReason
    detail: str | None = NOT_GIVEN


class SessionFailedRequestReason(Tagged, frozen=True, kw_only=True, tag="request"):
    request_id: str
    request_type: str


class SessionFailedTrainingRunReason(Tagged, frozen=True, kw_only=True, tag="training_run"):
    training_run_id: str


class SessionFailedSamplingSessionReason(Tagged, frozen=True, kw_only=True, tag="sampling_session"):
    sampling_session_id: str


SessionFailedReason: TypeAlias = (
    SessionFailedRequestReason | SessionFailedTrainingRunReason | SessionFailedSamplingSessionReason
)


class SessionFailed(Tagged, frozen=True, kw_only=True, tag="failed"):
    category: Literal["user", "internal"]
    reason: SessionFailedReason
    message: str


SessionStatus: TypeAlias = SessionFailed | SessionCancelled | ClientSessionFinished | SessionActive


class OwnSearchOwner(Tagged, frozen=True, kw_only=True, tag="own"):
    """The caller's own sessions."""


class AccessibleSearchOwner(Tagged, frozen=True, kw_only=True, tag="accessible"):
    """Every session that the caller may see."""


class UserSearchOwner(Tagged, frozen=True, kw_only=True, tag="user"):
    """Sessions of the named users."""

    owner_urns: Annotated[list[Id], msgspec.Meta(min_length=1, max_length=10)]


SearchOwner: TypeAlias = OwnSearchOwner | AccessibleSearchOwner | UserSearchOwner


class ActiveSessionStatusQuery(Tagged, frozen=True, kw_only=True, tag="active"):
    """Sessions that are running."""


class CancelledSessionStatusQuery(Tagged, frozen=True, kw_only=True, tag="cancelled"):
    """Sessions that were cancelled."""


class FailedSessionStatusQuery(Tagged, frozen=True, kw_only=True, tag="failed"):
    """Sessions that failed."""


class ClientFinishedSessionStatusQuery(Tagged, frozen=True, kw_only=True, tag="client_finished"):
    """Sessions that their client finished, for any reason or for the given ones."""

    reasons: Annotated[list[ClientSessionFinishReasonType], msgspec.Meta(min_length=1, max_length=16)] | None = (
        NOT_GIVEN
    )


SessionStatusQuery: TypeAlias = (
    ActiveSessionStatusQuery | CancelledSessionStatusQuery | FailedSessionStatusQuery | ClientFinishedSessionStatusQuery
)


class SessionSearchCursor(Message, frozen=True, kw_only=True):
    last_created_at: Annotated[datetime, msgspec.Meta(tz=True)]
    last_session_id: Id


class SessionSearchRequest(Message, frozen=True, kw_only=True):
    session_id: Id | None = NOT_GIVEN
    project_ids: Annotated[list[Id], msgspec.Meta(max_length=256)] | None = NOT_GIVEN
    user_metadata: Labels = {}
    display_name: Annotated[str, msgspec.Meta(min_length=1, max_length=1024)] | None = NOT_GIVEN
    owner: SearchOwner = msgspec.field(default_factory=OwnSearchOwner)
    statuses: Annotated[list[SessionStatusQuery], msgspec.Meta(min_length=1, max_length=16)] | None = NOT_GIVEN
    limit: Annotated[int, msgspec.Meta(ge=1, le=200)] = 50
    cursor: SessionSearchCursor | None = NOT_GIVEN


class SessionSummary(Message, frozen=True, kw_only=True):
    session_id: str
    created_at: datetime
    owner: str
    project_id: str
    checkpoints_count: int
    status: SessionStatus | None = NOT_GIVEN
    display_name: str | None = NOT_GIVEN
    user_metadata: dict[str, str] | None = NOT_GIVEN
    checkpoint_storage_bytes: int | None = NOT_GIVEN


class SessionSearchResponse(Message, frozen=True, kw_only=True):
    sessions: list[SessionSummary]
    next_cursor: SessionSearchCursor | None = NOT_GIVEN

"""The one place that decides who may access what.

Every route gets its sessions, models, samplers, checkpoints and requests from here. What a caller may not see is
reported as missing, so the ids of others cannot be distinguished from ids that do not exist. A key of a project sees
that project only; what has no project of its own is in that of its session.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Protocol, TypeAlias, TypeVar

from tinsmith.server.auth.authenticator import Authenticator
from tinsmith.server.auth.identity import Caller
from tinsmith.server.refusals import GoneError, NotAuthenticatedError, UnknownResourceError
from tinsmith.store.base import Row, Statement, Store, statement
from tinsmith.store.rows import CheckpointRow, CustomLossRow, JobRow, ModelRow, ProjectRow, SamplerRow, SessionRow
from tinsmith.wire.messages.weights import ParsedCheckpointTinkerPath

MAX_SAMPLERS = 20_000
"""Samplers that are cached. Sessions and models in use have limits of their own; samplers are read again if needed."""
RowT = TypeVar("RowT", bound=Row)
InProject: TypeAlias = SessionRow | ModelRow | CheckpointRow


class InSession(Protocol):
    """Something that belongs to a session, and to its project."""

    @property
    def org_id(self) -> str: ...
    @property
    def user_id(self) -> str: ...
    @property
    def session_id(self) -> str: ...


class Access:
    """Finds rows for a caller. Sessions, models and samplers in use are cached."""

    def __init__(self, store: Store, authenticator: Authenticator, *, clock: Callable[[], float] = time.time) -> None:
        self._store = store
        self._authenticator = authenticator
        self._clock = clock
        self.sessions: dict[str, SessionRow] = {}
        self.models: dict[str, ModelRow] = {}
        self.samplers: dict[str, SamplerRow] = {}

    async def session(self, caller: Caller, session_id: str, *, to_read: bool = False) -> SessionRow:
        """Return a session of the caller, or, to read it, of the caller's organisation."""
        row = self.sessions.get(session_id)
        if row is None:
            row = await self._one(SessionRow, "session", session_id=session_id)
        if row is None or not _may(caller, row, to_read):
            raise UnknownResourceError(f"session {session_id!r} does not exist or is not yours")
        if row.status == "active":
            self.sessions[session_id] = row
        return row

    async def live_session(self, caller: Caller, session_id: str) -> SessionRow:
        """Return a session that accepts work. One that expired is revived, since its client is back."""
        row = await self.session(caller, session_id)
        if row.status == "expired" and not row.pruned:
            return await self._revive(row)
        if row.status != "active":
            raise GoneError(f"session {session_id} has ended ({row.status}); create a new ServiceClient")
        return row

    async def begin_session(self, row: SessionRow) -> None:
        """Write a new session, and the project that it is the first of."""
        projects = [] if row.project_id is None else [project_statement(row.org_id, row.project_id, row.created_at)]
        await self._store.write(*projects, statement("insert_session", row))
        self.sessions[row.session_id] = row

    async def model(self, caller: Caller, model_id: str, *, to_read: bool = False) -> ModelRow:
        row = self.models.get(model_id)
        if row is None:
            row = await self._one(ModelRow, "model", model_id=model_id)
        if row is None or not _may(caller, row, to_read):
            raise UnknownResourceError(f"training run {model_id!r} does not exist or is not yours")
        return row

    async def live_model(self, caller: Caller, model_id: str) -> ModelRow:
        """Return a model that accepts work."""
        row = await self.model(caller, model_id)
        if row.state == "parked":
            await self.live_session(caller, row.session_id)
            row = await self.model(caller, model_id)
        if row.state != "live":
            raise GoneError(
                f"training run {model_id} was unloaded; resume from a checkpoint with create_training_client_from_state"
            )
        await self.live_session(caller, row.session_id)
        self.models[model_id] = row
        return row

    async def sampler(self, caller: Caller, sampler_id: str) -> SamplerRow:
        row = self.samplers.get(sampler_id)
        if row is None:
            row = await self._one(SamplerRow, "sampler", sampler_id=sampler_id)
        if row is None or not await self.owns(caller, row):
            raise UnknownResourceError(f"sampling session {sampler_id!r} does not exist or is not yours")
        return row

    async def live_sampler(self, caller: Caller, sampler_id: str) -> SamplerRow:
        """Return a sampling session that accepts work."""
        row = await self.sampler(caller, sampler_id)
        await self.live_session(caller, row.session_id)
        if sampler_id not in self.samplers and len(self.samplers) >= MAX_SAMPLERS:
            del self.samplers[next(iter(self.samplers))]  # the one that has been here longest
        self.samplers[sampler_id] = row
        return row

    async def checkpoint(
        self, caller: Caller, path: str, *, to_change: bool = False, token: str | None = None
    ) -> CheckpointRow:
        """Return a checkpoint of the caller. To read it, it may also be public, or `token` may be a key of its owner
        that may read files."""
        parsed = ParsedCheckpointTinkerPath.from_tinker_path(path)
        row = await self._one(CheckpointRow, "checkpoint", path=parsed.tinker_path)
        if row is not None and row.expires_at is not None and row.expires_at <= self._clock():
            row = None
        if row is not None and await self._may_checkpoint(caller, row, to_change, token):
            return row
        raise UnknownResourceError(f"checkpoint {path} does not exist, has expired, or is not yours to use")

    async def custom_loss(self, caller: Caller, loss_id: str) -> CustomLossRow:
        row = await self._one(CustomLossRow, "custom_loss", loss_id=loss_id)
        if row is None or not await self.owns(caller, row):
            raise UnknownResourceError(f"custom loss {loss_id!r} does not exist or is not yours")
        return row

    async def job(self, caller: Caller, request_id: str) -> JobRow:
        """Return an accepted request from the store."""
        row = await self._one(JobRow, "job", request_id=request_id)
        if row is None or row.state == "refused" or not await self.owns(caller, row):
            raise UnknownResourceError(f"request {request_id!r} does not exist, was pruned, or is not yours")
        return row

    async def owns(self, caller: Caller, thing: InSession) -> bool:
        """Whether the caller may use something."""
        return caller.owns(thing.org_id, thing.user_id, await self._project(caller, thing))

    async def sees(self, caller: Caller, thing: InSession) -> bool:
        """Whether the caller may read something, and it belongs in lists."""
        return caller.sees(thing.org_id, await self._project(caller, thing))

    async def _project(self, caller: Caller, thing: InSession) -> str | None:
        """Return the project that something is in; None if the caller's key is not limited to one."""
        if caller.project_id is None or thing.org_id != caller.org_id:
            return None
        row = self.sessions.get(thing.session_id) or await self._one(SessionRow, "session", session_id=thing.session_id)
        return row.project_id if row is not None else None

    def forget_session(self, session_id: str) -> tuple[list[str], list[str]]:
        """Remove a session that has ended from memory; return its cached models and samplers."""
        self.sessions.pop(session_id, None)
        models = [model_id for model_id, row in self.models.items() if row.session_id == session_id]
        samplers = [sampler_id for sampler_id, row in self.samplers.items() if row.session_id == session_id]
        for model_id in models:
            del self.models[model_id]
        for sampler_id in samplers:
            del self.samplers[sampler_id]
        return models, samplers

    async def _may_checkpoint(self, caller: Caller, row: CheckpointRow, to_change: bool, token: str | None) -> bool:
        if _may(caller, row):
            return True
        if to_change:
            return False
        if row.public:
            return True
        if token is None:
            return False
        try:
            owner = await self._authenticator.caller(token)
        except NotAuthenticatedError:
            return False
        return _may(owner, row) and (owner.may("read") or owner.may("train"))

    async def _revive(self, row: SessionRow) -> SessionRow:
        now = self._clock()
        alive = SessionRow(
            **{**row.parameters(), "status": "active", "ended_at": None, "heartbeat_at": now}  # type: ignore[arg-type]
        )
        await self._store.write(
            statement("set_session_status", alive), statement("revive_models", session_id=row.session_id)
        )
        self.sessions[row.session_id] = alive
        return alive

    async def _one(self, row_type: type[RowT], query: str, **parameters: str) -> RowT | None:
        rows = await self._store.read(row_type, query, **parameters)
        return rows[0] if rows else None


def project_statement(org_id: str, project_id: str, now: float) -> Statement:
    """Return the statement that creates a project of an organisation, if it does not exist."""
    row = ProjectRow(project_id=project_id, org_id=org_id, name=project_id, created_at=now)
    return statement("insert_project", row)


def _may(caller: Caller, row: InProject, to_read: bool = False) -> bool:
    if to_read:
        return caller.sees(row.org_id, row.project_id)
    return caller.owns(row.org_id, row.user_id, row.project_id)

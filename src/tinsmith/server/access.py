"""The one place that decides who may touch what.

Every route gets its sessions, models, samplers, checkpoints and promises from here. What a caller may not see reads as
missing, so ids of strangers cannot be told from ids that do not exist.
Does not know: HTTP, what is done with what was found.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeVar

from tinsmith.server.auth import Authenticator
from tinsmith.server.identity import Caller
from tinsmith.server.refusals import GoneError, NotAuthenticatedError, UnknownResourceError
from tinsmith.store.base import Row, Store, statement
from tinsmith.store.rows import CheckpointRow, CustomLossRow, JobRow, ModelRow, SamplerRow, SessionRow
from tinsmith.wire.weights import ParsedCheckpointTinkerPath

RowT = TypeVar("RowT", bound=Row)


class Access:
    """Finds rows for a caller. Sessions, models and samplers in use are kept in memory."""

    def __init__(self, store: Store, authenticator: Authenticator, *, clock: Callable[[], float] = time.time) -> None:
        self._store = store
        self._authenticator = authenticator
        self._clock = clock
        self.sessions: dict[str, SessionRow] = {}
        self.models: dict[str, ModelRow] = {}
        self.samplers: dict[str, SamplerRow] = {}

    async def session(self, caller: Caller, session_id: str, *, to_read: bool = False) -> SessionRow:
        """A session of the caller's; to read, of the caller's organisation."""
        row = self.sessions.get(session_id)
        if row is None:
            row = await self._one(SessionRow, "session", session_id=session_id)
        if row is None or not _may(caller, row.org_id, row.user_id, to_read):
            raise UnknownResourceError(f"session {session_id!r} does not exist or is not yours")
        if row.status == "active":
            self.sessions[session_id] = row
        return row

    async def live_session(self, caller: Caller, session_id: str) -> SessionRow:
        """A session that takes work. One that missed its heartbeats comes back to life: its client is there again."""
        row = await self.session(caller, session_id)
        if row.status == "expired" and not row.pruned:
            return await self._revive(row)
        if row.status != "active":
            raise GoneError(f"session {session_id} is over ({row.status}); create a new ServiceClient")
        return row

    async def model(self, caller: Caller, model_id: str, *, to_read: bool = False) -> ModelRow:
        row = self.models.get(model_id)
        if row is None:
            row = await self._one(ModelRow, "model", model_id=model_id)
        if row is None or not _may(caller, row.org_id, row.user_id, to_read):
            raise UnknownResourceError(f"training run {model_id!r} does not exist or is not yours")
        return row

    async def live_model(self, caller: Caller, model_id: str) -> ModelRow:
        """A model that takes work."""
        row = await self.model(caller, model_id)
        if row.state == "parked":
            await self.live_session(caller, row.session_id)
            row = await self.model(caller, model_id)
        if row.state != "live":
            raise GoneError(
                f"training run {model_id} was unloaded; go on from a checkpoint with create_training_client_from_state"
            )
        await self.live_session(caller, row.session_id)
        self.models[model_id] = row
        return row

    async def sampler(self, caller: Caller, sampler_id: str) -> SamplerRow:
        row = self.samplers.get(sampler_id)
        if row is None:
            row = await self._one(SamplerRow, "sampler", sampler_id=sampler_id)
        if row is None or not caller.owns(row.org_id, row.user_id):
            raise UnknownResourceError(f"sampling session {sampler_id!r} does not exist or is not yours")
        return row

    async def live_sampler(self, caller: Caller, sampler_id: str) -> SamplerRow:
        """A sampling session that takes work."""
        row = await self.sampler(caller, sampler_id)
        await self.live_session(caller, row.session_id)
        self.samplers[sampler_id] = row
        return row

    async def checkpoint(
        self, caller: Caller, path: str, *, to_change: bool = False, token: str | None = None
    ) -> CheckpointRow:
        """A checkpoint: one's own; to read, also a published one, or one whose owner's key is given as a token."""
        parsed = ParsedCheckpointTinkerPath.from_tinker_path(path)
        row = await self._one(CheckpointRow, "checkpoint", path=parsed.tinker_path)
        if row is not None and row.expires_at is not None and row.expires_at <= self._clock():
            row = None
        if row is not None and await self._may_checkpoint(caller, row, to_change, token):
            return row
        raise UnknownResourceError(f"checkpoint {path} does not exist, has expired, or is not yours to use")

    async def custom_loss(self, caller: Caller, loss_id: str) -> CustomLossRow:
        row = await self._one(CustomLossRow, "custom_loss", loss_id=loss_id)
        if row is None or not caller.owns(row.org_id, row.user_id):
            raise UnknownResourceError(f"custom loss {loss_id!r} does not exist or is not yours")
        return row

    async def job(self, caller: Caller, request_id: str) -> JobRow:
        """An accepted request that is not in memory any more."""
        row = await self._one(JobRow, "job", request_id=request_id)
        if row is None or row.state == "refused" or not caller.owns(row.org_id, row.user_id):
            raise UnknownResourceError(f"request {request_id!r} does not exist, was pruned, or is not yours")
        return row

    def forget_session(self, session_id: str) -> tuple[list[str], list[str]]:
        """Drop a session that is over from memory; returns its models and samplers that were in use."""
        self.sessions.pop(session_id, None)
        models = [model_id for model_id, row in self.models.items() if row.session_id == session_id]
        samplers = [sampler_id for sampler_id, row in self.samplers.items() if row.session_id == session_id]
        for model_id in models:
            del self.models[model_id]
        for sampler_id in samplers:
            del self.samplers[sampler_id]
        return models, samplers

    async def _may_checkpoint(self, caller: Caller, row: CheckpointRow, to_change: bool, token: str | None) -> bool:
        if caller.owns(row.org_id, row.user_id):
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
        return owner.owns(row.org_id, row.user_id)

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


def _may(caller: Caller, org_id: str, user_id: str, to_read: bool) -> bool:
    return caller.owns(org_id, user_id) or (to_read and caller.sees(org_id))

"""A session on the server: created when first needed, kept alive by heartbeats, finished at the end.

It also numbers the models, samplers and losses that are created in it.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from typing import Any, Literal

from tinsmith.client.connection.connection import Connection
from tinsmith.client.runtime.sequence import Numbers
from tinsmith.errors import APIStatusError, APITimeoutError, InvalidInputError, TinkerError
from tinsmith.transport.base import Purpose
from tinsmith.transport.retry import NO_RETRY
from tinsmith.version import PROTOCOL_VERSION
from tinsmith.wire.message import NOT_GIVEN
from tinsmith.wire.messages.sessions import (
    ClientSessionFinishErrored,
    ClientSessionFinishInterrupted,
    ClientSessionFinishReason,
    ClientSessionFinishSuccess,
    CreateSessionRequest,
    FinishSessionRequest,
    SessionHeartbeatRequest,
)
from tinsmith.wire.routes.table import CREATE_SESSION, FINISH_SESSION, SESSION_HEARTBEAT

logger = logging.getLogger(__name__)

HEARTBEAT_TIMEOUT_S = 10.0
WARN_AFTER_S = 120.0
FINISH_TIMEOUT_S = 0.8

EndStatus = Literal["success", "errored", "interrupted"]
_REASONS: dict[str, type[ClientSessionFinishReason]] = {
    "success": ClientSessionFinishSuccess,
    "errored": ClientSessionFinishErrored,
    "interrupted": ClientSessionFinishInterrupted,
}


def finish_request(status: str, detail: str | None = None) -> FinishSessionRequest:
    """Return the message that finishes a session."""
    _check_status(status)
    return FinishSessionRequest(reason=_REASONS[status](), detail=detail)


def _check_status(status: str) -> None:
    if status not in _REASONS:
        raise InvalidInputError(f"status: {status!r} is not one of {', '.join(_REASONS)}", field="status")


class Session:
    """The session of a service client, or one that another process created and this one joined."""

    def __init__(
        self,
        connection: Connection,
        *,
        user_metadata: dict[str, Any] | None = None,
        project_id: str | None = None,
        display_name: str | None = None,
        joined_id: str | None = None,
    ) -> None:
        self.connection = connection
        self.models = Numbers()
        self.samplers = Numbers()
        self.losses = Numbers()
        self._user_metadata = user_metadata
        self._project_id = project_id
        self._display_name = display_name
        self._id = joined_id
        self._is_joined = joined_id is not None
        self._created: asyncio.Task[str] | None = None
        self._heartbeat: asyncio.Task[Any] | None = None
        self._is_finished = False
        self.on_created: Callable[[str], None] | None = None

    @property
    def known_id(self) -> str | None:
        return self._id

    async def id(self) -> str:
        """Return the session's id, creating the session on the first call."""
        if self._id is not None:
            self._keep_alive()
            return self._id
        if self._created is None or (self._created.done() and (self._created.cancelled() or self._created.exception())):
            self._created = self.connection.runner.spawn(self._create())
        return await asyncio.shield(self._created)

    async def finish(self, status: EndStatus, detail: str | None = None) -> None:
        """Finish the session on the server and stop the heartbeats, without retries: closing must not take long."""
        _check_status(status)
        if self._heartbeat is not None:
            self._heartbeat.cancel()
        if self._id is None or self._is_joined or self._is_finished:
            return
        self._is_finished = True
        try:
            await self.connection.call(
                FINISH_SESSION,
                finish_request(status, detail),
                path={"session_id": self._id},
                purpose=Purpose.SESSION,
                policy=NO_RETRY,
                timeout_s=FINISH_TIMEOUT_S,
            )
        except APIStatusError as error:
            if error.status_code not in (404, 405, 410):  # servers before 0.28 have no such route
                logger.warning("finishing session %s failed: %s", self._id, error)
        except APITimeoutError as error:  # a busy server, which ends the session when the heartbeats stay away
            logger.info("session %s is left to expire: %s", self._id, error)
        except TinkerError as error:
            logger.warning("finishing session %s failed: %s", self._id, error)

    async def _create(self) -> str:
        connection = self.connection
        await connection.ready()
        request = CreateSessionRequest(
            tags=list(connection.config.tags),
            user_metadata=self._user_metadata if self._user_metadata is not None else {},
            sdk_version=PROTOCOL_VERSION,
            project_id=self._project_id or NOT_GIVEN,
            display_name=self._display_name or NOT_GIVEN,
        )
        answer = await connection.call(CREATE_SESSION, request, purpose=Purpose.SESSION)
        for level, message in (
            (logging.INFO, answer.info_message),
            (logging.WARNING, answer.warning_message),
            (logging.ERROR, answer.error_message),
        ):
            if message:
                logger.log(level, "%s", message)
        session_id: str = answer.session_id
        self._id = session_id
        if self.on_created is not None:
            self.on_created(session_id)
        self._keep_alive()
        return session_id

    def _keep_alive(self) -> None:
        if self._heartbeat is None:
            self._heartbeat = self.connection.runner.spawn(self._beat())

    async def _beat(self) -> None:
        last_success = time.monotonic()
        while True:
            await asyncio.sleep(self.connection.config.heartbeat_s)
            try:
                await self.connection.call(
                    SESSION_HEARTBEAT,
                    SessionHeartbeatRequest(session_id=self._id or ""),
                    purpose=Purpose.SESSION,
                    policy=NO_RETRY,
                    timeout_s=HEARTBEAT_TIMEOUT_S,
                )
                last_success = time.monotonic()
            except APIStatusError as error:
                if error.status_code == 410:
                    logger.warning("the server ended session %s; its models may be unloaded", self._id)
                    return
            except TinkerError:
                pass
            silent = time.monotonic() - last_success
            if silent > WARN_AFTER_S:
                logger.warning(
                    "no heartbeat of session %s has reached %s for %.0f s; the session may expire",
                    self._id,
                    self.connection.config.base_url,
                    silent,
                )
                last_success = time.monotonic()

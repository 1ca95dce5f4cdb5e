"""Sessions for callers whose clients have none: a client of OpenAI sends single requests.

What is sampled belongs to a session, which is how it is owned, counted and cleaned up. The first request of a key's
holder begins one, and it is used for an hour; then a new one takes its place and the old one ends. So neither results
that were delivered long ago nor links to deleted checkpoints stay for ever. A restart begins new ones; the old ones
expire like any session whose client is gone.
"""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Callable, Set

from tinsmith.server.auth.access import Access
from tinsmith.server.auth.identity import Caller
from tinsmith.server.ops.activity import Activity
from tinsmith.server.refusals import GoneError, UnknownResourceError
from tinsmith.store.rows import SessionRow

ROTATE_S = 3600.0
"""How long one session is used."""
LEAVE_S = 60.0
"""How long a request may take from learning its session to submitting its samples."""
NAME = "Requests of OpenAI and Anthropic clients"


class CallerSessions:
    """The sessions of those who send single requests, one for each key holder and project."""

    def __init__(self, access: Access, activity: Activity, clock: Callable[[], float]) -> None:
        self._access = access
        self._activity = activity
        self._clock = clock
        self._current: dict[tuple[bytes, ...], SessionRow] = {}
        self._old: dict[str, SessionRow] = {}
        self._beginning = asyncio.Lock()

    async def of(self, caller: Caller) -> str:
        """Return the id of the caller's session; begin one if there is none."""
        async with self._beginning:  # two first requests at once begin one session
            row = self._current.get(caller.namespace)
            if row is not None and self._clock() - row.created_at >= ROTATE_S:
                self._old[row.session_id] = row
                row = None
            if row is None or not await self._is_live(caller, row):
                row = self._current[caller.namespace] = await self._begin(caller)
        self._activity.heartbeats[row.session_id] = self._clock()
        return row.session_id

    def holds(self, session_id: str) -> bool:
        """Whether a session is one of these, which do not count against a user's limit."""
        return session_id in self._old or any(row.session_id == session_id for row in self._current.values())

    def sweep(self, busy: Set[str]) -> list[SessionRow]:
        """Keep the sessions alive that have samples under way (`busy`), and return those to end: nothing will use them
        again."""
        now = self._clock()
        for row in (*self._current.values(), *self._old.values()):
            if row.session_id in busy:
                self._activity.heartbeats[row.session_id] = now
        over = [
            row
            for row in self._old.values()
            if row.session_id not in busy and now - row.created_at >= ROTATE_S + LEAVE_S
        ]
        for row in over:
            del self._old[row.session_id]
        return over

    async def _is_live(self, caller: Caller, row: SessionRow) -> bool:
        try:
            await self._access.live_session(caller, row.session_id)
        except (GoneError, UnknownResourceError):  # its owner ended it, or moved it to another project
            return False
        return True

    async def _begin(self, caller: Caller) -> SessionRow:
        now = self._clock()
        row = SessionRow(
            session_id=str(uuid.uuid4()),
            org_id=caller.org_id,
            user_id=caller.user_id,
            project_id=caller.project_id,
            display_name=NAME,
            created_at=now,
            heartbeat_at=now,
        )
        await self._access.begin_session(row)
        return row

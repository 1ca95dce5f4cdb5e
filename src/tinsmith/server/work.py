"""A request on its way through the server: from draft to journalled work.

Does not know: how it is queued, run or stored.
"""

from __future__ import annotations

import hashlib
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec

from tinsmith.engine.base import AnyJob, Done, decode_job
from tinsmith.server.promises import Outcome
from tinsmith.server.token_log import TokenLog
from tinsmith.store.base import Statement
from tinsmith.store.rows import JobRow

CLONE_BLOCK = 10**9
"""Cloned samplers number their requests in blocks of this size (protocol section 10)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Draft:
    """A valid request, before it has an id."""

    kind: str
    lane: str
    seq: int
    session_id: str
    org_id: str
    user_id: str
    digest: str = ""
    make_job: Callable[[str], AnyJob] | None = None
    """From the request's id to the job; None where the backend has no part in it."""
    context: Mapping[str, Any] = field(default_factory=dict)
    statements: Sequence[Statement] = ()
    """Written with the request, in one transaction."""
    log: TokenLog | None = None
    """Where the tokens of a streamed sample go."""


@dataclass(slots=True, kw_only=True, eq=False)
class Work:
    """A journalled request."""

    row: JobRow
    job: AnyJob
    context: dict[str, Any]
    started_at: float = 0.0
    log: TokenLog | None = None
    cancel_reason: str = "cancelled"
    """What is told of it if it is cancelled."""
    beside: Sequence[Statement] = ()
    """Written with its result, if it is one."""

    @classmethod
    def from_row(cls, row: JobRow) -> Work:
        return cls(row=row, job=decode_job(row.job), context=msgspec.json.decode(row.context))

    @property
    def feed(self) -> tuple[str, int] | None:
        return (self.row.lane, self.row.seq // CLONE_BLOCK) if self.row.kind == "sample" else None


@dataclass(frozen=True, slots=True)
class Finished:
    """What a finished job means to its client, and what is written beside the result."""

    outcome: Outcome
    statements: Sequence[Statement] = ()
    after: Callable[[], None] | None = None
    """Done once it is durable."""


Finisher = Callable[[Work, Done], Awaitable[Finished]]


def digest_of(*parts: bytes) -> str:
    """Names content; repetitions of a request have the same."""
    digest = hashlib.sha256()
    for part in parts:
        digest.update(len(part).to_bytes(8, "little"))
        digest.update(part)
    return digest.hexdigest()


def error_outcome(message: str, category: str) -> Outcome:
    return Outcome(msgspec.json.encode({"error": message, "category": category}), "error")

"""A request as it passes through the server (draft, journalled work, completed), and the ids of requests.

Ids cannot be guessed, and begin with the time: rows are found by id, and ids made at about the same time are neighbours
in the database's index, so that a commit writes a few pages of it instead of one for each row.
"""

from __future__ import annotations

import hashlib
import secrets
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec

from tinsmith.engine.protocol import AnyJob, Done, decode_job
from tinsmith.errors import bounded
from tinsmith.server.jobs.pending_results import Outcome
from tinsmith.server.jobs.token_log import TokenLog
from tinsmith.server.redaction import redacted_text
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
    """Makes the job from the request's id; None if the backend has no part in it."""
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
    """The error message if it is cancelled."""
    beside: Sequence[Statement] = ()
    """Written together with its result, if it succeeds."""

    @classmethod
    def from_row(cls, row: JobRow) -> Work:
        return cls(row=row, job=decode_job(row.job), context=msgspec.json.decode(row.context))

    @property
    def sampling_client(self) -> tuple[str, int] | None:
        return (self.row.lane, self.row.seq // CLONE_BLOCK) if self.row.kind == "sample" else None


@dataclass(frozen=True, slots=True)
class Completed:
    """The answer to a finished job's client, and what is written together with the result."""

    outcome: Outcome
    statements: Sequence[Statement] = ()
    after: Callable[[], None] | None = None
    """Called once the result is durable."""


Finisher = Callable[[Work, Done], Awaitable[Completed]]


def digest_of(*parts: bytes) -> str:
    """Return a digest of the content; repetitions of a request have the same one."""
    digest = hashlib.sha256()
    for part in parts:
        digest.update(len(part).to_bytes(8, "little"))
        digest.update(part)
    return digest.hexdigest()


def error_outcome(message: str, category: str) -> Outcome:
    """Return the outcome of a failed job, as its client gets it."""
    return Outcome(msgspec.json.encode({"error": readable(redacted_text(message)), "category": category}), "error")


def readable(text: str) -> str:
    """Return a string that every store and client accepts, whatever was quoted in it: bounded, without NUL characters
    and lone surrogates."""
    return bounded(text).encode(errors="replace").decode().replace("\0", "\N{REPLACEMENT CHARACTER}")


def text_of(error: BaseException) -> str:
    """Return an error's message, or its type if even `str` fails."""
    try:
        return readable(str(error))
    except Exception:
        return type(error).__name__


TIME_BYTES = 6
"""Milliseconds, as in a UUID of version 7."""
RANDOM_BYTES = 10
FETCHED = 256
"""Ids whose random bytes are fetched at once: each fetch is a system call, which releases Python's lock."""


class RequestIds:
    """Makes request ids."""

    def __init__(
        self, fetch: Callable[[int], bytes] = secrets.token_bytes, clock: Callable[[], float] = time.time
    ) -> None:
        self._fetch = fetch
        self._clock = clock
        self._drawn: list[str] = []

    def __call__(self) -> str:
        if not self._drawn:
            fetched = self._fetch(FETCHED * RANDOM_BYTES)
            starts = range(0, len(fetched), RANDOM_BYTES)
            self._drawn = [fetched[start : start + RANDOM_BYTES].hex() for start in reversed(starts)]
        return f"{int(self._clock() * 1000):0{2 * TIME_BYTES}x}{self._drawn.pop()}"

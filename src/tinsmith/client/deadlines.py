"""How long a call may take: set for a client, or for the calls of a block.

Owns: which deadline counts for a call, and the words for one that has passed.
Does not know: what a call does; `runner` ends those that are late.
"""

from __future__ import annotations

import math
import sys
import time
from contextlib import AbstractContextManager
from contextvars import ContextVar, Token
from dataclasses import dataclass

from tinsmith.errors import APITimeoutError, InvalidInputError


@dataclass(frozen=True, slots=True)
class Deadline:
    """So many seconds from the call, None for as long as it takes; and where that was said."""

    seconds: float | None
    where: str


class Limit:
    """The deadline of one call, as a moment."""

    __slots__ = ("_deadline", "_seconds", "_until", "_what")

    def __init__(self, deadline: Deadline, seconds: float, what: str) -> None:
        self._deadline = deadline
        self._seconds = seconds
        self._until = time.monotonic() + seconds
        self._what = what

    @property
    def left_s(self) -> float:
        return self._until - time.monotonic()

    def error(self, *, goes_on: bool) -> APITimeoutError:
        """The error of a call that is late; trying it again would not make it be in time."""
        text = f"{self._what}: no result {self._seconds:g} s after the call ({self._deadline.where})"
        error = APITimeoutError(None, f"{text}; the server may still carry it out" if goes_on else text)
        error.retryable = False
        return error


_asked: ContextVar[Deadline | None] = ContextVar("tinsmith_deadline", default=None)
RUNNING: ContextVar[Limit | None] = ContextVar("tinsmith_limit", default=None)
"""Inside an operation: its limit, which also holds for the operations that it is made of."""


def deadline(seconds: float | None) -> AbstractContextManager[None]:
    """Give every call made in a `with` block so many seconds, counted from that call; None: as many as it takes.

    Goes before the client's own `result_deadline_s`, and an inner block before an outer one. A call that is late raises
    APITimeoutError, which says what was late and where its deadline was set. Calls of other threads and tasks that run
    meanwhile are not affected.
    """
    is_number = isinstance(seconds, (int, float)) and not isinstance(seconds, bool)
    if seconds is not None and not (is_number and 0 < seconds < math.inf):
        raise InvalidInputError(f"seconds: must be a number above 0, or None, got {seconds!r}", field="seconds")
    caller = sys._getframe(1)
    shown = "None" if seconds is None else f"{seconds:g}"
    return _Block(Deadline(seconds, f"tinsmith.deadline({shown}) at {caller.f_code.co_filename}:{caller.f_lineno}"))


def limit_of(what: str, default: Deadline | None) -> Limit | None:
    """The limit of a call that begins now: of the operation that it is part of, of its block, or the client's."""
    outer = RUNNING.get()
    if outer is not None:
        return outer
    chosen = _asked.get() or default
    return None if chosen is None or chosen.seconds is None else Limit(chosen, chosen.seconds, what)


def patience_s(seconds: float) -> float:
    """So many seconds, or what is left of the limit of the operation that asks."""
    limit = RUNNING.get()
    return seconds if limit is None else max(min(seconds, limit.left_s), 0.0)


class _Block(AbstractContextManager[None]):
    """Sets a deadline for what is called inside; can be entered again."""

    def __init__(self, deadline: Deadline) -> None:
        self._deadline = deadline
        self._entered: list[Token[Deadline | None]] = []

    def __enter__(self) -> None:
        self._entered.append(_asked.set(self._deadline))

    def __exit__(self, *_: object) -> None:
        _asked.reset(self._entered.pop())

"""How long a call may take: set for a client, or for the calls in a `with` block.

This module decides which deadline applies to a call; `runner` cancels the calls that miss it.
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
    """Seconds from the call (None: no limit), and where they were set, for the error message."""

    seconds: float | None
    where: str


class Limit:
    """The deadline of one call, as a point in time."""

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
        """Return the error for a call that missed its deadline. It is not retryable: a retry would be late as well."""
        text = f"{self._what}: no result {self._seconds:g} s after the call ({self._deadline.where})"
        error = APITimeoutError(None, f"{text}; the server may still carry it out" if goes_on else text)
        error.retryable = False
        return error


_asked: ContextVar[Deadline | None] = ContextVar("tinsmith_deadline", default=None)
RUNNING: ContextVar[Limit | None] = ContextVar("tinsmith_limit", default=None)
"""Inside an operation: its limit, which also applies to the operations it consists of."""


def deadline(seconds: float | None) -> AbstractContextManager[None]:
    """Give every call in a `with` block this many seconds, counted from that call; None: no limit.

    Takes precedence over the client's own `result_deadline_s`, and an inner block over an outer one. A call that is
    late raises APITimeoutError, which says what was late and where its deadline was set. Calls of other threads and
    tasks that run meanwhile are not affected.
    """
    is_number = isinstance(seconds, (int, float)) and not isinstance(seconds, bool)
    if seconds is not None and not (is_number and 0 < seconds < math.inf):
        raise InvalidInputError(f"seconds: must be a number above 0, or None, got {seconds!r}", field="seconds")
    caller = sys._getframe(1)
    shown = "None" if seconds is None else f"{seconds:g}"
    return _Block(Deadline(seconds, f"tinsmith.deadline({shown}) at {caller.f_code.co_filename}:{caller.f_lineno}"))


def limit_of(what: str, default: Deadline | None) -> Limit | None:
    """Return the limit of a call that starts now: that of its operation, of its `with` block, or the client's."""
    outer = RUNNING.get()
    if outer is not None:
        return outer
    chosen = _asked.get() or default
    return None if chosen is None or chosen.seconds is None else Limit(chosen, chosen.seconds, what)


def left_s() -> float:
    """Return what is left of the current operation's limit; infinity if it has none."""
    limit = RUNNING.get()
    return math.inf if limit is None else limit.left_s


def patience_s(seconds: float) -> float:
    """Return the given seconds, or what is left of the current operation's limit if that is less."""
    return max(min(seconds, left_s()), 0.0)


class _Block(AbstractContextManager[None]):
    """A reusable context manager that sets a deadline for the calls inside."""

    def __init__(self, deadline: Deadline) -> None:
        self._deadline = deadline
        self._entered: list[Token[Deadline | None]] = []

    def __enter__(self) -> None:
        self._entered.append(_asked.set(self._deadline))

    def __exit__(self, *_: object) -> None:
        _asked.reset(self._entered.pop())

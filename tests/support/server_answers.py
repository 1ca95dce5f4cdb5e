"""What a server can be told to answer instead of, or before, its normal answer.

Owns: the kinds of scripted answers and the order in which they are used up. Does not know: what a normal answer is.
"""

from __future__ import annotations

import re
import threading
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import msgspec

from tinsmith.wire.routes.table import PREFIX


@dataclass(frozen=True, slots=True)
class Answer:
    """A complete answer; `pieces` are written one by one, a None among them waits for `release`."""

    status: int = 200
    body: bytes = b""
    content_type: str = "application/json"
    headers: Mapping[str, str] = field(default_factory=dict)
    pieces: tuple[bytes | None, ...] | None = None

    @classmethod
    def of_json(cls, value: Any, status: int = 200, headers: Mapping[str, str] | None = None) -> Answer:
        return cls(status, msgspec.json.encode(value), headers=headers or {})


class RefusedError(Exception):
    """A request that is answered with an error status."""

    def __init__(self, status: int, detail: str) -> None:
        super().__init__(detail)
        self.status = status
        self.detail = detail


@dataclass(frozen=True, slots=True)
class Status:
    """This status. Without a body: `{"detail": ...}`; text and bytes go out as they are, anything else as JSON."""

    status: int
    headers: Mapping[str, str] = field(default_factory=dict)
    body: Any = None

    def answer(self) -> Answer:
        if isinstance(self.body, (bytes, str)):
            raw = self.body.encode() if isinstance(self.body, str) else self.body
            return Answer(self.status, raw, "text/plain", self.headers)
        body = {"detail": f"scripted {self.status}"} if self.body is None else self.body
        return Answer.of_json(body, self.status, self.headers)


@dataclass(frozen=True, slots=True)
class Drop:
    """Close the connection before answering; `after_work`: the request takes effect, only its answer is lost."""

    after_work: bool = False


@dataclass(frozen=True, slots=True)
class DropMidBody:
    """The normal answer, cut off after half of its body."""


@dataclass(frozen=True, slots=True)
class SlowBytes:
    """The normal answer, one byte at a time."""

    delay_s: float


@dataclass(frozen=True, slots=True)
class Delay:
    """The normal answer, later."""

    delay_s: float


@dataclass(frozen=True, slots=True)
class Hold:
    """The normal answer, once the test calls `release`."""


@dataclass(frozen=True, slots=True)
class Redirect:
    """Send the client elsewhere."""

    url: str
    status: int = 307


@dataclass(frozen=True, slots=True)
class Replace:
    """What the function makes of the recorded request: a `Status`, or a value that is sent as JSON."""

    function: Callable[[Any], Any]


@dataclass(frozen=True, slots=True)
class Pass:
    """The normal answer; for scripts such as `[Pass(), Status(503)]`."""


Scripted: TypeAlias = Status | Drop | DropMidBody | SlowBytes | Delay | Hold | Redirect | Replace | Pass

NOT_FINAL = frozenset({402, 408, 409, 410, 415, 425, 429})
"""After these the same request comes again, after 415 in another encoding."""


def is_final(answer: Status) -> bool:
    """Whether the client will give the request up, so that its sequence number will not come again."""
    retries = {name.lower(): value for name, value in answer.headers.items()}.get("x-should-retry") == "true"
    is_proxy_fault = answer.status == 400 and answer.body in (b"", "")
    return 400 <= answer.status < 500 and not (retries or is_proxy_fault or answer.status in NOT_FINAL)


class Script:
    """Scripted answers by path. A path is a regular expression for the whole path, with or without `/api/v1/`."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._queues: list[tuple[re.Pattern[str], deque[Scripted]]] = []

    def add(self, path: str, answers: Iterable[Scripted]) -> None:
        with self._lock:
            self._queues.append((re.compile(path), deque(answers)))

    def clear(self) -> None:
        with self._lock:
            self._queues.clear()

    def left(self, path: str) -> int:
        """How many answers for this path have not been used."""
        path = path if path.startswith("/") else PREFIX + path
        with self._lock:
            return sum(len(queue) for pattern, queue in self._queues if _matches(pattern, path))

    def take(self, path: str) -> Scripted:
        """The next answer for a request; `Pass` when no script speaks of it."""
        with self._lock:
            for pattern, queue in self._queues:
                if queue and _matches(pattern, path):
                    return queue.popleft()
        return Pass()


def _matches(pattern: re.Pattern[str], path: str) -> bool:
    return pattern.fullmatch(path) is not None or pattern.fullmatch(path.removeprefix(PREFIX)) is not None

"""Accepted requests without a result, and the long polls that wait for them.

A poll is woken as soon as its result is stored. Recent results stay in memory, within a limit, because a poll usually
asks for them soon. So do the logs of completions that batch polls read; older entries are in the store.
"""

from __future__ import annotations

import asyncio
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Container, Iterable
from dataclasses import dataclass, field
from typing import Literal, TypeAlias

import msgspec

ResultEncoding: TypeAlias = Literal["json", "protobuf", "error"]

KEPT_BYTES = 64 * 1024 * 1024
"""Memory for recent results, which a poll usually asks for soon."""
KEPT_S = 600.0
"""How long they are kept, unless others need the memory."""
ENTRY_BYTES = 1024
"""Overhead of each, besides its body."""
KEPT_EVENTS = 20_000
"""Entries in memory for each completion log; older ones are in the store."""
MAX_COMPLETION_LOGS = 4000
"""Completion logs of one organisation; limited, since clients can name any number of new ones."""


class Outcome(msgspec.Struct, frozen=True, gc=False):
    """How a job ended. The body of an error is the JSON that clients read: `{"error", "category"}`."""

    body: bytes
    encoding: ResultEncoding

    @property
    def is_error(self) -> bool:
        return self.encoding == "error"


@dataclass(slots=True, kw_only=True, eq=False)
class Promise:
    """An accepted request that has no outcome yet."""

    request_id: str
    kind: str
    lane: str
    session_id: str
    org_id: str
    user_id: str
    created_at: float
    sampling_client: tuple[str, int] | None = None
    """The (sampling session, clone) whose batch polls report it."""
    waiters: set[asyncio.Future[Outcome | None]] = field(default_factory=set)


class Completion(msgspec.Struct, frozen=True, gc=False):
    """An entry of a completion log: a request that has completed."""

    cursor: int
    request_id: str
    size_bytes: int
    is_error: bool


class CompletionLog:
    """The completed requests of one sampling client, in order. Cursors grow with time, also across restarts."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._events: deque[Completion] = deque(maxlen=KEPT_EVENTS)
        self._last = 0
        self._arrived = asyncio.Event()
        self.began = self._stamp()
        """Completions before this cursor are not in memory."""

    def add(self, request_id: str, size_bytes: int, *, is_error: bool) -> None:
        if len(self._events) == KEPT_EVENTS:
            self.began = self._events[0].cursor
        self._events.append(Completion(self._stamp(), request_id, size_bytes, is_error))
        self._arrived.set()

    def close(self) -> None:
        """Wake the polls that wait: the log is dropped from memory, and the store has its entries."""
        self._arrived.set()

    def is_ahead(self, cursor: int) -> bool:
        """Whether a cursor is from before a restart at which the clock was set back."""
        return cursor > self._last

    def pass_by(self, cursor: int) -> None:
        """Number further completions after this cursor."""
        self._last = max(self._last, cursor)

    def after(self, cursor: int) -> list[Completion]:
        """Return the completions after the cursor."""
        found: list[Completion] = []
        for event in reversed(self._events):
            if event.cursor <= cursor:
                break
            found.append(event)
        return found[::-1]

    async def wait(self, cursor: int, timeout_s: float) -> list[Completion]:
        """Return the completions after the cursor; wait for the first if there is none."""
        found = self.after(cursor)
        if found:
            return found
        self._arrived.clear()
        try:
            async with asyncio.timeout(timeout_s):
                await self._arrived.wait()
        except TimeoutError:
            return []
        return self.after(cursor)

    def _stamp(self) -> int:
        self._last = max(self._last + 1, int(self._clock() * 1e6))
        return self._last


class Recent:
    """Recent results, within a bound on memory. Over the bound the oldest of the organisation that holds most are
    dropped, so that one cannot push out another's share."""

    def __init__(self, kept_bytes: int) -> None:
        self._kept_bytes = kept_bytes
        self._all: dict[str, tuple[Promise, Outcome]] = {}
        self._by_tenant: dict[str, dict[str, int]] = {}
        """The sizes of each tenant's results, the oldest first."""
        self._held: dict[str, int] = {}
        self._since: dict[str, float] = {}
        """When each was delivered, the oldest first."""
        self._size = 0

    def get(self, request_id: str) -> tuple[Promise, Outcome] | None:
        return self._all.get(request_id)

    def add(self, promise: Promise, outcome: Outcome, now: float) -> None:
        size, tenant = len(outcome.body) + ENTRY_BYTES, promise.org_id
        self._since[promise.request_id] = now
        self._all[promise.request_id] = (promise, outcome)
        self._by_tenant.setdefault(tenant, {})[promise.request_id] = size
        self._held[tenant] = self._held.get(tenant, 0) + size
        self._size += size
        while self._size > self._kept_bytes and len(self._all) > 1:
            self.drop(next(iter(self._by_tenant[max(self._held, key=self._held.__getitem__)])))

    def drop(self, request_id: str) -> None:
        promise, _ = self._all.pop(request_id)
        del self._since[request_id]
        mine = self._by_tenant[promise.org_id]
        size = mine.pop(request_id)
        self._held[promise.org_id] -= size
        self._size -= size
        if not mine:
            del self._by_tenant[promise.org_id], self._held[promise.org_id]

    def drop_before(self, time: float) -> None:
        while self._since and next(iter(self._since.values())) < time:
            self.drop(next(iter(self._since)))

    def drop_lanes(self, lanes: Container[str]) -> None:
        for request_id in [key for key, (promise, _) in self._all.items() if promise.lane in lanes]:
            self.drop(request_id)


class Broker:
    """All pending requests of this process, and their recent results."""

    def __init__(self, clock: Callable[[], float] = time.time, kept_bytes: int = KEPT_BYTES) -> None:
        self._clock = clock
        self._pending: dict[str, Promise] = {}
        self._recent = Recent(kept_bytes)
        self._completion_logs: dict[str, OrderedDict[tuple[str, int], CompletionLog]] = {}
        """By tenant, then by sampling client."""

    def open(self, promise: Promise) -> None:
        """Let clients wait for a request."""
        self._pending[promise.request_id] = promise

    def pending(self, request_id: str) -> Promise | None:
        return self._pending.get(request_id)

    def all_pending(self) -> Iterable[Promise]:
        return self._pending.values()

    def recent(self, request_id: str) -> tuple[Promise, Outcome] | None:
        return self._recent.get(request_id)

    def count(self) -> int:
        return len(self._pending)

    async def wait(self, promise: Promise, timeout_s: float) -> Outcome | None:
        """Wait for the outcome; None if there is none in time."""
        if promise.request_id not in self._pending:
            found = self._recent.get(promise.request_id)
            return found[1] if found is not None else None
        loop = asyncio.get_running_loop()
        waiter: asyncio.Future[Outcome | None] = loop.create_future()
        timer = loop.call_later(timeout_s, _give_up, waiter)
        promise.waiters.add(waiter)
        try:
            return await waiter
        finally:
            timer.cancel()
            promise.waiters.discard(waiter)

    def settle(self, request_id: str, outcome: Outcome) -> None:
        """Wake every poll that waits for this request. A second outcome for it is ignored."""
        promise = self._pending.pop(request_id, None)
        if promise is None:
            return
        self._recent.add(promise, outcome, self._clock())
        for waiter in promise.waiters:
            if not waiter.done():
                waiter.set_result(outcome)
        promise.waiters.clear()
        if promise.sampling_client is not None:
            self.completion_log(promise.org_id, promise.sampling_client).add(
                request_id, len(outcome.body), is_error=outcome.is_error
            )

    def completion_log(self, tenant: str, name: tuple[str, int]) -> CompletionLog:
        """Return the completion log of a sampling client; a tenant's least recently used one makes room for a new
        one."""
        logs = self._completion_logs.setdefault(tenant, OrderedDict())
        log = logs.get(name)
        if log is None:
            log = logs[name] = CompletionLog(self._clock)
            if len(logs) > MAX_COMPLETION_LOGS:
                logs.popitem(last=False)[1].close()
        logs.move_to_end(name)
        return log

    def forget_old(self) -> None:
        """Drop results that have been in memory for long; the store has them."""
        self._recent.drop_before(self._clock() - KEPT_S)

    def forget(self, lanes: Iterable[str]) -> None:
        """Drop what belongs to lanes that have ended."""
        over = set(lanes)
        for logs in self._completion_logs.values():
            for name in [name for name in logs if name[0] in over]:
                logs.pop(name).close()
        self._recent.drop_lanes(over)


def _give_up(waiter: asyncio.Future[Outcome | None]) -> None:
    if not waiter.done():
        waiter.set_result(None)

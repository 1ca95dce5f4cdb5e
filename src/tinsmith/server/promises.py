"""Promises and those who wait for them.

Owns: what is pending, waking long polls at once, a bounded memory of recent results, and the feed of completions that
batch polls read. Results that left the memory are in the store; callers ask there.
Does not know: HTTP, the store, what a job is.
"""

from __future__ import annotations

import asyncio
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Literal, TypeAlias

import msgspec

ResultEncoding: TypeAlias = Literal["json", "protobuf", "error"]

KEPT_BYTES = 64 * 1024 * 1024
"""Results held in memory for the poll that is sure to come."""
ENTRY_BYTES = 1024
"""What remembering one costs beside its body."""
KEPT_EVENTS = 100_000
"""Completions remembered per feed; older ones are in the store."""

MAX_FEEDS = 10_000
"""Sampling clients whose completions are remembered: anybody can name new ones."""


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
    org_id: str
    user_id: str
    created_at: float
    feed: tuple[str, int] | None = None
    """The (sampling session, clone) whose batch polls hear of it."""
    waiters: set[asyncio.Future[Outcome | None]] = field(default_factory=set)


class Completion(msgspec.Struct, frozen=True, gc=False):
    """One line of a feed."""

    cursor: int
    request_id: str
    size_bytes: int
    is_error: bool


class Feed:
    """Completions of one sampling client in order. Cursors grow with time, also across restarts."""

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

    def is_ahead(self, cursor: int) -> bool:
        """Whether a cursor is from before a restart at which the clock was set back."""
        return cursor > self._last

    def pass_by(self, cursor: int) -> None:
        """From now on completions come behind this cursor."""
        self._last = max(self._last, cursor)

    def after(self, cursor: int) -> list[Completion]:
        """What happened after the cursor."""
        found: list[Completion] = []
        for event in reversed(self._events):
            if event.cursor <= cursor:
                break
            found.append(event)
        return found[::-1]

    async def wait(self, cursor: int, timeout_s: float) -> list[Completion]:
        """The same, waiting for the first if there is none."""
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


class Broker:
    """All promises of this process."""

    def __init__(self, clock: Callable[[], float] = time.time, kept_bytes: int = KEPT_BYTES) -> None:
        self._clock = clock
        self._pending: dict[str, Promise] = {}
        self._recent: OrderedDict[str, tuple[Promise, Outcome]] = OrderedDict()
        self._recent_bytes = 0
        self._kept_bytes = kept_bytes
        self._feeds: OrderedDict[tuple[str, int], Feed] = OrderedDict()

    def open(self, promise: Promise) -> None:
        """From now on the promise can be waited for."""
        self._pending[promise.request_id] = promise

    def pending(self, request_id: str) -> Promise | None:
        return self._pending.get(request_id)

    def recent(self, request_id: str) -> tuple[Promise, Outcome] | None:
        return self._recent.get(request_id)

    def count(self) -> int:
        return len(self._pending)

    async def wait(self, promise: Promise, timeout_s: float) -> Outcome | None:
        """The outcome as soon as it is there; None if it is not within the time."""
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
        """Tell everyone who waits. A second outcome for the same promise is ignored."""
        promise = self._pending.pop(request_id, None)
        if promise is None:
            return
        self._remember(promise, outcome)
        for waiter in promise.waiters:
            if not waiter.done():
                waiter.set_result(outcome)
        promise.waiters.clear()
        if promise.feed is not None:
            self.feed(promise.feed).add(request_id, len(outcome.body), is_error=outcome.is_error)

    def feed(self, name: tuple[str, int]) -> Feed:
        """The completions of a sampling client; beyond a number of them the longest unused is left to the store."""
        feed = self._feeds.get(name)
        if feed is None:
            feed = self._feeds[name] = Feed(self._clock)
            if len(self._feeds) > MAX_FEEDS:
                self._feeds.popitem(last=False)
        self._feeds.move_to_end(name)
        return feed

    def forget(self, lanes: Iterable[str]) -> None:
        """Let go of what belongs to lanes that are over."""
        over = set(lanes)
        for name in [name for name in self._feeds if name[0] in over]:
            del self._feeds[name]
        for request_id in [key for key, (promise, _) in self._recent.items() if promise.lane in over]:
            self._drop(request_id)

    def _remember(self, promise: Promise, outcome: Outcome) -> None:
        self._recent[promise.request_id] = (promise, outcome)
        self._recent_bytes += len(outcome.body) + ENTRY_BYTES
        while self._recent_bytes > self._kept_bytes and len(self._recent) > 1:
            self._drop(next(iter(self._recent)))

    def _drop(self, request_id: str) -> None:
        _, outcome = self._recent.pop(request_id)
        self._recent_bytes -= len(outcome.body) + ENTRY_BYTES


def _give_up(waiter: asyncio.Future[Outcome | None]) -> None:
    if not waiter.done():
        waiter.set_result(None)

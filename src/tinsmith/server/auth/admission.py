"""Rate limits, queue limits and token budgets of organisations and keys, checked before a request is journalled.

A request over a limit is refused with the time after which to retry, or, if that time is long, with an error that
clients do not retry. Nothing that was accepted is lost.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable, Mapping
from contextlib import AbstractAsyncContextManager, nullcontext
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any
from weakref import WeakValueDictionary

from tinsmith.server.auth.identity import Caller
from tinsmith.server.refusals import OverBudgetError, OverLimitError
from tinsmith.wire.routes.door import Cost
from tinsmith.wire.rules.faults import moment_after

QUEUE_RETRY_S = 1.0
MAX_TOGETHER: Mapping[Cost, int] = {"files": 4, "scan": 4}
"""How many calls of one organisation may run at the same time, by their cost: these use threads, which all share.
Further ones wait before their bodies are read; those of other organisations do not."""
DAY_S = 86_400
SOON_S = 60.0
"""Clients are told to wait for tokens that reset within this time; if it takes longer, they are told not to retry."""


@dataclass(slots=True)
class Bucket:
    """Tokens that refill with time: `rate` per second up to `size`."""

    rate: float
    size: float
    level: float
    at: float

    def take(self, now: float) -> float:
        """Take a token and return 0, or return the seconds until there is one."""
        self.level = min(self.size, self.level + (now - self.at) * self.rate)
        self.at = now
        if self.level >= 1:
            self.level -= 1
            return 0.0
        return (1 - self.level) / self.rate


class Admission:
    """Refuses requests over a limit, before anything is journalled."""

    def __init__(
        self,
        *,
        max_queued: int,
        max_queued_bytes: int,
        requests_per_minute: int | None = None,
        clock: Callable[[], float] = time.monotonic,
        wall_clock: Callable[[], float] = time.time,
    ) -> None:
        self._max_queued = max_queued
        self._max_queued_bytes = max_queued_bytes
        self._requests_per_minute = requests_per_minute
        self.is_draining = False
        """Whether the server is shutting down and accepts no new work."""
        self._clock = clock
        self._wall_clock = wall_clock
        self._buckets: dict[int, Bucket] = {}
        self._tokens: dict[tuple[str, str], tuple[int, int]] = {}
        self._turns: WeakValueDictionary[tuple[str, Cost], asyncio.Semaphore] = WeakValueDictionary()

    def turn(self, caller: Caller, cost: Cost) -> AbstractAsyncContextManager[Any]:
        """Return a semaphore that lets an organisation make only a few calls of this cost at a time."""
        most = MAX_TOGETHER.get(cost)
        if most is None:
            return nullcontext()
        return self._turns.setdefault((caller.org_id, cost), asyncio.Semaphore(most))

    def check_rate(self, caller: Caller) -> None:
        """Count a request of this key; refuse it if there were too many in the last minute."""
        limit = caller.requests_per_minute or self._requests_per_minute
        if limit is None:
            return
        bucket = self._buckets.get(caller.key_id)
        if bucket is None or bucket.size != limit:
            bucket = self._buckets[caller.key_id] = Bucket(limit / 60, limit, limit, self._clock())
        wait_s = bucket.take(self._clock())
        if wait_s:
            raise OverLimitError(f"this key has a limit of {limit} requests per minute", retry_after_s=wait_s)

    def check_queue(self, caller: Caller, queued: int, queued_bytes: int = 0, size: int = 0) -> None:
        """Refuse a job that would exceed the organisation's queue."""
        if queued_bytes and queued_bytes + size > self._max_queued_bytes:
            raise OverLimitError(
                f"your organisation's queued requests hold {queued_bytes} bytes; with this one they would exceed the "
                f"limit of {self._max_queued_bytes} (max_queued_bytes)",
                retry_after_s=QUEUE_RETRY_S,
            )
        if queued >= self._max_queued:
            raise OverLimitError(
                f"your organisation has {queued} queued requests; the limit is {self._max_queued} (max_queued)",
                retry_after_s=QUEUE_RETRY_S,
            )

    def check_tokens(self, caller: Caller, tokens: int) -> None:
        """Count the tokens that a job will use against the key's daily budget; refuse it over the budget."""
        if caller.tokens_per_day is None:
            return
        day = int(self._wall_clock() // DAY_S)
        used_on, used = self._tokens.get((caller.org_id, caller.user_id), (day, 0))
        used = used if used_on == day else 0
        remaining = max(0, caller.tokens_per_day - used)
        if tokens > remaining:
            raise _over_budget(caller.tokens_per_day, remaining, tokens, self._wall_clock())
        self._tokens[caller.org_id, caller.user_id] = (day, used + tokens)

    def give_back(self, caller: Caller, tokens: int) -> None:
        """Return the tokens taken today for a request that was not accepted after all."""
        day, used = self._tokens.get((caller.org_id, caller.user_id), (0, 0))
        self._tokens[caller.org_id, caller.user_id] = (day, max(0, used - tokens))

    def remember_tokens(self, org_id: str, user_id: str, tokens: int) -> None:
        """Count tokens that were used today before this process started."""
        self._tokens[org_id, user_id] = (int(self._wall_clock() // DAY_S), tokens)

    def remaining(self, caller: Caller, queued: int) -> dict[str, int | None]:
        """Return what is left of the limits, for the quota call."""
        day = int(self._wall_clock() // DAY_S)
        used_on, used = self._tokens.get((caller.org_id, caller.user_id), (day, 0))
        budget = caller.tokens_per_day
        return {
            "queued": queued,
            "queue_limit": self._max_queued,
            "requests_per_minute": caller.requests_per_minute or self._requests_per_minute,
            "tokens_per_day": budget,
            "tokens_left_today": None if budget is None else max(0, budget - (used if used_on == day else 0)),
        }


def _over_budget(budget: int, remaining: int, tokens: int, now: float) -> OverLimitError:
    """Return the refusal of a request that needs more than is left of a day's tokens."""
    text = f"the key's budget of {budget} tokens per day has {remaining} left; this needs {tokens}"
    if tokens > budget:
        text += ", more than a whole day's: send less at once, or use a key with a larger budget"
        return OverBudgetError(text, retry_after_s=math.inf, remaining=remaining)
    resets_at = (now // DAY_S + 1) * DAY_S
    text += f"; the budget resets at {moment_after(resets_at - now, datetime.fromtimestamp(now, UTC))}"
    refusal = OverLimitError if resets_at - now <= SOON_S else OverBudgetError
    return refusal(text, retry_after_s=resets_at - now, remaining=remaining)

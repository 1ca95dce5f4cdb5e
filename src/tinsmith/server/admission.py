"""Fair admission: how much of the server one tenant may hold.

Pure bookkeeping with a clock; over a limit the answer is when to come back, never a loss.
Does not know: HTTP, the store.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

from tinsmith.server.identity import Caller
from tinsmith.server.refusals import OverLimitError

QUEUE_RETRY_S = 1.0
DAY_S = 86_400


@dataclass(slots=True)
class Bucket:
    """Tokens that refill with time: `rate` per second up to `size`."""

    rate: float
    size: float
    level: float
    at: float

    def take(self, now: float, amount: float = 1.0) -> float:
        """Take some; returns 0, or the seconds until there are enough (then nothing is taken)."""
        self.level = min(self.size, self.level + (now - self.at) * self.rate)
        self.at = now
        if self.level >= amount:
            self.level -= amount
            return 0.0
        return (amount - self.level) / self.rate


class Admission:
    """Says no before anything is journalled."""

    def __init__(
        self,
        *,
        max_queued: int,
        requests_per_minute: int | None = None,
        clock: Callable[[], float] = time.monotonic,
        wall_clock: Callable[[], float] = time.time,
    ) -> None:
        self._max_queued = max_queued
        self._requests_per_minute = requests_per_minute
        self._clock = clock
        self._wall_clock = wall_clock
        self._buckets: dict[int, Bucket] = {}
        self._tokens: dict[tuple[str, str], tuple[int, int]] = {}

    def check_rate(self, caller: Caller) -> None:
        """One more request of this key."""
        limit = caller.requests_per_minute or self._requests_per_minute
        if limit is None:
            return
        bucket = self._buckets.get(caller.key_id)
        if bucket is None or bucket.size != limit:
            bucket = self._buckets[caller.key_id] = Bucket(limit / 60, limit, limit, self._clock())
        wait_s = bucket.take(self._clock())
        if wait_s:
            raise OverLimitError(f"more than {limit} requests per minute with this key", retry_after_s=wait_s)

    def check_queue(self, caller: Caller, queued: int) -> None:
        """One more job in the caller's queue."""
        if queued >= self._max_queued:
            raise OverLimitError(
                f"{queued} requests of your organisation wait already (limit {self._max_queued})",
                retry_after_s=QUEUE_RETRY_S,
            )

    def check_tokens(self, caller: Caller, tokens: int) -> None:
        """Tokens that a job is about to use, where the key has a daily budget."""
        if caller.tokens_per_day is None:
            return
        day = int(self._wall_clock() // DAY_S)
        used_on, used = self._tokens.get((caller.org_id, caller.user_id), (day, 0))
        used = used if used_on == day else 0
        remaining = max(0, caller.tokens_per_day - used)
        if tokens > remaining:
            raise OverLimitError(
                f"the key's budget of {caller.tokens_per_day} tokens per day has {remaining} left; this needs {tokens}",
                retry_after_s=(day + 1) * DAY_S - self._wall_clock(),
                remaining=remaining,
            )
        self._tokens[caller.org_id, caller.user_id] = (day, used + tokens)

    def give_back(self, caller: Caller, tokens: int) -> None:
        """What was taken today for a request that was not accepted after all."""
        day, used = self._tokens.get((caller.org_id, caller.user_id), (0, 0))
        self._tokens[caller.org_id, caller.user_id] = (day, max(0, used - tokens))

    def remember_tokens(self, org_id: str, user_id: str, tokens: int) -> None:
        """What was used before this process began, today."""
        self._tokens[org_id, user_id] = (int(self._wall_clock() // DAY_S), tokens)

    def remaining(self, caller: Caller, queued: int) -> dict[str, int | None]:
        """What is left, for the quota call."""
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

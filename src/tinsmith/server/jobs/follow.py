"""Follow running samples: their tokens as they come, and then their results.

Several samples may be followed together, as for a request with many prompts. When the follower leaves before the end,
the samples are cancelled, and their slots are free at once.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from tinsmith.server.jobs.pending_results import Outcome, Promise
from tinsmith.server.jobs.token_log import LoggedTokens, TokenLog
from tinsmith.server.services import Services

KEEP_ALIVE_S = 10.0
"""How often a silent stream gives a sign of life."""
AT_ONCE = 16
"""Events that are handled before others run."""
TOKENS = 256
"""Tokens in one event at most: a client that reads slowly may have missed many."""
MAX_S = 24 * 3600.0


@dataclass(slots=True, kw_only=True, eq=False)
class Followed:
    """One sample, and how much of it was seen."""

    promise: Promise
    log: TokenLog | None
    """None: its tokens come with the result only."""
    seen: list[int]
    """Tokens of each of its sequences."""
    outcome: asyncio.Task[Outcome | None] | None = field(default=None)


class SampleGrowth(NamedTuple):
    """New tokens of one of the samples."""

    sample: int
    new: LoggedTokens


class SampleEnd(NamedTuple):
    """A sample has ended; None if it did not within a day."""

    sample: int
    outcome: Outcome | None


Event = SampleGrowth | SampleEnd


async def follow(services: Services, samples: Sequence[Followed]) -> AsyncGenerator[list[Event], None]:
    """Yield what is new, whenever something is; an empty list after a while without news."""
    for followed in samples:
        followed.outcome = asyncio.create_task(services.broker.wait(followed.promise, MAX_S))
        if followed.log is not None:
            followed.log.join()
    running = list(range(len(samples)))
    try:
        while running:
            events = _news(samples, running)
            if events:
                for begin in range(0, len(events), AT_ONCE):
                    yield events[begin : begin + AT_ONCE]
                    if len(events) > AT_ONCE or _is_long(events[0]):
                        await asyncio.sleep(0)
                continue
            news: set[asyncio.Future[Any]] = set()
            for number in running:
                followed = samples[number]
                assert followed.outcome is not None
                news |= {followed.outcome} if followed.log is None else {followed.outcome, followed.log.growth()}
            done, _ = await asyncio.wait(news, timeout=KEEP_ALIVE_S, return_when=asyncio.FIRST_COMPLETED)
            if not done:
                yield []
    finally:
        _leave(services, samples)


def _news(samples: Sequence[Followed], running: list[int]) -> list[Event]:
    """Return what is new, and remove from `running` what has ended."""
    events: list[Event] = []
    for number in tuple(running):
        followed = samples[number]
        assert followed.outcome is not None
        is_over = followed.outcome.done()
        grown = list(followed.log.after(followed.seen)) if followed.log is not None else []
        for new in grown:
            piece = new if len(new.tokens) <= TOKENS else _first(new)
            followed.seen[new.index] += len(piece.tokens)
            events.append(SampleGrowth(number, piece))
        if is_over and not grown:
            running.remove(number)
            events.append(SampleEnd(number, followed.outcome.result()))
    return events


def _is_long(event: Event) -> bool:
    return isinstance(event, SampleGrowth) and len(event.new.tokens) >= TOKENS


def _first(new: LoggedTokens) -> LoggedTokens:
    topk = new.topk[:TOKENS] if new.topk is not None else None
    return LoggedTokens(new.index, new.tokens[:TOKENS], new.logprobs[:TOKENS], topk)


def _leave(services: Services, samples: Sequence[Followed]) -> None:
    for followed in samples:
        if followed.log is not None:
            followed.log.leave()
        if followed.outcome is not None and not followed.outcome.done():
            followed.outcome.cancel()
            services.samples.cancel(followed.promise.request_id)

"""Running samples as streams of their tokens, and then of their results.

`follow` yields what is new of several samples together, as for a request with many prompts; when it is closed before
the end, the samples are cancelled, and their slots are free at once. A `Stream` is one sample's, for our own route: a
client that was disconnected can resume it, from the start or from where it was, since the log of a running sample has
all of its tokens, and so has the result of a finished one. If nobody reads it for a while, the sample is cancelled.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import msgspec

from tinsmith.errors import InvalidInputError
from tinsmith.server.auth.identity import Caller
from tinsmith.server.jobs.lookup import find_outcome, position_of
from tinsmith.server.jobs.pending_results import Outcome, Promise
from tinsmith.server.jobs.token_log import LoggedTokens, News, TokenLog, tokens_at_once
from tinsmith.server.services import Services
from tinsmith.wire.codecs import proto_sampling
from tinsmith.wire.messages.sampling import SampledSequence, TopkLogprobs

KEEP_ALIVE_S = 10.0
"""How often a silent stream gives a sign of life."""
MAX_S = 24 * 3600.0
RETURN_S = 30.0
"""How long a numbered sample continues while nobody reads its stream: its client may reconnect."""
AT_ONCE = 16
"""Events that are handled before others run."""
TOKENS = 256
"""Tokens in one event at most: a client that reads slowly may have missed many."""


@dataclass(slots=True, kw_only=True, eq=False)
class Followed:
    """One sample, and how much of it was seen."""

    promise: Promise
    log: TokenLog | None
    """None: its tokens come with the result only."""
    seen: list[int]
    """Tokens of each of its sequences."""
    patience_s: float | None = None
    """How long it continues if its follower leaves before the end, and nobody else follows it; None if it is cancelled
    whoever else does."""
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
    arrivals = News(KEEP_ALIVE_S)
    for followed in samples:
        followed.outcome = asyncio.create_task(services.broker.wait(followed.promise, MAX_S))
        followed.outcome.add_done_callback(lambda _: arrivals.announce())
        if followed.log is not None:
            followed.log.join(arrivals)
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
            if not await arrivals.wait():
                yield []
    finally:
        arrivals.close()
        _leave(services, samples, arrivals)


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


def _leave(services: Services, samples: Sequence[Followed], arrivals: News) -> None:
    for followed in samples:
        if followed.log is not None:
            followed.log.leave(arrivals)
        if followed.outcome is None or followed.outcome.done():
            continue
        followed.outcome.cancel()
        if followed.patience_s is None:
            services.samples.cancel(followed.promise.request_id)
        else:
            services.samples.unfollowed(followed.promise.request_id, followed.patience_s)


def read_have(text: str | None, num_samples: int) -> list[int]:
    """Parse how many tokens of each sample a client has, such as `3,0,7`; 0 for those it leaves out."""
    counts = [] if not text else text.split(",")
    if len(counts) > num_samples or not all(
        count.isascii() and count.isdigit() and len(count) < 10 for count in counts
    ):
        raise InvalidInputError(
            f"have: {text!r:.100} is not a list of at most {num_samples} token counts, separated by commas",
            field="have",
        )
    return [int(count) for count in counts] + [0] * (num_samples - len(counts))


@dataclass(slots=True, kw_only=True)
class Stream:
    """One client's stream of a sample."""

    services: Services
    promise: Promise
    outcome: Outcome | None
    log: TokenLog | None
    """None if the sample has ended, or was not streamed when it began: its tokens come with the result."""
    sent: list[int]
    """Tokens of each sample that the client has."""
    is_numbered: bool
    """Whether its client can resume it."""

    async def events(self) -> AsyncGenerator[bytes, None]:
        """Yield server-sent events: `token` for new tokens, `wait` while there are none, then `done` or `error`."""
        outcome = self.outcome
        if outcome is None:
            patience_s = RETURN_S if self.is_numbered else 0.0
            followed = Followed(promise=self.promise, log=self.log, seen=list(self.sent), patience_s=patience_s)
            async with contextlib.aclosing(follow(self.services, [followed])) as all_news:
                async for news in all_news:
                    if not news:
                        yield self._wait()
                    for each in news:
                        if isinstance(each, SampleEnd):
                            outcome = each.outcome
                            continue
                        yield self._piece(each.new)
                        if each.new.topk is not None:
                            await asyncio.sleep(0)  # a large table: others run
        async for event in self._rest(outcome):
            yield event

    def _wait(self) -> bytes:
        position = position_of(self.services, self.promise)
        return _event("wait", {"ahead": position.ahead, "reason": position.reason})

    async def _rest(self, outcome: Outcome | None) -> AsyncGenerator[bytes, None]:
        if outcome is None:
            text = f"the sample did not finish within {MAX_S / 3600:g} hours"
            yield _event("error", {"error": text, "category": "server"})
        elif outcome.is_error:
            yield _event("error", msgspec.json.decode(outcome.body))
        else:
            ends = []
            for index, sequence in enumerate(proto_sampling.decode_response(outcome.body).sequences):
                for new in _pieces(index, sequence, self.sent[index]):
                    yield self._piece(new)
                    await asyncio.sleep(0)
                ends.append({"stop_reason": sequence.stop_reason, "tokens": len(sequence.tokens)})
            yield _event("done", {"sequences": ends})

    def _piece(self, new: LoggedTokens) -> bytes:
        position = self.sent[new.index]
        self.sent[new.index] += len(new.tokens)
        piece: dict[str, Any] = {
            "index": new.index,
            "position": position,
            "tokens": list(new.tokens),
            "logprobs": list(new.logprobs),
        }
        if new.topk is not None:
            piece["topk"] = new.topk
        return _event("token", piece)


def _pieces(index: int, sequence: SampledSequence, begin: int) -> Iterator[LoggedTokens]:
    """Yield a finished sample from a token on, in one piece unless it has top-k tables."""
    tokens, logprobs, topk = sequence.tokens, sequence.logprobs or [], sequence.topk_logprobs_np
    size = len(tokens) if topk is None else tokens_at_once(topk.token_ids.shape[1])
    for start in range(begin, len(tokens), max(size, 1)):
        part = slice(start, start + size)
        rows = None if topk is None else TopkLogprobs(topk.token_ids[part], topk.logprobs[part]).to_rows()
        listed = None if rows is None else [row or [] for row in rows]
        yield LoggedTokens(index, tokens[part], logprobs[part], listed)


async def open_stream(
    services: Services, caller: Caller, request_id: str, have: list[int], is_numbered: bool
) -> Stream:
    """Open the stream of an accepted sample; raises GoneError if its result was pruned."""
    promise, outcome = await find_outcome(services, caller, request_id)
    log = services.samples.log(request_id) if outcome is None else None
    return Stream(services=services, promise=promise, outcome=outcome, log=log, sent=have, is_numbered=is_numbered)


def _event(name: str, data: Any) -> bytes:
    return b"event: %s\ndata: %s\n\n" % (name.encode(), msgspec.json.encode(data))

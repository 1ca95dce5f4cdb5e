"""Samples as streams of tokens: what a sample has gained so far, and those who follow it.

A stream can be followed again, from the start or from where its client was: the log of a sample that runs has all of
its tokens, the result of one that has ended too. A stream that nobody follows for a while is given up.
Does not know: HTTP requests, how samples are drawn.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from tinsmith.errors import InvalidInputError
from tinsmith.server.identity import Caller
from tinsmith.server.promises import Outcome, Promise
from tinsmith.server.routes.futures import find_outcome, position_of
from tinsmith.server.services import Services
from tinsmith.server.token_log import TokenLog
from tinsmith.wire import proto_sampling

KEEP_ALIVE_S = 10.0
"""A silent stream says where it stands this often."""
RETURN_S = 30.0
"""How long a numbered sample goes on without anybody who follows it: its client may come back."""
MAX_S = 24 * 3600.0


def read_have(text: str | None, num_samples: int) -> list[int]:
    """How many tokens of each sample a client has, from `3,0,7`; those that it does not name have none."""
    counts = [] if not text else text.split(",")
    if len(counts) > num_samples or not all(
        count.isascii() and count.isdigit() and len(count) < 10 for count in counts
    ):
        raise InvalidInputError(
            f"have: {text!r:.100} does not say how many tokens of each of {num_samples} samples are there, at commas",
            field="have",
        )
    return [int(count) for count in counts] + [0] * (num_samples - len(counts))


@dataclass(slots=True, kw_only=True)
class Stream:
    """One client's way through a sample."""

    services: Services
    promise: Promise
    outcome: Outcome | None
    log: TokenLog | None
    """None where the sample has ended, or nobody asked for its tokens when it began: they come with the result."""
    sent: list[int]
    """Tokens of each sample that the client has."""
    is_numbered: bool
    """Whether its client can ask for it again."""

    async def events(self) -> AsyncIterator[bytes]:
        """Server-sent events: `token` for each piece, `wait` while nothing comes, then `done` or `error`."""
        if self.outcome is None:
            async for event in self._running():
                yield event
        for event in self._rest(self.outcome):
            yield event

    async def _running(self) -> AsyncIterator[bytes]:
        broker, log = self.services.broker, self.log
        waiting = asyncio.create_task(broker.wait(self.promise, MAX_S))
        if log is not None:
            log.join()
        try:
            while not waiting.done():
                if grown := self._grown():
                    for event in grown:
                        yield event
                    continue  # to see what has come meanwhile
                news: set[asyncio.Future[Any]] = {waiting} if log is None else {waiting, log.growth()}
                done, _ = await asyncio.wait(news, timeout=KEEP_ALIVE_S, return_when=asyncio.FIRST_COMPLETED)
                if not done:
                    position = position_of(self.services, self.promise)
                    yield _event("wait", {"ahead": position.ahead, "reason": position.reason})
            self.outcome = waiting.result()
        finally:
            if log is not None:
                log.leave()
            if not waiting.done():
                waiting.cancel()
                self.services.samples.unfollowed(self.promise.request_id, RETURN_S if self.is_numbered else 0.0)

    def _grown(self) -> list[bytes]:
        """What the log has and the client has not."""
        if self.log is None:
            return []
        return [self._piece(*grown) for grown in list(self.log.after(self.sent))]

    def _rest(self, outcome: Outcome | None) -> list[bytes]:
        if outcome is None:
            return [_event("error", {"error": f"it took more than {MAX_S / 3600:g} hours", "category": "server"})]
        if outcome.is_error:
            return [*self._grown(), _event("error", msgspec.json.decode(outcome.body))]
        events, ends = [], []
        for index, sequence in enumerate(proto_sampling.decode_response(outcome.body).sequences):
            tokens, logprobs = list(sequence.tokens), list(sequence.logprobs or [])
            begin = self.sent[index]
            if begin < len(tokens):
                events.append(self._piece(index, tokens[begin:], logprobs[begin:]))
            ends.append({"stop_reason": sequence.stop_reason, "tokens": len(tokens)})
        return [*events, _event("done", {"sequences": ends})]

    def _piece(self, index: int, tokens: Sequence[int], logprobs: Sequence[float]) -> bytes:
        position = self.sent[index]
        self.sent[index] += len(tokens)
        piece = {"index": index, "position": position, "tokens": list(tokens), "logprobs": list(logprobs)}
        return _event("token", piece)


async def open_stream(
    services: Services, caller: Caller, request_id: str, have: list[int], is_numbered: bool
) -> Stream:
    """The stream of an accepted sample; a GoneError if its result was pruned."""
    promise, outcome = await find_outcome(services, caller, request_id)
    log = services.samples.log(request_id) if outcome is None else None
    return Stream(services=services, promise=promise, outcome=outcome, log=log, sent=have, is_numbered=is_numbered)


def _event(name: str, data: Any) -> bytes:
    return b"event: %s\ndata: %s\n\n" % (name.encode(), msgspec.json.encode(data))

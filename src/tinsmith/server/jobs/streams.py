"""Samples as streams of tokens.

A client that was disconnected can resume a stream, from the start or from where it was: the log of a running sample has
all of its tokens, and so has the result of a finished one. A sample whose stream nobody reads for a while is cancelled.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from tinsmith.errors import InvalidInputError
from tinsmith.server.auth.identity import Caller
from tinsmith.server.jobs.lookup import find_outcome, position_of
from tinsmith.server.jobs.pending_results import Outcome, Promise
from tinsmith.server.jobs.token_log import TokenLog
from tinsmith.server.services import Services
from tinsmith.wire.codecs import proto_sampling

KEEP_ALIVE_S = 10.0
"""How often a silent stream sends its position in the queue."""
RETURN_S = 30.0
"""How long a numbered sample continues while nobody reads its stream: its client may reconnect."""
MAX_S = 24 * 3600.0


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
        if self.outcome is None:
            async for event in self._running():
                yield event
        for event in self._rest(self.outcome):
            yield event

    async def _running(self) -> AsyncGenerator[bytes, None]:
        broker, log = self.services.broker, self.log
        waiting = asyncio.create_task(broker.wait(self.promise, MAX_S))
        if log is not None:
            log.join()
        try:
            while not waiting.done():
                if grown := self._grown():
                    for event in grown:
                        yield event
                    continue  # something may have come meanwhile
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
        """Return the tokens that the client does not have yet."""
        if self.log is None:
            return []
        return [self._piece(*grown) for grown in list(self.log.after(self.sent))]

    def _rest(self, outcome: Outcome | None) -> list[bytes]:
        if outcome is None:
            return [
                _event(
                    "error", {"error": f"the sample did not finish within {MAX_S / 3600:g} hours", "category": "server"}
                )
            ]
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
    """Open the stream of an accepted sample; raises GoneError if its result was pruned."""
    promise, outcome = await find_outcome(services, caller, request_id)
    log = services.samples.log(request_id) if outcome is None else None
    return Stream(services=services, promise=promise, outcome=outcome, log=log, sent=have, is_numbered=is_numbered)


def _event(name: str, data: Any) -> bytes:
    return b"event: %s\ndata: %s\n\n" % (name.encode(), msgspec.json.encode(data))

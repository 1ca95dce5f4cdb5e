"""Samples as streams of tokens.

A client that was disconnected can resume a stream, from the start or from where it was: the log of a running sample has
all of its tokens, and so has the result of a finished one. A sample whose stream nobody reads for a while is cancelled.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Iterator
from dataclasses import dataclass
from typing import Any

import msgspec

from tinsmith.errors import InvalidInputError
from tinsmith.server.auth.identity import Caller
from tinsmith.server.jobs.lookup import find_outcome, position_of
from tinsmith.server.jobs.pending_results import Outcome, Promise
from tinsmith.server.jobs.token_log import LoggedTokens, TokenLog, tokens_at_once
from tinsmith.server.services import Services
from tinsmith.wire.codecs import proto_sampling
from tinsmith.wire.messages.sampling import SampledSequence, TopkLogprobs

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
        async for event in self._rest(self.outcome):
            yield event

    async def _running(self) -> AsyncGenerator[bytes, None]:
        broker, log = self.services.broker, self.log
        waiting = asyncio.create_task(broker.wait(self.promise, MAX_S))
        if log is not None:
            log.join()
        try:
            while not waiting.done():
                has_grown = False
                async for event in self._grown():
                    has_grown = True
                    yield event
                if has_grown:
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

    async def _grown(self) -> AsyncGenerator[bytes, None]:
        """Yield the tokens that the client does not have yet; large tables in pieces, between which others run."""
        for new in self.log.after(self.sent) if self.log is not None else ():
            yield self._piece(new)
            if new.topk is not None:
                await asyncio.sleep(0)

    async def _rest(self, outcome: Outcome | None) -> AsyncGenerator[bytes, None]:
        if outcome is None:
            text = f"the sample did not finish within {MAX_S / 3600:g} hours"
            yield _event("error", {"error": text, "category": "server"})
        elif outcome.is_error:
            async for event in self._grown():
                yield event
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

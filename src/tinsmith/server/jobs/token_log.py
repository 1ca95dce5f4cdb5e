"""The tokens of a running sample so far, for the clients that stream it."""

from __future__ import annotations

import asyncio
from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from tinsmith.engine.protocol import OnTokens, TokenEvent

PIECE_CELLS = 4096
"""Cells of a top-k table that are written in one piece: a few milliseconds of the event loop."""


def tokens_at_once(k: int) -> int:
    """Return how many tokens with tables of k entries make one piece."""
    return max(PIECE_CELLS // max(k, 1), 1)


@dataclass(frozen=True, slots=True)
class LoggedTokens:
    """Tokens of one sequence that a client does not have yet."""

    index: int
    tokens: Sequence[int]
    logprobs: Sequence[float]
    topk: list[list[tuple[int, float]]] | None = None
    """For each token the most likely ones at its position, likeliest first; None unless the request asks for them."""


class News:
    """Wakes one follower when something is new, however many samples it follows.

    `asyncio.wait` would do the same at several times the price, and a stream waits for every token. So there is one
    timer for all waits, which starts again if news came meanwhile.
    """

    def __init__(self, silence_s: float) -> None:
        self._silence_s = silence_s
        self._is_new = False
        self._waiter: asyncio.Future[None] | None = None
        self._since = 0.0
        self._timer: asyncio.TimerHandle | None = None

    def announce(self) -> None:
        self._is_new = True
        self._wake()

    async def wait(self) -> bool:
        """Wait for news, or for a silence; return whether there is something new since the last time."""
        if not self._is_new:
            loop = asyncio.get_running_loop()
            self._waiter, self._since = loop.create_future(), loop.time()
            if self._timer is None:
                self._timer = loop.call_later(self._silence_s, self._check)
            await self._waiter
        is_new, self._is_new = self._is_new, False
        return is_new

    def close(self) -> None:
        if self._timer is not None:
            self._timer.cancel()

    def _check(self) -> None:
        loop = asyncio.get_running_loop()
        left = self._since + self._silence_s - loop.time()
        if left <= 0:
            self._timer = None
            self._wake()
        else:
            self._timer = loop.call_later(left, self._check)

    def _wake(self) -> None:
        waiter, self._waiter = self._waiter, None
        if waiter is not None and not waiter.done():
            waiter.set_result(None)


class TokenLog:
    """Tokens and logprobs of each sequence of a request. Used on the server's event loop only.

    Top-k tables are kept flat, in as many bytes as in the result: as Python objects they would take ten times that.
    """

    def __init__(self, num_samples: int) -> None:
        self._tokens = [array("q") for _ in range(num_samples)]
        self._logprobs = [array("d") for _ in range(num_samples)]
        self._topk_tokens = [array("i") for _ in range(num_samples)]
        self._topk_logprobs = [array("f") for _ in range(num_samples)]
        self.followers: list[News] = []
        self.visits = 0
        """How many clients have ever followed it."""

    def join(self, news: News) -> None:
        """Announce new tokens there."""
        self.followers.append(news)
        self.visits += 1

    def leave(self, news: News) -> None:
        self.followers.remove(news)

    def listener(self) -> OnTokens:
        """Return a callback for the tokens of one attempt.

        If the backend loses a sample, a second attempt draws the same tokens again; those that are known are skipped.
        """
        seen = [0] * len(self._tokens)

        def take(event: TokenEvent) -> None:
            known = len(self._tokens[event.sample]) - seen[event.sample]
            seen[event.sample] += len(event.tokens)
            if known < len(event.tokens):
                self._tokens[event.sample].extend(event.tokens[known:])
                self._logprobs[event.sample].extend(event.logprobs[known:])
                skipped = known * (len(event.topk_tokens) // len(event.tokens))
                self._topk_tokens[event.sample].extend(event.topk_tokens[skipped:])
                self._topk_logprobs[event.sample].extend(event.topk_logprobs[skipped:])
                for news in self.followers:
                    news.announce()

        return take

    def after(self, sent: Sequence[int]) -> Iterator[LoggedTokens]:
        """Yield what is new of each sequence that has more tokens than were sent: with top-k tables, a piece of it."""
        for index, tokens in enumerate(self._tokens):
            begin, end = sent[index], len(tokens)
            if begin < end:
                k = len(self._topk_tokens[index]) // end
                end = min(end, begin + tokens_at_once(k)) if k else end
                topk = self._topk(index, range(begin * k, end * k, k)) if k else None
                yield LoggedTokens(index, tokens[begin:end], self._logprobs[index][begin:end], topk)

    def _topk(self, index: int, starts: range) -> list[list[tuple[int, float]]]:
        k, listed, logprobs = starts.step, self._topk_tokens[index], self._topk_logprobs[index]
        return [list(zip(listed[i : i + k], logprobs[i : i + k], strict=True)) for i in starts]

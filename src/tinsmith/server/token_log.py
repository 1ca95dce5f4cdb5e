"""What a sample that runs has gained so far, for those who follow it.

Does not know: HTTP, jobs, results.
"""

from __future__ import annotations

import asyncio
from array import array
from collections.abc import Iterator, Sequence

from tinsmith.engine.base import OnTokens, TokenEvent


class TokenLog:
    """Tokens and logprobs of each of a request's samples, in the loop of the server."""

    def __init__(self, num_samples: int) -> None:
        self._tokens = [array("q") for _ in range(num_samples)]
        self._logprobs = [array("d") for _ in range(num_samples)]
        self._growth: asyncio.Future[None] | None = None
        self.followers = 0
        self.visits = 0
        """Followers that there have ever been."""

    def join(self) -> None:
        self.followers += 1
        self.visits += 1

    def leave(self) -> None:
        self.followers -= 1

    def listener(self) -> OnTokens:
        """Takes the tokens of one run. One that begins anew, since the backend lost the first, draws the same tokens:
        those that are there already are passed over."""
        told = [0] * len(self._tokens)

        def take(event: TokenEvent) -> None:
            known = len(self._tokens[event.sample]) - told[event.sample]
            told[event.sample] += len(event.tokens)
            if known < len(event.tokens):
                self._tokens[event.sample].extend(event.tokens[known:])
                self._logprobs[event.sample].extend(event.logprobs[known:])
                self._wake()

        return take

    def after(self, sent: Sequence[int]) -> Iterator[tuple[int, array[int], array[float]]]:
        """Of each sample that has grown beyond what was sent: its number, and what came since."""
        for index, tokens in enumerate(self._tokens):
            if len(tokens) > sent[index]:
                yield index, tokens[sent[index] :], self._logprobs[index][sent[index] :]

    def growth(self) -> asyncio.Future[None]:
        """Done as soon as anything comes."""
        if self._growth is None:
            self._growth = asyncio.get_running_loop().create_future()
        return self._growth

    def _wake(self) -> None:
        growth, self._growth = self._growth, None
        if growth is not None and not growth.done():
            growth.set_result(None)

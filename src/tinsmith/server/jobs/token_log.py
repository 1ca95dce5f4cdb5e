"""The tokens of a running sample so far, for the clients that stream it."""

from __future__ import annotations

import asyncio
from array import array
from collections.abc import Iterator, Sequence

from tinsmith.engine.protocol import OnTokens, TokenEvent


class TokenLog:
    """Tokens and logprobs of each sequence of a request. Used on the server's event loop only."""

    def __init__(self, num_samples: int) -> None:
        self._tokens = [array("q") for _ in range(num_samples)]
        self._logprobs = [array("d") for _ in range(num_samples)]
        self._growth: asyncio.Future[None] | None = None
        self.followers = 0
        self.visits = 0
        """How many clients have ever followed it."""

    def join(self) -> None:
        self.followers += 1
        self.visits += 1

    def leave(self) -> None:
        self.followers -= 1

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
                self._wake()

        return take

    def after(self, sent: Sequence[int]) -> Iterator[tuple[int, array[int], array[float]]]:
        """Yield the index and the new tokens and logprobs of each sequence that has more than was sent."""
        for index, tokens in enumerate(self._tokens):
            if len(tokens) > sent[index]:
                yield index, tokens[sent[index] :], self._logprobs[index][sent[index] :]

    def growth(self) -> asyncio.Future[None]:
        """Return a future that is done when there are new tokens."""
        if self._growth is None:
            self._growth = asyncio.get_running_loop().create_future()
        return self._growth

    def _wake(self) -> None:
        growth, self._growth = self._growth, None
        if growth is not None and not growth.done():
            growth.set_result(None)

"""Ids of requests: they cannot be guessed, begin with the time, and making one needs no system call.

Rows are found by their ids. Ids of one time lie side by side in the database's index, so a commit writes a few pages
of it rather than one for each row.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable

TIME_BYTES = 6
"""Milliseconds, as in a UUID of version 7."""
RANDOM_BYTES = 10
FETCHED = 256
"""Ids whose random bytes are fetched at once; each fetch hands over Python's lock."""


class RequestIds:
    """Makes ids, each with random bytes of its own."""

    def __init__(
        self, fetch: Callable[[int], bytes] = secrets.token_bytes, clock: Callable[[], float] = time.time
    ) -> None:
        self._fetch = fetch
        self._clock = clock
        self._drawn: list[str] = []

    def __call__(self) -> str:
        if not self._drawn:
            fetched = self._fetch(FETCHED * RANDOM_BYTES)
            starts = range(0, len(fetched), RANDOM_BYTES)
            self._drawn = [fetched[start : start + RANDOM_BYTES].hex() for start in reversed(starts)]
        return f"{int(self._clock() * 1000):0{2 * TIME_BYTES}x}{self._drawn.pop()}"

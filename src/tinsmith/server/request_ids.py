"""Ids of requests: they cannot be guessed, and making one needs no system call."""

from __future__ import annotations

import secrets
from collections.abc import Callable

ID_BYTES = 16
FETCHED = 256
"""Ids whose random bytes are fetched at once; each fetch hands over Python's lock."""


class RequestIds:
    """Makes ids, each from random bytes of its own."""

    def __init__(self, fetch: Callable[[int], bytes] = secrets.token_bytes) -> None:
        self._fetch = fetch
        self._left = memoryview(b"")

    def __call__(self) -> str:
        if not self._left:
            self._left = memoryview(self._fetch(FETCHED * ID_BYTES))
        made, self._left = self._left[:ID_BYTES], self._left[ID_BYTES:]
        return made.hex()

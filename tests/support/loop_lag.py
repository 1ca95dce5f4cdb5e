"""How long the loop was held: CPU time of its thread in the longest single callback, whatever else the machine does."""

from __future__ import annotations

import asyncio
import gc
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


class Lag:
    """The longest callback since the last `reset`."""

    def __init__(self) -> None:
        self.seconds = 0.0
        self.where = ""

    def reset(self) -> None:
        self.seconds, self.where = 0.0, ""

    def note(self, seconds: float, handle: Any) -> None:
        if seconds > self.seconds:
            self.seconds, self.where = seconds, repr(handle)[:300]


@contextmanager
def watched_loop() -> Iterator[Lag]:
    """Measure every callback of asyncio's loops in this block. Garbage is collected before, and not meanwhile."""
    lag, run = Lag(), asyncio.Handle._run

    def measured(self: asyncio.Handle) -> Any:
        began = time.thread_time()
        try:
            return run(self)
        finally:
            lag.note(time.thread_time() - began, self)

    gc.collect()
    gc.disable()
    asyncio.Handle._run = measured  # type: ignore[method-assign]
    try:
        yield lag
    finally:
        asyncio.Handle._run = run  # type: ignore[method-assign]
        gc.enable()

"""Noticing that a sampler is stuck: samples are pending and none has finished for a long time."""

from __future__ import annotations

import asyncio
import time
from typing import Any

from tinsmith.client.runner import Runner


class ProgressWatch:
    """Gives up the pending samples of one client when none of them has made progress for `timeout_s`."""

    def __init__(self, timeout_s: float, runner: Runner) -> None:
        self._timeout_s = timeout_s
        self._runner = runner
        self._pending: dict[asyncio.Task[Any], bool] = {}
        self._last = 0.0
        self._watching: asyncio.Task[Any] | None = None

    def enter(self) -> None:
        """The current task begins to wait for a sample."""
        if not self._pending:
            self._last = time.monotonic()
        task = asyncio.current_task()
        assert task is not None
        self._pending[task] = False
        if self._watching is None or self._watching.done():
            self._watching = self._runner.spawn(self._watch())

    def leave(self) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._pending.pop(task, None)

    def made(self) -> None:
        """A sample finished."""
        self._last = time.monotonic()

    def gave_up(self) -> bool:
        """Whether the current task was cancelled by this watch."""
        task = asyncio.current_task()
        return task is not None and self._pending.get(task, False)

    async def _watch(self) -> None:
        while self._pending:
            left = self._last + self._timeout_s - time.monotonic()
            if left > 0:
                await asyncio.sleep(min(left, self._timeout_s))
                continue
            for task in self._pending:
                self._pending[task] = True
                task.cancel()
            return

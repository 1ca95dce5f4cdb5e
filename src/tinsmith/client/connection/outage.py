"""Logging an outage once, however many operations wait for the server; and noticing a sampler that is stuck, whose
samples are pending while none has finished for a long time."""

from __future__ import annotations

import asyncio
import time
from typing import Any

from tinsmith.client.runtime.runner import Runner


class Outage:
    """An outage as one client sees it: it starts with the first operation that fails and ends when none is affected any
    more. Used in the client's loop only."""

    def __init__(self) -> None:
        self.affected = 0


class Affected:
    """One operation's part in an outage."""

    def __init__(self, outage: Outage) -> None:
        self._outage = outage
        self._is_affected = False

    def begin(self) -> bool:
        """Mark the operation as affected; return True if it is the first one, so that the outage is logged."""
        if self._is_affected:
            return False
        self._is_affected = True
        self._outage.affected += 1
        return self._outage.affected == 1

    def over(self) -> None:
        """The operation has recovered, or has given up."""
        if self._is_affected:
            self._is_affected = False
            self._outage.affected -= 1


class ProgressWatch:
    """Cancels the pending samples of one client when none of them has finished for `timeout_s`."""

    def __init__(self, timeout_s: float, runner: Runner) -> None:
        self._timeout_s = timeout_s
        self._runner = runner
        self._pending: dict[asyncio.Task[Any], bool] = {}
        self._last = 0.0
        self._watching: asyncio.Task[Any] | None = None

    def enter(self) -> None:
        """The current task starts to wait for a sample."""
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

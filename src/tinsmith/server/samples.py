"""Samples on their way to the backend: in any order, and again if the backend lost them.

Does not know: HTTP, how results are kept (`jobs`).
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

from tinsmith.engine.base import Backend, BackendLostError, Done, JobCancelledError, Position
from tinsmith.server.jobs import Jobs
from tinsmith.server.token_log import TokenLog
from tinsmith.server.work import Work

RETRY_S = 0.2


class Samples:
    """All samples under way."""

    def __init__(self, backend: Backend, jobs: Jobs, *, clock: Callable[[], float] = time.time) -> None:
        self._backend = backend
        self._jobs = jobs
        self._clock = clock
        self._under_way: dict[str, Work] = {}
        self._lost: dict[str, asyncio.TimerHandle] = {}
        """Those that the backend lost, until they are submitted again."""
        self._is_stopped = False

    def put(self, work: Work) -> None:
        """Hand a sample to the backend."""
        self._under_way[work.row.request_id] = work
        self._submit(work)

    def log(self, request_id: str) -> TokenLog | None:
        """The tokens so far of a sample that is under way and streamed."""
        work = self._under_way.get(request_id)
        return work.log if work is not None else None

    def unfollowed(self, request_id: str, patience_s: float) -> None:
        """Somebody has stopped following a stream: give it up if nobody does, or comes back in time."""
        log = self.log(request_id)
        if log is None or log.followers:
            return
        if patience_s:
            asyncio.get_running_loop().call_later(patience_s, self._give_up, request_id, log.visits, patience_s)
        else:
            self.cancel(request_id)

    def _give_up(self, request_id: str, visits: int, patience_s: float) -> None:
        work = self._under_way.get(request_id)
        if work is not None and work.log is not None and work.log.visits == visits and not self._is_stopped:
            work.cancel_reason = f"cancelled: nobody followed its stream for {patience_s:g} s"
            self.cancel(request_id)

    def cancel(self, request_id: str) -> bool:
        """Drop a sample; its slot is free at once."""
        timer = self._lost.pop(request_id, None)
        if timer is not None:
            timer.cancel()
            self._jobs.finish(self._under_way.pop(request_id), JobCancelledError("cancelled"))
            return True
        self._backend.cancel(request_id)
        return request_id in self._under_way

    def stop(self) -> None:
        """The server goes down: what the backend lost waits in the journal for the next start."""
        self._is_stopped = True
        for timer in self._lost.values():
            timer.cancel()
        self._lost.clear()

    def position(self, request_id: str) -> Position:
        return self._backend.position(request_id)

    def of_lane(self, lane: str) -> list[str]:
        """The ids of samples of a sampling session that have no result yet."""
        return [request_id for request_id, work in self._under_way.items() if work.row.lane == lane]

    def _submit(self, work: Work) -> None:
        work.started_at = work.started_at or self._clock()
        future = self._backend.submit(work.job, work.log.listener() if work.log is not None else None)
        future.add_done_callback(lambda done: self._done(work, done))

    def _done(self, work: Work, future: asyncio.Future[Done]) -> None:
        error = asyncio.CancelledError() if future.cancelled() else future.exception()
        if isinstance(error, (BackendLostError, asyncio.CancelledError)):
            if not self._is_stopped:
                loop = asyncio.get_running_loop()
                self._lost[work.row.request_id] = loop.call_later(RETRY_S, self._again, work)
            return
        self._under_way.pop(work.row.request_id, None)
        self._jobs.finish(work, error if error is not None else future.result())

    def _again(self, work: Work) -> None:
        del self._lost[work.row.request_id]
        self._submit(work)

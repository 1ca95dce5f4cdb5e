"""Samples between the journal and the backend: submitted in any order, and again if the backend lost them."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Collection

import msgspec

from tinsmith.engine.protocol import AnyJob, Backend, BackendLostError, Done, JobCancelledError, Position, Sample
from tinsmith.server.jobs.job import Work
from tinsmith.server.jobs.lifecycle import Jobs, in_turns
from tinsmith.server.jobs.token_log import TokenLog

RETRY_S = 0.2


class Samples:
    """All samples that have no result yet."""

    def __init__(self, backend: Backend, jobs: Jobs, *, clock: Callable[[], float] = time.time) -> None:
        self._backend = backend
        self._jobs = jobs
        self._clock = clock
        self._under_way: dict[str, Work] = {}
        self._lost: dict[str, asyncio.TimerHandle] = {}
        """Timers of samples that the backend lost, until they are submitted again."""
        self._is_stopped = False

    def put(self, work: Work) -> None:
        """Hand a sample to the backend."""
        self._under_way[work.row.request_id] = work
        self._submit(work)

    def log(self, request_id: str) -> TokenLog | None:
        """Return the tokens so far of a sample that is being streamed."""
        work = self._under_way.get(request_id)
        return work.log if work is not None else None

    def unfollowed(self, request_id: str, patience_s: float) -> None:
        """Cancel a streamed sample that nobody follows any more, unless somebody comes back in time."""
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
            work.cancel_reason = f"cancelled: no client read its stream for {patience_s:g} s"
            self.cancel(request_id)

    def cancel(self, request_id: str) -> bool:
        """Cancel a sample; its slot is free at once."""
        timer = self._lost.pop(request_id, None)
        if timer is not None:
            timer.cancel()
            self._jobs.finish(self._under_way.pop(request_id), JobCancelledError("cancelled"))
            return True
        self._backend.cancel(request_id)
        return request_id in self._under_way

    def stop(self) -> None:
        """Stop resubmitting: what the backend lost stays in the journal for the next start."""
        self._is_stopped = True
        for timer in self._lost.values():
            timer.cancel()
        self._lost.clear()

    def position(self, request_id: str) -> Position:
        return self._backend.position(request_id)

    async def cancel_lanes(self, lanes: Collection[str]) -> None:
        """Cancel the samples of sampling sessions that have ended; there may be thousands of both."""
        over = [request_id for request_id, work in self._under_way.items() if work.row.lane in lanes]
        async for request_id in in_turns(over):
            self.cancel(request_id)

    def sessions(self) -> set[str]:
        """Return the ids of the sessions that have samples under way."""
        return {work.row.session_id for work in self._under_way.values()}

    def _submit(self, work: Work) -> None:
        work.started_at = work.started_at or self._clock()
        future = self._backend.submit(_with_own_key(work.job), work.log.listener() if work.log is not None else None)
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


def _with_own_key(job: AnyJob) -> AnyJob:
    """Prefix the key of a sample's weights with its organisation.

    Backends cache weights by this key, and files that one organisation imported must never be used for another.
    """
    if not isinstance(job, Sample) or job.adapter_key is None:
        return job
    return msgspec.structs.replace(job, adapter_key=f"{job.tenant}/{job.adapter_key}")

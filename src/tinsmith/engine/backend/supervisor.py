"""Supervises the engine of one base model: starts it when needed, watches it, restarts it, unloads it when idle.

States: idle -> starting -> ready -> (restarting -> ready)* -> idle, and failed if it cannot start. An engine that dies
while it is starting is started again, and jobs wait for it up to a deadline; they fail at once only if the engine
itself reports that it can never start. A failed engine rejects jobs with the reason; after a while, the next job makes
it try again.
"""

from __future__ import annotations

import asyncio
import logging
from dataclasses import dataclass
from typing import Any

from tinsmith.engine import ipc
from tinsmith.engine.backend.engine_process import Child, Ending
from tinsmith.engine.backend.job_queue import Entry, JobQueue
from tinsmith.engine.backend.suspects import Cause
from tinsmith.engine.ipc import EngineSpec
from tinsmith.engine.protocol import (
    AnyJob,
    BackendLostError,
    CreateModel,
    Done,
    EngineDownError,
    JobCancelledError,
    JobFailedError,
    ModelCard,
    OnTokens,
    Position,
    Sample,
    Status,
    Unload,
)

logger = logging.getLogger(__name__)

LEAST_LOOK_S = 0.05
"""Shortest time between two checks of the jobs that must run apart."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SupervisorOptions:
    """Timeouts of a supervisor. A server sets `idle_s` and `start_deadline_s`; the others are shorter in tests."""

    idle_s: float | None = None
    """After this long without jobs, the engine is unloaded with its models; None: never."""
    start_timeout_s: float = 600.0
    """How long loading a model may take."""
    backoff_s: float = 0.5
    """Pause before the second restart in a row, doubled for each further one. The first restart is immediate, and
    deaths from outside do not count."""
    max_backoff_s: float = 30.0
    start_deadline_s: float = 600.0
    """How long a job waits for an engine that does not start."""
    retry_failed_s: float = 30.0
    """How long a failed engine rejects jobs before the next job makes it try again."""


class StartFailedError(Exception):
    """The process started, but its engine did not. `is_final`: the engine reported that it never will."""

    def __init__(self, reason: str, *, is_final: bool = False, cause: Cause = "crash") -> None:
        super().__init__(reason)
        self.is_final = is_final
        self.cause = cause


class Supervisor:
    """Runs the engine of one base model and its jobs."""

    def __init__(self, spec: EngineSpec, options: SupervisorOptions) -> None:
        self.spec = spec
        self.epoch = 1
        self.card: ModelCard = spec.card
        self._options = options
        self._loop = asyncio.get_running_loop()
        self._queue = JobQueue(self._loop.time)
        self._models: set[str] = set()
        self._child: Child | None = None
        self._is_ready = False
        self._is_closing = False
        self._is_idling = False
        self._started: asyncio.Future[ModelCard] | None = None
        self._life: asyncio.Task[None] | None = None
        self._deaths = 0
        """Deaths in a row, not counting those from outside."""
        self._last_death = ""
        self._starting_since: float | None = None
        self._failed_starts = 0
        self._failure = ""
        self._retry_at = 0.0
        self._idle_timer: asyncio.TimerHandle | None = None
        self._look_timer: asyncio.TimerHandle | None = None

    @property
    def status(self) -> Status:
        if self._failure:
            return Status(state="failed", reason=self._failure)
        if self._is_ready or self._is_idling or self._life is None:
            return Status(state="ready")
        if self._failed_starts:
            times = "once" if self._failed_starts == 1 else f"{self._failed_starts} times"
            text = f"the engine died {times} while it was starting and is being started again; the last time it was"
            return Status(state="restarting", reason=f"{text} {self._last_death}")
        if self._last_death:
            return Status(state="restarting", reason=f"the engine is being restarted; it was {self._last_death}")
        return Status(state="starting", reason="the engine is loading the model")

    @property
    def pid(self) -> int | None:
        return None if self._child is None or self._child.ended.done() else self._child.pid

    def submit(self, job: AnyJob, on_tokens: OnTokens | None) -> asyncio.Future[Done]:
        future: asyncio.Future[Done] = self._loop.create_future()
        if refusal := self._refusal(job):
            future.set_exception(refusal)
            return future
        self._queue.add(Entry(job, future, on_tokens))
        self.wake()
        self._dispatch()
        return future

    def _refusal(self, job: AnyJob) -> Exception | None:
        if self._is_closing:
            return BackendLostError("the backend is closed")
        now = self._loop.time()
        if self._failure and now < self._retry_at:
            return EngineDownError(f"the engine of {self.spec.card.name} cannot start: {self._failure}")
        if self._is_overdue(now):
            return self._down(self._last_death)
        if self._queue.suspects.is_condemned(job):
            return _condemned(job.job_id, self._last_death)
        return None

    def wake(self) -> None:
        """Make sure that the engine is running or starting."""
        if self._idle_timer is not None:
            self._idle_timer.cancel()
            self._idle_timer = None
        if self._life is None:
            self._failure = ""
            self._life = self._loop.create_task(self._live(), name=f"supervisor of {self.spec.card.name}")

    def cancel(self, job_id: str) -> None:
        entry = self._queue.get(job_id)
        if entry is None:
            return
        if entry.stage != "waiting" and self._child is not None:
            self._child.send(ipc.Cancel(job_id))
            if not isinstance(entry.job, Sample):
                return  # the engine will report whether it could be cancelled
        self._queue.drop(job_id)
        _resolve(entry, JobCancelledError(f"job {job_id} was cancelled"))
        self._dispatch()
        self._note_idle()

    def position(self, job_id: str) -> Position:
        entry = self._queue.get(job_id)
        if entry is None:
            return Position(ahead=0, reason="not running")
        ahead = self._queue.ahead(entry)
        if not self._is_ready:
            return Position(ahead=ahead, reason=self.status.reason or "the engine is starting")
        if entry.stage == "begun":
            return Position(ahead=0, reason="running")
        if held := self._queue.why_held(entry):
            return Position(ahead=ahead, reason=held)
        if ahead and entry.model_id is not None:
            return Position(ahead=ahead, reason=f"waits for {ahead} earlier operations of the same model")
        operations, samples = self._queue.running()
        return Position(ahead=ahead, reason=f"waits while {operations} operations and {samples} samples are running")

    async def close(self, grace_s: float) -> None:
        self._is_closing = True
        self._stop_timer()
        if self._child is not None and self._is_ready:
            await self._child.stop(grace_s)
        elif self._child is not None:
            self._child.interrupt()
        if self._life is not None:
            if self._child is None:
                self._life.cancel()
            await asyncio.gather(self._life, return_exceptions=True)
        self._lose("the backend was closed", None)

    # the engine's life

    async def _live(self) -> None:
        """Start the engine and watch it, again and again, until it is idle, fails or is closed."""
        try:
            while not self._is_closing:
                try:
                    await self._start()
                except StartFailedError as error:
                    if self._gives_up(error):
                        return
                else:
                    self._dispatch()
                    assert self._child is not None
                    self._note_end(await self._child.ended)
                    if self._is_idling and not len(self._queue):
                        return
                self._child = None
                if not self._is_idling:
                    await asyncio.sleep(self._backoff_s())
                self._is_idling = False
        except Exception as error:
            logger.exception("the supervisor of %s failed", self.spec.card.name)
            self._fail(f"{type(error).__name__}: {error}")
        finally:
            self._child = None
            self._is_ready = self._is_idling = False
            self._life = None

    async def _start(self) -> None:
        """Start a process and wait until it reports that it is ready."""
        started: asyncio.Future[ModelCard] = self._loop.create_future()
        self._started = started
        self._starting_since = self._loop.time() if self._starting_since is None else self._starting_since
        child = self._child = Child(self.spec, self._on_frame)
        try:
            await child.start()
        except OSError as error:
            raise StartFailedError(f"its process cannot be started: {error}") from error
        first: list[asyncio.Future[Any]] = [started, child.ended]
        await asyncio.wait(first, timeout=self._options.start_timeout_s, return_when=asyncio.FIRST_COMPLETED)
        if started.done() and started.exception() is None:
            self.card = started.result()
            self._is_ready = True
            self._failure, self._starting_since, self._failed_starts = "", None, 0
            logger.info("engine of %s is ready, process %d", self.spec.card.name, child.pid)
            return
        timed_out = not started.done() and not child.ended.done()
        child.interrupt()
        ending = await child.ended
        said = started.exception() if started.done() else None
        if said is not None:
            raise said
        if timed_out:
            raise StartFailedError(f"not ready after {self._options.start_timeout_s:g} s")
        raise StartFailedError(ending.reason, cause=ending.cause)

    def _gives_up(self, error: StartFailedError) -> bool:
        """Return whether to stop trying after a failed start. No job is to blame: none had been sent."""
        if self._is_closing:
            return True
        self._note_death(str(error), error.cause)
        self._failed_starts += 1
        logger.warning("engine of %s did not start: %s", self.spec.card.name, error, extra={"event": "start_failed"})
        if error.is_final:
            self._fail(str(error))
            return True
        now = self._loop.time()
        for entry in self._queue.expired(now - self._options.start_deadline_s):
            _resolve(entry, self._down(str(error)))
        if self._is_overdue(now) and not len(self._queue):
            self._fail(str(error))
            return True
        return False

    def _is_overdue(self, now: float) -> bool:
        """Return whether the engine has been starting for longer than the deadline."""
        return self._starting_since is not None and now >= self._starting_since + self._options.start_deadline_s

    def _down(self, reason: str) -> EngineDownError:
        text = f"the engine of {self.spec.card.name} cannot start: {reason}"
        return EngineDownError(f"{text} (tried for {self._options.start_deadline_s:g} s)")

    def _note_death(self, reason: str, cause: Cause) -> None:
        self._deaths = max(2, self._deaths) if cause == "killed" and self._deaths else self._deaths + 1
        self._last_death = reason

    def _fail(self, reason: str) -> None:
        """Fail all waiting jobs with the reason, and reject new ones for a while."""
        self._failure = reason
        self._retry_at = self._loop.time() + self._options.retry_failed_s
        self._deaths = 0
        self._starting_since, self._failed_starts = None, 0
        for entry, _ in self._queue.lose(None):
            _resolve(entry, EngineDownError(f"the engine of {self.spec.card.name} cannot start: {reason}"))

    def _note_end(self, ending: Ending) -> None:
        self._is_ready = False
        if self._is_closing or self._is_idling:
            return
        self._note_death(ending.reason, ending.cause)
        logger.warning("engine of %s ended: %s", self.spec.card.name, ending.reason, extra={"event": "engine_died"})
        self.epoch += 1
        self._lose(f"the engine of {self.spec.card.name} was {ending.reason}", ending.cause)

    def _lose(self, why: str, cause: Cause | None) -> None:
        """End all jobs. If there is a cause, the engine died, and the running jobs become suspects."""
        self._models.clear()
        for entry, is_condemned in self._queue.lose(cause):
            if is_condemned:
                tenant, job_id = entry.job.tenant, entry.job.job_id
                extra = {"event": "job_condemned", "job_id": job_id, "org_id": tenant}
                logger.error(
                    "job %s of %s killed the engine while nothing else was running; it is not tried again",
                    job_id,
                    tenant,
                    extra=extra,
                )
                _resolve(entry, _condemned(entry.job.job_id, self._last_death))
            else:
                _resolve(entry, BackendLostError(f"job {entry.job.job_id} did not finish: {why}"))

    def _backoff_s(self) -> float:
        if self._deaths <= 1:
            return 0.0
        return min(self._options.max_backoff_s, self._options.backoff_s * 2.0 ** (self._deaths - 2))

    # idleness

    def _note_idle(self) -> None:
        if self._options.idle_s is not None and not len(self._queue) and self._idle_timer is None:
            self._idle_timer = self._loop.call_later(self._options.idle_s, self._unload)

    def _stop_timer(self) -> None:
        for timer in (self._idle_timer, self._look_timer):
            if timer is not None:
                timer.cancel()
        self._idle_timer = self._look_timer = None

    def _unload(self) -> None:
        self._idle_timer = None
        if self._child is None or not self._is_ready or len(self._queue):
            return
        self._is_idling, self._is_ready = True, False
        if self._models:
            self.epoch += 1  # at once, so that no job is submitted for a model that is about to go
            self._models.clear()
        logger.info("engine of %s is unloaded: idle for %g s", self.spec.card.name, self._options.idle_s)
        self._child.interrupt()

    # jobs

    def _dispatch(self) -> None:
        if not self._is_ready or self._child is None or self._is_closing:
            return
        for entry in self._queue.take_back():
            self._child.send(ipc.Cancel(entry.job.job_id))
            why = "it was interrupted for a request that must run alone, because the engine died during that request"
            _resolve(entry, BackendLostError(f"job {entry.job.job_id} did not finish: {why}"))
        for entry in self._queue.take_sendable():
            self._child.send(ipc.Submit(entry.job, entry.on_tokens is not None))
        self._look_again()

    def _look_again(self) -> None:
        """Set a timer: jobs that run apart may have to wait for a certain time, not only for other jobs."""
        if self._look_timer is not None:
            self._look_timer.cancel()
            self._look_timer = None
        look_at = self._queue.look_again_at()
        if look_at is not None:
            self._look_timer = self._loop.call_at(max(look_at, self._loop.time() + LEAST_LOOK_S), self._dispatch)

    def _on_frame(self, frame: ipc.FromEngine) -> None:
        match frame:
            case ipc.Began():
                self._queue.begin(frame.job_ids)
            case ipc.StreamedTokens():
                self._pass_on(frame)
            case ipc.Finished():
                self._deaths = 0
                self._end(frame.job_id, frame.done)
            case ipc.Failed():
                self._end(frame.job_id, JobFailedError(frame.message, frame.category))
            case ipc.Cancelled():
                self._on_cancelled(frame.job_id)
            case ipc.Ready() | ipc.StartFailed():
                self._on_start(frame)

    def _on_cancelled(self, job_id: str) -> None:
        """Process the end of a job that was being cancelled, or that was taken back and is queued again."""
        entry = self._queue.get(job_id)
        self._queue.gone(job_id)
        if entry is not None and entry.stage != "waiting":
            self._queue.drop(job_id)
            _resolve(entry, JobCancelledError(f"job {job_id} was cancelled"))
        self._dispatch()
        self._note_idle()

    def _on_start(self, frame: ipc.Ready | ipc.StartFailed) -> None:
        assert self._started is not None
        if isinstance(frame, ipc.StartFailed):
            self._started.set_exception(StartFailedError(frame.reason, is_final=frame.is_final))
            return
        announced = self.spec.card.vocab_size
        if frame.card.vocab_size == announced:
            self._started.set_result(frame.card)
        else:
            text = f"the model has a vocabulary of {frame.card.vocab_size}, but {announced} was announced"
            self._started.set_exception(StartFailedError(text, is_final=True))

    def _pass_on(self, frame: ipc.StreamedTokens) -> None:
        entry = self._queue.get(frame.job_id)
        if entry is None or entry.on_tokens is None or entry.stage == "waiting":
            return  # the job was taken back and will start again
        try:
            entry.on_tokens(frame.event)
        except Exception:
            logger.exception("the consumer of job %s's token stream failed", frame.job_id)
            entry.on_tokens = None

    def _end(self, job_id: str, result: Done | Exception) -> None:
        entry = self._queue.end(job_id)
        if entry is None:
            return
        if isinstance(result, Done):
            if isinstance(entry.job, CreateModel):
                self._models.add(entry.job.model_id)
            elif isinstance(entry.job, Unload):
                self._models.discard(entry.job.model_id)
        _resolve(entry, result)
        self._dispatch()
        self._note_idle()


def _resolve(entry: Entry, result: Done | Exception) -> None:
    if entry.future.done():
        return
    if isinstance(result, Done):
        entry.future.set_result(result)
        return
    entry.future.set_exception(result)
    if isinstance(result, BackendLostError):
        entry.future.exception()  # marks the exception as retrieved, since nobody may be waiting for it


def _condemned(job_id: str, death: str) -> JobFailedError:
    text = f"job {job_id} is not tried again: it killed the engine, also while nothing else was running"
    return JobFailedError(f"{text} ({death})")

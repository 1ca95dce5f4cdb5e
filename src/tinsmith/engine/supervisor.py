"""The engine of one base model: started when it is needed, watched, restarted, unloaded when idle.

States: idle -> starting -> ready -> (restarting -> ready)* -> idle, and failed when it cannot start. A failed engine
refuses jobs with the reason, until some time has passed: then the next job makes it try again.

Owns: the epoch, the queue, and what each job's future ends with. Does not know: other base models, torch.
"""

from __future__ import annotations

import asyncio
import logging
from dataclasses import dataclass
from typing import Any

from tinsmith.engine import frames
from tinsmith.engine.base import (
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
from tinsmith.engine.child import Child, EngineSpec
from tinsmith.engine.queues import Entry, JobQueue

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class SupervisorOptions:
    """How patient the supervisor of an engine is."""

    idle_s: float | None = None
    """An engine without jobs for this long is unloaded, its models with it; None: never."""
    start_timeout_s: float = 600.0
    """How long loading a model may take."""
    backoff_s: float = 0.5
    """Wait before the second restart in a row; doubled for each further one. The first comes at once."""
    max_backoff_s: float = 30.0
    max_starts: int = 3
    """Deaths in a row while starting before the engine counts as failed."""
    retry_failed_s: float = 30.0
    """How long a failed engine refuses jobs before the next one makes it try again."""


class StartFailedError(Exception):
    """The process came up without an engine in it. `is_final`: the engine said so itself."""

    def __init__(self, reason: str, *, is_final: bool) -> None:
        super().__init__(reason)
        self.is_final = is_final


class Supervisor:
    """Runs the engine of one base model and its jobs."""

    def __init__(self, spec: EngineSpec, options: SupervisorOptions) -> None:
        self.spec = spec
        self.epoch = 1
        self.card: ModelCard = spec.card
        self._options = options
        self._loop = asyncio.get_running_loop()
        self._queue = JobQueue()
        self._models: set[str] = set()
        self._child: Child | None = None
        self._is_ready = False
        self._is_closing = False
        self._is_idling = False
        self._started: asyncio.Future[ModelCard] | None = None
        self._life: asyncio.Task[None] | None = None
        self._deaths = 0
        self._last_death = ""
        self._failure = ""
        self._retry_at = 0.0
        self._idle_timer: asyncio.TimerHandle | None = None

    @property
    def status(self) -> Status:
        if self._failure:
            return Status(state="failed", reason=self._failure)
        if self._is_ready or self._is_idling or self._life is None:
            return Status(state="ready")
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
        if self._failure and self._loop.time() < self._retry_at:
            return EngineDownError(f"the engine of {self.spec.card.name} cannot start: {self._failure}")
        if self._queue.is_condemned(job.job_id):
            return _condemned(job.job_id, self._last_death)
        return None

    def wake(self) -> None:
        """Make sure that the engine runs or comes up."""
        if self._idle_timer is not None:
            self._idle_timer.cancel()
            self._idle_timer = None
        if self._life is None:
            self._failure = ""
            self._life = self._loop.create_task(self._live(), name=f"supervisor of {self.spec.card.name}")

    def cancel(self, job_id: str) -> None:
        entry = self._queue.get(job_id)
        if entry is None or (entry.stage == "begun" and not isinstance(entry.job, Sample)):
            return
        if entry.stage != "waiting" and self._child is not None:
            self._child.send(frames.Cancel(job_id))
            if not isinstance(entry.job, Sample):
                return  # the engine says whether it had begun
        self._end(job_id, JobCancelledError(f"job {job_id} was cancelled"))

    def position(self, job_id: str) -> Position:
        entry = self._queue.get(job_id)
        if entry is None:
            return Position(ahead=0, reason="not under way")
        ahead = self._queue.ahead(entry)
        if not self._is_ready:
            return Position(ahead=ahead, reason=self.status.reason or "the engine is being started")
        if entry.stage == "begun":
            return Position(ahead=0, reason="is being computed")
        if ahead and entry.model_id is not None:
            return Position(ahead=ahead, reason=f"waits for {ahead} earlier operations of the same model")
        operations, samples = self._queue.running()
        return Position(ahead=ahead, reason=f"waits while {operations} operations and {samples} samples are computed")

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
        self._lose("the backend was closed", blame=False)

    # the engine's life

    async def _live(self) -> None:
        """Start the engine and follow it, again and again, until it is idle, fails or is closed."""
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
        """Bring a process up until it says that it is ready."""
        started: asyncio.Future[ModelCard] = self._loop.create_future()
        self._started = started
        child = self._child = Child(self.spec, self._on_frame)
        try:
            await child.start()
        except OSError as error:
            raise StartFailedError(f"its process cannot be started: {error}", is_final=False) from error
        first: list[asyncio.Future[Any]] = [started, child.ended]
        await asyncio.wait(first, timeout=self._options.start_timeout_s, return_when=asyncio.FIRST_COMPLETED)
        if started.done() and started.exception() is None:
            self.card = started.result()
            self._is_ready = True
            self._failure = ""
            logger.info("engine of %s is ready, process %d", self.spec.card.name, child.pid)
            return
        timed_out = not started.done() and not child.ended.done()
        child.interrupt()
        reason = await child.ended
        said = started.exception() if started.done() else None
        if said is not None:
            raise StartFailedError(str(said), is_final=True)
        if timed_out:
            reason = f"it was not ready after {self._options.start_timeout_s:g} s"
        raise StartFailedError(reason, is_final=timed_out)

    def _gives_up(self, error: StartFailedError) -> bool:
        if self._is_closing:
            return True
        self._deaths += 1
        self._last_death = str(error)
        logger.warning("engine of %s did not start: %s", self.spec.card.name, error)
        if error.is_final or self._deaths >= self._options.max_starts:
            self._fail(str(error))
            return True
        return False

    def _fail(self, reason: str) -> None:
        """It does not start: whoever waits is told why, and the next jobs too, for a while."""
        self._failure = reason
        self._retry_at = self._loop.time() + self._options.retry_failed_s
        self._deaths = 0
        for entry, _ in self._queue.lose(blame=False):
            _resolve(entry, EngineDownError(f"the engine of {self.spec.card.name} cannot start: {reason}"))

    def _note_end(self, reason: str) -> None:
        self._is_ready = False
        if self._is_closing or self._is_idling:
            return
        self._deaths += 1
        self._last_death = reason
        logger.warning("engine of %s ended: %s", self.spec.card.name, reason, extra={"event": "engine_died"})
        self.epoch += 1
        self._lose(f"the engine of {self.spec.card.name} was {reason}", blame=True)

    def _lose(self, why: str, *, blame: bool) -> None:
        self._models.clear()
        for entry, is_condemned in self._queue.lose(blame=blame):
            if is_condemned:
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
        if self._idle_timer is not None:
            self._idle_timer.cancel()
            self._idle_timer = None

    def _unload(self) -> None:
        self._idle_timer = None
        if self._child is None or not self._is_ready or len(self._queue):
            return
        self._is_idling, self._is_ready = True, False
        if self._models:
            self.epoch += 1  # now, so that no job is submitted for a model that will not be there
            self._models.clear()
        logger.info("engine of %s is unloaded: idle for %g s", self.spec.card.name, self._options.idle_s)
        self._child.interrupt()

    # jobs

    def _dispatch(self) -> None:
        if not self._is_ready or self._child is None or self._is_closing:
            return
        for entry in self._queue.take_sendable():
            self._child.send(frames.Submit(entry.job, entry.on_tokens is not None))

    def _on_frame(self, frame: frames.FromEngine) -> None:
        match frame:
            case frames.Began():
                self._queue.begin(frame.job_ids)
            case frames.Tokens():
                self._pass_on(frame)
            case frames.Finished():
                self._deaths = 0
                self._end(frame.job_id, frame.done)
            case frames.Failed():
                self._end(frame.job_id, JobFailedError(frame.message, frame.category))
            case frames.Cancelled():
                self._end(frame.job_id, JobCancelledError(f"job {frame.job_id} was cancelled"))
            case frames.Ready() | frames.StartFailed():
                self._on_start(frame)

    def _on_start(self, frame: frames.Ready | frames.StartFailed) -> None:
        assert self._started is not None
        if isinstance(frame, frames.StartFailed):
            self._started.set_exception(StartFailedError(frame.reason, is_final=True))
            return
        announced = self.spec.card.vocab_size
        if frame.card.vocab_size == announced:
            self._started.set_result(frame.card)
        else:
            text = f"the model has a vocabulary of {frame.card.vocab_size}, not of {announced} as announced"
            self._started.set_exception(StartFailedError(text, is_final=True))

    def _pass_on(self, frame: frames.Tokens) -> None:
        entry = self._queue.get(frame.job_id)
        if entry is None or entry.on_tokens is None:
            return
        try:
            entry.on_tokens(frame.event)
        except Exception:
            logger.exception("whoever streams job %s cannot take its tokens", frame.job_id)
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
        entry.future.exception()  # marks it as seen: whoever waits is told, nobody need be waiting


def _condemned(job_id: str, death: str) -> JobFailedError:
    return JobFailedError(f"job {job_id} is not tried again: the engine died twice while it was computed ({death})")

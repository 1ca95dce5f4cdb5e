"""`MemoryBackend`: a complete backend in the server's own process, for tests only.

It fulfils the contract of `tinsmith.engine.protocol.Backend` (tests/contract/test_backends.py), and tests can control
it: `hold` delays jobs, `pace` delays streamed tokens, `log_path` records executions across processes, and `lose` drops
all state.
"""

from __future__ import annotations

import asyncio
import os
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any, TypeAlias

import msgspec

from tinsmith.engine.protocol import (
    AnyJob,
    BackendLostError,
    Done,
    JobCancelledError,
    JobFailedError,
    ModelCard,
    OnTokens,
    Position,
    Sample,
    Status,
)
from tinsmith.testing.engine import ArithmeticEngine, token_events

ARITHMETIC = ModelCard(
    name="tinsmith/arithmetic", vocab_size=512, max_context_length=4096, arch="arithmetic", lora_alpha=32.0
)

Hold: TypeAlias = Callable[[AnyJob], Awaitable[object]]
"""Awaited before a job runs; `lambda job: event.wait()` holds all jobs at a gate."""
Pace: TypeAlias = Callable[[AnyJob, int], Awaitable[object]]
"""Awaited before each token event of a streamed sample, with the event's number."""


class Execution(msgspec.Struct, frozen=True, kw_only=True):
    """A line of the log: a job that started, with its process and epoch."""

    process: int
    epoch: int
    job_id: str
    kind: str


def read_log(path: Path) -> list[Execution]:
    """Return the executions that backends logged to a file, in order. An unfinished last line is ignored."""
    return [msgspec.json.decode(line, type=Execution) for line in path.read_bytes().split(b"\n")[:-1]]


def open_log(path: Path) -> int:
    """Open a log to append to it.

    SIGKILL can cut a write off at a page boundary, so an unfinished line that a killed process left is removed first:
    its job had not started.
    """
    log = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT, 0o600)
    os.ftruncate(log, path.read_bytes().rfind(b"\n") + 1)
    return log


class _Entry:
    """A job that has not ended."""

    __slots__ = ("future", "has_begun", "job", "on_tokens", "task")

    def __init__(self, job: AnyJob, on_tokens: OnTokens | None, future: asyncio.Future[Done]) -> None:
        self.job = job
        self.on_tokens = on_tokens
        self.future = future
        self.has_begun = False
        self.task: asyncio.Task[None] | None = None


class MemoryBackend:
    """Serves base models by arithmetic. Jobs of one model run in order; models and samples run concurrently."""

    def __init__(
        self,
        cards: Sequence[ModelCard] = (ARITHMETIC,),
        *,
        hold: Hold | None = None,
        pace: Pace | None = None,
        log_path: Path | None = None,
    ) -> None:
        self._cards = tuple(cards)
        self._hold = hold
        self._pace = pace
        self._log_path = log_path
        self._log: int | None = None
        self._engine = ArithmeticEngine(cards)
        self._epochs = {card.name: 1 for card in cards}
        self._entries: dict[str, _Entry] = {}
        self._queues: dict[str, deque[_Entry]] = {}
        self._samples: list[_Entry] = []
        """Samples that start in the next iteration of the event loop."""
        self._status = Status(state="starting", reason="not open yet")

    def epoch_of(self, base_model: str) -> int:
        return self._epochs[base_model]

    @property
    def status(self) -> Status:
        return self._status

    async def open(self) -> None:
        self._loop = asyncio.get_running_loop()
        if self._log_path is not None:
            self._log = open_log(self._log_path)
        self._status = Status(state="ready")

    async def close(self, grace_s: float) -> None:
        self._status = Status(state="failed", reason="closed")
        running = [entry.future for entry in self._entries.values() if entry.has_begun]
        if running and grace_s > 0:
            await asyncio.wait(running, timeout=grace_s)
        tasks = [entry.task for entry in self._entries.values() if entry.task is not None]
        self._drop(list(self._entries.values()), "the backend was closed")
        await asyncio.gather(*tasks, return_exceptions=True)
        self._engine.forget(list(self._epochs))
        if self._log is not None:
            os.close(self._log)
            self._log = None

    def cards(self) -> Sequence[ModelCard]:
        return self._cards

    def submit(self, job: AnyJob, on_tokens: OnTokens | None = None) -> asyncio.Future[Done]:
        future: asyncio.Future[Done] = self._loop.create_future()
        if self._status.state != "ready":
            future.set_exception(BackendLostError(f"the backend is {self._status.reason}"))
            return future
        assert job.job_id not in self._entries, f"job {job.job_id} was already submitted"
        entry = _Entry(job, on_tokens, future)
        self._entries[job.job_id] = entry
        if isinstance(job, Sample):
            self._start(entry)
        else:
            queue = self._queues.setdefault(job.model_id, deque())
            queue.append(entry)
            if len(queue) == 1:
                self._start(entry)
        return future

    def cancel(self, job_id: str) -> None:
        entry = self._entries.get(job_id)
        if entry is None or (entry.has_begun and not isinstance(entry.job, Sample)):
            return
        self._end(entry, JobCancelledError(f"job {job_id} was cancelled"))

    def position(self, job_id: str) -> Position:
        entry = self._entries.get(job_id)
        if entry is None:
            return Position(ahead=0, reason="not running")
        job = entry.job
        ahead = 0 if isinstance(job, Sample) else self._queues[job.model_id].index(entry)
        if ahead:
            return Position(ahead=ahead, reason=f"waits for {ahead} earlier operations of the same model")
        return Position(ahead=0, reason="running" if entry.has_begun else "about to start")

    def lose(self, base_model: str | None = None) -> None:
        """Drop the state of one base model, or of all, as a killed engine would."""
        lost = [base_model] if base_model is not None else list(self._epochs)
        for name in lost:
            self._epochs[name] += 1
        self._engine.forget(lost)
        self._drop([entry for entry in self._entries.values() if entry.job.base_model in lost], "its state was lost")

    def _start(self, entry: _Entry) -> None:
        if self._hold is None and not isinstance(entry.job, Sample):
            self._loop.call_soon(self._run, entry)
        elif self._hold is None and entry.on_tokens is None:
            if not self._samples:
                self._loop.call_soon(self._run_samples)
            self._samples.append(entry)
        else:
            entry.task = self._loop.create_task(self._run_held(entry))

    def _run(self, entry: _Entry) -> None:
        if self._entries.get(entry.job.job_id) is not entry:
            return  # cancelled or lost before it started
        self._begin([entry])
        self._execute(entry)

    def _run_samples(self) -> None:
        """Run all samples that arrived in one iteration of the event loop together."""
        came, self._samples = self._samples, []
        entries = [entry for entry in came if self._entries.get(entry.job.job_id) is entry]
        self._begin(entries)
        try:
            results = self._engine.samples([entry.job for entry in entries])  # type: ignore[misc]
        except Exception:  # at least one fails: run each alone, so that the others succeed
            for entry in entries:
                self._execute(entry)
        else:
            for entry, done in zip(entries, results, strict=True):
                self._end(entry, done)

    def _execute(self, entry: _Entry) -> None:
        try:
            done = self._engine.execute(entry.job)
        except JobFailedError as error:
            self._end(entry, error)
        except Exception as error:
            self._end(entry, JobFailedError(f"{type(error).__name__}: {error}"))
        else:
            self._end(entry, done)

    async def _run_held(self, entry: _Entry) -> None:
        if self._hold is not None:
            await self._hold(entry.job)
        if entry.on_tokens is None or not isinstance(entry.job, Sample):
            self._run(entry)
            return
        try:
            self._begin([entry])
            done, response = self._engine.sample(entry.job)
            for number, event in enumerate(token_events(response)):
                await (asyncio.sleep(0) if self._pace is None else self._pace(entry.job, number))
                entry.on_tokens(event)
        except JobFailedError as error:
            self._end(entry, error)
        except Exception as error:
            self._end(entry, JobFailedError(f"{type(error).__name__}: {error}"))
        else:
            self._end(entry, done)

    def _begin(self, entries: Sequence[_Entry]) -> None:
        for entry in entries:
            entry.has_begun = True
        if self._log is not None and entries:
            os.write(self._log, b"".join([self._line(entry.job) for entry in entries]))

    def _line(self, job: AnyJob) -> bytes:
        epoch = self._epochs.get(job.base_model, 0)
        kind = str(job.__struct_config__.tag)
        line = Execution(process=os.getpid(), epoch=epoch, job_id=job.job_id, kind=kind)
        return msgspec.json.encode(line) + b"\n"

    def _end(self, entry: _Entry, result: Done | Exception) -> None:
        job = entry.job
        if self._entries.get(job.job_id) is entry:
            del self._entries[job.job_id]
        if not isinstance(job, Sample) and (queue := self._queues.get(job.model_id)) is not None:
            self._leave(queue, entry)
        if entry.task is not None and entry.task is not asyncio.current_task():
            entry.task.cancel()
        if entry.future.done():
            return
        if isinstance(result, Done):
            entry.future.set_result(result)
        else:
            entry.future.set_exception(result)

    def _leave(self, queue: deque[_Entry], entry: _Entry) -> None:
        was_first = bool(queue) and queue[0] is entry
        queue.remove(entry)
        if was_first and queue:
            self._start(queue[0])
        elif not queue:
            del self._queues[entry.job.model_id]  # type: ignore[union-attr]

    def _drop(self, entries: list[_Entry], why: str) -> None:
        """End jobs with BackendLostError, without starting the next ones."""
        for entry in entries:
            if not isinstance(entry.job, Sample):
                self._queues.pop(entry.job.model_id, None)
        for entry in entries:
            self._end(entry, BackendLostError(f"job {entry.job.job_id} did not finish: {why}"))
            if not entry.future.cancelled():
                entry.future.exception()  # marks the exception as retrieved, since nobody may be waiting for it


def memory_backend(config: Any) -> MemoryBackend:
    """Return the backend for `tinsmith serve --backend tinsmith.testing.backend:memory_backend`.

    It logs executions to the data directory.
    """
    names = [model.partition("=")[0] for model in config.models]
    cards = [msgspec.structs.replace(ARITHMETIC, name=name) for name in names] or [ARITHMETIC]
    return MemoryBackend(cards, log_path=config.data_dir / "executions.jsonl")

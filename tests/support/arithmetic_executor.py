"""An executor of the test arithmetic, for engine processes without torch; it can be made to misbehave."""

from __future__ import annotations

import os
import signal
import sys
from collections import Counter, deque
from collections.abc import Generator, Mapping
from pathlib import Path
from typing import Any

import msgspec

from tinsmith.engine.ipc import Finished, StreamedTokens
from tinsmith.engine.protocol import Done, ModelCard, Sample, SaveState, TokenEvent
from tinsmith.engine.worker.executor import (
    Beside,
    Executor,
    SampleEvent,
    SamplerStep,
    StartError,
    StateInDoubtError,
    TrainingJob,
)
from tinsmith.testing.engine import ArithmeticEngine, token_events


def make(options: Mapping[str, Any]) -> Executor:
    """Options: `card`; `hang`: never comes up; `start_log`, `log`: files with a line per start and per job begun;
    `refuse`, `no_memory`, `die_at_start`: how many starts, by the start log, go wrong; `die_in`: a job whose id
    contains this text kills the process; `die_on`: so does one whose body contains this text; `die_by`: with this
    signal, SIGSEGV unless told otherwise; `doubt_on`: one with this text leaves its model in doubt, the first time by
    the file `doubt_log`; `hold_fifo`: a job whose id contains "hold" waits for this to be opened and closed; one that
    is to be saved beside others waits there when the others may go on.
    """
    if options.get("hang"):
        signal.pause()
    starts = _append(options.get("start_log"), str(os.getpid()))
    if starts <= options.get("refuse", 0):
        raise StartError(f"start {starts} was told to fail")
    if starts <= options.get("no_memory", 0):
        raise MemoryError("told to have none")
    if starts <= options.get("die_at_start", 0):
        print("dying as told", file=sys.stderr, flush=True)
        os.kill(os.getpid(), signal.SIGKILL)
    return ArithmeticExecutor(options)


def _append(path: str | None, line: str) -> int:
    """Add a line to a file; the number of its lines."""
    if path is None:
        return 1
    with Path(path).open("a") as file:
        file.write(f"{line}\n")
    return len(Path(path).read_text().splitlines())


class ArithmeticExecutor:
    """The arithmetic in steps: passes yield once in the middle, samples give a token a step."""

    def __init__(self, options: Mapping[str, Any]) -> None:
        self._card = msgspec.convert(options["card"], ModelCard)
        self._log: str | None = options.get("log")
        self._die_in: str | None = options.get("die_in")
        self._die_on: str | None = options.get("die_on")
        self._die_by = signal.Signals[options.get("die_by", "SIGSEGV")]
        self._doubt_on: str | None = options.get("doubt_on")
        self._doubt_log: str | None = options.get("doubt_log")
        self._hold_fifo: str | None = options.get("hold_fifo")
        self._engine = ArithmeticEngine([self._card])
        self._samples: dict[str, tuple[str, Done, deque[TokenEvent], bool]] = {}

    def describe(self) -> ModelCard:
        return self._card

    def _begin(self, job_id: str) -> None:
        _append(self._log, job_id)
        if self._die_in is not None and self._die_in in job_id:
            os.kill(os.getpid(), self._die_by)

    def _read(self, body: bytes) -> None:
        if self._die_on is not None and self._die_on.encode() in body:
            os.kill(os.getpid(), self._die_by)

    def train(self, job: TrainingJob) -> Generator[None, None, Done | Beside]:
        self._begin(job.job_id)
        body = getattr(job, "body", b"")
        self._read(body)
        if self._doubt_on is not None and self._doubt_on.encode() in body and _append(self._doubt_log, "doubt") == 1:
            raise StateInDoubtError("half of it was changed")
        if isinstance(job, SaveState) and job.beside:
            return self._save_beside(job)
        self._hold(job)
        yield
        return self._engine.execute(job)

    def _hold(self, job: TrainingJob) -> None:
        if self._hold_fifo is not None and "hold" in job.job_id:
            Path(self._hold_fifo).read_bytes()  # until the test opens the other end and closes it

    def _save_beside(self, job: SaveState) -> Beside:
        staged = f"{job.directory}.staged"
        done = self._engine.execute(msgspec.structs.replace(job, directory=staged))

        def finish() -> Done:
            self._hold(job)
            os.rename(staged, job.directory)
            return done

        return Beside(finish)

    def add_sample(self, job: Sample, stream: bool) -> None:
        self._begin(job.job_id)
        self._read(job.body)
        done, response = self._engine.sample(job)
        self._samples[job.job_id] = (job.tenant, done, deque(token_events(response)), stream)

    def step(self, tenants: frozenset[str]) -> SamplerStep:
        events: list[SampleEvent] = []
        tokens: Counter[str] = Counter()
        for job_id, (tenant, done, left, stream) in list(self._samples.items()):
            if tenant not in tenants:
                continue
            tokens[tenant] += 1
            if left and stream:
                events.append(StreamedTokens(job_id, left.popleft()))
            elif left:
                left.popleft()
            if not left:
                del self._samples[job_id]
                events.append(Finished(job_id, done))
        return SamplerStep(events, tokens)

    def cancel_sample(self, job_id: str) -> None:
        self._samples.pop(job_id, None)


class BrokenSampler(ArithmeticExecutor):
    """Fails in a step, not in a job."""

    def step(self, tenants: frozenset[str]) -> SamplerStep:
        raise RuntimeError("the sampler is broken")


def make_broken_sampler(options: Mapping[str, Any]) -> Executor:
    return BrokenSampler(options)


class BreakableSampler(ArithmeticExecutor):
    """Fails in every step that a sample with the seed 666 is part of."""

    def __init__(self, options: Mapping[str, Any]) -> None:
        super().__init__(options)
        self._bad: dict[str, str] = {}

    def add_sample(self, job: Sample, stream: bool) -> None:
        super().add_sample(job, stream)
        if job.seed == 666:
            self._bad[job.job_id] = job.tenant

    def step(self, tenants: frozenset[str]) -> SamplerStep:
        if tenants & set(self._bad.values()):
            raise RuntimeError("a row of 666")
        return super().step(tenants)

    def cancel_sample(self, job_id: str) -> None:
        self._bad.pop(job_id, None)
        super().cancel_sample(job_id)


def make_breakable_sampler(options: Mapping[str, Any]) -> Executor:
    return BreakableSampler(options)

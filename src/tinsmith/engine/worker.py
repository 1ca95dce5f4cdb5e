"""The engine process: `python -m tinsmith.engine.worker`, started by `child` with a socket to the API process.

A thread reads frames; the main thread alone computes and answers, and another may write what a job left to be written.
It ends when the API process does: the kernel kills
it (Linux), and elsewhere the end of the socket does.
Does not know: how anything is computed (`executor`), whose turn it is (`scheduler`).
"""

from __future__ import annotations

import argparse
import ctypes
import importlib
import logging
import os
import queue
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Generator
from dataclasses import dataclass
from typing import NoReturn

import msgspec

from tinsmith.engine import frames, freed_memory
from tinsmith.engine.base import Category, Done, JobFailedError, Sample
from tinsmith.engine.executor import Beside, Executor, Factory, StartError, StateInDoubtError, TrainingJob
from tinsmith.engine.frames import Began, Cancelled, Failed, Finished, Frame, FrameCutter, StartFailed, ToEngine
from tinsmith.engine.scheduler import Job, Scheduler, Turn

logger = logging.getLogger(__name__)

READ_BYTES = 1 << 20
PR_SET_PDEATHSIG = 1
ORPHANED = 3
"""Exit code of a worker whose API process is gone."""
CANNOT_START = 4
IN_DOUBT = 5
"""A model may be half changed."""
REST_S = 10.0
"""After so long without work the memory of the last is given back."""


@dataclass(frozen=True, slots=True)
class Ended:
    """What a thread beside the main one has come to."""

    answer: Finished | Failed


class Pipe:
    """The socket to the API process: frames in by a thread, frames out from the main thread."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self.inbox: queue.SimpleQueue[ToEngine | Ended] = queue.SimpleQueue()
        self._outbox: list[bytes] = []

    def listen(self) -> None:
        threading.Thread(target=self._read, name="frames", daemon=True).start()

    def _read(self) -> None:
        cutter = FrameCutter()
        while data := self._connection.recv(READ_BYTES):
            for content in cutter.feed(data):
                self.inbox.put(frames.decode_to_engine(content))
        os._exit(ORPHANED)

    def put(self, frame: Frame) -> None:
        """Say something with the next flush."""
        self._outbox += frames.encode(frame)

    def flush(self) -> None:
        if self._outbox:
            self._connection.sendall(b"".join(self._outbox))
            self._outbox.clear()


@dataclass(eq=False, slots=True)
class Operation:
    """A training job at the engine; `steps` is there once it has begun."""

    job: TrainingJob
    steps: Generator[None, None, Done | Beside] | None = None
    device_s: float = 0.0


class Worker:
    """Takes jobs from the pipe, has them computed in turns, and answers."""

    def __init__(self, executor: Executor, pipe: Pipe, clock: Callable[[], float] = time.perf_counter) -> None:
        self._executor = executor
        self._pipe = pipe
        self._clock = clock
        self._scheduler = Scheduler()
        self._operations: dict[str, Operation] = {}
        self._samples: dict[str, str] = {}
        self._new: list[frames.Submit] = []
        self._is_stopping = False
        self._is_writing = False
        """Whether a thread finishes a job."""

    def run(self) -> None:
        """Work until told to stop and all that has begun is done."""
        while True:
            self._read()
            turn = self._scheduler.next()
            if turn is None:  # told to stop, and nothing is left
                return
            if turn.job_id is not None:
                self._train(self._operations[turn.job_id])
            else:
                self._sample(turn)
            self._pipe.flush()

    def _read(self) -> None:
        """Take what has arrived; wait for something where there is nothing to do."""
        rest_s: float | None = REST_S
        while True:
            is_ending = self._is_stopping and not self._is_writing
            is_busy = bool(self._operations or self._samples or self._new or is_ending)
            if not is_busy:
                self._pipe.flush()
            try:
                frame = self._pipe.inbox.get(not is_busy, rest_s)
            except queue.Empty:
                if not is_busy:
                    freed_memory.give_back()
                    rest_s = None
                    continue
                if self._add_samples():
                    continue
                self._pipe.flush()
                return
            match frame:
                case frames.Submit():
                    self._take(frame)
                case frames.Cancel():
                    self._cancel(frame.job_id)
                case frames.Stop():
                    self._stop()
                case Ended():
                    self._is_writing = False
                    self._pipe.put(frame.answer)

    def _stop(self) -> None:
        """Only what has begun goes on."""
        self._is_stopping = True
        self._new.clear()
        for operation in list(self._operations.values()):
            if operation.steps is None:
                self._drop(operation)

    def _take(self, frame: frames.Submit) -> None:
        if self._is_stopping:
            return
        job = frame.job
        if isinstance(job, Sample):
            self._new.append(frame)
            return
        self._operations[job.job_id] = Operation(job)
        self._scheduler.add(Job(id=job.job_id, tenant=job.tenant, kind="train", lane=job.model_id))

    def _add_samples(self) -> bool:
        """Give the samples that have arrived to the executor."""
        if not self._new:
            return False
        new, self._new = self._new, []
        self._say_begun([frame.job.job_id for frame in new])
        for frame in new:
            assert isinstance(frame.job, Sample)
            try:
                self._executor.add_sample(frame.job, frame.stream)
            except Exception as error:
                self._pipe.put(failure(frame.job.job_id, error))
            else:
                self._samples[frame.job.job_id] = frame.job.tenant
                self._scheduler.add(Job(id=frame.job.job_id, tenant=frame.job.tenant, kind="sample"))
        return True

    def _say_begun(self, job_ids: list[str]) -> None:
        """Told before anything is computed: it may be the end of this process."""
        self._pipe.put(Began(job_ids))
        self._pipe.flush()

    def _cancel(self, job_id: str) -> None:
        self._new = [frame for frame in self._new if frame.job.job_id != job_id]
        if job_id in self._samples:
            self._end_sample(job_id)
            self._executor.cancel_sample(job_id)
        operation = self._operations.get(job_id)
        if operation is not None and operation.steps is None:
            self._drop(operation)
            self._pipe.put(Cancelled(job_id))

    def _drop(self, operation: Operation) -> None:
        del self._operations[operation.job.job_id]
        self._scheduler.remove(operation.job.job_id)

    def _end_sample(self, job_id: str) -> None:
        del self._samples[job_id]
        self._scheduler.remove(job_id)

    def _train(self, operation: Operation) -> None:
        """One step of an operation."""
        job_id = operation.job.job_id
        if operation.steps is None:
            operation.steps = self._executor.train(operation.job)
            self._say_begun([job_id])
        began_at = self._clock()
        answer: Frame | None = None
        ending: Done | Beside | None = None
        try:
            ending = advanced(operation.steps)
            if isinstance(ending, Beside) and self._is_writing:  # one at a time: each holds a copy of what it writes
                ending = ending.finish()
        except StateInDoubtError as error:
            logger.error("job %s: %s; this process ends, models are made again from their journals", job_id, error)
            sys.stderr.flush()
            os._exit(IN_DOUBT)
        except Exception as error:
            answer = failure(job_id, error)
        spent_s = self._clock() - began_at
        operation.device_s += spent_s
        self._scheduler.charge("train", {operation.job.tenant: spent_s})
        if isinstance(ending, Done):
            device_s = ending.device_s or operation.device_s
            answer = Finished(job_id, msgspec.structs.replace(ending, device_s=device_s))
        if ending is not None or answer is not None:
            self._drop(operation)
        if answer is not None:
            self._pipe.put(answer)
        if isinstance(ending, Beside):
            self._is_writing = True
            threading.Thread(target=self._finish, args=(operation, ending), name="beside", daemon=True).start()

    def _finish(self, operation: Operation, ending: Beside) -> None:
        """In a thread of its own: finish a job. What that computes counts as the device's time, waiting does not."""
        began_at = time.thread_time()
        answer: Finished | Failed
        try:
            done = ending.finish()
            device_s = operation.device_s + time.thread_time() - began_at
            answer = Finished(operation.job.job_id, msgspec.structs.replace(done, device_s=device_s))
        except Exception as error:
            answer = failure(operation.job.job_id, error)
        self._pipe.inbox.put(Ended(answer))

    def _sample(self, turn: Turn) -> None:
        """One step of the sampler; those who took part pay by their tokens."""
        began_at = self._clock()
        try:
            step = self._executor.step(turn.tenants)
        except Exception as error:  # which sample it was is not known: all of them end, training goes on
            for job_id in list(self._samples):
                self._executor.cancel_sample(job_id)
                self._end_sample(job_id)
                self._pipe.put(failure(job_id, error))
            return
        spent_s = self._clock() - began_at
        shares = step.tokens or dict.fromkeys(turn.tenants, 1)
        total = sum(shares.values())
        self._scheduler.charge("sample", {tenant: spent_s * share / total for tenant, share in shares.items()})
        for event in step.events:
            self._pipe.put(event)
            if not isinstance(event, frames.Tokens):
                self._end_sample(event.job_id)


def advanced(steps: Generator[None, None, Done | Beside]) -> Done | Beside | None:
    """One step; what the job came to, or None if it goes on."""
    try:
        next(steps)
    except StopIteration as end:
        ending: Done | Beside = end.value
        return ending
    return None


def failure(job_id: str, error: Exception) -> Failed:
    """How a job's exception is told; what is not a JobFailedError is our mistake and logged as such."""
    if isinstance(error, JobFailedError):
        return Failed(job_id, str(error), error.category)
    logger.error("job %s failed", job_id, exc_info=error)
    category: Category = "server"
    return Failed(job_id, f"{type(error).__name__}: {error}", category)


def die_with(parent: int) -> None:
    """End when the API process ends, whatever this one is doing."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(ORPHANED)


def make_executor(name: str, options: dict[str, object]) -> Executor:
    """The executor that a factory `module:function` makes."""
    module, _, function = name.partition(":")
    factory: Factory = getattr(importlib.import_module(module), function)
    return factory(options)


def main() -> NoReturn:
    parser = argparse.ArgumentParser(prog="python -m tinsmith.engine.worker", description=__doc__)
    parser.add_argument("--fd", type=int, required=True, help="socket to the API process")
    parser.add_argument("--parent", type=int, required=True, help="process id of the API process")
    parser.add_argument("--executor", required=True, help="factory of what computes, as module:function")
    parser.add_argument("--options", default="{}", help="what the factory is given, as JSON")
    arguments = parser.parse_args()
    die_with(arguments.parent)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole group; the API process decides
    logging.basicConfig(stream=sys.stderr, level=logging.INFO, format="%(levelname)s %(name)s: %(message)s")
    pipe = Pipe(socket.socket(fileno=arguments.fd))
    pipe.listen()
    try:
        executor = make_executor(arguments.executor, msgspec.json.decode(arguments.options))
    except Exception as error:
        if not isinstance(error, StartError):
            logger.exception("the engine cannot start")
        reason = str(error) if isinstance(error, StartError) else f"{type(error).__name__}: {error}"
        pipe.put(StartFailed(reason))
        pipe.flush()
        os._exit(CANNOT_START)
    pipe.put(frames.Ready(executor.describe()))
    pipe.flush()
    Worker(executor, pipe).run()
    sys.stderr.flush()
    os._exit(0)  # no waiting for threads of libraries: there is nothing left to save


if __name__ == "__main__":
    main()

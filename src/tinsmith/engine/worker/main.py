"""The engine process: `python -m tinsmith.engine.worker.main`, started by `backend/engine_process` with a socket.

One thread reads frames from the socket. The main thread does everything else in a loop: take what has arrived, ask the
`scheduler` whose turn it is, let the executor compute one step, send the results. A third thread may write a checkpoint
whose data no longer depends on the model. The process ends with the API process: on Linux the kernel kills it,
elsewhere it notices the closed socket.
"""

from __future__ import annotations

import argparse
import ctypes
import errno
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

from tinsmith.config import SCHEDULER_QUANTUM_S
from tinsmith.engine import ipc
from tinsmith.engine.ipc import Began, Cancelled, Failed, Finished, Frame, FrameCutter, StartFailed, ToEngine
from tinsmith.engine.protocol import Done, ForwardBackward, JobFailedError, Sample
from tinsmith.engine.training.pauses import advanced
from tinsmith.engine.worker import memory
from tinsmith.engine.worker.executor import (
    Beside,
    Executor,
    Factory,
    StartError,
    StateInDoubtError,
    TrainingJob,
    failure,
)
from tinsmith.engine.worker.scheduler import QueuedJob, Scheduler, Turn

logger = logging.getLogger(__name__)

READ_BYTES = 1 << 20
PR_SET_PDEATHSIG = 1
ORPHANED = 3
"""Exit code: the API process is gone."""
CANNOT_START = 4
IN_DOUBT = 5
"""Exit code: a model may be half changed."""
PASSING = {errno.ENOMEM, errno.ENOSPC, errno.EDQUOT, errno.EMFILE, errno.ENFILE, errno.EAGAIN}
"""Errors of a start that may be gone the next time."""
REST_S = 10.0
"""Seconds without work after which unused memory is returned to the system."""


@dataclass(frozen=True, slots=True)
class Ended:
    """The result of a job that another thread has finished."""

    answer: Finished | Failed


class Pipe:
    """The socket to the API process: a thread reads frames, the main thread writes them."""

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
                self.inbox.put(ipc.decode_to_engine(content))
        os._exit(ORPHANED)

    def put(self, frame: Frame) -> None:
        """Send a frame with the next flush."""
        self._outbox += ipc.encode(frame)

    def flush(self) -> None:
        if self._outbox:
            self._connection.sendall(b"".join(self._outbox))
            self._outbox.clear()


@dataclass(eq=False, slots=True)
class RunningJob:
    """A training job; `steps` is set once it has started."""

    job: TrainingJob
    steps: Generator[None, None, Done | Beside] | None = None
    device_s: float = 0.0

    @property
    def is_over_budget(self) -> bool:
        most_s = self.job.max_device_s if isinstance(self.job, ForwardBackward) else None
        return most_s is not None and self.device_s > most_s


class Worker:
    """Takes jobs from the pipe, runs them in turns, and sends the results."""

    def __init__(
        self,
        executor: Executor,
        pipe: Pipe,
        clock: Callable[[], float] = time.perf_counter,
        quantum_s: float = SCHEDULER_QUANTUM_S,
    ) -> None:
        self._executor = executor
        self._pipe = pipe
        self._clock = clock
        self._scheduler = Scheduler(quantum_s)
        self._operations: dict[str, RunningJob] = {}
        self._samples: dict[str, str] = {}
        self._new: dict[str, ipc.Submit] = {}
        """Samples that have arrived and are not at the executor yet."""
        self._is_stopping = False
        self._is_writing = False
        """Whether a thread is finishing a job."""

    def run(self) -> None:
        """Work until a Stop frame has arrived and all running jobs are finished."""
        while True:
            self._read()
            turn = self._scheduler.next()
            if turn is None:  # stopped, and nothing is left to do
                return
            if turn.job_id is not None:
                self._train(self._operations[turn.job_id])
            else:
                self._sample(turn)
            self._pipe.flush()

    def _read(self) -> None:
        """Process all frames that have arrived; if there is nothing to do, wait for one."""
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
                    memory.give_back()
                    rest_s = None
                    continue
                if self._add_samples():
                    continue
                self._pipe.flush()
                return
            match frame:
                case ipc.Submit():
                    self._take(frame)
                case ipc.Cancel():
                    self._cancel(frame.job_id)
                case ipc.Stop():
                    self._stop()
                case Ended():
                    self._is_writing = False
                    self._pipe.put(frame.answer)

    def _stop(self) -> None:
        """Drop all jobs that have not started."""
        self._is_stopping = True
        self._new.clear()
        for operation in list(self._operations.values()):
            if operation.steps is None:
                self._drop(operation)

    def _take(self, frame: ipc.Submit) -> None:
        if self._is_stopping:
            return
        job = frame.job
        if isinstance(job, Sample):
            self._new[job.job_id] = frame
            return
        self._operations[job.job_id] = RunningJob(job)
        self._scheduler.add(QueuedJob(id=job.job_id, tenant=job.tenant, kind="train"))

    def _add_samples(self) -> bool:
        """Hand the samples that have arrived to the executor."""
        if not self._new:
            return False
        new, self._new = self._new, {}
        self._say_begun(list(new))
        for frame in new.values():
            assert isinstance(frame.job, Sample)
            try:
                self._executor.add_sample(frame.job, frame.stream)
            except Exception as error:
                self._pipe.put(failure(frame.job.job_id, error))
            else:
                self._samples[frame.job.job_id] = frame.job.tenant
                self._scheduler.add(QueuedJob(id=frame.job.job_id, tenant=frame.job.tenant, kind="sample"))
        return True

    def _say_begun(self, job_ids: list[str]) -> None:
        """Report jobs as running before anything is computed: computing them may kill this process."""
        self._pipe.put(Began(job_ids))
        self._pipe.flush()

    def _cancel(self, job_id: str) -> None:
        """Cancel a job; report it to the API process once nothing of it is left here."""
        if self._new.pop(job_id, None) is not None:
            self._pipe.put(Cancelled(job_id))
        if job_id in self._samples:
            self._end_sample(job_id)
            self._executor.cancel_sample(job_id)
            self._pipe.put(Cancelled(job_id))
        operation = self._operations.get(job_id)
        if operation is not None and (operation.steps is None or isinstance(operation.job, ForwardBackward)):
            self._drop(operation)
            self._pipe.put(Cancelled(job_id))

    def _drop(self, operation: RunningJob) -> None:
        """Remove an operation that has ended, or close it between two of its steps."""
        if operation.steps is not None:
            operation.steps.close()
        del self._operations[operation.job.job_id]
        self._scheduler.remove(operation.job.job_id)

    def _end_sample(self, job_id: str) -> None:
        del self._samples[job_id]
        self._scheduler.remove(job_id)

    def _train(self, operation: RunningJob) -> None:
        """Run one step of an operation."""
        job_id = operation.job.job_id
        if operation.steps is None:
            operation.steps = self._executor.train(operation.job)
            self._say_begun([job_id])
        began_at = self._clock()
        answer: Frame | None = None
        ending: Done | Beside | None = None
        try:
            ending = advanced(operation.steps)
            if (
                isinstance(ending, Beside) and self._is_writing
            ):  # one at a time, because each holds a copy of what it writes
                ending = ending.finish()
        except StateInDoubtError as error:
            logger.error("job %s: %s; the engine exits, and its models are rebuilt from their journals", job_id, error)
            sys.stderr.flush()
            os._exit(IN_DOUBT)
        except Exception as error:
            answer = failure(job_id, error)
        spent_s = self._clock() - began_at
        operation.device_s += spent_s
        self._scheduler.charge("train", {operation.job.tenant: spent_s})
        if ending is None and answer is None and operation.is_over_budget:
            answer = failure(job_id, over_budget(operation))
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

    def _finish(self, operation: RunningJob, ending: Beside) -> None:
        """Finish a job, in a separate thread. Its CPU time counts as device time; waiting does not."""
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
        """Run one sampler step. If it fails, run one for each tenant alone, to find out whose fault it was."""
        try:
            self._step(turn.tenants)
        except Exception as error:
            for tenant in sorted(turn.tenants):
                self._step_alone(tenant, error if len(turn.tenants) == 1 else None)

    def _step_alone(self, tenant: str, error: Exception | None) -> None:
        """Run a step for one tenant; if that fails (or has failed with `error`), fail all of its samples."""
        if error is None:
            try:
                self._step(frozenset({tenant}))
            except Exception as alone:
                error = alone
        if error is not None:
            for job_id in [job_id for job_id, owner in self._samples.items() if owner == tenant]:
                self._executor.cancel_sample(job_id)
                self._end_sample(job_id)
                self._pipe.put(failure(job_id, error))

    def _step(self, tenants: frozenset[str]) -> None:
        """Run one sampler step, and charge the tenants in proportion to their tokens."""
        began_at = self._clock()
        step = self._executor.step(tenants)
        spent_s = self._clock() - began_at
        shares = step.tokens or dict.fromkeys(tenants, 1)
        total = sum(shares.values())
        self._scheduler.charge("sample", {tenant: spent_s * share / total for tenant, share in shares.items()})
        for event in step.events:
            self._pipe.put(event)
            if not isinstance(event, ipc.StreamedTokens):
                self._end_sample(event.job_id)


def over_budget(operation: RunningJob) -> JobFailedError:
    assert isinstance(operation.job, ForwardBackward)
    return JobFailedError(
        f"the pass computed for {operation.device_s:.1f} s, longer than the allowed {operation.job.max_device_s:g} s, "
        "and nothing was changed; send fewer or shorter datums at a time",
        "user",
    )


def die_with(parent: int) -> None:
    """Make sure that this process ends with the API process, whatever it is doing."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(ORPHANED)


def make_executor(name: str, options: dict[str, object]) -> Executor:
    """Return the executor that the factory `module:function` creates."""
    module, _, function = name.partition(":")
    factory: Factory = getattr(importlib.import_module(module), function)
    return factory(options)


def is_passing(error: Exception) -> bool:
    """Return whether a start failed because of a resource that may be available the next time."""
    return isinstance(error, MemoryError) or (isinstance(error, OSError) and error.errno in PASSING)


def main() -> NoReturn:
    parser = argparse.ArgumentParser(prog="python -m tinsmith.engine.worker.main", description=__doc__)
    parser.add_argument("--fd", type=int, required=True, help="socket to the API process")
    parser.add_argument("--parent", type=int, required=True, help="process id of the API process")
    parser.add_argument("--executor", required=True, help="factory of the executor, as module:function")
    parser.add_argument("--options", default="{}", help="options of the factory, as JSON")
    parser.add_argument(
        "--quantum-s", type=float, default=SCHEDULER_QUANTUM_S, help="device seconds per tenant and round"
    )
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
        pipe.put(StartFailed(reason, not is_passing(error)))
        pipe.flush()
        os._exit(CANNOT_START)
    pipe.put(ipc.Ready(executor.describe()))
    pipe.flush()
    Worker(executor, pipe, quantum_s=arguments.quantum_s).run()
    sys.stderr.flush()
    os._exit(0)  # do not wait for threads of libraries; there is nothing left to save


if __name__ == "__main__":
    main()

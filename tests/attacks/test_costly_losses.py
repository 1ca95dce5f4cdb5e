"""An expensive pass delays nobody else, ends at its budget or when it is cancelled, and then changes nothing."""

from __future__ import annotations

import itertools
import queue
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from support.costly_loss import costly_loss
from support.jobs import Jobs, datum
from support.tiny_engine import NAME, bodies, executor, same_bits, state_of, torch_as_it_was, train

from tinsmith.engine import ipc
from tinsmith.engine.ipc import Cancelled, Failed, Finished, Frame
from tinsmith.engine.protocol import ForwardBackward, JobFailedError
from tinsmith.engine.training.custom_loss import interpreter
from tinsmith.engine.training.custom_loss.interpreter import LossProgram
from tinsmith.engine.worker import torch_executor
from tinsmith.engine.worker.main import Worker
from tinsmith.engine.worker.torch_executor import TorchExecutor
from tinsmith.errors import InvalidInputError
from tinsmith.server.runs.replay import replace_id
from tinsmith.wire.codecs import json_codec
from tinsmith.wire.messages.training import CreateCustomLossRequest

PROBE = [5, 9, 2, 33, 7]


def custom_pass(jobs: Jobs, datums: int, loss: CreateCustomLossRequest | None = None, **limits: Any) -> ForwardBackward:
    data = [datum([*PROBE, n % 50 + 3]) for n in range(datums)]
    job = jobs.forward_backward(*data, loss_fn="custom", loss_fn_config={"loss_id": "l"})
    return msgspec.structs.replace(job, custom_loss=json_codec.encode(loss or costly_loss()), **limits)


def trained(engine: TorchExecutor, **fields: Any) -> Jobs:
    jobs = Jobs(NAME, **fields)
    bodies(engine, [jobs.create(), *jobs.steps(1), jobs.forward_backward(datum(PROBE))])
    return jobs


class Inbox:
    """A pipe without a socket: what is said to the worker, in order, and what it answers."""

    def __init__(self) -> None:
        self.inbox: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self.said: list[Frame] = []

    def put(self, frame: Frame) -> None:
        self.said.append(frame)

    def flush(self) -> None:
        pass

    def of(self, job_id: str) -> list[Frame]:
        """How a job ended."""
        return [frame for frame in self.said if getattr(frame, "job_id", None) == job_id]


class Ticks:
    """A clock that goes on by a second whenever it is looked at."""

    def __init__(self) -> None:
        self._count = itertools.count()

    def __call__(self) -> float:
        return float(next(self._count))


@pytest.fixture
def pipe() -> Inbox:
    return Inbox()


@pytest.fixture(autouse=True)
def _torch_as_it_was() -> Iterator[None]:
    with torch_as_it_was():
        yield


def work(pipe: Inbox, engine: TorchExecutor, *told: Any, clock: Any = None) -> Worker:
    """A worker that has heard these frames."""
    worker = Worker(engine, pipe, *([clock] if clock else []))  # type: ignore[arg-type]
    for frame in told:
        pipe.inbox.put(frame)
    return worker


def turn(worker: Worker) -> bool:
    """One turn of the worker's loop; whether there was anything to do."""
    worker._read()
    step = worker._scheduler.next()
    if step is None:
        return False
    if step.job_id is not None:
        worker._train(worker._operations[step.job_id])
    else:
        worker._sample(step)
    return True


def run_out(worker: Worker) -> None:
    worker._pipe.inbox.put(ipc.Stop())
    while turn(worker):
        pass


def test_a_costly_loss_pauses_between_datums_and_within_one(
    engine: TorchExecutor, monkeypatch: pytest.MonkeyPatch
) -> None:
    jobs = trained(engine)
    assert len(list(engine.train(custom_pass(jobs, 6, costly_loss(1, 4))))) >= 6
    monkeypatch.setattr(interpreter, "PAUSE_S", 0.0)  # every operation takes longer than that
    assert len(list(engine.train(custom_pass(jobs, 1, costly_loss(16, 8))))) > 32


def test_pauses_change_no_bits(engine: TorchExecutor, monkeypatch: pytest.MonkeyPatch) -> None:
    one, other = trained(engine), trained(engine)
    first = train(engine, custom_pass(one, 3)).body
    monkeypatch.setattr(interpreter, "PAUSE_S", -1.0)
    assert train(engine, custom_pass(other, 3)).body == first
    assert same_bits(state_of(engine, one.model_id), state_of(engine, other.model_id))


def test_anothers_sample_is_drawn_while_a_costly_loss_computes(engine: TorchExecutor, pipe: Inbox) -> None:
    loud, quiet = trained(engine, tenant="loud"), Jobs(NAME, tenant="quiet")
    costly = custom_pass(loud, 40)
    worker = work(pipe, engine, ipc.Submit(costly))
    for _ in range(5):
        turn(worker)
    sample = quiet.sample(PROBE, max_tokens=3, stop=[])
    pipe.inbox.put(ipc.Submit(sample))
    for _ in range(40):
        turn(worker)
        if pipe.of(sample.job_id):
            break
    assert isinstance(pipe.of(sample.job_id)[0], Finished)
    assert pipe.of(costly.job_id) == [], "it is still under way"
    pipe.inbox.put(ipc.Cancel(costly.job_id))
    run_out(worker)


@pytest.mark.parametrize("kind", ["custom", "plain"])
@pytest.mark.parametrize("turns", [1, 2, 5])
def test_a_pass_that_is_cancelled_while_it_computes_never_happened(
    home: Path, pipe: Inbox, kind: str, turns: int
) -> None:
    engine = executor(home, micro_batch_tokens=8)
    jobs, alone = trained(engine), trained(engine)
    before = state_of(engine, jobs.model_id)
    plain = jobs.forward_backward(*[datum(PROBE)] * 40)
    job = custom_pass(jobs, 40) if kind == "custom" else plain
    worker = work(pipe, engine, ipc.Submit(job))
    for _ in range(turns):
        turn(worker)
    pipe.inbox.put(ipc.Cancel(job.job_id))
    run_out(worker)
    assert pipe.of(job.job_id) == [Cancelled(job.job_id)]
    assert same_bits(before, state_of(engine, jobs.model_id))
    rest = [bodies(engine, [who.optim_step(), *who.steps(2, seed=5)]) for who in (jobs, alone)]
    assert rest[0] == rest[1]


def test_a_cancel_that_comes_too_late_changes_nothing(engine: TorchExecutor, pipe: Inbox) -> None:
    jobs = trained(engine)
    job = jobs.optim_step()
    worker = work(pipe, engine, ipc.Submit(job))
    turn(worker)
    pipe.inbox.put(ipc.Cancel(job.job_id))
    run_out(worker)
    assert [type(frame) for frame in pipe.of(job.job_id)] == [Finished]


def test_a_pass_beyond_its_budget_fails_and_leaves_no_trace(home: Path, pipe: Inbox) -> None:
    engine = executor(home, micro_batch_tokens=8)
    jobs = trained(engine)
    before = state_of(engine, jobs.model_id)
    long = jobs.forward_backward(*[datum(PROBE)] * 40)
    job = msgspec.structs.replace(long, max_device_s=7.5)
    worker = work(pipe, engine, ipc.Submit(job), clock=Ticks())
    turn(worker)
    run_out(worker)
    (answer,) = pipe.of(job.job_id)
    assert isinstance(answer, Failed)
    assert answer.category == "user"
    assert "computed for 8.0 s, longer than the allowed 7.5 s" in answer.message
    assert same_bits(before, state_of(engine, jobs.model_id))


def test_a_loss_beyond_its_budget_fails_and_leaves_no_trace(
    engine: TorchExecutor, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Slow(LossProgram):
        def __init__(self, request: CreateCustomLossRequest, max_device_s: float | None = None) -> None:
            super().__init__(request, max_device_s, Ticks())

    monkeypatch.setattr(torch_executor, "LossProgram", Slow)
    jobs = trained(engine)
    before = state_of(engine, jobs.model_id)
    with pytest.raises(
        JobFailedError, match=r"data\[\d\]: custom loss 'costly': computed for .* longer than the allowed 100 s"
    ) as caught:
        train(engine, custom_pass(jobs, 8, costly_loss(4, 8), max_loss_device_s=100.0))
    assert caught.value.category == "user"
    assert same_bits(before, state_of(engine, jobs.model_id))


def test_what_finished_once_is_replayed_without_a_budget(engine: TorchExecutor) -> None:
    """A slower machine must not lose a run."""
    job = custom_pass(Jobs(NAME), 2, max_device_s=1.0, max_loss_device_s=1.0)
    again = replace_id(job)
    assert isinstance(again, ForwardBackward)
    assert (again.max_device_s, again.max_loss_device_s) == (None, None)
    assert again.body == job.body


def test_what_one_datum_may_cost_is_limited_in_all() -> None:
    """Its gradient is computed without a pause, so the work behind it must be little."""
    import torch

    loss = LossProgram(costly_loss(40, 600))
    with pytest.raises(InvalidInputError, match=r"multiplications, .* with the earlier ones; at most"):
        loss.evaluate(torch.zeros(4) - 1, {})


def test_a_datum_longer_than_a_micro_batch_pauses_between_layers(home: Path) -> None:
    engine = executor(home, micro_batch_tokens=16)
    jobs = trained(engine)
    assert len(list(engine.train(jobs.forward_backward(datum(PROBE * 20))))) >= 4

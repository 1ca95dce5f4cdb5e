"""The torch executor on a tiny model, called directly: jobs in, results out."""

from __future__ import annotations

from collections.abc import Generator, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from support.backends import torch_tiny_spec
from tinsmith.engine.ipc import Failed, Finished
from tinsmith.engine.protocol import AnyJob, Done, JobFailedError, Sample
from tinsmith.engine.worker.executor import Beside
from tinsmith.engine.worker.startup import read_options
from tinsmith.engine.worker.torch_executor import TorchExecutor

NAME = "tiny/model"


@contextmanager
def torch_as_it_was() -> Iterator[None]:
    """For tests that make executors: one sets up its process, and this one has others in it."""
    threads, is_deterministic = torch.get_num_threads(), torch.are_deterministic_algorithms_enabled()
    yield
    torch.set_num_threads(threads)
    torch.use_deterministic_algorithms(is_deterministic)


def executor(home: Path, **options: Any) -> TorchExecutor:
    spec = torch_tiny_spec(NAME, home, seed=3, **options)
    return TorchExecutor(read_options(spec.options), "float32")


def train(engine: TorchExecutor, job: AnyJob) -> Done:
    assert not isinstance(job, Sample)
    return finish(engine.train(job))


def refusal(engine: TorchExecutor, *jobs: AnyJob) -> JobFailedError | None:
    """Do jobs until one fails; how it did."""
    try:
        for job in jobs:
            train(engine, job)
    except JobFailedError as error:
        return error
    return None


def finish(steps: Generator[None, None, Done | Beside]) -> Done:
    while True:
        try:
            next(steps)
        except StopIteration as end:
            ending: Done | Beside = end.value
            return ending.finish() if isinstance(ending, Beside) else ending


def bodies(engine: TorchExecutor, jobs: Iterable[AnyJob]) -> list[bytes]:
    return [train(engine, job).body for job in jobs]


def sampled(engine: TorchExecutor, job: Sample, stream: bool = False) -> list[Any]:
    """All events of one sample that is drawn alone."""
    engine.add_sample(job, stream)
    events: list[Any] = []
    while not any(isinstance(event, (Finished, Failed)) for event in events):
        events += engine.step(frozenset({job.tenant})).events
    return events


def state_of(engine: TorchExecutor, model_id: str) -> dict[str, torch.Tensor]:
    """Copies of everything a model is: weights, gradients, moments and step."""
    with engine._adapters.use(model_id) as model:
        parts: Mapping[str, Mapping[str, torch.Tensor]] = {
            "p": model.adapter.parameters(),
            "g": model.adapter.gradients(),
            "o": model.optimizer.state(),
        }
        return {f"{part}.{name}": tensor.clone() for part, named in parts.items() for name, tensor in named.items()}


def same_bits(a: Mapping[str, torch.Tensor], b: Mapping[str, torch.Tensor]) -> bool:
    return a.keys() == b.keys() and all(a[name].numpy().tobytes() == b[name].numpy().tobytes() for name in a)

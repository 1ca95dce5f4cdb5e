"""The seam inside an engine process: the worker's loop decides what runs next, an executor computes it.

An executor is made in the engine's process by a factory, named `module:function`, from a dict of options; the factory
loads the model and raises `StartError` if it cannot. Everything but `Beside.finish` is called from one thread.

Does not know: sockets, order, fairness. No import of torch here.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeAlias

from tinsmith.engine.base import (
    CreateModel,
    Done,
    ForwardBackward,
    LoadState,
    ModelCard,
    OptimStep,
    Sample,
    SaveState,
    Unload,
)
from tinsmith.engine.frames import Failed, Finished, Tokens
from tinsmith.errors import TinkerError

TrainingJob: TypeAlias = CreateModel | ForwardBackward | OptimStep | SaveState | LoadState | Unload
SampleEvent: TypeAlias = Tokens | Finished | Failed
Factory: TypeAlias = Callable[[Mapping[str, Any]], "Executor"]


class StartError(TinkerError):
    """The engine cannot start, and trying again at once would not help; the text says why and what to change."""


class StateInDoubtError(Exception):
    """A model may have been changed by half. The engine must end: its models are made again from their journals."""


@dataclass(frozen=True, slots=True)
class Step:
    """What a step of the sampler brought, and how many tokens of each tenant it computed."""

    events: Sequence[SampleEvent] = ()
    tokens: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Beside:
    """The rest of a job that needs neither the device nor the model any more: a thread does it while others compute."""

    finish: Callable[[], Done]


class Executor(Protocol):
    """A loaded base model with its adapters."""

    def describe(self) -> ModelCard: ...

    def train(self, job: TrainingJob) -> Generator[None, None, Done | Beside]:
        """Do a job in steps that are short where they can be: other work may run wherever it yields.

        Whatever it raises, the model is as it was before, but for StateInDoubtError. Jobs of one model never overlap.
        """

    def add_sample(self, job: Sample, stream: bool) -> None:
        """Take up a sample; JobFailedError if it cannot be done. Events come from `step`."""

    def step(self, tenants: frozenset[str]) -> Step:
        """Advance the samples of these tenants by one step."""

    def cancel_sample(self, job_id: str) -> None:
        """Drop a sample and free what it holds; no event follows."""

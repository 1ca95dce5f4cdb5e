"""The seam inside an engine process: the worker's loop decides what runs next, and an executor computes it.

An executor is created in the engine process by a factory, named `module:function`, from a dict of options; the factory
loads the model, or raises `StartError`. Everything except `Beside.finish` is called from one thread. An executor knows
nothing of sockets, order or fairness. Errors of a job become a `JobFailedError` that says whose fault it was
(`as_job_failures`). This module does not import torch, so torch's errors are recognised by name.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol, TypeAlias

import msgspec

from tinsmith.config import MAX_BATCH_SEQUENCES, MICRO_BATCH_TOKENS, PREFILL_TOKENS
from tinsmith.engine.ipc import Failed, Finished, StreamedTokens
from tinsmith.engine.protocol import (
    CreateModel,
    Done,
    ForwardBackward,
    JobFailedError,
    LoadState,
    ModelCard,
    OptimStep,
    Sample,
    SaveState,
    Unload,
)
from tinsmith.errors import InvalidInputError, NonFiniteError, TinkerError, WireError

TrainingJob: TypeAlias = CreateModel | ForwardBackward | OptimStep | SaveState | LoadState | Unload
SampleEvent: TypeAlias = StreamedTokens | Finished | Failed
Factory: TypeAlias = Callable[[Mapping[str, Any]], "Executor"]


class StartError(TinkerError):
    """The engine cannot start, and trying again would not help; the message says why and what to change."""


class StateInDoubtError(Exception):
    """A model may be half changed. The engine must exit, so that its models are rebuilt from their journals."""


@dataclass(frozen=True, slots=True)
class SamplerStep:
    """The events of a sampler step, and how many tokens it computed for each tenant."""

    events: Sequence[SampleEvent] = ()
    tokens: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Beside:
    """The rest of a job that no longer needs the device or the model: a thread finishes it while other jobs run."""

    finish: Callable[[], Done]


class Executor(Protocol):
    """A loaded base model with its adapters."""

    def describe(self) -> ModelCard: ...

    def train(self, job: TrainingJob) -> Generator[None, None, Done | Beside]:
        """Run a job in steps; other work may run wherever it yields.

        If it raises anything but StateInDoubtError, or is closed before the end, the model is unchanged. Jobs of one
        model never overlap.
        """

    def add_sample(self, job: Sample, stream: bool) -> None:
        """Start a sample, or raise JobFailedError. `step` returns its events."""

    def step(self, tenants: frozenset[str]) -> SamplerStep:
        """Advance the samples of these tenants by one step."""

    def cancel_sample(self, job_id: str) -> None:
        """Cancel a sample and free its memory; no event follows."""


logger = logging.getLogger(__name__)


@contextmanager
def as_job_failures() -> Iterator[None]:
    """Turn errors that somebody can fix into a JobFailedError that says who."""
    try:
        yield
    except (InvalidInputError, WireError, NonFiniteError) as error:
        raise JobFailedError(str(error), "user") from error
    except JobFailedError:
        raise
    except TinkerError as error:
        raise JobFailedError(str(error), "server") from error
    except (MemoryError, RuntimeError) as error:
        if not is_out_of_memory(error):
            raise
        text = f"the engine does not have enough memory for this: {error}; send fewer or shorter sequences at a time"
        raise JobFailedError(text, "server") from error


def is_out_of_memory(error: Exception) -> bool:
    """Return whether memory ran out. On a CPU, torch raises a RuntimeError that only its message identifies."""
    is_typed = isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError"
    return is_typed or "can't allocate memory" in str(error) or "not enough memory" in str(error)


def failure(job_id: str, error: Exception) -> Failed:
    """Return the frame for a job's exception; anything but a JobFailedError is a bug and is logged as one."""
    if isinstance(error, JobFailedError):
        return Failed(job_id, str(error), error.category)
    logger.error("job %s failed", job_id, exc_info=error)
    return Failed(job_id, f"{type(error).__name__}: {error}", "server")


class TorchOptions(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The options of the engine of one base model."""

    card: ModelCard
    source: str
    """A Hugging Face directory, a GGUF file or a hub id."""
    cache_dir: str
    """Where converted tokenizers and the results of trials on this machine are cached."""
    device: str = "cpu"
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    threads: int = 0
    """Threads that compute; 0: one per core. Only the same number gives the same bits."""
    micro_batch_tokens: int = MICRO_BATCH_TOKENS
    """Tokens that a training pass computes together; part of the fingerprint, since the bits depend on it."""
    prefill_tokens: int = PREFILL_TOKENS
    """Prompt tokens in one sampler step."""
    max_sequences: int = MAX_BATCH_SEQUENCES
    """Samples in one sampler step."""
    adapter_bytes: int | None = None
    """Memory for adapters in training; the others are on disk. None, here and below: chosen by `worker/memory`."""
    sampler_adapter_bytes: int | None = None
    """Memory for frozen adapters to sample from."""
    cache_bytes: int | None = None
    """Memory for the sampler's keys and values."""
    engines: int = 1
    """Engines that share the machine's memory, this one included."""
    spool_dir: str | None = None
    """Where adapters that do not fit into memory are written; None: the directory for temporary files."""

"""The backends that the contract suite runs against, each with two base models and a way to break it."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

import msgspec

from support.cards import card_of
from tinsmith.engine.backend.local import ProcessBackend
from tinsmith.engine.backend.supervisor import SupervisorOptions
from tinsmith.engine.ipc import EngineSpec
from tinsmith.engine.protocol import Backend, ModelCard
from tinsmith.engine.worker.executor import TorchOptions
from tinsmith.engine.worker.startup import torch_spec
from tinsmith.testing.backend import MemoryBackend

ONE = ModelCard(name="test/one", vocab_size=512, max_context_length=4096)
TWO = ModelCard(name="test/two", vocab_size=256, max_context_length=128)
TESTS = Path(__file__).parents[1]


class Harness(Protocol):
    """A backend under test."""

    models: tuple[str, str]

    @property
    def backend(self) -> Backend: ...

    async def lose(self, base_model: str) -> None:
        """Take the state of a base model away; returns when the backend has noticed."""

    def leftovers(self) -> list[int]:
        """The processes that must be gone after close."""


class MemoryHarness:
    """The backend in this process."""

    models = (ONE.name, TWO.name)

    def __init__(self, directory: Path) -> None:
        self.backend = MemoryBackend([ONE, TWO])

    async def lose(self, base_model: str) -> None:
        self.backend.lose(base_model)

    def leftovers(self) -> list[int]:
        return []


class ProcessHarness:
    """Engine processes; state is lost by killing one."""

    def __init__(self, *specs: EngineSpec, options: SupervisorOptions | None = None) -> None:
        self.models = tuple(spec.card.name for spec in specs)
        self.backend = ProcessBackend(specs, options or SupervisorOptions())

    async def lose(self, base_model: str) -> None:
        await kill(self.backend, base_model)

    def leftovers(self) -> list[int]:
        return list(self.backend.processes().values())


async def kill(backend: ProcessBackend, base_model: str) -> None:
    """kill -9 an engine; returns when the backend has noticed."""
    epoch = backend.epoch_of(base_model)
    os.kill(backend.processes()[base_model], signal.SIGKILL)
    while backend.epoch_of(base_model) == epoch:
        await asyncio.sleep(0.001)


def is_alive(process: int) -> bool:
    """Whether a process runs; one that has ended and was not waited for does not."""
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def arithmetic_spec(card: ModelCard, factory: str = "make", **options: Any) -> EngineSpec:
    """An engine process that computes the test arithmetic."""
    return EngineSpec(
        card=card,
        executor=f"support.arithmetic_executor:{factory}",
        options={"card": msgspec.to_builtins(card), **options},
        environment={"PYTHONPATH": os.pathsep.join([str(TESTS), *filter(None, [os.environ.get("PYTHONPATH")])])},
    )


def process_harness(directory: Path) -> ProcessHarness:
    return ProcessHarness(arithmetic_spec(ONE), arithmetic_spec(TWO))


def torch_tiny_spec(name: str, directory: Path, seed: int, **options: Any) -> EngineSpec:
    """An engine process that trains and samples a tiny model with torch."""
    from tinsmith.engine.models.tiny import make_tiny

    source = directory / "models" / name
    if not source.exists():
        make_tiny(source, seed=seed)
    values = {"dtype": "float32", "threads": 1, "cache_bytes": 1 << 22, **options}
    return torch_spec(
        TorchOptions(card=card_of(name, source), source=str(source), cache_dir=str(directory / "cache"), **values)
    )


def torch_harness(directory: Path) -> ProcessHarness:
    return ProcessHarness(
        *(torch_tiny_spec(name, directory, seed) for seed, name in enumerate(("tiny/one", "tiny/two")))
    )


def general_harness(directory: Path) -> Harness:
    from support.general_models import general_spec

    kinds = {"tiny/gpt2": "gpt2", "tiny/neox": "gpt_neox"}
    return ProcessHarness(*(general_spec(name, directory, kind) for name, kind in kinds.items()))


HARNESSES: dict[str, Callable[[Path], Harness]] = {
    "memory": MemoryHarness,
    "process": process_harness,
    "torch": torch_harness,
    "transformers": general_harness,
}

"""The backends that the contract suite runs against, each with two base models and a way to break it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Protocol

from tinsmith.engine.base import Backend, ModelCard
from tinsmith.testing.backend import MemoryBackend

ONE = ModelCard(name="test/one", vocab_size=512, max_context_length=4096)
TWO = ModelCard(name="test/two", vocab_size=256, max_context_length=128)


class Harness(Protocol):
    """A backend under test."""

    models: tuple[str, str]

    @property
    def backend(self) -> Backend: ...

    async def lose(self, base_model: str) -> None:
        """Take the state of a base model away; returns when the backend has noticed."""

    def leftovers(self) -> list[int]:
        """The processes that must be gone after close."""

    def is_alive(self, process: int) -> bool: ...


class MemoryHarness:
    """The backend in this process."""

    models = (ONE.name, TWO.name)

    def __init__(self, directory: Path) -> None:
        self.backend = MemoryBackend([ONE, TWO])

    async def lose(self, base_model: str) -> None:
        self.backend.lose(base_model)

    def leftovers(self) -> list[int]:
        return []

    def is_alive(self, process: int) -> bool:
        return False


HARNESSES: dict[str, Callable[[Path], Harness]] = {"memory": MemoryHarness}

"""Tiny models, written once per test run."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from tinsmith.engine.models.decoder import Decoder
from tinsmith.engine.models.load import load_model
from tinsmith.engine.models.tiny import make_tiny


@dataclass(frozen=True)
class Tiny:
    directory: Path
    decoder: Decoder


@pytest.fixture(autouse=True, scope="session")
def one_thread() -> Iterator[None]:
    """Tiny products gain nothing from several threads, and waiting for each other costs much on a busy machine."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Tiny]:
    """tiny(family, **sizes): a model on disk and its decoder."""
    made: dict[str, Tiny] = {}

    def get(family: str = "llama", **sizes: Any) -> Tiny:
        key = json.dumps([family, sizes], sort_keys=True)
        if key not in made:
            directory = make_tiny(tmp_path_factory.mktemp(family), family, seed=3, **sizes)
            made[key] = Tiny(directory, load_model(directory, cache_dir=directory).decoder)
        return made[key]

    return get

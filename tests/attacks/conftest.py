"""What attacks on an engine share: a torch executor on a tiny model."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the tiny model is."""
    return tmp_path_factory.mktemp("engine")


@pytest.fixture(scope="module")
def engine(home: Path) -> Iterator[object]:
    """An executor that the tests of a module share."""
    from support.tiny_engine import executor, torch_as_it_was

    with torch_as_it_was():
        yield executor(home)

"""One server with a tiny model for the programs of a module."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from support.clients import Served, serve


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the server's data, the model and the program's files are."""
    return tmp_path_factory.mktemp("clients")


@pytest.fixture(scope="module")
def server(place: Path) -> Iterator[Served]:
    with serve(place) as server:
        yield server

"""One server with a tiny model for all programs, and a checkpoint that knows some answers by heart.

`make test` runs the programs of QUICK only; `make clients`, or naming this folder or a file of it, runs all.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.clients import Served, serve, tune

from tinsmith import ServiceClient

QUICK = (
    "test_anthropic.py",
    "test_anthropic_types.py",
    "test_environments.py",
    "test_openai.py",
    "test_openai_types.py",
    "test_openapi.py",
)


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Leave large programs out unless they were asked for."""
    is_asked_for = any("clients" in Path(argument).parts for argument in config.args)
    is_large = collection_path.name.startswith("test_") and collection_path.name not in QUICK
    return True if is_large and not is_asked_for else None


@pytest.fixture(scope="session")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    with serve(tmp_path_factory.mktemp("server")) as server:
        yield server


@pytest.fixture(scope="session")
def tuned(server: Served) -> str:
    """The path of the checkpoint."""
    return tune(server)


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The home directory of a program."""
    return tmp_path_factory.mktemp("client")


@pytest.fixture
def service(server: Served) -> Iterator[ServiceClient]:
    """Our own client of the same server."""
    with contextlib.closing(ServiceClient(base_url=server.url, api_key=server.key)) as service:
        yield service

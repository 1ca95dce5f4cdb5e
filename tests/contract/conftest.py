"""Releases of the official SDK, each behind a process that answers questions about it; and stores of each kind."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.official import Official, Oracle, official_release, running
from support.postgres import PostgresServer
from support.releases import NEWEST, RELEASES
from support.stores import MakeStore, memory_stores, postgres_stores, sqlite_stores


@pytest.fixture(scope="session", autouse=True)
def _close_all() -> Iterator[None]:
    yield
    for official in running.values():
        official.close()


@pytest.fixture(params=RELEASES)
def official(request: pytest.FixtureRequest) -> Official:
    """Each release in turn."""
    return official_release(request.param)


@pytest.fixture
def newest() -> Official:
    return official_release(NEWEST)


@pytest.fixture(scope="session")
def postgres() -> Iterator[PostgresServer]:
    """A PostgreSQL of the tests' own."""
    with contextlib.closing(PostgresServer()) as server:
        yield server


@pytest.fixture(params=["memory", "sqlite", "postgres"])
def make_store(request: pytest.FixtureRequest, tmp_path: Path) -> MakeStore:
    """Each kind of store in turn, on an empty database."""
    if request.param == "memory":
        return memory_stores()
    if request.param == "sqlite":
        return sqlite_stores(tmp_path)
    return postgres_stores(request.getfixturevalue("postgres").schema())


@pytest.fixture(params=["sqlite", "postgres"])
def make_lasting_store(request: pytest.FixtureRequest, tmp_path: Path) -> MakeStore:
    """The kinds of store that outlive their process."""
    if request.param == "sqlite":
        return sqlite_stores(tmp_path)
    return postgres_stores(request.getfixturevalue("postgres").schema())


@pytest.fixture(scope="module")
def oracle() -> Iterator[Oracle]:
    process = Oracle()
    yield process
    process.close()

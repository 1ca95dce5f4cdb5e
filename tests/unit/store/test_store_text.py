"""The statements' text, and which store a URL names."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tinsmith.errors import InvalidInputError, StoreError
from tinsmith.store.memory import MemoryStore
from tinsmith.store.open import open_store
from tinsmith.store.postgres import PostgresStore, described
from tinsmith.store.queries import Query, load_queries, parse, positional
from tinsmith.store.sqlite import SqliteStore


def test_statements_are_found_by_name() -> None:
    text = "-- Intro.\n\n-- What.\n-- name: one\nSELECT 1\nFROM a; -- why\n\n-- Next.\n-- name: two\nDELETE FROM a;\n"
    assert parse(text) == {"one": "SELECT 1 FROM a", "two": "DELETE FROM a"}


def test_a_name_given_twice_is_refused() -> None:
    with pytest.raises(ValueError, match="there are two statements named one"):
        parse("-- name: one\nSELECT 1;\n-- name: one\nSELECT 2;\n")


def test_parameters_are_taken_by_position() -> None:
    sql = "SELECT :a, :b_2 FROM t WHERE x = :a AND y::text = 'z' AND n % 2 = 0"
    question = positional("q", sql, "?")
    assert question == Query("q", "SELECT ?, ? FROM t WHERE x = ? AND y::text = 'z' AND n % 2 = 0", ("a", "b_2", "a"))
    assert positional("q", sql, "%s").sql == "SELECT %s, %s FROM t WHERE x = %s AND y::text = 'z' AND n %% 2 = 0"
    assert question.bind({"a": True, "b_2": None, "more": 1}) == (1, None, 1)


def test_the_statements_are_read_once_and_cannot_be_changed() -> None:
    queries = load_queries("?")
    assert queries is load_queries("?")
    with pytest.raises(TypeError):
        queries["new"] = queries["org"]  # type: ignore[index]


@pytest.mark.parametrize(
    ("given", "path"),
    [
        ("data/tinsmith.db", "data/tinsmith.db"),
        (Path("/data/a:b.db"), "/data/a:b.db"),
        ("sqlite:///data/tinsmith.db", "data/tinsmith.db"),
        ("sqlite:////data/my%20file.db", "/data/my file.db"),
        ("SQLite:////data/a.db", "/data/a.db"),
    ],
)
def test_paths_and_sqlite_urls(given: str | Path, path: str) -> None:
    store = open_store(given)
    assert type(store) is SqliteStore
    assert store.path == path


def test_other_urls() -> None:
    assert type(open_store("memory:")) is MemoryStore
    store = open_store("postgresql://me:secret@db.example.org:5433/tin")
    assert type(store) is PostgresStore
    assert store.where == "postgresql://db.example.org:5433/tin"


@pytest.mark.parametrize("given", ["mysql://host/db", "sqlite:", "sqlite://host/a.db", "sqlite:///"])
def test_urls_that_name_no_database(given: str) -> None:
    with pytest.raises(InvalidInputError, match=r"^database: "):
        open_store(given)


def test_a_dsn_is_described_without_its_password() -> None:
    assert described("host=a dbname=b password=secret") == "postgresql://a/b"
    with pytest.raises(StoreError, match="the database's DSN cannot be read") as caught:
        described("postgresql://me:secret@host:port:port/x?wrong")
    assert "secret" not in str(caught.value)


def test_without_psycopg_the_error_says_what_to_install() -> None:
    code = (
        "import sys; sys.modules['psycopg'] = None\n"
        "from tinsmith.store.open import open_store\n"
        "open_store('memory:')\n"
        "try: open_store('postgresql://host/db')\n"
        "except Exception as error: print(type(error).__name__, error)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.startswith("StoreError a PostgreSQL database needs psycopg")
    assert "pip install 'tinsmith[postgres]'" in done.stdout

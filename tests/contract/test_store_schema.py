"""Migrating a database: from the first version, after a failed step, and never from a newer version."""

from __future__ import annotations

import re
import sqlite3
from pathlib import Path

import psycopg
import pytest
from support import store_rows as make
from support.postgres import PostgresServer
from support.stores import AnyStore, MakeStore, postgres_stores, run, sqlite_stores

from tinsmith.errors import StoreError
from tinsmith.store import rows
from tinsmith.store.base import Row, Value, statement
from tinsmith.store.schema import Migration, for_postgres, load_migrations, parse_migration, pending

FIRST_VERSION = Path(__file__).parent / "first_version.sql"
"""Rows as the first version wrote them, in SQLite's words. Written once; it does not change with the code."""

NEXT = Migration(
    len(load_migrations()) + 1,
    "colours",
    (
        "CREATE TABLE colours (name TEXT NOT NULL PRIMARY KEY, amount INTEGER NOT NULL, share REAL, dots BLOB) STRICT",
        "ALTER TABLE orgs ADD COLUMN colour TEXT NOT NULL DEFAULT 'tin'",
    ),
)
BROKEN = Migration(NEXT.number, "broken", (*NEXT.statements, "CREATE TABLE orgs (name TEXT)"))

KEPT: list[tuple[Row, str, dict[str, Value]]] = [
    (make.org(), "org", {"org_id": "org-1"}),
    (make.user(), "user", {"user_id": "user-1"}),
    (make.project(), "project", {"org_id": "org-1", "project_id": "project-1"}),
    (make.key(), "key", {"key_id": 1}),
    (make.session(), "session", {"session_id": "session-1"}),
    (make.model(), "model", {"model_id": "model-1"}),
    (make.sampler(), "sampler", {"sampler_id": "sampler-1"}),
    (make.job(), "job", {"request_id": "model-1:1"}),
    (make.result(), "result", {"request_id": "model-1:1"}),
    (make.checkpoint(), "checkpoint", {"path": "tinker://model-1/weights/a"}),
    (make.custom_loss(), "custom_loss", {"loss_id": "loss-1"}),
    (make.usage(), "usage_of_org", {"org_id": "org-1", "since_hour": 0, "until_hour": 1000}),
    (make.audit(), "audit_of_org", {"org_id": "org-1", "since": 0.0, "until": 99.0, "limit": 9}),
    (make.telemetry(), "telemetry_newest", {"limit": 9}),
]


class Colour(Row, frozen=True, kw_only=True):
    org_id: str
    colour: str


def first_version() -> list[str]:
    return [part.strip() for part in re.sub(r"--[^\n]*\n", "", FIRST_VERSION.read_text()).split(";\n") if part.strip()]


def write_first_version_to_sqlite(path: Path) -> None:
    connection = sqlite3.connect(path)
    for sql in first_version():
        connection.execute(sql)
    connection.commit()
    connection.close()


def write_first_version_to_postgres(dsn: str) -> None:
    with psycopg.connect(dsn) as connection:
        for sql in first_version():
            in_postgres = re.sub(r"X'([0-9A-F]*)'", r"'\\x\1'", sql) if sql.startswith("INSERT") else for_postgres(sql)
            connection.execute(in_postgres)


@pytest.fixture(params=["sqlite", "postgres"])
def old_database(request: pytest.FixtureRequest, tmp_path: Path) -> MakeStore:
    """A database that the first version wrote."""
    if request.param == "sqlite":
        write_first_version_to_sqlite(tmp_path / "tinsmith.db")
        return sqlite_stores(tmp_path)
    server: PostgresServer = request.getfixturevalue("postgres")
    dsn = server.schema()
    write_first_version_to_postgres(dsn)
    return postgres_stores(dsn)


def test_a_database_of_the_first_version_is_brought_up_to_date(old_database: MakeStore) -> None:
    async def scenario(store: AnyStore) -> None:
        for row, query, parameters in KEPT:
            assert await store.read(type(row), query, **parameters) == [row]
        await store.write(statement("insert_key", make.key(2)))
        await store.write(
            statement("insert_audit", make.audit(98.0)), statement("insert_telemetry", make.telemetry(98.0))
        )

    run(old_database, scenario)


OLD_USAGE = [
    ("user-1", "session-2", "training", 5),
    ("user-1", "session-2", "prefill", 6),
    ("user-1", "session-2", "prefill_cached", 7),
    ("user-1", "session-2", "sampled", 2**33),
    ("user-1", "session-2", "checkpoint", 1),
    ("user-2", "", "storage", 2**40),
]


@pytest.mark.parametrize("engine", ["sqlite", "postgres"])
def test_usage_of_the_version_before_runs_were_counted(
    request: pytest.FixtureRequest, tmp_path: Path, engine: str
) -> None:
    """Kinds become columns of one row, which belongs to no run; what comes later is counted beside it."""
    insert = "INSERT INTO usage VALUES ('org-1', 5, '{}', 'project-1', '{}', 'stub/model', '{}', {})"
    if engine == "sqlite":
        make_store = sqlite_stores(tmp_path)
        run(make_store, lambda store: store.size_bytes(), migrations=load_migrations()[:2])
        with sqlite3.connect(tmp_path / "tinsmith.db") as connection:
            for values in OLD_USAGE:
                connection.execute(insert.format(*values))
        connection.close()
    else:
        dsn = request.getfixturevalue("postgres").database()
        make_store = postgres_stores(dsn)
        run(make_store, lambda store: store.size_bytes(), migrations=load_migrations()[:2])
        with psycopg.connect(dsn) as connection:
            for values in OLD_USAGE:
                connection.execute(insert.format(*values))

    async def scenario(store: AnyStore) -> None:
        later = make.usage(5, session_id="session-2", run_id="model-1", device_us=9)
        await store.write(statement("add_usage", later))
        found = await store.read(rows.UsageRow, "usage_by_run", org_id="org-1", since_hour=0, until_hour=9)
        tokens = {"training": 5, "prefill": 6, "prefill_cached": 7, "sampled": 2**33, "checkpoints": 1}
        assert found == [
            make.usage(5, session_id="session-2", **tokens),
            later,
            make.usage(5, user_id="user-2", session_id="", training=0, storage=2**40),
        ]
        await store.write(statement("insert_step", make.step()))
        sampler = make.sampler("new", run_id="model-1")
        await store.write(statement("insert_sampler", sampler))
        assert await store.read(rows.SamplerRow, "sampler", sampler_id="new") == [sampler]

    run(make_store, scenario)


def test_a_further_step_is_applied_once_and_keeps_rows(old_database: MakeStore) -> None:
    async def scenario(store: AnyStore) -> None:
        assert await store.read(Colour, "orgs") == [Colour(org_id="org-1", colour="tin")]
        assert await store.read(rows.OrgRow, "orgs") == [make.org()]

    for _ in range(2):
        run(old_database, scenario, migrations=[*load_migrations(), NEXT])


def test_a_step_that_fails_leaves_the_database_as_it_was(old_database: MakeStore) -> None:
    async def scenario(store: AnyStore) -> None:
        assert await store.read(rows.OrgRow, "orgs") == [make.org()]

    with pytest.raises(StoreError, match=r"orgs.* already exists"):
        run(old_database, scenario, migrations=[*load_migrations(), BROKEN])
    run(old_database, scenario)
    run(old_database, scenario, migrations=[*load_migrations(), NEXT])


def test_a_newer_database_is_refused(make_lasting_store: MakeStore) -> None:
    async def scenario(store: AnyStore) -> None:
        await store.write(statement("insert_org", make.org()))

    run(make_lasting_store, scenario, migrations=[*load_migrations(), NEXT])
    newer = rf"written by a newer tinsmith \(its schema is {NEXT.number}, this version knows up to {NEXT.number - 1}\)"
    with pytest.raises(StoreError, match=newer):
        run(make_lasting_store, scenario)


def test_the_first_step_is_what_the_first_version_wrote() -> None:
    """A step that databases have is not edited: change the schema by adding a file."""
    written = [" ".join(sql.split()) for sql in first_version() if not sql.startswith("INSERT")][1:]
    assert [" ".join(sql.split()) for sql in load_migrations()[0].statements] == written


def test_pending_steps() -> None:
    first, second = Migration(1, "a", ()), Migration(2, "b", ())
    assert pending([], [first, second], "x") == [first, second]
    assert pending([1], [first, second], "x") == [second]
    assert pending([1, 2], [first, second], "x") == []
    with pytest.raises(StoreError, match=r"^x: .*its schema is 3, this version knows up to 2"):
        pending([1, 2, 3], [first, second], "x")


def test_a_steps_file_is_split_into_statements() -> None:
    text = "-- Why.\nCREATE TABLE a (x TEXT); -- what\n\nINSERT INTO a VALUES ('one;two');\n"
    assert parse_migration("0002_more.sql", text) == Migration(
        2, "more", ("CREATE TABLE a (x TEXT)", "INSERT INTO a VALUES ('one;two')")
    )
    with pytest.raises(ValueError, match=r"migrations/2-more\.sql: must be named like"):
        parse_migration("2-more.sql", text)


def test_postgres_reads_the_same_words() -> None:
    sql = "CREATE TABLE a (i INTEGER NOT NULL PRIMARY KEY, n INTEGER, t TEXT NOT NULL, r REAL, b BLOB) STRICT"
    assert for_postgres(sql) == (
        "CREATE TABLE a (i BIGINT GENERATED BY DEFAULT AS IDENTITY PRIMARY KEY, n BIGINT, "
        't TEXT COLLATE "C" NOT NULL, r DOUBLE PRECISION, b BYTEA)'
    )

"""A data directory that the previous schema wrote: the server opens it, and what was in training continues.

This version writes the directory. Its database is then rebuilt as the version before wrote it: the schema without the
newest migration, with the rows that fit. `tests/contract/test_store_schema.py` has databases of the first schema.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import pytest
from support.server_process import ServerProcess

from tinsmith import AdamParams, Datum, ModelInput, ServiceClient, TrainingClient
from tinsmith.engine.models.tiny import make_tiny
from tinsmith.store.schema import INSTALLATION, RECORD, load_migrations

pytestmark = pytest.mark.usefixtures("clean_environment")

WAIT_S = 240
"""For a result, on a busy machine that has to start an engine first."""
TOKENS = [11, 12, 13, 41, 42, 43, 44]
DATUM = Datum(ModelInput.from_ints(TOKENS[:-1]), {"target_tokens": TOKENS[1:], "weights": [1.0] * 6})


def losses(training: TrainingClient, steps: int) -> list[float]:
    found = []
    for _ in range(steps):
        passed = training.forward_backward([DATUM], "cross_entropy")
        training.optim_step(AdamParams(learning_rate=1e-2)).result(WAIT_S)
        found.append(passed.result(WAIT_S).metrics["loss:sum"])
    return found


def tables(connection: sqlite3.Connection) -> list[str]:
    rows = connection.execute("SELECT name FROM sqlite_master WHERE type = 'table' AND name NOT LIKE 'sqlite_%'")
    return [name for (name,) in rows]


def columns(connection: sqlite3.Connection, table: str) -> list[str]:
    return [row[1] for row in connection.execute(f"PRAGMA table_info({table})")]


def applied(database: Path) -> list[int]:
    with closing(sqlite3.connect(database)) as connection:
        return [number for (number,) in connection.execute("SELECT number FROM migrations ORDER BY number")]


def as_the_version_before(database: Path) -> None:
    """Replace a database by one with the schema before the newest migration and the same rows."""
    older = database.with_suffix(".older")
    migrations = load_migrations()[:-1]
    with closing(sqlite3.connect(older)) as target, closing(sqlite3.connect(database)) as source:
        for sql in (RECORD, INSTALLATION, *(sql for migration in migrations for sql in migration.statements)):
            target.execute(sql)
        for table in tables(target):
            names = [name for name in columns(target, table) if name in columns(source, table)]
            rows = source.execute(f"SELECT {', '.join(names)} FROM {table}").fetchall()
            places = ", ".join("?" * len(names))
            target.executemany(f"INSERT INTO {table} ({', '.join(names)}) VALUES ({places})", rows)
        target.execute("DELETE FROM migrations WHERE number > ?", (len(migrations),))
        target.commit()
    for suffix in ("-wal", "-shm"):
        database.with_name(database.name + suffix).unlink(missing_ok=True)
    older.replace(database)


def test_a_run_that_began_under_the_previous_schema_continues(
    tmp_path: Path, connect: Callable[..., ServiceClient]
) -> None:
    model = make_tiny(tmp_path / "model")
    settings = {"dtype": "float32", "threads": 1}
    with ServerProcess(tmp_path / "data", "--model", f"tiny={model}", backend="local", **settings) as server:
        client = connect(server.url, api_key=server.key, retry_deadline_s=WAIT_S)
        wanted = losses(client.create_lora_training_client("tiny", rank=4, seed=0), 4)
        training = client.create_lora_training_client("tiny", rank=4, seed=0)
        before = losses(training, 2)
        saved = training.save_state("half").result(WAIT_S).path
        assert server.terminate(120) == 0

        database = server.data_dir / "tinsmith.sqlite"
        as_the_version_before(database)
        newest = len(load_migrations())
        assert applied(database) == list(range(1, newest))

        server.start()
        assert before + losses(training, 2) == wanted
        loaded = client.create_training_client_from_state_with_optimizer(saved)
        assert losses(loaded, 2) == wanted[2:]
        assert applied(database) == list(range(1, newest + 1))
        runs = client.create_rest_client().list_training_runs().result(WAIT_S).training_runs
        assert len(runs) == 3
        assert not any(run.corrupted for run in runs)

"""A database and a data directory that do not belong together: the server does not start, and touches neither. And one
server per database."""

from __future__ import annotations

import asyncio
import contextlib
import json
import shutil
import signal
import sqlite3
from collections.abc import Iterator
from pathlib import Path

import psycopg
import pytest
from support.in_process import serving
from support.postgres import PostgresServer
from support.server_process import ServerEndedError, ServerProcess
from support.stores import postgres_stores, run

from tinsmith.errors import StoreError, StoreTakenError
from tinsmith.server.data_dir import Files
from tinsmith.server.ops.installation import FILE, Installation, MismatchError, judge, read_identity
from tinsmith.server.process import TAKEN_EXIT
from tinsmith.store.base import Found, FoundRuns, Identity, statement
from tinsmith.store.memory import MemoryStore
from tinsmith.store.postgres import PostgresStore
from tinsmith.store.sqlite import SqliteStore

ONE, TWO = (Identity(installation_id=name, generation=5) for name in ("one", "two"))
OLD = Identity(installation_id="one", generation=4)
NEW = Found(is_new=True)
UNTIED = Found(is_new=False)
RUNS = FoundRuns(frozenset({"a:train:0", "b:train:0"}), frozenset({"a:train:0"}))
FILES = frozenset({"a_train_0"})
OTHERS = frozenset({"c_train_0"})
NO_RUNS, NO_FILES = FoundRuns(), frozenset[str]()


def held(identity: Identity) -> Found:
    return Found(is_new=False, identity=identity)


@pytest.mark.parametrize(
    ("found", "recorded", "runs", "names"),
    [
        (NEW, None, NO_RUNS, NO_FILES),
        (UNTIED, None, NO_RUNS, NO_FILES),
        (UNTIED, None, RUNS, FILES),
        (UNTIED, None, RUNS, FILES | OTHERS),
        (held(ONE), ONE, NO_RUNS, FILES),
        (held(ONE), ONE, NO_RUNS, NO_FILES),
        (held(ONE), OLD, NO_RUNS, FILES),
        (held(ONE), None, RUNS, FILES),
        (held(ONE), None, NO_RUNS, NO_FILES),
    ],
)
def test_pairs_that_belong_together(
    tmp_path: Path, found: Found, recorded: Identity | None, runs: FoundRuns, names: frozenset[str]
) -> None:
    judge(tmp_path, "db", found, recorded, runs, names)


@pytest.mark.parametrize(
    ("found", "recorded", "runs", "names", "says"),
    [
        (NEW, ONE, NO_RUNS, FILES, "the database db is new or empty, but .* belongs to installation one"),
        (NEW, ONE, NO_RUNS, NO_FILES, "the database db is new or empty"),
        (UNTIED, ONE, RUNS, FILES, "the database db does not belong to an installation"),
        (held(TWO), ONE, NO_RUNS, FILES, "the database db belongs to installation two, but .* to one"),
        (held(OLD), ONE, NO_RUNS, FILES, "is older than .*generation 4 of 5"),
        (NEW, None, NO_RUNS, FILES, "holds the files of 1 runs, but the database db has none"),
        (UNTIED, None, RUNS, OTHERS, "has none of them"),
        (held(ONE), None, RUNS, OTHERS, "has none of them"),
        (held(ONE), None, RUNS, NO_FILES, "has 1 runs with files, but .* holds none.*write .*one"),
        (UNTIED, None, RUNS, NO_FILES, "has 1 runs with files, but .* holds none"),
    ],
)
def test_pairs_that_do_not(
    tmp_path: Path, found: Found, recorded: Identity | None, runs: FoundRuns, names: frozenset[str], says: str
) -> None:
    with pytest.raises(MismatchError, match=says):
        judge(tmp_path, "db", found, recorded, runs, names)


def contents(place: Path) -> dict[str, bytes]:
    """All files below a place; what a lock or a look leaves beside a database aside."""
    passing = ("server.lock", "-shm", "-wal", ".log")
    return {
        str(path.relative_to(place)): path.read_bytes()
        for path in place.rglob("*")
        if path.is_file() and not path.name.endswith(passing)
    }


@pytest.fixture
def data(tmp_path: Path) -> Path:
    """The data directory of a server that ran, with a run's snapshot and a checkpoint in it."""
    place = tmp_path / "data"
    with ServerProcess(place) as server:
        server.terminate()
    with contextlib.closing(sqlite3.connect(place / "tinsmith.sqlite")) as database, database:
        database.execute(
            "INSERT INTO models (model_id, session_id, org_id, user_id, base_model, lora, optimizer, created_at, "
            "used_at, state, snapshot_directory, snapshot_seq) VALUES ('m', 's', 'o', 'u', 'b', '{}', 'adamw', 0, 0, "
            "'parked', ?, 3)",
            (str(place / "snapshots" / "m" / "3-abc"),),
        )
    for name in ("snapshots/m/3-abc/adapter_model.safetensors", "checkpoints/m/weights/x-1/manifest.json"):
        (place / name).parent.mkdir(parents=True)
        (place / name).write_bytes(b"precious")
    return place


def refused(place: Path, *options: str) -> str:
    before = contents(place.parent)
    with pytest.raises(ServerEndedError) as caught:
        ServerProcess(place, *options).start()
    assert contents(place.parent) == before, "nothing was touched"
    return caught.value.log


def test_a_wrong_or_empty_database_deletes_nothing(data: Path, tmp_path: Path) -> None:
    assert "is new or empty" in refused(data, "--database", str(tmp_path / "absent.sqlite"))
    assert not (tmp_path / "absent.sqlite").exists()
    with ServerProcess(tmp_path / "other") as server:
        server.terminate()
    said = refused(data, "--database", str(tmp_path / "other" / "tinsmith.sqlite"))
    assert "belongs to installation" in said
    assert "Traceback" not in said
    assert ":memory: is new or empty" in refused(data, "--database", "memory:")
    (data / "tinsmith.sqlite").rename(tmp_path / "away.sqlite")
    assert "is new or empty" in refused(data)
    (data / "tinsmith.sqlite").touch()
    assert "is new or empty" in refused(data)
    (tmp_path / "away.sqlite").rename(data / "tinsmith.sqlite")
    with ServerProcess(data) as server:
        server.terminate()
    assert (data / "snapshots/m/3-abc/adapter_model.safetensors").read_bytes() == b"precious"


def test_an_installation_of_an_earlier_release_is_taken_over_if_it_is_one(data: Path, tmp_path: Path) -> None:
    def make_old() -> None:
        (data / FILE).unlink()
        with contextlib.closing(sqlite3.connect(data / "tinsmith.sqlite")) as database, database:
            database.execute("DROP TABLE installation")

    make_old()
    with ServerProcess(data) as server:
        server.terminate()
    assert read_identity(data) is not None
    make_old()
    assert "has none of them" in refused(data, "--database", str(tmp_path / "absent.sqlite"))
    (tmp_path / "empty").mkdir()
    assert "has 1 runs with files" in refused(tmp_path / "empty", "--database", str(data / "tinsmith.sqlite"))


def test_a_lost_log_is_found_out(tmp_path: Path) -> None:
    place = tmp_path / "data"
    with ServerProcess(place) as server:
        server.terminate()
        server.start()
        server.kill()  # the second start is in the log alone
    assert (place / "tinsmith.sqlite-wal").stat().st_size > 0
    shutil.copytree(place, tmp_path / "whole")
    (place / "tinsmith.sqlite-wal").unlink()
    (place / "tinsmith.sqlite-shm").unlink()
    assert "is older than" in refused(place)
    with ServerProcess(tmp_path / "whole") as server:
        server.terminate()
    (place / FILE).unlink()
    with ServerProcess(place) as server:  # the operator has decided to go on without it
        server.terminate()


def test_the_generation_of_the_directory_is_never_ahead(tmp_path: Path) -> None:
    async def scenario() -> None:
        store = SqliteStore(tmp_path / "a.sqlite")
        await store.open()
        await store.write(statement("insert_installation", ONE, created_at=1.0))
        now = 0.0
        installation = Installation(tmp_path, store, ONE, lambda: now)
        await installation.advance()
        assert read_identity(tmp_path) is None
        now = 61.0
        await installation.advance()
        recorded = read_identity(tmp_path)
        assert recorded is not None
        assert recorded.generation == 6
        await store.close()
        now = 200.0
        with pytest.raises(StoreError):
            await installation.advance()
        assert read_identity(tmp_path) == recorded
        assert (await SqliteStore(tmp_path / "a.sqlite").look()).identity == recorded

    asyncio.run(scenario())


@pytest.mark.parametrize("text", ["", "{", "[]", '{"installation_id": 5}', "[" * 100_000])
def test_a_damaged_file_is_named(tmp_path: Path, text: str) -> None:
    (tmp_path / FILE).write_text(text)
    with pytest.raises(MismatchError, match=r"installation\.json cannot be read"):
        read_identity(tmp_path)


def test_snapshots_of_runs_that_a_database_does_not_know_stay(tmp_path: Path) -> None:
    place = tmp_path / "data" / "snapshots" / "unknown_train_0" / "7-abcd"
    place.mkdir(parents=True)

    async def scenario() -> None:
        async with serving(tmp_path):
            assert place.exists()

    asyncio.run(scenario())


def test_a_copy_never_deletes_what_belongs_to_the_original(tmp_path: Path) -> None:
    original, copy = tmp_path / "original", tmp_path / "copy"
    (original / "checkpoints" / "m").mkdir(parents=True)
    (copy / "checkpoints" / "m").mkdir(parents=True)
    files = Files(copy, 1)
    files.remove(str(original / "checkpoints" / "m"))
    files.remove(str(copy / "checkpoints" / ".." / ".." / "original" / "checkpoints" / "m"))
    assert (original / "checkpoints" / "m").exists()
    files.remove(str(copy / "checkpoints" / "m"))
    assert not (copy / "checkpoints" / "m").exists()


def test_looking_changes_nothing(tmp_path: Path) -> None:
    async def scenario() -> None:
        path = tmp_path / "a.sqlite"
        assert await SqliteStore(path).look() == NEW
        assert not path.exists()
        assert await MemoryStore().look() == NEW
        store = SqliteStore(path)
        await store.open()
        await store.close()
        before = path.read_bytes()
        assert await SqliteStore(path).look() == UNTIED
        assert await SqliteStore(path).look_for_runs() == NO_RUNS
        assert path.read_bytes() == before
        path.write_bytes(b"no database" * 1000)
        with pytest.raises(StoreError):
            await SqliteStore(path).look()

    asyncio.run(scenario())


@pytest.fixture(scope="module")
def postgres() -> Iterator[PostgresServer]:
    with contextlib.closing(PostgresServer()) as server:
        yield server


def test_one_server_per_postgres_database(postgres: PostgresServer, tmp_path: Path) -> None:
    dsn = postgres.database()
    with ServerProcess(tmp_path / "one", "--database", dsn) as server:
        identity = read_identity(tmp_path / "one")
        (tmp_path / "two").mkdir()
        (tmp_path / "two" / FILE).write_text(json.dumps({"installation_id": "other", "generation": 1}))
        assert "belongs to installation" in refused(tmp_path / "two", "--database", dsn)
        shutil.copy(tmp_path / "one" / FILE, tmp_path / "two" / FILE)
        said = refused(tmp_path / "two", "--database", dsn)
        assert "another server uses this database, and only one may at a time" in said
        made = server.run("key", "create", "ann", "--database", dsn)
        assert made.returncode == 0, made.stderr
        server.kill()
        server.start()
        after = read_identity(tmp_path / "one")
        assert identity is not None
        assert after is not None
        assert (after.installation_id, after.generation > identity.generation) == (identity.installation_id, True)


def test_a_server_that_lost_its_database_to_another_leaves(postgres: PostgresServer, tmp_path: Path) -> None:
    dsn = postgres.database()
    with ServerProcess(tmp_path / "one", "--database", dsn, sweep_s=0.2) as server:

        async def take() -> None:
            server.signal(signal.SIGSTOP)
            drop_locks(dsn)
            store = PostgresStore(dsn)
            await store.open(alone=True)
            server.signal(signal.SIGCONT)
            try:
                assert await asyncio.to_thread(server.wait) == TAKEN_EXIT
            finally:
                await store.close()

        asyncio.run(asyncio.wait_for(take(), 60))
        assert "another server uses this database" in server.log


def drop_locks(dsn: str) -> None:
    """End the connections that hold a lock of a server, as a cut in the network would."""
    with psycopg.connect(dsn, autocommit=True) as other:
        other.execute(
            "SELECT pg_terminate_backend(pid) FROM pg_locks WHERE locktype = 'advisory' AND granted AND database = "
            "(SELECT oid FROM pg_database WHERE datname = current_database())"
        )


def test_a_store_that_lost_its_connection_gets_its_lock_back(postgres: PostgresServer) -> None:
    dsn = postgres.schema()
    stores = postgres_stores(dsn)

    async def scenario(_: PostgresStore) -> None:
        store, second = stores(), stores()
        await store.open(alone=True)
        with pytest.raises(StoreTakenError):
            await second.open(alone=True)
        for name in ("a", "b", "c"):
            drop_locks(dsn)
            await store.write(statement("insert_org", org_id=name, name=name, created_at=1.0))
        with pytest.raises(StoreTakenError):
            await second.open(alone=True)
        await store.close()
        await second.open(alone=True)
        await second.close()

    run(stores, scenario)


def test_a_lock_that_our_own_lost_connection_still_holds_is_taken_back(postgres: PostgresServer) -> None:
    """As after a cut in the network: the server does not know yet that the connection is gone."""
    stores = postgres_stores(postgres.schema())

    async def scenario(_: PostgresStore) -> None:
        store = stores()
        await store.open(alone=True)
        lingering, store._writing = store._writing, None
        assert lingering is not None
        await store.write(statement("insert_org", org_id="a", name="a", created_at=1.0))
        with pytest.raises(psycopg.OperationalError):
            await lingering.execute("SELECT 1")
        await lingering.close()
        await store.close()

    run(stores, scenario)

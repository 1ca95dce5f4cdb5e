"""Behaviour specific to SQLite: kill -9, full and locked databases, files, threads and forks."""

from __future__ import annotations

import asyncio
import os
import random
import sqlite3
import stat
import subprocess
import sys
import textwrap
import threading
from pathlib import Path

import pytest
from support import store_rows as make
from support.stores import run, sqlite_stores

from tinsmith.errors import ConstraintError, StorageFullError, StoreError, StoreUnavailableError, UnstorableError
from tinsmith.store.base import statement
from tinsmith.store.memory import MemoryStore
from tinsmith.store.rows import CountRow, JobRow, OrgRow
from tinsmith.store.sqlite import SqliteStore, explained

WRITER = """
import asyncio, sys
from support import store_rows as make
from tinsmith.store.base import statement
from tinsmith.store.sqlite import SqliteStore

async def write(store, lane, first):
    for seq in range(first, first + 10_000):
        row = make.job(lane, seq, job=f"{lane}:{seq}".encode() * 50)
        await store.write(statement("insert_job", row), statement("add_usage", make.usage(session_id=lane, training=1)))
        print(lane, seq, flush=True)

async def main():
    store = SqliteStore(sys.argv[1])
    await store.open()
    await asyncio.gather(*(write(store, f"lane-{index}", int(sys.argv[2])) for index in range(20)))

asyncio.run(main())
"""

FORK = """
import asyncio, os, sys
from support import store_rows as make
from tinsmith.errors import StoreError
from tinsmith.store.base import statement
from tinsmith.store.rows import OrgRow
from tinsmith.store.sqlite import SqliteStore

async def main():
    store = SqliteStore(sys.argv[1])
    await store.open()
    await store.write(statement("insert_org", make.org("before")))
    child = os.fork()
    if child == 0:
        # The forked process has the parent's loop object; a coroutine is driven by hand instead.
        try:
            store.write(statement("insert_org", make.org("child"))).send(None)
        except StoreError as error:
            print(error, flush=True)
        os._exit(0)
    os.waitpid(child, 0)
    await store.write(statement("insert_org", make.org("after", created_at=9.0)))
    print([row.org_id for row in await store.read(OrgRow, "orgs")], flush=True)
    await store.close()

asyncio.run(main())
"""


def child(script: str, *arguments: str | Path) -> subprocess.Popen[str]:
    tests = Path(__file__).parents[1]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(map(str, (tests.parent / "src", tests)))}
    command = [sys.executable, "-W", "ignore", "-c", textwrap.dedent(script), *map(str, arguments)]
    return subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True)


def test_every_acknowledged_row_survives_kill_9(tmp_path: Path) -> None:
    path = tmp_path / "tinsmith.db"
    chance = random.Random(7)
    acknowledged: set[tuple[str, int]] = set()
    for number in range(6):
        process = child(WRITER, path, str(number * 10_000))
        assert process.stdout is not None
        wanted = len(acknowledged) + chance.randint(1, 1500)
        for line in process.stdout:
            if not line.endswith("\n"):
                continue  # it was killed while it said so
            acknowledged.add((line.split()[0], int(line.split()[1])))
            if len(acknowledged) == wanted:
                process.kill()
        process.stdout.close()
        assert process.wait(60) == -9
    connection = sqlite3.connect(path)
    assert connection.execute("PRAGMA integrity_check").fetchone() == ("ok",)
    kept = {(lane, seq): job for lane, seq, job in connection.execute("SELECT lane, seq, job FROM jobs")}
    assert acknowledged <= kept.keys()
    assert all(kept[lane, seq] == f"{lane}:{seq}".encode() * 50 for lane, seq in acknowledged)
    # Both statements of a write are there, or neither is.
    amounts = dict(connection.execute("SELECT session_id, training FROM usage"))
    assert amounts == dict(connection.execute("SELECT lane, COUNT(*) FROM jobs GROUP BY lane"))
    connection.close()


def test_a_forked_process_is_told_to_open_its_own(tmp_path: Path) -> None:
    process = child(FORK, tmp_path / "tinsmith.db")
    output, _ = process.communicate(timeout=60)
    told, orgs = output.splitlines()
    assert "a forked process must open its own" in told
    assert orgs == "['before', 'after']"


def test_a_full_database_refuses_and_goes_on_when_there_is_room(tmp_path: Path) -> None:
    async def scenario(store: SqliteStore) -> None:
        await store.write(statement("insert_key", make.key()))
        rows = [make.job(seq=seq, state="done", job=bytes(400_000)) for seq in range(20)]
        writes = [store.write(statement("insert_job", row)) for row in rows]
        outcomes = await asyncio.gather(*writes, return_exceptions=True)
        full = [outcome for outcome in outcomes if isinstance(outcome, StorageFullError)]
        stored = outcomes.count(1)
        assert 5 <= stored < 20
        assert len(full) == 20 - stored
        assert "tinsmith.db: no space for the database" in str(full[0])
        assert "Free some on its disk" in str(full[0])
        assert len(await store.read(JobRow, "jobs_of_lane_after", lane="model-1", seq=-1, limit=99)) == stored
        await store.write(statement("prune_journal", lane="model-1", seq=99))
        assert await store.write(statement("insert_job", make.job(seq=50, job=bytes(400_000)))) == 1

    run(sqlite_stores(tmp_path), scenario, max_bytes=2**22)


def test_small_writes_are_stored_beside_one_that_does_not_fit(tmp_path: Path) -> None:
    async def scenario(store: SqliteStore) -> None:
        outcomes = await asyncio.gather(
            store.write(statement("insert_job", make.job(seq=1))),
            store.write(statement("insert_job", make.job(seq=2, job=bytes(2**23)))),
            store.write(statement("insert_job", make.job(seq=3))),
            return_exceptions=True,
        )
        assert outcomes[0] == outcomes[2] == 1
        assert isinstance(outcomes[1], StorageFullError)

    run(sqlite_stores(tmp_path), scenario, max_bytes=2**22)


def test_a_locked_database_is_reported_and_can_still_be_read(tmp_path: Path) -> None:
    async def scenario(store: SqliteStore) -> None:
        await store.write(statement("insert_org", make.org()))
        other = sqlite3.connect(store.path, isolation_level=None)
        other.execute("BEGIN IMMEDIATE")
        with pytest.raises(StoreUnavailableError, match=r"tinsmith\.db: another process has locked the database"):
            await store.write(statement("insert_org", make.org("locked out")))
        assert await store.read(OrgRow, "orgs") == [make.org()]
        other.execute("ROLLBACK")
        other.close()
        assert await store.write(statement("insert_org", make.org("free again"))) == 1

    run(sqlite_stores(tmp_path), scenario, busy_timeout_s=0.01)


def read_only_error(path: Path) -> sqlite3.Error:
    sqlite3.connect(path).close()
    connection = sqlite3.connect(f"file:{path}?mode=ro", uri=True)
    with pytest.raises(sqlite3.Error) as caught:
        connection.execute("CREATE TABLE a (x)")
    connection.close()
    return caught.value


def test_a_read_only_database_is_named_with_what_to_do(tmp_path: Path) -> None:
    error = explained(read_only_error(tmp_path / "a.db"), "/data/a.db")
    assert type(error) is StoreError
    assert str(error) == (
        "/data/a.db: attempt to write a readonly database. The file or its directory is not writable: check its "
        "owner, mode and mount options."
    )


@pytest.mark.parametrize(
    ("code", "kind", "text"),
    [
        (sqlite3.SQLITE_FULL, StorageFullError, "Free some on its disk"),
        (sqlite3.SQLITE_IOERR_SHMSIZE, StorageFullError, "Free some on its disk"),
        (sqlite3.SQLITE_BUSY_SNAPSHOT, StoreUnavailableError, "another process has locked the database"),
        (sqlite3.SQLITE_CONSTRAINT_UNIQUE, ConstraintError, "boom"),
        (sqlite3.SQLITE_IOERR_FSYNC, StoreError, "its file system failed"),
        (sqlite3.SQLITE_CORRUPT, StoreError, "restore a backup"),
        (sqlite3.SQLITE_ERROR, UnstorableError, "/data/a.db: boom"),
        (sqlite3.SQLITE_TOOBIG, UnstorableError, "/data/a.db: boom"),
        (None, StoreError, "/data/a.db: boom"),
    ],
)
def test_errors_of_sqlite_by_their_code(code: int | None, kind: type[StoreError], text: str) -> None:
    error = sqlite3.OperationalError("boom")
    if code is not None:
        error.sqlite_errorcode = code
    found = explained(error, "/data/a.db")
    assert type(found) is kind
    assert text in str(found)


def test_a_file_that_is_no_database_is_refused(tmp_path: Path) -> None:
    (tmp_path / "tinsmith.db").write_bytes(b"not a database at all" * 100)
    with pytest.raises(StoreError, match="not a SQLite database: give another path"):
        run(sqlite_stores(tmp_path), lambda store: store.size_bytes())


def test_a_path_that_cannot_be_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(
        StoreError, match=r"file/tinsmith\.db: the database cannot be opened: (Not a directory|File exists)"
    ):
        run(sqlite_stores(tmp_path / "file"), lambda store: store.size_bytes())
    with pytest.raises(StoreError, match="the database cannot be opened: Is a directory"):
        run(lambda: SqliteStore(tmp_path), lambda store: store.size_bytes())


def test_what_is_acknowledged_is_on_the_disk_not_only_in_its_cache(tmp_path: Path) -> None:
    """A killed process loses nothing with less, so only the setting itself shows what a lost machine would lose."""
    connection = SqliteStore(tmp_path / "db.sqlite")._connect()
    try:
        asked = {name: connection.execute(f"PRAGMA {name}").fetchone()[0] for name in ("synchronous", "journal_mode")}
        assert asked == {"synchronous": 2, "journal_mode": "wal"}, "FULL, not NORMAL: a commit waits for the disk"
    finally:
        connection.close()


def test_the_files_are_for_their_owner_alone(tmp_path: Path) -> None:
    async def scenario(store: SqliteStore) -> None:
        await store.write(statement("insert_org", make.org()))
        modes = {file.name: stat.S_IMODE(file.stat().st_mode) for file in (tmp_path / "new").iterdir()}
        names = ("tinsmith.db", "tinsmith.db-wal", "tinsmith.db-shm", "tinsmith.db-reserve")
        assert modes == dict.fromkeys(names, 0o600)

    run(sqlite_stores(tmp_path / "new"), scenario)


def test_no_thread_and_no_log_file_is_left_after_closing(tmp_path: Path) -> None:
    async def scenario(store: SqliteStore) -> None:
        await store.write(statement("insert_org", make.org()))
        assert sum(thread.name.startswith("tinsmith-store") for thread in threading.enumerate()) == 3

    run(sqlite_stores(tmp_path), scenario)
    assert [thread for thread in threading.enumerate() if thread.name.startswith("tinsmith-store")] == []
    assert [file.name for file in tmp_path.iterdir()] == ["tinsmith.db"]


def test_memory_is_gone_at_the_end() -> None:
    async def scenario(store: MemoryStore) -> int:
        await store.write(statement("insert_job", make.job()))
        return (await store.read(CountRow, "count_jobs_queued"))[0].count

    assert [run(MemoryStore, scenario) for _ in range(2)] == [1, 1]


@pytest.mark.parametrize("state", ["done", "failed"])
def test_the_end_of_a_large_job_does_not_write_its_payload_again(tmp_path: Path, state: str) -> None:
    async def scenario() -> None:
        store = SqliteStore(tmp_path / "db")
        await store.open()
        row = make.job("a", 1, job=os.urandom(2**20))
        await store.write(statement("insert_job", row))
        before = await store.size_bytes()
        await store.write(statement("set_job_state", request_id=row.request_id, state=state))
        assert await store.size_bytes() - before < 2**18
        [found] = await store.read(JobRow, "job", request_id=row.request_id)
        assert (found.state, found.job, found.context.rstrip()) == (state, row.job, row.context)
        await store.close()

    asyncio.run(scenario())

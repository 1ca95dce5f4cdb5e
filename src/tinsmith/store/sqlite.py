"""State in one SQLite file, durable on return, with many writes per commit; `threads` explains how.

WAL with `synchronous=FULL`: a commit is on the disk when it returns, and reads never wait for writes. Other processes
(the command line) may use the file at the same time.
"""

from __future__ import annotations

import asyncio
import os
import sqlite3
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from pathlib import Path
from queue import SimpleQueue
from typing import Any
from urllib.parse import quote

from tinsmith.errors import (
    ConstraintError,
    StorageFullError,
    StoreError,
    StoreTakenError,
    StoreUnavailableError,
    UnstorableError,
)
from tinsmith.store.base import (
    LOOK_FOR_FILES,
    LOOK_FOR_IDENTITY,
    LOOK_FOR_KNOWN,
    Found,
    FoundRuns,
    Identity,
    RowT,
    Statement,
    Value,
)
from tinsmith.store.queries import URGENT, Query, find, load_queries
from tinsmith.store.reserve import Reserve
from tinsmith.store.schema import INSTALLATION, RECORD, Migration, load_migrations, pending
from tinsmith.store.threads import Outbox, Queue, Reader, Task, Writer

OLDEST_SQLITE = (3, 37, 0)
"""The first with STRICT tables; RETURNING is older."""

PAGE_BYTES = 16384
"""Page size of a new file. Writing a 4 MB payload takes two thirds of the time of SQLite's default, 4096."""
CHECKPOINT_PAGES = 4000
"""Pages in the log (64 MB) before a commit itself moves them to the file; the writer does so earlier (`threads`)."""

MEMORY = ":memory:"

_QUERIES: Mapping[str, Query] = load_queries("?")


class SqliteStore:
    """A store in a file. `busy_timeout_s`: how long to wait while another process holds the lock.

    `max_bytes` bounds the file: beyond it writes fail as on a full disk, until rows have been deleted.
    """

    def __init__(
        self,
        path: str | Path,
        *,
        busy_timeout_s: float = 5.0,
        max_bytes: int | None = None,
        readers: int = 2,
        migrations: Sequence[Migration] | None = None,
    ) -> None:
        self.path = str(path)
        self._busy_timeout_s = busy_timeout_s
        self._max_bytes = max_bytes
        self._reader_count = readers
        self._migrations = load_migrations() if migrations is None else migrations
        self._readers: list[Reader] = []
        self._writer: Writer | None = None
        self._reads: Queue = SimpleQueue()
        self._process_id = -1
        self._loop: asyncio.AbstractEventLoop | None = None

    @property
    def where(self) -> str:
        return self.path

    @property
    def is_lasting(self) -> bool:
        return self.path != MEMORY

    @property
    def commits(self) -> int:
        """How many transactions were committed since `open`."""
        return self._writer.commits if self._writer is not None else 0

    async def look(self) -> Found:
        return await asyncio.to_thread(self._look)

    async def look_for_runs(self) -> FoundRuns:
        return await asyncio.to_thread(self._look_for_runs)

    async def taken(self) -> StoreTakenError:
        await asyncio.Event().wait()
        raise AssertionError("nobody sets it")

    async def open(self, *, alone: bool = False) -> None:
        if self._writer is not None:
            raise StoreError(f"{self.path}: the store is already open")
        writing, reading = await asyncio.to_thread(self._connect_all)
        self._loop = asyncio.get_running_loop()
        self._process_id = os.getpid()
        outbox = Outbox(self._loop)
        reserve = Reserve(Path(f"{self.path}-reserve")) if self.is_lasting else None
        self._writer = Writer(writing, outbox, self._explain, busy_timeout_s=self._busy_timeout_s, reserve=reserve)
        self._reads = SimpleQueue()
        self._readers = [Reader(item, self._reads, outbox, self._explain) for item in reading]
        self._writer.start()
        for reader in self._readers:
            reader.start()

    async def close(self) -> None:
        if self._writer is None or self._process_id != os.getpid():
            return
        writer, self._writer = self._writer, None
        for _ in self._readers:
            self._reads.put(None)
        for reader in self._readers:
            await asyncio.to_thread(reader.join)
        self._readers = []
        # Last and alone: SQLite moves the log into the database when the last connection closes, but not if two close
        # at the same moment.
        await writer.close()

    async def write(self, *statements: Statement) -> int:
        if not statements:
            return 0
        bound = []
        size_bytes = 0
        for statement in statements:
            query = find(_QUERIES, statement.name)
            values = query.bind(statement.parameters)
            bound.append((query.sql, values))
            size_bytes += sum([len(value) for value in values if type(value) is bytes])
        is_urgent = any(statement.name in URGENT for statement in statements)
        task = Task(bound, None, self._future(), size_bytes, is_urgent=is_urgent)
        self._open_writer().put(task)
        count: int = await task.future
        return count

    async def write_returning(self, row_type: type[RowT], name: str, /, **parameters: Value) -> list[RowT]:
        query = find(_QUERIES, name)
        task = Task([(query.sql, query.bind(parameters))], row_type, self._future())
        self._open_writer().put(task)
        rows: list[RowT] = await task.future
        return rows

    async def read(self, row_type: type[RowT], name: str, /, **parameters: Value) -> list[RowT]:
        query = find(_QUERIES, name)
        task = Task([(query.sql, query.bind(parameters))], row_type, self._future(), is_read=True)
        rows: list[RowT] = await self._read(task)
        return rows

    async def size_bytes(self) -> int:
        self._open_writer()
        return await asyncio.to_thread(self._file_bytes)

    def _read(self, task: Task) -> asyncio.Future[Any]:
        """Queue a read for a reader, or for the writer if there is no other connection."""
        (self._reads if self._readers else self._open_writer()).put(task)
        return task.future

    def _future(self) -> asyncio.Future[Any]:
        self._open_writer()
        assert self._loop is not None
        return self._loop.create_future()

    def _open_writer(self) -> Writer:
        if self._writer is None:
            raise StoreError(f"{self.path}: the store is not open")
        if self._process_id != os.getpid():
            raise StoreError(
                f"{self.path}: the store was opened in process {self._process_id}; a forked process must open its own"
            )
        return self._writer

    def _file_bytes(self) -> int:
        return sum(os.stat(file).st_size for file in (self.path, f"{self.path}-wal") if os.path.exists(file))

    def _look(self) -> Found:
        if self.path == MEMORY or not os.path.exists(self.path):
            return Found(is_new=True)
        with self._looking() as connection:
            tables = {name for (name,) in connection.execute("SELECT name FROM sqlite_master WHERE type = 'table'")}
            row = connection.execute(LOOK_FOR_IDENTITY).fetchone() if "installation" in tables else None
        identity = Identity(installation_id=row[0], generation=row[1]) if row is not None else None
        return Found(is_new="migrations" not in tables, identity=identity)

    def _look_for_runs(self) -> FoundRuns:
        with self._looking() as connection:
            known, with_files = (
                frozenset(name for (name,) in connection.execute(sql)) for sql in (LOOK_FOR_KNOWN, LOOK_FOR_FILES)
            )
        return FoundRuns(known, with_files)

    @contextmanager
    def _looking(self) -> Iterator[sqlite3.Connection]:
        """Open a read-only connection."""
        address = f"file:{quote(os.path.abspath(self.path))}?mode=ro"
        try:
            with closing(sqlite3.connect(address, uri=True, timeout=self._busy_timeout_s)) as connection:
                yield connection
        except sqlite3.Error as error:
            raise self._explain(error) from error

    def _connect_all(self) -> tuple[sqlite3.Connection, list[sqlite3.Connection]]:
        if sqlite3.sqlite_version_info < OLDEST_SQLITE:
            needed = ".".join(map(str, OLDEST_SQLITE))
            raise StoreError(
                f"SQLite {needed} or newer is needed; this Python has {sqlite3.sqlite_version}. "
                "Use a newer Python, or PostgreSQL."
            )
        connections: list[sqlite3.Connection] = []
        try:
            self._make_file()
            connections.append(self._connect())
            self._migrate(connections[0])
            connections += [self._connect() for _ in range(self._reader_count)]
        except BaseException as error:
            for connection in connections:
                connection.close()
            if isinstance(error, sqlite3.Error):
                raise self._explain(error) from error
            raise
        return connections[0], connections[1:]

    def _make_file(self) -> None:
        """Create the file, readable by its owner only; SQLite gives its -wal file the same mode."""
        if self.path == MEMORY:
            return
        try:
            Path(self.path).parent.mkdir(parents=True, exist_ok=True)
            os.close(os.open(self.path, os.O_RDWR | os.O_CREAT, 0o600))
        except OSError as error:
            raise StoreError(f"{self.path}: the database cannot be opened: {error.strerror}") from error

    def _connect(self) -> sqlite3.Connection:
        connection = sqlite3.connect(
            self.path,
            timeout=self._busy_timeout_s,
            isolation_level=None,
            check_same_thread=False,
            cached_statements=len(_QUERIES) + 10,
        )
        connection.execute(f"PRAGMA page_size = {PAGE_BYTES}")
        connection.execute("PRAGMA journal_mode = WAL")
        connection.execute("PRAGMA synchronous = FULL")
        connection.execute(f"PRAGMA wal_autocheckpoint = {CHECKPOINT_PAGES}")
        connection.execute(f"PRAGMA journal_size_limit = {64 * 2**20}")
        if self._max_bytes is not None:
            (page_bytes,) = connection.execute("PRAGMA page_size").fetchone()
            connection.execute(f"PRAGMA max_page_count = {max(self._max_bytes // page_bytes, 1)}")
        return connection

    def _migrate(self, connection: sqlite3.Connection) -> None:
        connection.execute("BEGIN IMMEDIATE")
        connection.execute(f"{RECORD} STRICT")
        connection.execute(f"{INSTALLATION} STRICT")
        applied = [number for (number,) in connection.execute("SELECT number FROM migrations")]
        for migration in pending(applied, self._migrations, self.path):
            for sql in migration.statements:
                connection.execute(sql)
            connection.execute("INSERT INTO migrations VALUES (?, ?)", (migration.number, migration.name))
        connection.execute("COMMIT")

    def _explain(self, error: sqlite3.Error) -> StoreError:
        failure = explained(error, self.path)
        failure.__cause__ = error
        return failure


def explained(error: sqlite3.Error, path: str) -> StoreError:
    """Turn an error of SQLite into one that says what went wrong, where, and what to do."""
    extended: int = getattr(error, "sqlite_errorcode", None) or 0
    code = extended & 0xFF
    if code == sqlite3.SQLITE_CONSTRAINT:
        return ConstraintError(str(error))
    if code == sqlite3.SQLITE_FULL or extended == sqlite3.SQLITE_IOERR_SHMSIZE:
        return StorageFullError(
            f"{path}: no space for the database ({error}). Free some on its disk, or raise its size limit; "
            "nothing that was acknowledged is lost."
        )
    if code in (sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED):
        return StoreUnavailableError(
            f"{path}: another process has locked the database ({error}). Retry, or stop that process."
        )
    if code in _UNSTORABLE:
        return UnstorableError(f"{path}: {error}")
    return StoreError(f"{path}: {error}. {_ADVICE.get(code, 'The request failed.')}")


_UNSTORABLE = frozenset({sqlite3.SQLITE_ERROR, sqlite3.SQLITE_TOOBIG, sqlite3.SQLITE_MISMATCH, sqlite3.SQLITE_RANGE})
"""Errors of the value or the statement; retrying would fail again."""

_ADVICE = {
    sqlite3.SQLITE_READONLY: "The file or its directory is not writable: check its owner, mode and mount options.",
    sqlite3.SQLITE_CANTOPEN: "Check that the directory exists and that this user may write to it.",
    sqlite3.SQLITE_IOERR: "The disk or its file system failed: check the system's log, then restart.",
    sqlite3.SQLITE_CORRUPT: "The file is damaged: stop the server and restore a backup.",
    sqlite3.SQLITE_NOTADB: "This file is not a SQLite database: give another path.",
    sqlite3.SQLITE_PERM: "Check the owner and the mode of the file and its directory.",
}

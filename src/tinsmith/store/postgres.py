"""State in PostgreSQL. One server uses it alone; other processes (the command line) may read and write, too.

One connection writes, in groups: what was queued while the last commit ran shares the next one, sent as one pipeline. A
few connections read. If the database becomes unreachable, calls wait for up to `patience_s` and then fail with the
reason. A commit whose confirmation was lost is looked up by its transaction id, so nothing is written twice.
"""

from __future__ import annotations

import asyncio
import logging
import os
import time
import zlib
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Any, TypeVar

import psycopg

from tinsmith.errors import StoreError, StoreTakenError, StoreUnavailableError
from tinsmith.store.base import (
    LOOK_FOR_FILES,
    LOOK_FOR_IDENTITY,
    LOOK_FOR_KNOWN,
    Found,
    FoundRuns,
    Identity,
    Row,
    RowT,
    Statement,
    Value,
)
from tinsmith.store.postgres_commit import Connection, GroupCommit, Outcome, Write, execute, explained, is_lost, rows_of
from tinsmith.store.queries import Bound, Query, find, load_queries
from tinsmith.store.schema import INSTALLATION, RECORD, Migration, for_postgres, load_migrations, pending

logger = logging.getLogger(__name__)

OLDEST_SERVER = 130000
"""PostgreSQL 13: the first that reports the outcome of a transaction by its 64-bit id."""
MAX_GROUP = 1000
MAX_GROUP_BYTES = 32 * 2**20
CONNECTING: dict[str, Any] = {
    "connect_timeout": 10,
    "tcp_user_timeout": 20_000,
    "keepalives_idle": 10,
    "prepare_threshold": None,
}
"""Timeouts, in libpq's units, for a peer that is silent without having closed the connection. No prepared statements:
psycopg believes that one exists whose creation was skipped because something before it in a pipeline failed."""
FIRST_PAUSE_S = 0.05
LONGEST_PAUSE_S = 1.0
"""Between attempts to reach a server that is gone."""
SERVER_LOCK = 746_573
"""The advisory lock of a store that is opened alone, together with a number of its schema."""
LOCK_WATCH_S = 5.0
"""How often a server that writes nothing checks that it still has the lock."""
LOCK_PATIENCE_S = 3.0
"""How long PostgreSQL may take to notice that the process which held it was killed."""
SCHEMA_LOCK = 7_465_737_301
"""The advisory lock during migrations, since several processes may start at once."""

ResultT = TypeVar("ResultT")

_QUERIES: Mapping[str, Query] = load_queries("%s")


class PostgresStore:
    """A store in the database that a DSN names."""

    def __init__(
        self,
        dsn: str,
        *,
        patience_s: float = 30.0,
        readers: int = 4,
        watch_s: float = LOCK_WATCH_S,
        migrations: Sequence[Migration] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._dsn = dsn
        self.where = described(dsn)
        self.is_lasting = True
        self._patience_s = patience_s
        self._migrations = load_migrations() if migrations is None else migrations
        self._clock = clock
        self.commits = 0
        self._queue: deque[Write] = deque()
        self._wake = asyncio.Event()
        self._task: asyncio.Task[None] | None = None
        self._is_closing = False
        self._writing: Connection | None = None
        self._reader_slots = asyncio.Semaphore(readers)
        self._idle: list[Connection] = []
        self._process_id = -1
        self._lost_at: float | None = None
        self._watch_s = watch_s
        self._is_alone = False
        self._is_taken = asyncio.Event()
        self._holder_id: int | None = None
        """The PostgreSQL process that held our lock last."""

    async def look(self) -> Found:
        async with self._looking() as connection:
            cursor = await connection.execute(
                "SELECT to_regclass('migrations') IS NOT NULL, to_regclass('installation') IS NOT NULL"
            )
            has_tables, has_identity = await cursor.fetchone() or (False, False)
            row = await (await connection.execute(LOOK_FOR_IDENTITY)).fetchone() if has_identity else None
        identity = Identity(installation_id=row[0], generation=row[1]) if row is not None else None
        return Found(is_new=not has_tables, identity=identity)

    async def look_for_runs(self) -> FoundRuns:
        async with self._looking() as connection:
            known, with_files = [
                frozenset(name for (name,) in await (await connection.execute(sql)).fetchall())
                for sql in (LOOK_FOR_KNOWN, LOOK_FOR_FILES)
            ]
        return FoundRuns(known, with_files)

    @asynccontextmanager
    async def _looking(self) -> AsyncIterator[Connection]:
        try:
            connection = await self._connect()
            try:
                yield connection
            finally:
                await connection.close()
        except psycopg.Error as error:
            raise self._explain(error) from error

    async def taken(self) -> StoreTakenError:
        await self._is_taken.wait()
        return StoreTakenError(self._taken_text())

    async def open(self, *, alone: bool = False) -> None:
        if self._task is not None:
            raise StoreError(f"{self.where}: the store is already open")
        self._process_id = os.getpid()
        self._is_closing = False
        self._is_alone = alone
        try:
            await self._persist(self._migrate)
        except BaseException:
            await self._drop_writing()
            raise
        self._task = asyncio.create_task(self._write_groups(), name="tinsmith-store-writer")

    async def close(self) -> None:
        if self._task is None or self._process_id != os.getpid():
            return
        self._is_closing = True
        self._wake.set()
        await self._task
        self._task = None
        await self._drop_writing()
        while self._idle:
            await self._idle.pop().close()

    async def write(self, *statements: Statement) -> int:
        if not statements:
            return 0
        queries = [find(_QUERIES, statement.name) for statement in statements]
        bound = [
            (query.sql, query.bind(statement.parameters)) for query, statement in zip(queries, statements, strict=True)
        ]
        count: int = await self._submit(bound, None)
        return count

    async def write_returning(self, row_type: type[RowT], name: str, /, **parameters: Value) -> list[RowT]:
        query = find(_QUERIES, name)
        rows: list[RowT] = await self._submit([(query.sql, query.bind(parameters))], row_type)
        return rows

    async def read(self, row_type: type[RowT], name: str, /, **parameters: Value) -> list[RowT]:
        query = find(_QUERIES, name)
        return await self._read(row_type, query.sql, query.bind(parameters))

    async def size_bytes(self) -> int:
        rows = await self._read(_Size, "SELECT pg_database_size(current_database()) AS size_bytes", ())
        return rows[0].size_bytes

    # Writing --------------------------------------------------------------------------------------------------------

    def _submit(self, statements: Sequence[tuple[str, Bound]], row_type: type[Row] | None) -> asyncio.Future[Any]:
        self._check_open()
        size_bytes = sum(len(value) for _, values in statements for value in values if isinstance(value, bytes))
        write = Write(statements, row_type, asyncio.get_running_loop().create_future(), size_bytes)
        self._queue.append(write)
        self._wake.set()
        return write.future

    async def _write_groups(self) -> None:
        while True:
            try:
                await asyncio.wait_for(self._wake.wait(), self._watch_s if self._is_alone else None)
            except TimeoutError:
                await self._keep_lock()
                continue
            self._wake.clear()
            while self._queue:
                group = self._next_group()
                _deliver(group, await self._commit(group))
            if self._is_closing:
                return

    async def _keep_lock(self) -> None:
        """Check the connection that holds the lock while nothing is written that would show its loss."""
        try:
            await self._persist(_answers)
        except StoreError as error:
            logger.error("%s", error, extra={"event": "store_failing"})

    def _next_group(self) -> list[Write]:
        group: list[Write] = []
        size_bytes = 0
        while self._queue and len(group) < MAX_GROUP and size_bytes < MAX_GROUP_BYTES:
            group.append(self._queue.popleft())
            size_bytes += group[-1].size_bytes
        return group

    async def _commit(self, group: Sequence[Write]) -> Sequence[Outcome]:
        attempt = GroupCommit(group, self.where)
        try:
            outcomes = await self._persist(attempt.run)
            self.commits += 1
            return outcomes
        except StoreError as error:
            logger.error("a commit failed: %s", error, extra={"event": "store_failing", "writes": len(group)})
            if attempt.is_unsettled:
                error = StoreUnavailableError(f"{error} It is unknown whether this write was stored.")
            return [error] * len(group)
        except Exception as error:
            logger.exception("a commit failed")
            await self._drop_writing()
            if len(group) == 1 or attempt.is_unsettled:
                return [error] * len(group)
            # A write cannot even be sent: run each alone, so that it affects no other.
            return [outcome for write in group for outcome in await self._commit([write])]

    async def _persist(self, action: Callable[[Connection], Awaitable[ResultT]]) -> ResultT:
        """Run an action on the writing connection, and again on a new one while the database may come back."""
        pause_s = FIRST_PAUSE_S
        while True:
            try:
                if self._writing is None:
                    self._writing = await self._connect_writing()
                result = await action(self._writing)
                self._lost_at = None
                return result
            except psycopg.Error as error:
                is_passing = is_lost(error, self._writing)
                await self._drop_writing()
                if not is_passing or self._is_patience_over():
                    raise self._explain(error) from error
                if pause_s == FIRST_PAUSE_S:
                    logger.warning("%s; retrying", self._explain(error), extra={"event": "store_reconnecting"})
            await asyncio.sleep(pause_s)
            pause_s = min(pause_s * 2, LONGEST_PAUSE_S)

    def _is_patience_over(self) -> bool:
        """Count the timeout from the loss, so that later groups do not each wait that long."""
        now = self._clock()
        if self._lost_at is None:
            self._lost_at = now
        return now - self._lost_at >= self._patience_s

    async def _drop_writing(self) -> None:
        connection, self._writing = self._writing, None
        if connection is not None:
            await connection.close()

    # Reading --------------------------------------------------------------------------------------------------------

    async def _read(self, row_type: type[RowT], sql: str, parameters: Bound) -> list[RowT]:
        self._check_open()
        deadline = self._clock() + self._patience_s
        async with self._reader_slots:
            pause_s = FIRST_PAUSE_S
            while True:
                connection: Connection | None = None
                try:
                    connection = self._idle.pop() if self._idle else await self._connect()
                    cursor = await execute(connection, sql, parameters)
                    rows = await rows_of(row_type, cursor)
                    self._idle.append(connection)
                    return rows
                except psycopg.Error as error:
                    is_passing = is_lost(error, connection)
                    await _dispose(connection)
                    if not is_passing or self._clock() + pause_s > deadline:
                        raise self._explain(error) from error
                except BaseException:
                    await _dispose(connection)
                    raise
                await asyncio.sleep(pause_s)
                pause_s = min(pause_s * 2, LONGEST_PAUSE_S)

    # Connections ----------------------------------------------------------------------------------------------------

    async def _connect(self) -> Connection:
        connection = await psycopg.AsyncConnection.connect(
            self._dsn, autocommit=True, application_name="tinsmith", **CONNECTING
        )
        if connection.info.server_version < OLDEST_SERVER:
            await connection.close()
            raise StoreError(f"{self.where}: PostgreSQL 13 or newer is needed")
        # A commit that returns has to be on the disk, whatever the server's default is; stronger settings stay.
        await connection.execute(
            "SELECT set_config('synchronous_commit', 'on', false) WHERE current_setting('synchronous_commit') = 'off'"
        )
        return connection

    async def _connect_writing(self) -> Connection:
        """Return a connection to write on. For a store that is opened alone it holds an advisory lock, which ends with
        the connection: nothing is ever written without it, and a server that finds it taken must not write any more."""
        connection = await self._connect()
        if not self._is_alone:
            return connection
        try:
            deadline = self._clock() + LOCK_PATIENCE_S
            while not await self._is_locked(connection):
                if self._clock() >= deadline:
                    self._is_taken.set()
                    raise StoreTakenError(self._taken_text())
                await asyncio.sleep(FIRST_PAUSE_S)
        except BaseException:
            await connection.close()
            raise
        self._holder_id = connection.info.backend_pid
        return connection

    async def _is_locked(self, connection: Connection) -> bool:
        """Take the lock if it is free, or if PostgreSQL has not noticed that our own last connection ended."""
        cursor = await connection.execute("SELECT current_schema()")
        schema = str((await cursor.fetchone() or ("",))[0])
        key = SERVER_LOCK, zlib.crc32(schema.encode()) - 2**31
        cursor = await connection.execute("SELECT pg_try_advisory_lock(%s, %s)", key)
        if (await cursor.fetchone() or (False,))[0]:
            return True
        if self._holder_id is not None:
            await connection.execute(
                "SELECT pg_terminate_backend(pid) FROM pg_locks WHERE locktype = 'advisory' AND granted AND pid = %s "
                "AND database = (SELECT oid FROM pg_database WHERE datname = current_database()) "
                "AND classid::bigint = %s AND objid::bigint = %s",
                (self._holder_id, key[0], key[1] % 2**32),
            )
        return False

    def _taken_text(self) -> str:
        return (
            f"{self.where}: another server uses this database, and only one may at a time. Stop it (the "
            "database's connections with application_name 'tinsmith' show its machine), or name another --database."
        )

    async def _migrate(self, connection: Connection) -> None:
        async with connection.transaction():
            await connection.execute("SELECT pg_advisory_xact_lock(%s)", (SCHEMA_LOCK,))
            await connection.execute(for_postgres(RECORD))
            await connection.execute(for_postgres(INSTALLATION))
            cursor = await connection.execute("SELECT number FROM migrations")
            applied = [number for (number,) in await cursor.fetchall()]
            for migration in pending(applied, self._migrations, self.where):
                for sql in migration.statements:
                    await connection.execute(for_postgres(sql))
                await connection.execute("INSERT INTO migrations VALUES (%s, %s)", (migration.number, migration.name))

    def _check_open(self) -> None:
        if self._task is None or self._is_closing:
            raise StoreError(f"{self.where}: the store is not open")
        if self._process_id != os.getpid():
            raise StoreError(
                f"{self.where}: the store was opened in process {self._process_id}; a forked process must open its own"
            )

    def _explain(self, error: psycopg.Error) -> StoreError:
        return explained(error, self.where)


class _Size(Row, frozen=True, kw_only=True):
    size_bytes: int


async def _answers(connection: Connection) -> None:
    await connection.execute("SELECT 1")


async def _dispose(connection: Connection | None) -> None:
    if connection is not None:
        await connection.close()


def _deliver(group: Sequence[Write], outcomes: Sequence[Outcome]) -> None:
    for write, outcome in zip(group, outcomes, strict=True):
        if write.future.done():
            continue
        if isinstance(outcome, Exception):
            write.future.set_exception(outcome)
        else:
            write.future.set_result(outcome)


def described(dsn: str) -> str:
    """Return a DSN without its password, for messages."""
    try:
        parts = psycopg.conninfo.conninfo_to_dict(dsn)
    except psycopg.ProgrammingError:
        raise StoreError(
            "the database's DSN cannot be read; write postgresql://user:password@host:port/database"
        ) from None
    port = f":{parts['port']}" if parts.get("port") else ""
    return f"postgresql://{parts.get('host') or 'localhost'}{port}/{parts.get('dbname') or ''}"

"""State in PostgreSQL, for installations of several API processes.

One connection writes, in groups: what was queued while the last commit ran shares the next one, sent as one pipeline. A
few connections read. When the server goes away, calls wait for it up to `patience_s` and then fail with the reason. A
commit whose answer was lost is looked up by its transaction id, so nothing is written twice.

Does not know: what the rows mean.
"""

from __future__ import annotations

import asyncio
import logging
import os
import time
from collections import deque
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, TypeAlias, TypeVar

import msgspec

from tinsmith.errors import ConstraintError, StorageFullError, StoreError, StoreUnavailableError
from tinsmith.store.base import Row, RowT, Statement, Value, make_row
from tinsmith.store.queries import Bound, Query, find, load_queries
from tinsmith.store.schema import RECORD, Migration, for_postgres, load_migrations, pending

try:
    import psycopg
except ImportError as error:
    raise StoreError(f"a PostgreSQL database needs psycopg ({error}): pip install 'tinsmith[postgres]'") from error

logger = logging.getLogger(__name__)

OLDEST_SERVER = 130000
"""PostgreSQL 13: the first that tells the outcome of a transaction by its 64-bit id."""
MAX_GROUP = 1000
MAX_GROUP_BYTES = 32 * 2**20
CONNECTING: dict[str, Any] = {
    "connect_timeout": 10,
    "tcp_user_timeout": 20_000,
    "keepalives_idle": 10,
    "prepare_threshold": None,
}
"""Bounds, in libpq's units, on a peer that is silent without having closed the connection. No prepared statements:
psycopg takes one for made whose making was skipped because something before it in a pipeline failed."""
FIRST_PAUSE_S = 0.05
LONGEST_PAUSE_S = 1.0
"""Between tries to reach a server that went away."""
SCHEMA_LOCK = 7_465_737_301
"""Held while the schema is brought up to date, since several processes may start at once."""

Connection: TypeAlias = "psycopg.AsyncConnection[tuple[Any, ...]]"
Cursor: TypeAlias = "psycopg.AsyncCursor[tuple[Any, ...]]"
Outcome: TypeAlias = "int | list[Row] | Exception"
ResultT = TypeVar("ResultT")

_QUERIES: Mapping[str, Query] = load_queries("%s")


class Write(msgspec.Struct, frozen=True):
    """What a caller of the writer waits for; with a row type it gives rows, else a count."""

    statements: Sequence[tuple[str, Bound]]
    row_type: type[Row] | None
    future: asyncio.Future[Any]
    size_bytes: int = 0


class PostgresStore:
    """A store in the database that a DSN names."""

    def __init__(
        self,
        dsn: str,
        *,
        patience_s: float = 30.0,
        readers: int = 4,
        migrations: Sequence[Migration] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._dsn = dsn
        self.where = described(dsn)
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

    async def open(self) -> None:
        if self._task is not None:
            raise StoreError(f"{self.where}: the store is open already")
        self._process_id = os.getpid()
        self._is_closing = False
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
            await self._wake.wait()
            self._wake.clear()
            while self._queue:
                group = self._next_group()
                _deliver(group, await self._commit(group))
            if self._is_closing:
                return

    def _next_group(self) -> list[Write]:
        group: list[Write] = []
        size_bytes = 0
        while self._queue and len(group) < MAX_GROUP and size_bytes < MAX_GROUP_BYTES:
            group.append(self._queue.popleft())
            size_bytes += group[-1].size_bytes
        return group

    async def _commit(self, group: Sequence[Write]) -> Sequence[Outcome]:
        attempt = _GroupCommit(group, self.where)
        try:
            outcomes = await self._persist(attempt.run)
            self.commits += 1
            return outcomes
        except StoreError as error:
            logger.error("a commit failed: %s", error, extra={"event": "store_failing", "writes": len(group)})
            if attempt.is_unsettled:
                error = StoreUnavailableError(f"{error} Whether this write was stored is not known.")
            return [error] * len(group)
        except Exception as error:
            logger.exception("a commit failed")
            await self._drop_writing()
            return [error] * len(group)

    async def _persist(self, action: Callable[[Connection], Awaitable[ResultT]]) -> ResultT:
        """Run an action on the writing connection; anew on a new one while the server can be expected back."""
        pause_s = FIRST_PAUSE_S
        while True:
            try:
                if self._writing is None:
                    self._writing = await self._connect()
                result = await action(self._writing)
                self._lost_at = None
                return result
            except psycopg.Error as error:
                is_passing = is_lost(error, self._writing)
                await self._drop_writing()
                if not is_passing or self._is_patience_over():
                    raise self._explain(error) from error
                if pause_s == FIRST_PAUSE_S:
                    logger.warning("%s; trying again", self._explain(error), extra={"event": "store_reconnecting"})
            await asyncio.sleep(pause_s)
            pause_s = min(pause_s * 2, LONGEST_PAUSE_S)

    def _is_patience_over(self) -> bool:
        """Patience begins with the loss, so that groups behind the first do not each wait that long."""
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
                    cursor = await _execute(connection, sql, parameters)
                    rows = await _rows(row_type, cursor)
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

    async def _migrate(self, connection: Connection) -> None:
        async with connection.transaction():
            await connection.execute("SELECT pg_advisory_xact_lock(%s)", (SCHEMA_LOCK,))
            await connection.execute(for_postgres(RECORD))
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


class _GroupCommit:
    """One group, until it is known to be written. `run` may be called again after the connection was lost."""

    def __init__(self, group: Sequence[Write], where: str) -> None:
        self._group = group
        self._where = where
        self._is_careful = False
        self._unsettled: tuple[str, list[Outcome]] | None = None
        """A transaction whose commit was not answered, and what it gave."""

    @property
    def is_unsettled(self) -> bool:
        return self._unsettled is not None

    async def run(self, connection: Connection) -> list[Outcome]:
        if self._unsettled is not None:
            transaction, outcomes = self._unsettled
            if await _is_committed(connection, transaction):
                return outcomes
            self._unsettled = None
        try:
            transaction, outcomes = await self._run_statements(connection)
        except psycopg.Error as error:
            if is_lost(error, connection):
                raise
            await connection.execute("ROLLBACK")
            if isinstance(error, _OF_THE_GROUP) or self._is_careful:
                raise
            # Some caller's statement failed: now each by itself, behind a savepoint.
            self._is_careful = True
            return await self.run(connection)
        self._unsettled = transaction, outcomes
        await connection.execute("COMMIT")
        return outcomes

    async def _run_statements(self, connection: Connection) -> tuple[str, list[Outcome]]:
        if self._is_careful:
            await connection.execute("BEGIN")
            found = await connection.execute(_TRANSACTION)
            outcomes = [await _run_behind_savepoint(connection, write, self._where) for write in self._group]
        else:
            async with connection.pipeline():
                await connection.execute("BEGIN")
                found = await connection.execute(_TRANSACTION)
                cursors = [
                    [await _execute(connection, sql, parameters) for sql, parameters in write.statements]
                    for write in self._group
                ]
            outcomes = [await _outcome(write, of_one) for write, of_one in zip(self._group, cursors, strict=True)]
        row = await found.fetchone()
        assert row is not None
        return row[0], outcomes


_TRANSACTION = "SELECT pg_current_xact_id()::text"
_OF_THE_GROUP = (psycopg.errors.DeadlockDetected, psycopg.errors.SerializationFailure)
"""Nobody's fault: the group is run again as it is."""
_OF_THE_CALLER = (psycopg.IntegrityError, psycopg.DataError, psycopg.ProgrammingError, psycopg.errors.DiskFull)
_PASSING = ("08", "57P", "53300", "40001", "40P01")
"""Beginnings of the codes after which another try makes sense: connection lost, shutdown, too many, deadlock."""


async def _is_committed(connection: Connection, transaction: str) -> bool:
    """Whether a transaction of a lost connection was committed."""
    try:
        cursor = await connection.execute("SELECT pg_xact_status(%s::xid8)", (transaction,))
    except psycopg.errors.InvalidParameterValue:
        return False  # this server, promoted since, has not come to that number: it never saw the transaction
    row = await cursor.fetchone()
    if row is not None and row[0] == "in progress":
        raise psycopg.errors.ConnectionFailure("the old connection is still committing")
    return row is not None and row[0] == "committed"


async def _run_behind_savepoint(connection: Connection, write: Write, where: str) -> Outcome:
    await connection.execute("SAVEPOINT caller")
    try:
        cursors = [await _execute(connection, sql, parameters) for sql, parameters in write.statements]
        outcome = await _outcome(write, cursors)
    except _OF_THE_CALLER as error:
        await connection.execute("ROLLBACK TO SAVEPOINT caller")
        outcome = explained(error, where)
        outcome.__cause__ = error
    await connection.execute("RELEASE SAVEPOINT caller")
    return outcome


async def _outcome(write: Write, cursors: Sequence[Cursor]) -> Outcome:
    if write.row_type is None:
        return sum(max(cursor.rowcount, 0) for cursor in cursors)
    try:
        rows: list[Row] = await _rows(write.row_type, cursors[0])
        return rows
    except msgspec.ValidationError as error:
        return error


async def _execute(connection: Connection, sql: str, parameters: Bound) -> Cursor:
    return await connection.cursor(binary=True).execute(sql, parameters)


async def _rows(row_type: type[RowT], cursor: Cursor) -> list[RowT]:
    columns = [column.name for column in cursor.description or ()]
    return [make_row(row_type, columns, values) for values in await cursor.fetchall()]


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


def is_lost(error: psycopg.Error, connection: Connection | None) -> bool:
    """Whether the connection or the moment is at fault, not the statement."""
    if connection is None or connection.closed or connection.broken:
        return True
    return (error.sqlstate or "").startswith(_PASSING)


def explained(error: psycopg.Error, where: str) -> StoreError:
    """What went wrong, where, and what to do, for an error of PostgreSQL."""
    text = " ".join(str(error).split())
    if isinstance(error, psycopg.IntegrityError):
        return ConstraintError(text)
    if isinstance(error, (psycopg.errors.DiskFull, psycopg.errors.OutOfMemory)):
        return StorageFullError(
            f"{where}: no room for the database ({text}). Free some on the database server; nothing that was "
            "acknowledged is lost."
        )
    if isinstance(error, psycopg.errors.ReadOnlySqlTransaction):
        return StoreError(f"{where}: the database cannot be written ({text}). Name the primary server, not a copy.")
    if isinstance(error, psycopg.OperationalError):
        return StoreUnavailableError(
            f"{where}: the database cannot be reached ({text}). Check that it runs, its address and its password."
        )
    return StoreError(f"{where}: {text}")


def described(dsn: str) -> str:
    """A DSN in words, without its password."""
    try:
        parts = psycopg.conninfo.conninfo_to_dict(dsn)
    except psycopg.ProgrammingError:
        raise StoreError(
            "the database's DSN cannot be read; write postgresql://user:password@host:port/database"
        ) from None
    port = f":{parts['port']}" if parts.get("port") else ""
    return f"postgresql://{parts.get('host') or 'localhost'}{port}/{parts.get('dbname') or ''}"

"""One commit in PostgreSQL: the writes of several callers in one transaction, and what its errors mean.

The statements of a group are sent as one pipeline. If one of them fails, the group is run again with a savepoint around
each caller, so that only that caller gets the error. If the connection is lost during the commit, the outcome is looked
up by the transaction's id. `postgres` has the connections, and decides how long to retry.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any, TypeAlias

import msgspec
import psycopg

from tinsmith.errors import (
    ConstraintError,
    StorageFullError,
    StoreError,
    StoreUnavailableError,
    UnstorableError,
)
from tinsmith.store.base import Row, RowT, make_row
from tinsmith.store.queries import Bound

Connection: TypeAlias = "psycopg.AsyncConnection[tuple[Any, ...]]"
Cursor: TypeAlias = "psycopg.AsyncCursor[tuple[Any, ...]]"
Outcome: TypeAlias = "int | list[Row] | Exception"

_TRANSACTION = "SELECT pg_current_xact_id()::text"
_OF_THE_GROUP = (psycopg.errors.DeadlockDetected, psycopg.errors.SerializationFailure)
"""Conflicts with other transactions: the group is run again as it is."""
_OF_THE_CALLER = (
    psycopg.IntegrityError,
    psycopg.DataError,
    psycopg.ProgrammingError,
    psycopg.errors.DiskFull,
    psycopg.errors.ProgramLimitExceeded,
)
_UNSTORABLE = (psycopg.DataError, psycopg.ProgrammingError, psycopg.errors.ProgramLimitExceeded)
"""Errors of the value or the statement; retrying would fail again."""
_PASSING = ("08", "57P", "53300", "40001", "40P01")
"""Prefixes of codes after which a retry makes sense: connection lost, shutdown, too many connections, deadlock."""


class Write(msgspec.Struct, frozen=True):
    """A caller's write and the future it waits for; results in rows of `row_type`, else in a count."""

    statements: Sequence[tuple[str, Bound]]
    row_type: type[Row] | None
    future: asyncio.Future[Any]
    size_bytes: int = 0


class GroupCommit:
    """One group of writes, until it is known to be committed. `run` may be called again after a lost connection."""

    def __init__(self, group: Sequence[Write], where: str) -> None:
        self._group = group
        self._where = where
        self._is_careful = False
        self._unsettled: tuple[str, list[Outcome]] | None = None
        """A transaction whose commit was not confirmed, and its results."""

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
            # A caller's statement failed: run each caller's with a savepoint.
            self._is_careful = True
            return await self.run(connection)
        self._unsettled = transaction, outcomes
        await connection.execute("COMMIT")
        return outcomes

    async def _run_statements(self, connection: Connection) -> tuple[str, list[Outcome]]:
        if self._is_careful:
            await connection.execute("BEGIN")
            found = await connection.execute(_TRANSACTION)
            outcomes = [await _run_in_savepoint(connection, write, self._where) for write in self._group]
        else:
            async with connection.pipeline():
                await connection.execute("BEGIN")
                found = await connection.execute(_TRANSACTION)
                cursors = [
                    [await execute(connection, sql, parameters) for sql, parameters in write.statements]
                    for write in self._group
                ]
            outcomes = [await _outcome(write, of_one) for write, of_one in zip(self._group, cursors, strict=True)]
        row = await found.fetchone()
        assert row is not None
        return row[0], outcomes


async def _is_committed(connection: Connection, transaction: str) -> bool:
    """Whether a transaction of a lost connection was committed."""
    try:
        cursor = await connection.execute("SELECT pg_xact_status(%s::xid8)", (transaction,))
    except psycopg.errors.InvalidParameterValue:
        return False  # a replica that was promoted since and has not reached that number never saw the transaction
    row = await cursor.fetchone()
    if row is not None and row[0] == "in progress":
        raise psycopg.errors.ConnectionFailure("the old connection is still committing")
    return row is not None and row[0] == "committed"


async def _run_in_savepoint(connection: Connection, write: Write, where: str) -> Outcome:
    await connection.execute("SAVEPOINT caller")
    try:
        cursors = [await execute(connection, sql, parameters) for sql, parameters in write.statements]
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
        rows: list[Row] = await rows_of(write.row_type, cursors[0])
        return rows
    except msgspec.ValidationError as error:
        return error


async def execute(connection: Connection, sql: str, parameters: Bound) -> Cursor:
    """Run a statement; parameters and rows are sent in PostgreSQL's binary format."""
    return await connection.cursor(binary=True).execute(sql, parameters)


async def rows_of(row_type: type[RowT], cursor: Cursor) -> list[RowT]:
    """Return what a statement found, as rows of a type."""
    columns = [column.name for column in cursor.description or ()]
    return [make_row(row_type, columns, values) for values in await cursor.fetchall()]


def is_lost(error: psycopg.Error, connection: Connection | None) -> bool:
    """Whether the connection or a conflict is the reason, not the statement."""
    if connection is None or connection.closed or connection.broken:
        return True
    return (error.sqlstate or "").startswith(_PASSING)


def explained(error: psycopg.Error, where: str) -> StoreError:
    """Turn an error of PostgreSQL into one that says what went wrong, where, and what to do."""
    text = " ".join(str(error).split())
    if isinstance(error, psycopg.IntegrityError):
        return ConstraintError(text)
    if isinstance(error, (psycopg.errors.DiskFull, psycopg.errors.OutOfMemory)):
        return StorageFullError(
            f"{where}: no space for the database ({text}). Free some on the database server; nothing that was "
            "acknowledged is lost."
        )
    if isinstance(error, _UNSTORABLE):
        return UnstorableError(f"{where}: {text}")
    if isinstance(error, psycopg.errors.ReadOnlySqlTransaction):
        return StoreError(
            f"{where}: the database is read-only ({text}). Use the address of the primary, not of a replica."
        )
    if isinstance(error, psycopg.OperationalError):
        return StoreUnavailableError(
            f"{where}: cannot connect to the database ({text}). Check that it is running, its address and its password."
        )
    return StoreError(f"{where}: {text}")

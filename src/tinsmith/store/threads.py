"""Threads that work on SQLite connections for an event loop: one that writes, some that read.

The writer commits in groups: what was queued while the last commit ran shares the next one. Each caller's statements
stand or fall by themselves, and results go back to the loop together.

Does not know: names of statements, paths, what errors mean to a user.
"""

from __future__ import annotations

import asyncio
import logging
import sqlite3
import threading
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from queue import Empty, SimpleQueue
from typing import Any, TypeAlias

import msgspec

from tinsmith.store.base import Row, make_row
from tinsmith.store.queries import Bound

logger = logging.getLogger(__name__)

MAX_GROUP = 1000
"""Writes in one commit."""
MAX_GROUP_BYTES = 32 * 2**20
"""Bytes of payload in one commit, so that a small write does not wait long behind large ones."""

_OF_THE_DATABASE = frozenset(
    {
        sqlite3.SQLITE_FULL,
        sqlite3.SQLITE_IOERR,
        sqlite3.SQLITE_NOMEM,
        sqlite3.SQLITE_BUSY,
        sqlite3.SQLITE_LOCKED,
        sqlite3.SQLITE_READONLY,
        sqlite3.SQLITE_CORRUPT,
        sqlite3.SQLITE_NOTADB,
    }
)
"""Faults that say nothing about the statement at hand."""

Outcome: TypeAlias = "tuple[asyncio.Future[Any], Any, BaseException | None]"
Explain: TypeAlias = Callable[[sqlite3.Error], Exception]


class Task(msgspec.Struct, frozen=True):
    """What a caller waits for: a write of statements, or a read with one. Gives rows of a type, else a count."""

    statements: Sequence[tuple[str, Bound]]
    row_type: type[Row] | None
    future: asyncio.Future[Any]
    size_bytes: int = 0
    is_read: bool = False

    def run(self, connection: sqlite3.Connection) -> Any:
        count = 0
        for sql, parameters in self.statements:
            cursor = connection.execute(sql, parameters)
            if self.row_type is not None:
                return _rows(self.row_type, cursor)
            count += max(cursor.rowcount, 0)
        return count


def _rows(row_type: type[Row], cursor: sqlite3.Cursor) -> list[Row]:
    columns = [column[0] for column in cursor.description]
    return [make_row(row_type, columns, values) for values in cursor.fetchall()]


class Outbox:
    """Results on their way to the loop; however many arrive before it wakes, it is woken once."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._lock = threading.Lock()
        self._outcomes: deque[Outcome] = deque()
        self._is_woken = False

    def put(self, outcomes: Iterable[Outcome]) -> None:
        with self._lock:
            self._outcomes.extend(outcomes)
            was_woken, self._is_woken = self._is_woken, True
        if not was_woken:
            try:
                self._loop.call_soon_threadsafe(self._deliver)
            except RuntimeError:
                logger.warning("the event loop is closed; results of finished writes have no receiver")

    def _deliver(self) -> None:
        with self._lock:
            outcomes, self._outcomes = self._outcomes, deque()
            self._is_woken = False
        for future, result, error in outcomes:
            if future.done():
                continue
            if error is None:
                future.set_result(result)
            else:
                future.set_exception(error)


Queue: TypeAlias = "SimpleQueue[Task | None]"


class Reader(threading.Thread):
    """Runs reads from a queue that several readers may share; None ends it."""

    def __init__(self, connection: sqlite3.Connection, queue: Queue, outbox: Outbox, explain: Explain) -> None:
        super().__init__(name="tinsmith-store-reader", daemon=True)
        self._connection, self._queue, self._outbox, self._explain = connection, queue, outbox, explain

    def run(self) -> None:
        while (task := self._queue.get()) is not None:
            self._outbox.put([read(task, self._connection, self._explain)])
        self._connection.close()


def read(task: Task, connection: sqlite3.Connection, explain: Explain) -> Outcome:
    """The outcome of a read. What cannot be turned into rows is the caller's to see, too."""
    try:
        return task.future, task.run(connection), None
    except sqlite3.Error as error:
        return task.future, None, explain(error)
    except Exception as error:
        return task.future, None, error


class _HalfDoneError(Exception):
    """A statement of a caller failed behind others of the same caller."""


class Writer(threading.Thread):
    """Runs writes in the order of its queue, in groups; None ends it when all before that is done.

    A group runs without savepoints first. Only if a caller's later statement fails, it is rolled back and run again
    with one around each caller: every statement hands over Python's lock several times, so fewer are faster.
    """

    def __init__(self, connection: sqlite3.Connection, outbox: Outbox, explain: Explain) -> None:
        super().__init__(name="tinsmith-store-writer", daemon=True)
        self.queue: Queue = SimpleQueue()
        self.commits = 0
        self._connection, self._outbox, self._explain = connection, outbox, explain
        self._is_over = False
        self._is_failing = False

    def run(self) -> None:
        while not self._is_over:
            group = self._next_group()
            writes = [task for task in group if not task.is_read]
            outcomes = self._commit(writes) if writes else []
            outcomes += [read(task, self._connection, self._explain) for task in group if task.is_read]
            self._outbox.put(outcomes)
        self._connection.close()

    def _next_group(self) -> list[Task]:
        """Waits for one task and takes what is there behind it."""
        group: list[Task] = []
        size_bytes = 0
        try:
            task = self.queue.get()
            while task is not None:
                group.append(task)
                size_bytes += task.size_bytes
                if len(group) == MAX_GROUP or size_bytes >= MAX_GROUP_BYTES:
                    return group
                task = self.queue.get_nowait()
            self._is_over = True
        except Empty:
            pass
        return group

    def _commit(self, group: Sequence[Task], *, is_careful: bool = False) -> list[Outcome]:
        try:
            self._connection.execute("BEGIN IMMEDIATE")
            outcomes = [self._run(task, is_careful=is_careful) for task in group]
            self._connection.execute("COMMIT")
            self.commits += 1
            self._note(None)
            return outcomes
        except _HalfDoneError:
            self._roll_back()
            return self._commit(group, is_careful=True)
        except sqlite3.Error as error:
            self._roll_back()
            if len(group) > 1 and _code(error) == sqlite3.SQLITE_FULL:
                # One large write must not take the small ones with it: results should still find the room that is left.
                return [outcome for task in group for outcome in self._commit([task])]
            self._note(error)
            return [(task.future, None, self._explain(error)) for task in group]

    def _note(self, error: sqlite3.Error | None) -> None:
        """Say when commits begin to fail and when they succeed again, not each time."""
        if error is not None and not self._is_failing:
            logger.error("commits fail: %s", error, extra={"event": "store_failing"})
        elif error is None and self._is_failing:
            logger.warning("commits succeed again", extra={"event": "store_recovered"})
        self._is_failing = error is not None

    def _run(self, task: Task, *, is_careful: bool) -> Outcome:
        """One caller's statements. SQLite undoes a failed statement by itself; those before it need a savepoint."""
        is_saved = is_careful and len(task.statements) > 1
        if is_saved:
            self._connection.execute("SAVEPOINT caller")
        try:
            outcome: Outcome = task.future, task.run(self._connection), None
        except Exception as error:
            if isinstance(error, sqlite3.Error) and not self._is_of_the_caller(error):
                raise
            if len(task.statements) > 1 and not is_saved:
                raise _HalfDoneError from error
            if is_saved:
                self._connection.execute("ROLLBACK TO caller")
            outcome = task.future, None, self._explain(error) if isinstance(error, sqlite3.Error) else error
        if is_saved:
            self._connection.execute("RELEASE caller")
        return outcome

    def _is_of_the_caller(self, error: sqlite3.Error) -> bool:
        return self._connection.in_transaction and _code(error) not in _OF_THE_DATABASE

    def _roll_back(self) -> None:
        if self._connection.in_transaction:
            try:
                self._connection.execute("ROLLBACK")
            except sqlite3.Error:
                logger.exception("a rollback failed")


def _code(error: sqlite3.Error) -> int:
    """SQLite's primary code of an error; -1 where Python's own layer raised it."""
    return (getattr(error, "sqlite_errorcode", None) or -1) & 0xFF

"""SQLite connections that work for an event loop: one that writes, with a thread that commits, and threads that read.

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
from queue import SimpleQueue
from typing import Any, TypeAlias

import msgspec

from tinsmith.store.base import Row, make_row
from tinsmith.store.queries import Bound

logger = logging.getLogger(__name__)

MAX_GROUP = 1000
"""Writes in one commit."""
MAX_GROUP_BYTES = 32 * 2**20
"""Bytes of payload in one commit, so that a small write does not wait long behind large ones."""

CHECKPOINT_BYTES = 16 * 2**20
"""Bytes in the log before they are moved to the file, which is done when nobody waits for the commit any more."""
COMMIT_BYTES = 128 * 1024
"""What a commit of small rows writes, about."""

MAX_INLINE_BYTES = 256 * 1024
"""Bytes of payload that are written on the loop; copying more would make others wait."""

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
        self.loop = loop
        self._lock = threading.Lock()
        self._outcomes: deque[Outcome] = deque()
        self._calls: list[Callable[[], None]] = []
        self._is_woken = False

    def put(self, outcomes: Iterable[Outcome], then: Callable[[], None] | None = None) -> None:
        """Deliver, and then call something on the loop."""
        with self._lock:
            self._outcomes.extend(outcomes)
            if then is not None:
                self._calls.append(then)
            was_woken, self._is_woken = self._is_woken, True
        if not was_woken:
            try:
                self.loop.call_soon_threadsafe(self._deliver)
            except RuntimeError:
                logger.warning("the event loop is closed; results of finished writes have no receiver")

    def _deliver(self) -> None:
        with self._lock:
            outcomes, self._outcomes = self._outcomes, deque()
            calls, self._calls = self._calls, []
            self._is_woken = False
        for future, result, error in outcomes:
            if future.done():
                continue
            if error is None:
                future.set_result(result)
            else:
                future.set_exception(error)
        for call in calls:
            call()


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


class Writer:
    """Runs writes in the order in which they were put, in groups; what comes while one commits is the next.

    Small statements run on the loop, and a thread does the commit, which waits for the disk: each statement would hand
    over Python's lock, and a thread waits long for it while the loop is busy. A group that deletes, has
    much payload, or finds the database locked by another process, runs in the thread as a whole.

    A group runs without savepoints first. Only if a caller's later statement fails, it is rolled back and run again
    with one around each caller.
    """

    def __init__(
        self, connection: sqlite3.Connection, outbox: Outbox, explain: Explain, *, busy_timeout_s: float
    ) -> None:
        self.commits = 0
        self._connection, self._outbox, self._explain = connection, outbox, explain
        self._busy_timeout_s = busy_timeout_s
        connection.execute("PRAGMA busy_timeout = 0")
        self._waiting: deque[Task] = deque()
        self._is_at_work = False
        self._is_idle: asyncio.Event = asyncio.Event()
        self._groups: SimpleQueue[tuple[list[Task], list[Outcome] | None] | None] = SimpleQueue()
        self._thread = threading.Thread(target=self._run_groups, name="tinsmith-store-writer", daemon=True)
        self._is_failing = False
        self._log_bytes = 0
        """About what was written to the log since it was moved into the file."""

    def start(self) -> None:
        self._thread.start()

    def put(self, task: Task) -> None:
        """Queue a task. Called on the loop. A small one waits for others of the same turn, a large one begins."""
        self._waiting.append(task)
        if not self._is_at_work:
            self._is_at_work = True
            if task.size_bytes > MAX_INLINE_BYTES:
                self._next()
            else:
                self._outbox.loop.call_soon(self._next)

    async def close(self) -> None:
        """Finish what was put, then close the connection."""
        while self._is_at_work:
            self._is_idle.clear()
            await self._is_idle.wait()
        self._groups.put(None)
        await asyncio.to_thread(self._thread.join)

    def _next(self) -> None:
        """Begin the next group, if there is one."""
        group = self._next_group()
        if not group:
            self._is_at_work = False
            self._is_idle.set()
            return
        self._groups.put((group, self._begin(group)))

    def _next_group(self) -> list[Task]:
        group: list[Task] = []
        size_bytes = 0
        while self._waiting and len(group) < MAX_GROUP and size_bytes < MAX_GROUP_BYTES:
            group.append(self._waiting.popleft())
            size_bytes += group[-1].size_bytes
        return group

    def _begin(self, group: Sequence[Task]) -> list[Outcome] | None:
        """The outcomes of the group's statements, run here and not committed; None if the thread is to run them."""
        writes = [task for task in group if not task.is_read]
        if not writes or sum(task.size_bytes for task in writes) > MAX_INLINE_BYTES or any(map(_deletes, writes)):
            return None
        try:
            self._connection.execute("BEGIN IMMEDIATE")
            return [self._run(task, is_careful=False) for task in writes]
        except (_HalfDoneError, sqlite3.Error):
            self._roll_back()
            return None

    def _run_groups(self) -> None:
        while (item := self._groups.get()) is not None:
            group, begun = item
            writes = [task for task in group if not task.is_read]
            outcomes = self._commit(writes, begun) if writes else []
            outcomes += [read(task, self._connection, self._explain) for task in group if task.is_read]
            self._log_bytes += sum(task.size_bytes for task in writes) + COMMIT_BYTES
            if self._log_bytes < CHECKPOINT_BYTES:
                self._outbox.put(outcomes, self._next)
            else:
                self._outbox.put(outcomes)  # they need not wait for what comes now
                self._checkpoint()
                self._outbox.put([], self._next)
        self._connection.close()

    def _checkpoint(self) -> None:
        """Move the log into the file. What is committed is safe in either."""
        self._log_bytes = 0
        try:
            self._connection.execute("PRAGMA wal_checkpoint(PASSIVE)").fetchall()
        except sqlite3.Error as error:
            logger.warning("the log was not moved into the database: %s", error, extra={"event": "store_checkpoint"})

    def _commit(
        self, group: Sequence[Task], begun: list[Outcome] | None = None, *, is_careful: bool = False
    ) -> list[Outcome]:
        try:
            if begun is None:
                self._wait_for_lock()
                begun = [self._run(task, is_careful=is_careful) for task in group]
            self._connection.execute("COMMIT")
            self.commits += 1
            self._note(None)
            return begun
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

    def _wait_for_lock(self) -> None:
        """Begin, as soon as other processes let go of the database. Only here may it take time."""
        self._connection.execute(f"PRAGMA busy_timeout = {int(self._busy_timeout_s * 1000)}")
        try:
            self._connection.execute("BEGIN IMMEDIATE")
        finally:
            self._connection.execute("PRAGMA busy_timeout = 0")

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


def _deletes(task: Task) -> bool:
    """Whether it may touch many rows: pruning would make the loop wait."""
    return any(sql.startswith("DELETE") for sql, _ in task.statements)


def _code(error: sqlite3.Error) -> int:
    """SQLite's primary code of an error; -1 where Python's own layer raised it."""
    return (getattr(error, "sqlite_errorcode", None) or -1) & 0xFF

"""SQLite behind an event loop: one connection that writes, with a thread that commits, and threads that read.

A durable commit waits for the disk (fsync), which takes milliseconds however little is written. So the writer commits
in groups ("group commit"): while one commit waits for the disk, further writes queue up, and all of them share the next
commit. With one caller each write is a commit; with hundreds, hundreds of writes cost one fsync, and nobody waits for
more than two. A caller's future resolves only after the commit that contains its statements, so what `write` returned
for is durable.

Callers are independent although they share a transaction: if the statements of one fail, only that one gets the error.
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
from tinsmith.store.reserve import Reserve

logger = logging.getLogger(__name__)

MAX_GROUP = 1000
"""Most writes in one commit."""
MAX_GROUP_BYTES = 32 * 2**20
"""Most bytes of payload in one commit, so that a small write does not wait long for large ones."""

CHECKPOINT_BYTES = 16 * 2**20
"""Bytes in the write-ahead log before they are moved to the database file (a WAL checkpoint). The writer does that
after it has delivered a commit's results, so no caller waits for it."""
COMMIT_BYTES = 128 * 1024
"""About what a commit of small rows writes to the log."""

MAX_INLINE_BYTES = 256 * 1024
"""Most bytes of payload that are written on the loop; copying more would hold up others."""
MAX_INLINE_STATEMENTS = 2000
"""Most statements that run on the loop, a few milliseconds' worth."""

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
"""Errors of the database as a whole, not of the statement that met them."""

Outcome: TypeAlias = "tuple[asyncio.Future[Any], Any, BaseException | None]"
Explain: TypeAlias = Callable[[sqlite3.Error], Exception]


class Task(msgspec.Struct, frozen=True):
    """A caller's write or read, and the future it waits for; results in rows of `row_type`, else in a count."""

    statements: Sequence[tuple[str, Bound]]
    row_type: type[Row] | None
    future: asyncio.Future[Any]
    size_bytes: int = 0
    is_read: bool = False
    is_urgent: bool = False
    """Whether it must work on a full disk."""

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
    """Carries results from the threads to the loop, which is woken once for however many there are."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.loop = loop
        self._lock = threading.Lock()
        self._outcomes: deque[Outcome] = deque()
        self._calls: list[Callable[[], None]] = []
        self._is_woken = False

    def put(self, outcomes: Iterable[Outcome], then: Callable[[], None] | None = None) -> None:
        """Deliver outcomes on the loop, then call `then` there."""
        with self._lock:
            self._outcomes.extend(outcomes)
            if then is not None:
                self._calls.append(then)
            was_woken, self._is_woken = self._is_woken, True
        if not was_woken:
            try:
                self.loop.call_soon_threadsafe(self._deliver)
            except RuntimeError:
                logger.warning("the event loop is closed; results of finished writes cannot be delivered")

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
    """Runs reads from a queue that several readers share; None stops it."""

    def __init__(self, connection: sqlite3.Connection, queue: Queue, outbox: Outbox, explain: Explain) -> None:
        super().__init__(name="tinsmith-store-reader", daemon=True)
        self._connection, self._queue, self._outbox, self._explain = connection, queue, outbox, explain

    def run(self) -> None:
        while (task := self._queue.get()) is not None:
            self._outbox.put([read(task, self._connection, self._explain)])
        self._connection.close()


def read(task: Task, connection: sqlite3.Connection, explain: Explain) -> Outcome:
    """Run a read; an answer that cannot be converted to rows is the caller's error, too."""
    try:
        return task.future, task.run(connection), None
    except sqlite3.Error as error:
        return task.future, None, explain(error)
    except Exception as error:
        return task.future, None, error


class _HalfDoneError(Exception):
    """A statement failed after others of the same caller had run."""


class Writer:
    """Runs writes in the order in which they were queued, in groups; what arrives while one commits is the next.

    The trick: the statements of a group run on the loop, and only COMMIT, which waits for the disk, runs in the thread.
    Each call into SQLite releases Python's lock, and a thread waits long to get it back while the loop is busy; so a
    thread that ran a hundred small statements would wait a hundred times. A group that changes many rows, has a large
    payload, or finds the database locked by another process, runs in the thread as a whole.

    A group first runs without savepoints, which is cheaper. If a caller's second or later statement fails, the group
    is rolled back and run again with a savepoint around each caller.
    """

    def __init__(
        self,
        connection: sqlite3.Connection,
        outbox: Outbox,
        explain: Explain,
        *,
        busy_timeout_s: float,
        reserve: Reserve | None = None,
    ) -> None:
        self.commits = 0
        self._connection, self._outbox, self._explain = connection, outbox, explain
        self._busy_timeout_s = busy_timeout_s
        self._reserve = reserve
        connection.execute("PRAGMA busy_timeout = 0")
        self._waiting: deque[Task] = deque()
        self._is_at_work = False
        self._is_idle: asyncio.Event = asyncio.Event()
        self._groups: SimpleQueue[tuple[list[Task], list[Outcome] | None] | None] = SimpleQueue()
        self._thread = threading.Thread(target=self._run_groups, name="tinsmith-store-writer", daemon=True)
        self._is_failing = False
        self._log_bytes = 0
        """About what was written to the log since it was last moved to the file."""

    def start(self) -> None:
        self._thread.start()

    def put(self, task: Task) -> None:
        """Queue a task; called on the loop. A small one waits for others of the same loop turn, a large one starts."""
        self._waiting.append(task)
        if not self._is_at_work:
            self._is_at_work = True
            if task.size_bytes > MAX_INLINE_BYTES:
                self._next()
            else:
                self._outbox.loop.call_soon(self._next)

    async def close(self) -> None:
        """Finish what was queued, then close the connection."""
        while self._is_at_work:
            self._is_idle.clear()
            await self._is_idle.wait()
        self._groups.put(None)
        await asyncio.to_thread(self._thread.join)

    def _next(self) -> None:
        """Start the next group, if there is one."""
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
        """Run the group's statements without committing; None if the thread should run them."""
        writes = [task for task in group if not task.is_read]
        if not writes or _is_much(writes):
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
            if self._reserve is not None and self._reserve.is_due:
                self._reserve.fill()
            self._log_bytes += sum(task.size_bytes for task in writes) + COMMIT_BYTES
            if self._log_bytes < CHECKPOINT_BYTES:
                self._outbox.put(outcomes, self._next)
            else:
                self._outbox.put(outcomes)  # these callers need not wait for the WAL checkpoint
                self._checkpoint()
                self._outbox.put([], self._next)
        self._connection.close()
        if self._reserve is not None:
            self._reserve.close()

    def _checkpoint(self) -> bool:
        """Move the log to the database file; return whether all of it was. What is committed is safe in either."""
        self._log_bytes = 0
        try:
            [(busy, length, moved)] = self._connection.execute("PRAGMA wal_checkpoint(PASSIVE)").fetchall()
        except sqlite3.Error as error:
            logger.warning(
                "could not move the write-ahead log to the database: %s", error, extra={"event": "store_checkpoint"}
            )
            return False
        return not busy and length == moved

    def _commit(
        self, group: Sequence[Task], begun: list[Outcome] | None = None, *, is_careful: bool = False, tries: int = 0
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
            return self._commit(group, is_careful=True, tries=tries)
        except sqlite3.Error as error:
            self._roll_back()
            if len(group) > 1 and _code(error) == sqlite3.SQLITE_FULL:
                # One large write must not fail the small ones with it: results should still get the space that is left.
                return [outcome for task in group for outcome in self._commit([task])]
            if _code(error) == sqlite3.SQLITE_FULL and self._makes_room(group[0], tries):
                return self._commit(group, tries=tries + 1)
            self._note(error)
            return [(task.future, None, self._explain(error)) for task in group]

    def _makes_room(self, task: Task, tries: int) -> bool:
        """Whether to try again: once the log has been moved to the file its space is reused, and urgent writes may use
        the reserve."""
        if not tries and self._checkpoint():
            return True
        return task.is_urgent and self._reserve is not None and self._reserve.give_up()

    def _wait_for_lock(self) -> None:
        """Begin a transaction as soon as other processes release the database; only the thread may wait."""
        self._connection.execute(f"PRAGMA busy_timeout = {int(self._busy_timeout_s * 1000)}")
        try:
            self._connection.execute("BEGIN IMMEDIATE")
        finally:
            self._connection.execute("PRAGMA busy_timeout = 0")

    def _note(self, error: sqlite3.Error | None) -> None:
        """Log when commits begin to fail and when they succeed again, not each time."""
        if error is not None and not self._is_failing:
            logger.error("commits fail: %s", error, extra={"event": "store_failing"})
        elif error is None and self._is_failing:
            logger.warning("commits succeed again", extra={"event": "store_recovered"})
        self._is_failing = error is not None

    def _run(self, task: Task, *, is_careful: bool) -> Outcome:
        """Run one caller's statements. SQLite reverts a failed statement itself; those before it need a savepoint."""
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


def _is_much(writes: Sequence[Task]) -> bool:
    """Whether running these writes would hold up the loop."""
    return (
        sum(task.size_bytes for task in writes) > MAX_INLINE_BYTES
        or sum(len(task.statements) for task in writes) > MAX_INLINE_STATEMENTS
        or any(map(_touches_many, writes))
    )


def _touches_many(task: Task) -> bool:
    """Whether it may change many rows, which would hold up the loop; statements that update many are marked."""
    return any(sql.startswith(("DELETE", "/* many rows */")) for sql, _ in task.statements)


def _code(error: sqlite3.Error) -> int:
    """Return SQLite's primary error code; -1 if Python's own layer raised it."""
    return (getattr(error, "sqlite_errorcode", None) or -1) & 0xFF

"""One event loop in one thread, for one client: it runs every coroutine that the client submits."""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import contextvars
import os
import threading
from collections.abc import Callable, Coroutine
from typing import Any, TypeAlias, TypeVar

from tinsmith.client.runtime.deadlines import RUNNING, Limit
from tinsmith.client.runtime.futures import Future
from tinsmith.errors import TinkerError

T = TypeVar("T")


class Runner:
    """An event loop thread for callers in any thread. It starts with the first task and ends with `close`."""

    def __init__(self) -> None:
        self._lock = (
            threading.RLock()
        )  # reentrant: a client that is garbage-collected while the lock is held closes its runner
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None
        self._tasks: set[asyncio.Task[Any]] = set()
        self._open: dict[asyncio.Task[Any], Future[Any]] = {}
        self._submitted: list[_Submitted] = []
        self._context = contextvars.Context()
        """The context of background tasks, which serve many callers and inherit from none of them."""
        self._pid = os.getpid()
        self._is_closed = False
        self._last: asyncio.Task[Any] | None = None

    @property
    def is_closed(self) -> bool:
        return self._is_closed

    @property
    def is_inherited(self) -> bool:
        """Whether this is a forked child, in which the loop does not run."""
        return os.getpid() != self._pid

    def submit(
        self, coroutine: Coroutine[Any, Any, T], *, cancellable: bool = True, limit: Limit | None = None
    ) -> Future[T]:
        """Start a coroutine in the loop, in the caller's context; its future is safe to use from any thread or loop.
        At its limit the future fails, whatever the coroutine waits for then, and the coroutine is cancelled."""
        context = contextvars.copy_context()
        if limit is not None:
            context.run(RUNNING.set, limit)
        try:
            self._check_process()
            with self._lock:
                loop = self._running_loop()
                future: Future[T] = Future(self._thread, cancellable=cancellable)
                self._submitted.append((coroutine, future, context, limit))
                is_first = len(self._submitted) == 1
        except TinkerError:
            coroutine.close()
            raise
        if is_first:  # each wake-up of the loop is a system call; one serves everything submitted until the loop runs
            with contextlib.suppress(RuntimeError):  # closed since; `_end` has seen to what was submitted before
                loop.call_soon_threadsafe(self._start_submitted, context=self._context)
        return future

    def spawn(
        self, coroutine: Coroutine[Any, Any, Any], context: contextvars.Context | None = None
    ) -> asyncio.Task[Any]:
        """Start a background task from inside the loop; `close` cancels it."""
        task = asyncio.get_running_loop().create_task(coroutine, context=context)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    def close(self, last: Callable[[], Coroutine[Any, Any, Any]] | None = None, timeout_s: float = 0.8) -> None:
        """Accept nothing more, cancel what runs, run what `last` makes (it is called in the loop, before anything is
        cancelled), end the thread, and wait for that up to the timeout; from inside the loop nothing is waited for.
        Safe to call twice, and after a fork."""
        if self.is_inherited:
            self._is_closed = True
            return
        with self._lock:
            self._is_closed = True
            loop, thread = self._loop, self._thread
            self._loop = self._thread = None
        if loop is None or thread is None:
            return
        loop.call_soon_threadsafe(self._end, loop, last)
        if thread is not threading.current_thread():
            thread.join(timeout_s)

    def _check_process(self) -> None:
        """Raise in a forked child. Called before the lock is taken: the fork may have copied it in the locked state."""
        if self.is_inherited:
            raise TinkerError(
                "This client was created before the process forked, and its connections belong to the parent. "
                "Create a new client in the child process."
            )

    def _running_loop(self) -> asyncio.AbstractEventLoop:
        """Return the loop, starting it if needed. The caller holds the lock."""
        if self._is_closed:
            raise TinkerError("This client is closed. Create a new one.")
        if self._loop is None:
            self._loop = asyncio.new_event_loop()
            self._thread = threading.Thread(target=_run, args=(self._loop, self._tasks), name="tinsmith", daemon=True)
            self._thread.start()
        return self._loop

    def _start_submitted(self) -> None:
        with self._lock:
            submitted, self._submitted = self._submitted, []
        for one in submitted:
            self._start(*one)

    def _start(
        self, coroutine: Coroutine[Any, Any, T], future: Future[T], context: contextvars.Context, limit: Limit | None
    ) -> None:
        if future.cancelled():
            coroutine.close()
            return
        task = self.spawn(coroutine, context)
        self._open[task] = future
        loop = asyncio.get_running_loop()
        timer: asyncio.TimerHandle | None = None

        def expire(limit: Limit) -> None:
            with contextlib.suppress(concurrent.futures.InvalidStateError):
                future.set_exception(limit.error(goes_on=not future.is_cancellable))
            task.cancel()

        if limit is not None:
            timer = loop.call_later(limit.left_s, expire, limit)

        def finish(task: asyncio.Task[T]) -> None:
            del self._open[task]
            if timer is not None:
                timer.cancel()
            error = None if task.cancelled() else task.exception()
            if future.done():  # cancelled by its owner, past its deadline, or failed by `close`
                return
            with contextlib.suppress(concurrent.futures.InvalidStateError):  # cancelled by its owner just now
                if task.cancelled():
                    future.set_exception(_closed())
                elif error is not None:
                    future.set_exception(error)
                else:
                    future.set_result(task.result())

        def forward_cancel(future: Future[T]) -> None:
            if future.cancelled():
                loop.call_soon_threadsafe(task.cancel)

        task.add_done_callback(finish)
        future.add_done_callback(forward_cancel)  # type: ignore[arg-type]

    def _end(self, loop: asyncio.AbstractEventLoop, last: Callable[[], Coroutine[Any, Any, Any]] | None) -> None:
        """Fail the waiting futures first: that is quick, while cancelling thousands of tasks is not."""
        farewell = last() if last is not None else None
        self._start_submitted()  # so that what was submitted just before `close` fails as well
        for future in [future for task, future in self._open.items() if not task.done()]:
            with contextlib.suppress(concurrent.futures.InvalidStateError):
                future.set_exception(_closed())
        for task in list(self._tasks):
            task.cancel()
        if farewell is None:
            loop.call_soon(loop.stop)
            return
        self._last = loop.create_task(farewell)
        self._last.add_done_callback(lambda _: loop.stop())


_Submitted: TypeAlias = tuple[Coroutine[Any, Any, Any], Future[Any], contextvars.Context, Limit | None]


def _closed() -> TinkerError:
    return TinkerError("The client was closed before the operation finished.")


def _run(loop: asyncio.AbstractEventLoop, tasks: set[asyncio.Task[Any]]) -> None:
    asyncio.set_event_loop(loop)
    try:
        loop.run_forever()
    finally:
        pending = [task for task in tasks if not task.done()]
        for task in pending:
            task.cancel()
        if pending:
            loop.run_until_complete(asyncio.wait(pending, timeout=1.0))
        loop.run_until_complete(loop.shutdown_asyncgens())
        loop.close()

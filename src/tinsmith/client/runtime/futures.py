"""The one kind of future that every operation returns, and the adapters that make the `_async` and blocking twins."""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import functools
import logging
import sys
import threading
import time
import weakref
from collections.abc import Awaitable, Callable, Coroutine, Generator
from typing import Any, ClassVar, Concatenate, ParamSpec, TypeVar

from tinsmith.errors import TinkerError

logger = logging.getLogger(__name__)

INTERRUPTIBLE_S = 0.2
"""The longest wait on Windows during which Ctrl-C is not noticed."""

T = TypeVar("T")
S = TypeVar("S")
P = ParamSpec("P")


class Waker:
    """Wakes awaiting tasks of one loop from other threads, in batches: each wake-up of a loop is a system call."""

    _by_loop: ClassVar[weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, Waker]] = weakref.WeakKeyDictionary()

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = weakref.ref(loop)
        self._lock = threading.Lock()
        self._ready: list[asyncio.Future[None]] = []

    @classmethod
    def of(cls, loop: asyncio.AbstractEventLoop) -> Waker:
        """Return the waker of the running loop."""
        waker = cls._by_loop.get(loop)
        if waker is None:
            waker = cls._by_loop[loop] = cls(loop)
        return waker

    def wake(self, waiting: asyncio.Future[None]) -> None:
        with self._lock:
            self._ready.append(waiting)
            if len(self._ready) > 1:
                return
        loop = self._loop()
        if loop is not None:
            with contextlib.suppress(RuntimeError):  # the loop is closed, so nothing awaits there any more
                loop.call_soon_threadsafe(self._flush)

    def _flush(self) -> None:
        with self._lock:
            ready, self._ready = self._ready, []
        for waiting in ready:
            if not waiting.done():
                waiting.set_result(None)


class Future(concurrent.futures.Future[T]):
    """A future result. Wait for it with `result(timeout)` or await it; a timeout never cancels, `cancel()` does.

    Works with `asyncio.gather` and `concurrent.futures.wait`. An operation that changes a model keeps its place in the
    model's queue and cannot be cancelled once it has started: `cancel()` then returns False.
    """

    def __init__(self, runner_thread: threading.Thread | None = None, *, cancellable: bool = True) -> None:
        super().__init__()
        self._runner_thread = runner_thread
        self.is_cancellable = cancellable

    def result(self, timeout: float | None = None) -> T:
        """Wait for the result; raise TimeoutError after `timeout` seconds."""
        self._check_thread()
        return super().result(self._left_to_wait(timeout))

    def exception(self, timeout: float | None = None) -> BaseException | None:
        self._check_thread()
        return super().exception(self._left_to_wait(timeout))

    async def result_async(self, timeout: float | None = None) -> T:
        """Await the result; raise TimeoutError after `timeout` seconds, without cancelling the operation."""
        async with asyncio.timeout(timeout):
            return await asyncio.shield(asyncio.wrap_future(self))

    def cancel(self) -> bool:
        """Cancel the operation. Return False if it has finished, or changes a model and therefore runs to its end."""
        if not self.is_cancellable and not self.done():
            logger.info("not cancelled: an operation that changes a model cannot be taken out of the queue")
            return False
        with self._condition:
            if self.cancelled() or not super().cancel():
                return self.cancelled()
            self.set_running_or_notify_cancel()  # or `concurrent.futures.wait` would not see it
        return True

    def __await__(self) -> Generator[Any, None, T]:
        if not self.done():
            loop = asyncio.get_running_loop()
            waiting: asyncio.Future[None] = loop.create_future()
            waker = Waker.of(loop)
            self.add_done_callback(lambda _: waker.wake(waiting))
            try:
                yield from waiting
            except asyncio.CancelledError:
                if self.is_cancellable:
                    self.cancel()
                raise
        if self.cancelled():
            raise asyncio.CancelledError
        return super().result()

    def _left_to_wait(self, timeout: float | None) -> float | None:
        """Return the timeout. On Windows, wait first, in pieces: Python notices Ctrl-C there only between them."""
        if sys.platform == "win32":
            end = time.monotonic() + (timeout if timeout is not None else threading.TIMEOUT_MAX)
            while not self.done() and (left_s := end - time.monotonic()) > 0:
                concurrent.futures.wait([self], min(left_s, INTERRUPTIBLE_S))
            timeout = 0.0
        return timeout

    def _check_thread(self) -> None:
        if self._runner_thread is threading.current_thread() and not self.done():
            raise TinkerError(
                "result() would block forever: this is the client's own thread. Await the future instead."
            )


def awaited(method: Callable[Concatenate[S, P], Awaitable[T]]) -> Callable[Concatenate[S, P], Coroutine[Any, Any, T]]:
    """Return the twin of a method that is awaited for the value."""

    @functools.wraps(method)
    async def twin(self: S, /, *args: P.args, **kwargs: P.kwargs) -> T:
        return await method(self, *args, **kwargs)

    return twin


def submitted(
    method: Callable[Concatenate[S, P], Future[T]],
) -> Callable[Concatenate[S, P], Coroutine[Any, Any, Future[T]]]:
    """Return the twin of a method that is awaited for the future, which is then awaited for the value."""

    @functools.wraps(method)
    async def twin(self: S, /, *args: P.args, **kwargs: P.kwargs) -> Future[T]:
        return method(self, *args, **kwargs)

    return twin


def blocking(method: Callable[Concatenate[S, P], Future[T]]) -> Callable[Concatenate[S, P], T]:
    """Return the twin of a method that blocks until it has the value."""

    @functools.wraps(method)
    def twin(self: S, /, *args: P.args, **kwargs: P.kwargs) -> T:
        return method(self, *args, **kwargs).result()

    return twin

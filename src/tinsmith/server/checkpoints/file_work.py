"""Threads for work on files that takes time in proportion to their size: hashing, checking, writing.

They are separate from the default threads, so that loads, traces and tokenizers never wait for them. Each organisation
has one piece of work at a time: it holds at most one thread, and never works on the same files twice at once. When the
server stops, the work stops between two blocks of a file.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Concatenate, ParamSpec, TypeVar
from weakref import WeakValueDictionary

from tinsmith.server.refusals import NotReadyError

THREADS = 4

ResultT = TypeVar("ResultT")
P = ParamSpec("P")


class FileWork:
    """A few threads, and whose turn it is."""

    def __init__(self, threads: int = THREADS) -> None:
        self._threads = ThreadPoolExecutor(threads, "tinsmith-files")
        self._turns: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()
        self._is_ending = threading.Event()

    async def run(
        self,
        org_id: str,
        function: Callable[Concatenate[Callable[[], None], P], ResultT],
        *args: P.args,
        **kwargs: P.kwargs,
    ) -> ResultT:
        """Call a function in a thread; it calls its first argument now and then, which raises when the server stops."""
        turn = self._turns.setdefault(org_id, asyncio.Lock())
        await turn.acquire()
        try:
            self._check()
            work = self._threads.submit(lambda: self._begin(function, *args, **kwargs))
        except BaseException:
            turn.release()
            raise
        loop = asyncio.get_running_loop()

        def over(_: Future[ResultT]) -> None:  # not earlier: a cancelled caller does not stop the thread
            with contextlib.suppress(RuntimeError):
                loop.call_soon_threadsafe(turn.release)

        work.add_done_callback(over)
        return await asyncio.wrap_future(work)

    def close(self) -> None:
        """Stop running work at its next block, and waiting work before it begins."""
        self._is_ending.set()
        self._threads.shutdown(wait=False)

    def _begin(
        self, function: Callable[Concatenate[Callable[[], None], P], ResultT], *args: P.args, **kwargs: P.kwargs
    ) -> ResultT:
        self._check()
        return function(self._check, *args, **kwargs)

    def _check(self) -> None:
        if self._is_ending.is_set():
            raise NotReadyError("the server is shutting down; retry after its restart")

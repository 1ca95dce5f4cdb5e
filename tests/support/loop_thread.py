"""An event loop in a thread of its own, for servers that tests talk to over real sockets."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

T = TypeVar("T")

CONTROL_TIMEOUT_S = 10.0
"""How long a control call from the test's thread may take before something is wrong."""
ACCEPTING_ROUNDS = 10
"""Rounds of the loop that asyncio may take from accepting a connection to telling its protocol."""


class LoopThread:
    """Runs one loop until `close`; the other methods are for other threads."""

    def __init__(self, name: str) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name=name, daemon=True)
        self._thread.start()

    def run(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """The result of a coroutine that runs on the loop."""
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop).result(CONTROL_TIMEOUT_S)

    def call(self, function: Callable[..., T], *args: Any) -> T:
        """The result of a plain function that is called on the loop."""

        async def called() -> T:
            return function(*args)

        return self.run(called())

    def close(self) -> None:
        """Cancel what is left, stop the loop, join the thread."""
        self.run(_cancel_all())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(CONTROL_TIMEOUT_S)
        self._loop.close()


async def _cancel_all() -> None:
    current = asyncio.current_task()
    tasks = [task for task in asyncio.all_tasks() if task is not current]
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    await asyncio.get_running_loop().shutdown_asyncgens()


async def stop_accepting(listener: asyncio.Server) -> None:
    """Close a port without losing a connection that has just been accepted.

    If `listener.close()` comes between asyncio's accepting a connection and making its transport, making it fails in
    silence, and the connection stays open, unknown to its protocol and to the server. So: accept no more, let asyncio
    finish those it has accepted, then close.
    """
    for port in listener.sockets:
        asyncio.get_running_loop().remove_reader(port)
    for _ in range(ACCEPTING_ROUNDS):
        await asyncio.sleep(0)
    listener.close()

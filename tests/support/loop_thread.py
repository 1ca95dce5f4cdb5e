"""An event loop in a thread of its own, for servers that tests talk to over real sockets."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

T = TypeVar("T")

CONTROL_TIMEOUT_S = 10.0
"""How long a control call from the test's thread may take before something is wrong."""


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

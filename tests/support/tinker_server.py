"""A complete Tinker server for tests of clients: in memory, deterministic, scriptable, and watched.

It computes no model; its numbers follow from their inputs by the formulas in `server_arithmetic`. It runs in a thread
of its own, on a real port of the loopback interface:

    with TinkerServer(vintage="0.36", flags={"proto_compress_fwdbwd": True}) as server:
        server.script("optim_step", [Status(503, {"retry-after-ms": "1"}), Drop()])
        client = Client(base_url=server.url, api_key=server.key)
        ...
        assert server.violations == []
        assert len(server.find("optim_step")) == 3
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Literal, Self, TypeVar

from support import (
    server_futures,
    server_runs,
    server_sampling,
    server_service,
    server_sessions,
    server_training,
    server_weights,
)
from support.loop_thread import LoopThread, stop_accepting
from support.server_answers import (
    Delay,
    Drop,
    DropMidBody,
    Hold,
    Pass,
    Redirect,
    Replace,
    Script,
    Scripted,
    SlowBytes,
    Status,
)
from support.server_core import Core, Handler, Settings
from support.server_http import CountingServer, HttpShell
from support.server_recording import WAIT_TIMEOUT_S, Recorded, Recorder
from support.server_state import Failure, State
from support.server_vintages import VINTAGES

__all__ = [
    "Delay",
    "Drop",
    "DropMidBody",
    "Hold",
    "Pass",
    "Recorded",
    "Redirect",
    "Replace",
    "SlowBytes",
    "Status",
    "TinkerServer",
]

T = TypeVar("T")

HANDLERS: Mapping[str, Handler] = {
    **server_service.HANDLERS,
    **server_sessions.HANDLERS,
    **server_training.HANDLERS,
    **server_weights.HANDLERS,
    **server_sampling.HANDLERS,
    **server_futures.HANDLERS,
    **server_runs.HANDLERS,
}
KEY = "tml-test-key"
FOREIGN_KEY = "tml-foreign-key"


class TinkerServer:
    """See the module's docstring; `settings` holds everything that can be changed while it runs."""

    def __init__(
        self,
        *,
        vintage: str = "0.36",
        flags: Mapping[str, Any] | None = None,
        dynamic_flags: Mapping[str, Any] | None = None,
        prefix: str = "",
        keepalive_s: float = 75.0,
    ) -> None:
        self.key = KEY
        self.foreign_key = FOREIGN_KEY
        self._core = Core(VINTAGES[vintage], KEY, FOREIGN_KEY, HANDLERS)
        self._core.settings.flags.update(flags or {})
        self._core.settings.dynamic_flags.update(dynamic_flags or {})
        self._recorder = Recorder()
        self._script = Script()
        self._shell = HttpShell(self._core, self._recorder, self._script, prefix)
        self._prefix = prefix
        self._keepalive_s = keepalive_s
        self._thread: LoopThread | None = None
        self._listener: asyncio.Server | None = None
        self._port = 0
        self._peak = 0

    # Life

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def start(self) -> None:
        """Listen; after `stop` on the same port as before."""
        if self._thread is None:
            self._thread = LoopThread("tinker-server")
        self._thread.run(self._listen())

    def stop(self) -> None:
        """Close the port and every connection; nothing is forgotten."""
        if self._thread is not None:
            self._thread.run(self._close_port())

    def restart(self, *, forget_promises: bool = False) -> None:
        """Stop and start; with `forget_promises` every promise made so far is lost (410)."""
        self.stop()
        if forget_promises:
            self._on_loop(self._forget_promises)
        self.start()

    def close(self) -> None:
        """Stop for good."""
        if self._thread is not None:
            self.stop()
            self._thread.close()
            self._thread = None

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._port}{self._prefix}"

    # What happened

    @property
    def requests(self) -> list[Recorded]:
        return self._recorder.all()

    def find(self, path: str) -> list[Recorded]:
        """Requests for a path (a regular expression, `/api/v1/` may be left out)."""
        return self._recorder.find(path)

    def wait_for(self, path: str, count: int = 1, timeout_s: float = WAIT_TIMEOUT_S) -> list[Recorded]:
        """Wait until so many requests for a path have arrived."""
        return self._recorder.wait_for(path, count, timeout_s)

    def clear_requests(self) -> None:
        self._recorder.clear()

    @property
    def state(self) -> State:
        """What the server remembers. Read it; the server's own thread writes it."""
        return self._core.state

    @property
    def violations(self) -> list[str]:
        """Where a client broke the protocol."""
        return list(self.state.violations)

    @property
    def executed(self) -> list[tuple[str, int | None, str]]:
        """(model id, seq_id, route name) of every training job, in the order they ran."""
        return list(self.state.executed)

    @property
    def stuck(self) -> dict[str, list[int]]:
        """Per model the numbers of jobs that still wait for a lower one."""
        return self._on_loop(self.state.stuck)

    @property
    def open_connections(self) -> int:
        return len(self._shell.server.open) if self._shell.server is not None else 0

    @property
    def max_connections(self) -> int:
        """The most connections that were open at once."""
        return max(self._peak, self._shell.server.peak if self._shell.server is not None else 0)

    # What is to happen

    @property
    def settings(self) -> Settings:
        return self._core.settings

    def script(self, path: str, answers: Iterable[Scripted]) -> None:
        """Answers for the next requests of a path (a regular expression), in order; then normal behaviour again."""
        self._script.add(path, answers)

    def clear_script(self) -> None:
        """Forget all scripted answers: normal behaviour from now on."""
        self._script.clear()

    def script_left(self, path: str) -> int:
        return self._script.left(path)

    def release(self) -> None:
        """Let everything go that has arrived and is held, or will be."""
        self._on_loop(self._core.release)

    def pending_first(
        self,
        polls: int,
        *,
        form: Literal["408", "try_again"] = "408",
        queue_state: str = "active",
        reason: str | None = None,
    ) -> None:
        """The first polls of each promise are told, at once, to try again."""
        settings = self.settings
        settings.pending_form, settings.queue_state, settings.queue_state_reason = form, queue_state, reason
        settings.pending_polls = polls

    def lose_promises(self, count: int) -> None:
        """The next polls lose their promise: 410, until the same request is submitted again."""
        self.settings.lose_next = count

    def fail_next(self, route_name: str, error: str, category: str = "user") -> None:
        """The next operation of a route is accepted and fails."""
        self.state.failures.append((route_name, Failure(error, category)))

    def pause_work(self) -> None:
        """Accept operations without running them, so that polls wait."""
        self.state.is_paused = True

    def resume_work(self) -> None:
        self._on_loop(self._resume)

    def end_session(self, session_id: str) -> None:
        """From now on the session's heartbeats are answered 410."""
        self.state.sessions[session_id].is_gone = True

    # On the server's own loop

    def _on_loop(self, function: Callable[[], T]) -> T:
        assert self._thread is not None, "the server is not running"
        return self._thread.call(function)

    def _resume(self) -> None:
        self.state.is_paused = False
        self.state.start()

    def _forget_promises(self) -> None:
        for promise in self.state.promises.values():
            promise.is_lost = True

    async def _listen(self) -> None:
        server = CountingServer(self._shell.handle, self._keepalive_s)
        listener = socket.create_server(("127.0.0.1", self._port), backlog=4096)
        self._port = listener.getsockname()[1]
        self._core.url = self.url
        self._shell.server = server
        self._listener = await asyncio.get_running_loop().create_server(server, sock=listener, backlog=4096)

    async def _close_port(self) -> None:
        server, listener = self._shell.server, self._listener
        if server is None or listener is None:
            return
        self._peak = max(self._peak, server.peak)
        await stop_accepting(listener)
        while server.open or server.connections:
            server.abort_all()
            await asyncio.sleep(0)
        await listener.wait_closed()
        self._shell.server = self._listener = None

"""One run of an engine process, as seen by the API process: start it, exchange frames with it, find out how it ended.

It never blocks the event loop: frames that the pipe does not accept wait here. The engine process dies with this one
(see `worker/main`). Jobs and restarts are up to `supervisor`.
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import socket
import sys
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import cast

import msgspec

from tinsmith.engine import ipc
from tinsmith.engine.backend.suspects import Cause
from tinsmith.engine.ipc import EngineSpec, Frame, FrameCutter, FromEngine

logger = logging.getLogger(__name__)

KEPT_LINES = 20
"""Last lines of the process's stderr, kept to explain how it ended."""
MAX_LINE = 2000
TERMINATE_S = 2.0
"""Seconds between SIGTERM and SIGKILL."""
EXIT_S = 5.0
"""Seconds from the end of its pipe to the end of the process."""
SOCKET_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class Ending:
    """How a process ended: a sentence, and the cause."""

    reason: str
    cause: Cause


class Child(asyncio.Protocol):
    """A running engine process. It calls `on_frame` for each frame; `ended` resolves when the process has ended."""

    def __init__(self, spec: EngineSpec, on_frame: Callable[[FromEngine], None]) -> None:
        self._spec = spec
        self._on_frame = on_frame
        self._cutter = FrameCutter()
        self._waiting: deque[Frame] = deque()
        self._is_paused = False
        self._lines: deque[str] = deque(maxlen=KEPT_LINES)
        self._pipe_ended = asyncio.Event()
        self._process: asyncio.subprocess.Process | None = None
        self._is_doomed = False
        self._duplicate: socket.socket | None = None
        """A duplicate of the pipe, to read what the transport leaves in it."""
        self._watcher: asyncio.Task[None] | None = None
        self._oom_kills = oom_kills()
        self.ended: asyncio.Future[Ending] = asyncio.get_running_loop().create_future()

    async def start(self) -> None:
        ours, theirs = socket.socketpair()
        try:
            for end in (ours, theirs):
                end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SOCKET_BYTES)
            self._process = await asyncio.create_subprocess_exec(
                *self._command(theirs.fileno()),
                stdin=asyncio.subprocess.DEVNULL,
                stdout=asyncio.subprocess.DEVNULL,
                stderr=asyncio.subprocess.PIPE,
                pass_fds=(theirs.fileno(),),
                env={**os.environ, **self._spec.environment},
            )
        except BaseException:
            ours.close()
            raise
        finally:
            theirs.close()
        loop = asyncio.get_running_loop()
        self._duplicate = ours.dup()
        self._transport, _ = await loop.create_unix_connection(lambda: self, sock=ours)
        self._watcher = loop.create_task(self._watch(self._process), name=f"engine {self.pid}")
        if self._is_doomed:
            self._signal(signal.SIGKILL)

    def _command(self, descriptor: int) -> list[str]:
        options = msgspec.json.encode(dict(self._spec.options)).decode()
        arguments = ["--fd", str(descriptor), "--parent", str(os.getpid()), "--executor", self._spec.executor]
        arguments += ["--options", options, "--quantum-s", str(self._spec.quantum_s)]
        return [sys.executable, "-m", "tinsmith.engine.worker.main", *arguments]

    @property
    def pid(self) -> int | None:
        return None if self._process is None else self._process.pid

    def send(self, frame: Frame) -> None:
        """Send a frame, or queue it while the pipe is full."""
        if self._is_paused or self._waiting:
            self._waiting.append(frame)
        elif not self._pipe_ended.is_set():
            self._transport.writelines(ipc.encode(frame))

    def interrupt(self) -> None:
        """Kill the process at once, even while it is starting; `ended` resolves afterwards."""
        self._is_doomed = True
        self._signal(signal.SIGKILL)

    async def stop(self, grace_s: float) -> None:
        """Let the process finish its running jobs, then stop it; return when it is gone."""
        self.send(ipc.Stop())
        for number, patience_s in ((signal.SIGTERM, grace_s), (signal.SIGKILL, TERMINATE_S)):
            await asyncio.wait([self.ended], timeout=patience_s)
            if self.ended.done():
                break
            self._signal(number)
        await self.ended
        if self._watcher is not None:
            await self._watcher

    def _signal(self, number: signal.Signals) -> None:
        if self._process is not None:
            with suppress(ProcessLookupError):
                self._process.send_signal(number)

    # asyncio.Protocol

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        self._transport.set_write_buffer_limits(high=4 * SOCKET_BYTES)

    def data_received(self, data: bytes) -> None:
        for content in self._cutter.feed(data):
            self._on_frame(ipc.decode_from_engine(content))

    def pause_writing(self) -> None:
        self._is_paused = True

    def resume_writing(self) -> None:
        self._is_paused = False
        while self._waiting and not self._is_paused:
            self._transport.writelines(ipc.encode(self._waiting.popleft()))

    def connection_lost(self, error: Exception | None) -> None:
        self._waiting.clear()
        if error is not None:
            self._read_rest()
        self._pipe_ended.set()

    def _read_rest(self) -> None:
        """Read what the process sent before a write to it failed.

        The transport stops reading after a failed write, but we must know which jobs had started.
        """
        if self._duplicate is None:
            return
        with suppress(OSError):
            while data := self._duplicate.recv(SOCKET_BYTES, socket.MSG_DONTWAIT):
                self.data_received(data)

    # the end

    async def _watch(self, process: asyncio.subprocess.Process) -> None:
        """Wait for the end of the process, and set the reason once everything that it sent has been read."""
        said = asyncio.create_task(self._read_stderr(process))
        exited = asyncio.create_task(process.wait())
        silent = asyncio.create_task(self._pipe_ended.wait())
        await asyncio.wait([exited, silent], return_when=asyncio.FIRST_COMPLETED)
        await asyncio.wait([exited], timeout=EXIT_S)
        is_stuck = not exited.done()
        self._signal(signal.SIGKILL)
        code = await exited
        _, late = await asyncio.wait([said, silent], timeout=EXIT_S)
        for task in late:  # a child process that it left behind keeps the pipes open
            task.cancel()
        self._transport.abort()
        if self._duplicate is not None:
            self._duplicate.close()
        cause: Cause = "crash" if is_stuck else end_cause(code, self._oom_kills)
        self.ended.set_result(Ending(end_reason(code, list(self._lines)), cause))

    async def _read_stderr(self, process: asyncio.subprocess.Process) -> None:
        assert process.stderr is not None
        rest = b""
        while data := await process.stderr.read(1 << 16):
            *lines, rest = (rest + data).split(b"\n")
            for line in lines:
                self._keep(line)
            rest = rest[-MAX_LINE:]
        self._keep(rest)

    def _keep(self, line: bytes) -> None:
        text = line.decode(errors="replace").rstrip()[-MAX_LINE:]
        if text:
            self._lines.append(text)
            logger.info("engine of %s: %s", self._spec.card.name, text, extra={"event": "engine_output"})


HINTS = {
    signal.SIGKILL: ", often because the machine ran out of memory",
    signal.SIGILL: ": this processor does not support an instruction; exclude it with ONEDNN_MAX_CPU_ISA",
}


def end_reason(code: int, lines: list[str]) -> str:
    """Return why a process ended, from its exit code and the end of its stderr."""
    if code < 0:
        try:
            number = signal.Signals(-code)
            reason = f"killed by {number.name}{HINTS.get(number, '')}"
        except ValueError:
            reason = f"killed by signal {-code}"
    else:
        reason = f"exited with code {code}"
    return f"{reason}; last output: {' | '.join(lines[-5:])}" if lines else reason


FROM_OUTSIDE = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)
"""Signals, besides SIGKILL, that others send to a process."""


def oom_kills() -> int | None:
    """Return how many processes the kernel has killed because memory ran out; None if unknown."""
    try:
        lines = Path("/proc/vmstat").read_text().splitlines()
    except OSError:
        return None
    return next((int(line.split()[1]) for line in lines if line.startswith("oom_kill ")), None)


def end_cause(code: int, oom_kills_before: int | None) -> Cause:
    """Return the cause of an exit. SIGKILL is blamed on memory if the kernel's count of such kills has increased."""
    if code == -signal.SIGKILL:
        return "memory" if oom_kills_before is None or (oom_kills() or 0) > oom_kills_before else "killed"
    return "killed" if -code in FROM_OUTSIDE else "crash"

"""One run of an engine process, seen from the API process: start it, talk to it, say how it ended.

Never blocks the event loop: what the pipe does not take waits here. The process dies with this one (see `worker`).
Does not know: jobs, restarts.
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import socket
import sys
from collections import deque
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, cast

import msgspec

from tinsmith.engine import frames
from tinsmith.engine.base import ModelCard
from tinsmith.engine.frames import Frame, FrameCutter, FromEngine

logger = logging.getLogger(__name__)

KEPT_LINES = 20
"""Lines of the process' stderr that are kept for the reason of its end."""
MAX_LINE = 2000
TERMINATE_S = 2.0
"""From SIGTERM to SIGKILL."""
EXIT_S = 5.0
"""From the end of its pipe to the end of the process."""
SOCKET_BYTES = 1 << 20


@dataclass(frozen=True, kw_only=True)
class EngineSpec:
    """How to start the engine of one base model."""

    card: ModelCard
    executor: str
    """`module:function`, the factory of what computes (see `executor`)."""
    options: Mapping[str, Any] = field(default_factory=dict)
    """What the factory is given; values that msgpack has."""
    environment: Mapping[str, str] = field(default_factory=dict)
    """Variables that the process has beside the inherited ones."""


class Child(asyncio.Protocol):
    """A running engine process. Frames arrive by `on_frame`; `ended` resolves to the reason of its end."""

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
        self._ear: socket.socket | None = None
        """The pipe once more, for what the transport leaves in it."""
        self._watcher: asyncio.Task[None] | None = None
        self.ended: asyncio.Future[str] = asyncio.get_running_loop().create_future()

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
        self._ear = ours.dup()
        self._transport, _ = await loop.create_unix_connection(lambda: self, sock=ours)
        self._watcher = loop.create_task(self._watch(self._process), name=f"engine {self.pid}")
        if self._is_doomed:
            self._signal(signal.SIGKILL)

    def _command(self, descriptor: int) -> list[str]:
        options = msgspec.json.encode(dict(self._spec.options)).decode()
        arguments = ["--fd", str(descriptor), "--parent", str(os.getpid()), "--executor", self._spec.executor]
        return [sys.executable, "-m", "tinsmith.engine.worker", *arguments, "--options", options]

    @property
    def pid(self) -> int | None:
        return None if self._process is None else self._process.pid

    def send(self, frame: Frame) -> None:
        """Hand over a frame; it waits here while the pipe is full."""
        if self._is_paused or self._waiting:
            self._waiting.append(frame)
        elif not self._pipe_ended.is_set():
            self._transport.writelines(frames.encode(frame))

    def interrupt(self) -> None:
        """End the process at once, also while it is being started; `ended` follows."""
        self._is_doomed = True
        self._signal(signal.SIGKILL)

    async def stop(self, grace_s: float) -> None:
        """Let it finish what has begun, then make it end; returns when it is gone."""
        self.send(frames.Stop())
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
            self._on_frame(frames.decode_from_engine(content))

    def pause_writing(self) -> None:
        self._is_paused = True

    def resume_writing(self) -> None:
        self._is_paused = False
        while self._waiting and not self._is_paused:
            self._transport.writelines(frames.encode(self._waiting.popleft()))

    def connection_lost(self, error: Exception | None) -> None:
        self._waiting.clear()
        if error is not None:
            self._hear_rest()
        self._pipe_ended.set()

    def _hear_rest(self) -> None:
        """What the process said before a write to it failed: the transport reads no further then, but which jobs had
        begun must be known."""
        if self._ear is None:
            return
        with suppress(OSError):
            while data := self._ear.recv(SOCKET_BYTES, socket.MSG_DONTWAIT):
                self.data_received(data)

    # the end

    async def _watch(self, process: asyncio.subprocess.Process) -> None:
        """Follow the process to its end and say why it ended, once everything that it said has been heard."""
        said = asyncio.create_task(self._read_stderr(process))
        exited = asyncio.create_task(process.wait())
        silent = asyncio.create_task(self._pipe_ended.wait())
        await asyncio.wait([exited, silent], return_when=asyncio.FIRST_COMPLETED)
        await asyncio.wait([exited], timeout=EXIT_S)
        self._signal(signal.SIGKILL)
        code = await exited
        _, late = await asyncio.wait([said, silent], timeout=EXIT_S)
        for task in late:  # a process of its own that it left behind holds the other ends
            task.cancel()
        self._transport.abort()
        if self._ear is not None:
            self._ear.close()
        self.ended.set_result(end_reason(code, list(self._lines)))

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
    signal.SIGKILL: ", often because memory ran out",
    signal.SIGILL: ": an instruction that this processor does not have; ONEDNN_MAX_CPU_ISA can forbid it",
}


def end_reason(code: int, lines: list[str]) -> str:
    """Why a process ended, from its exit code and the end of its stderr."""
    if code < 0:
        try:
            number = signal.Signals(-code)
            reason = f"killed by {number.name}{HINTS.get(number, '')}"
        except ValueError:
            reason = f"killed by signal {-code}"
    else:
        reason = f"exited with code {code}"
    return f"{reason}; its last words: {' | '.join(lines[-5:])}" if lines else reason

"""Large bodies are decoded in other processes: decoding holds Python's lock, and would stop the event loop.

There are a few processes, started when the first large body arrives. Organisations take turns, and each has at most one
process decoding for it, so that one that sends many only delays itself. Small bodies are decoded on the loop, which
takes less time than asking a process, unless they hold a grammar or text to tokenize; of those, a turn has several.
docs/decisions/0024-body-readers.md has the reasons and the numbers.

The loop itself reads and writes the pipes. A thread would have to compete with it for Python's lock, and a busy loop
gives that away once in five milliseconds: 32 streams that begin together cost twice as much CPU that way.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import subprocess
import sys
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import msgspec

from tinsmith.errors import LimitExceededError
from tinsmith.server.bodies.questions import Fault, Question, ReaderFailure, Reading
from tinsmith.server.bodies.read import NeedsProcessError, read
from tinsmith.server.bodies.reader_process import HEAD

logger = logging.getLogger(__name__)

INLINE_BYTES = 32 * 1024
"""Bodies up to this size are decoded on the loop, which takes a few milliseconds at worst."""
TURN_BODIES = 8
"""Bodies that a process decodes for one organisation before the next one's turn, if all of them together are small."""
COUNT = 2
PIPE_BYTES = 1024 * 1024
READ_S = 60.0
"""A body that takes longer to decode is refused, and the process is replaced."""

Reply: TypeAlias = Reading | Fault | ReaderFailure

_questions = msgspec.msgpack.Encoder()
_answers = msgspec.msgpack.Decoder(Reading | Fault | ReaderFailure)


class BodyReaderError(Exception):
    """A reader process met an exception that it did not expect. The body is not to blame, and the client gets a 500."""


@dataclass(frozen=True, slots=True, eq=False)
class Asked:
    """A body, what is asked about it, and who waits for the answer."""

    question: bytes
    body: bytes
    answer: asyncio.Future[Reply]

    @property
    def size_bytes(self) -> int:
        return len(self.question) + len(self.body)

    def reply(self, reply: Reply) -> None:
        if not self.answer.done():  # its client may have left
            self.answer.set_result(reply)


class BodyReader:
    """One process; used by one task at a time."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None

    async def serve(self, turn: Sequence[Asked]) -> None:
        """Answer all. If the process dies, it is replaced, and what it had not answered is tried once more, each body
        by itself: the process may have been killed for another reason, and only one body can be the reason."""
        if await self._try(turn):
            return
        for asked in turn:
            if not asked.answer.done() and not await self._try([asked]):
                asked.reply(_TOO_MUCH)

    async def _try(self, turn: Sequence[Asked]) -> bool:
        try:
            await self._exchange(turn)
        except (OSError, EOFError) as error:
            await asyncio.to_thread(self.stop)
            logger.warning("a process that decodes bodies died (%s)", type(error).__name__, extra={"event": "reader"})
            if isinstance(error, TimeoutError):
                next(asked for asked in turn if not asked.answer.done()).reply(_TOO_MUCH)
            return False
        return True

    async def _exchange(self, turn: Sequence[Asked]) -> None:
        process = self._process if self._process is not None else await asyncio.to_thread(self._start)
        assert process.stdin is not None
        assert process.stdout is not None
        into, out = process.stdin.fileno(), process.stdout.fileno()
        unsent = _send_now(into, _framed(turn))
        sending = asyncio.ensure_future(_send(into, unsent)) if unsent else None
        try:
            received = bytearray()
            for asked in turn:
                async with asyncio.timeout(READ_S):
                    reply, received = await _receive(out, received)
                asked.reply(_answers.decode(reply))
        finally:
            if sending is not None:
                sending.cancel()
                await asyncio.gather(sending, return_exceptions=True)

    def _start(self) -> subprocess.Popen[bytes]:
        process = subprocess.Popen(
            [sys.executable, "-m", "tinsmith.server.bodies.reader_process"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            bufsize=0,
        )
        for pipe in (process.stdin, process.stdout):
            assert pipe is not None
            os.set_blocking(pipe.fileno(), False)
            _widen(pipe.fileno())
        self._process = process
        return process

    def stop(self) -> None:
        process, self._process = self._process, None
        if process is not None:
            process.kill()
            process.wait()
            for pipe in (process.stdin, process.stdout):
                if pipe is not None:
                    pipe.close()


_TOO_MUCH = Fault.of(
    LimitExceededError("body: decoding it takes too much time or memory; send less in one request", field="body")
)


def _framed(turn: Sequence[Asked]) -> list[bytes]:
    """Return the bytes to send: one string if they are few, or the body by itself, which saves a copy."""
    parts = [
        part
        for asked in turn
        for part in (HEAD.pack(len(asked.question), len(asked.body)) + asked.question, asked.body)
    ]
    return [b"".join(parts)] if sum(map(len, parts)) <= 2 * INLINE_BYTES else parts


def _send_now(descriptor: int, parts: Sequence[bytes]) -> list[memoryview]:
    """Write what the pipe takes at once; return the rest."""
    left = deque(memoryview(part) for part in parts if part)
    while left:
        try:
            sent = os.write(descriptor, left[0])
        except BlockingIOError:
            break
        if sent < len(left[0]):
            left[0] = left[0][sent:]
            break
        left.popleft()
    return list(left)


async def _send(descriptor: int, left: Sequence[memoryview]) -> None:
    loop = asyncio.get_running_loop()
    for view in left:
        while view:
            await _ready(descriptor, loop.add_writer, loop.remove_writer)
            with contextlib.suppress(BlockingIOError):
                view = view[os.write(descriptor, view) :]


async def _receive(descriptor: int, received: bytearray) -> tuple[memoryview, bytearray]:
    """Return a whole reply, and what was received after it."""
    loop = asyncio.get_running_loop()
    end = HEAD.size
    while True:
        if len(received) >= HEAD.size:
            end = HEAD.size + HEAD.unpack_from(received)[0]
            if len(received) >= end:
                return memoryview(received)[HEAD.size : end], received[end:]
        await _ready(descriptor, loop.add_reader, loop.remove_reader)
        with contextlib.suppress(BlockingIOError):
            got = os.read(descriptor, min(PIPE_BYTES, max(2 * INLINE_BYTES, end - len(received))))
            if not got:
                raise EOFError
            received += got


async def _ready(descriptor: int, add: Callable[..., Any], remove: Callable[[int], Any]) -> None:
    """Wait until a pipe can be read or written."""
    ready: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def notice() -> None:
        if not ready.done():
            ready.set_result(None)

    add(descriptor, notice)
    try:
        await ready
    finally:
        remove(descriptor)


def _widen(descriptor: int) -> None:
    """Enlarge a pipe's buffer where the system can: fewer system calls for the same bytes."""
    if sys.platform == "linux":
        import fcntl

        with contextlib.suppress(OSError):
            fcntl.fcntl(descriptor, fcntl.F_SETPIPE_SZ, PIPE_BYTES)


class ReaderPool:
    """A few reader processes, and whose turn it is."""

    def __init__(self, count: int = COUNT) -> None:
        self._all = [BodyReader() for _ in range(count)]
        self._free = list(self._all)
        self._served: set[str] = set()
        """Organisations whose turn it is."""
        self._waiting: dict[str, deque[Asked]] = {}
        self._turns: set[asyncio.Task[None]] = set()

    async def ask(self, tenant: str, question: Question, body: bytes) -> Reading:
        """Answer a question about a body; raises what is wrong with it."""
        if len(body) <= INLINE_BYTES:
            with contextlib.suppress(NeedsProcessError):
                return read(question, body, is_on_loop=True)
        asked = Asked(_questions.encode(question), body, asyncio.get_running_loop().create_future())
        self._waiting.setdefault(tenant, deque()).append(asked)
        self._assign()
        answer = await asked.answer
        if isinstance(answer, Fault):
            raise answer.error()
        if isinstance(answer, ReaderFailure):
            raise BodyReaderError(f"reading a body failed with {answer.name}; its traceback is in the log")
        return answer

    async def close(self) -> None:
        """Stop the processes, after what they are decoding."""
        while self._turns:
            await asyncio.wait(self._turns)
        for reader in self._all:
            await asyncio.to_thread(reader.stop)

    def _assign(self) -> None:
        """Give free readers to organisations that wait; one that was served goes to the end of the queue."""
        for tenant in [tenant for tenant in self._waiting if tenant not in self._served]:
            if not self._free:
                return
            waiting = self._waiting.pop(tenant)
            turn = next_turn(waiting)
            if waiting:
                self._waiting[tenant] = waiting
            if turn:
                self._served.add(tenant)
                task = asyncio.ensure_future(self._serve(tenant, self._free.pop(), turn))
                self._turns.add(task)
                task.add_done_callback(self._turns.discard)

    async def _serve(self, tenant: str, reader: BodyReader, turn: Sequence[Asked]) -> None:
        try:
            await reader.serve(turn)
        finally:
            for asked in turn:
                if not asked.answer.done():
                    asked.answer.set_exception(BodyReaderError("reading a body failed; the log has the reason"))
            self._free.append(reader)
            self._served.discard(tenant)
            self._assign()


def next_turn(waiting: deque[Asked]) -> list[Asked]:
    """Take the bodies of one turn: the next one, and those after it as long as all of them together are small."""
    turn: list[Asked] = []
    size = 0
    while waiting and len(turn) < TURN_BODIES:
        if not waiting[0].answer.done():  # its client is still there
            size += waiting[0].size_bytes
            if turn and size > INLINE_BYTES:
                break
            turn.append(waiting[0])
        waiting.popleft()
    return turn

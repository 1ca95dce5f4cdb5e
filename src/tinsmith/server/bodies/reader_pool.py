"""Large bodies are decoded in other processes: decoding holds Python's lock, and would stop the event loop.

There are a few processes, started when the first large body arrives. Organisations take turns, and each has at most one
body being decoded, so that one that sends many only delays itself. Small bodies are decoded on the loop, which takes
less time than asking a process, unless they hold a grammar. docs/decisions/0024-body-readers.md has the reasons and the
numbers.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import select
import subprocess
import sys
from collections import deque
from concurrent.futures import ThreadPoolExecutor

import msgspec

from tinsmith.errors import LimitExceededError
from tinsmith.server.bodies.questions import Fault, Question, ReaderFailure, Reading
from tinsmith.server.bodies.read import NeedsProcessError, read
from tinsmith.server.bodies.reader_process import HEAD, receive, send

logger = logging.getLogger(__name__)

INLINE_BYTES = 32 * 1024
"""Bodies up to this size are decoded on the loop, which takes a few milliseconds at worst."""
COUNT = 2
PIPE_BYTES = 1024 * 1024
READ_S = 60.0
"""A body that takes longer to decode is refused, and the process is replaced."""

_questions = msgspec.msgpack.Encoder()
_answers = msgspec.msgpack.Decoder(Reading | Fault | ReaderFailure)


class BodyReaderError(Exception):
    """A reader process met an exception that it did not expect. The body is not to blame, and the client gets a 500."""


class BodyReader:
    """One process; used by one thread at a time."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None

    def ask(self, question: bytes, body: bytes) -> Reading | Fault | ReaderFailure:
        """Return the answer. A process that died is replaced once: it may have been killed for another reason."""
        for is_last in (False, True):
            try:
                return self._exchange(question, body)
            except (OSError, EOFError) as error:
                self.stop()
                logger.warning(
                    "a process that decodes bodies died (%s)", type(error).__name__, extra={"event": "reader"}
                )
                if is_last or isinstance(error, TimeoutError):
                    break
        return Fault.of(
            LimitExceededError(
                "body: decoding it takes too much time or memory; send less in one request", field="body"
            )
        )

    def _exchange(self, question: bytes, body: bytes) -> Reading | Fault | ReaderFailure:
        process = self._started()
        assert process.stdin is not None
        assert process.stdout is not None
        into, out = process.stdin.fileno(), process.stdout.fileno()
        head = HEAD.pack(len(question), len(body)) + question
        if len(body) <= INLINE_BYTES:
            send(into, head + body)
        else:
            send(into, head)
            send(into, body)
        if not select.select([out], [], [], READ_S)[0]:
            raise TimeoutError
        answer: Reading | Fault | ReaderFailure = _answers.decode(_reply(out))
        return answer

    def _started(self) -> subprocess.Popen[bytes]:
        if self._process is None:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "tinsmith.server.bodies.reader_process"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                bufsize=0,
            )
            for pipe in (self._process.stdin, self._process.stdout):
                assert pipe is not None
                _widen(pipe.fileno())
        return self._process

    def stop(self) -> None:
        process, self._process = self._process, None
        if process is not None:
            process.kill()
            process.wait()
            for pipe in (process.stdin, process.stdout):
                if pipe is not None:
                    pipe.close()


def _reply(descriptor: int) -> bytes:
    """Read an answer. Most come in one piece: each system call gives Python's lock away, and a busy loop keeps it for
    milliseconds."""
    got = os.read(descriptor, PIPE_BYTES)
    if not got:
        raise EOFError
    if len(got) < HEAD.size:
        got += receive(descriptor, HEAD.size - len(got))
    size, _ = HEAD.unpack_from(got)
    missing = HEAD.size + size - len(got)
    return got[HEAD.size :] + (receive(descriptor, missing) if missing else b"")


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
        """Organisations whose body is being decoded."""
        self._waiting: dict[str, deque[asyncio.Future[BodyReader]]] = {}
        self._pool = ThreadPoolExecutor(count, "tinsmith-reader")

    async def ask(self, tenant: str, question: Question, body: bytes) -> Reading:
        """Answer a question about a body; raises what is wrong with it."""
        if len(body) <= INLINE_BYTES:
            with contextlib.suppress(NeedsProcessError):
                return read(question, body, is_on_loop=True)
        reader = await self._turn(tenant)
        asked = asyncio.get_running_loop().run_in_executor(self._pool, reader.ask, _questions.encode(question), body)
        asked.add_done_callback(lambda _: self._give_back(tenant, reader))
        answer = await asyncio.shield(asked)
        if isinstance(answer, Fault):
            raise answer.error()
        if isinstance(answer, ReaderFailure):
            raise BodyReaderError(f"reading a body failed with {answer.name}; its traceback is in the log")
        return answer

    def close(self) -> None:
        """Stop the processes, after what they are decoding."""
        self._pool.shutdown()
        for reader in self._all:
            reader.stop()

    async def _turn(self, tenant: str) -> BodyReader:
        waiter: asyncio.Future[BodyReader] = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(tenant, deque()).append(waiter)
        self._assign()
        try:
            return await waiter
        except asyncio.CancelledError:
            if waiter.done() and not waiter.cancelled():
                self._give_back(tenant, waiter.result())
            raise

    def _give_back(self, tenant: str, reader: BodyReader) -> None:
        self._free.append(reader)
        self._served.discard(tenant)
        self._assign()

    def _assign(self) -> None:
        """Give free readers to organisations that wait; one that was served goes to the end of the queue."""
        for tenant in [tenant for tenant in self._waiting if tenant not in self._served]:
            if not self._free:
                return
            waiters = self._waiting.pop(tenant)
            waiter = waiters.popleft()
            while waiter.done() and waiters:
                waiter = waiters.popleft()
            if waiters:
                self._waiting[tenant] = waiters
            if not waiter.done():
                self._served.add(tenant)
                waiter.set_result(self._free.pop())

"""The process that decodes large bodies: `python -m tinsmith.server.bodies.reader_process`.

It answers one question after another (`read`), and exits with the server. Its memory is bounded, so that a body which
expands too much is refused instead of using up the machine's memory.
"""

from __future__ import annotations

import contextlib
import os
import signal
import struct
import traceback
from typing import BinaryIO

import msgspec

from tinsmith.errors import InvalidInputError, LimitExceededError, WireError
from tinsmith.server.bodies.questions import Fault, Question, ReaderFailure, Reading
from tinsmith.server.bodies.read import read

HEAD = struct.Struct("<QQ")
"""Before a question: its length and the body's. Before an answer: its length, and 0."""
MAX_DATA_BYTES = 2 * 1024**3
"""Memory that the process may take: many times the largest body."""

_questions = msgspec.msgpack.Decoder(Question)
_answers = msgspec.msgpack.Encoder()


def main() -> None:
    """Answer until the server closes the pipe."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the server, which closes the pipe
    bound_memory()
    out = os.dup(1)
    os.dup2(2, 1)  # what a library prints must not mix with answers
    with os.fdopen(os.dup(0), "rb") as into, contextlib.suppress(EOFError, BrokenPipeError):
        while True:
            question_bytes, body_bytes = HEAD.unpack(receive(into, HEAD.size))
            question = receive(into, question_bytes)
            reply = _answers.encode(answer(question, receive(into, body_bytes)))
            send(out, HEAD.pack(len(reply), 0) + reply)


def answer(question: bytes, body: bytes) -> Reading | Fault | ReaderFailure:
    try:
        return read(_questions.decode(question), body)
    except (InvalidInputError, WireError) as error:
        return Fault.of(error)
    except MemoryError:
        return Fault.of(
            LimitExceededError("body: decoding it takes too much memory; send less in one request", field="body")
        )
    except Exception as error:  # a mistake of ours, or a broken installation: not the fault of the body
        traceback.print_exc()
        return ReaderFailure(type(error).__name__)


def bound_memory() -> None:
    """Make allocations beyond the bound fail, where the system can."""
    try:
        import resource
    except ImportError:
        return
    with contextlib.suppress(ValueError, OSError):
        resource.setrlimit(resource.RLIMIT_DATA, (MAX_DATA_BYTES, resource.getrlimit(resource.RLIMIT_DATA)[1]))


def receive(pipe: BinaryIO, size: int) -> bytes:
    """Read exactly `size` bytes, or raise EOFError."""
    data = pipe.read(size)
    if len(data) < size:
        raise EOFError
    return data


def send(descriptor: int, data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(descriptor, view) :]


if __name__ == "__main__":
    main()

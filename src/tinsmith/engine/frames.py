"""What the API process and an engine process say to each other: frames of msgpack with a length in front. No pickle.

Owns: the frames' types, their bytes, and cutting a stream of bytes back into frames.
Does not know: sockets, processes, who speaks first.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from typing import TypeAlias

import msgspec

from tinsmith.engine.base import AnyJob, Category, Done, ModelCard, TokenEvent
from tinsmith.errors import WireError

MAX_FRAME_BYTES = 2**31 - 1
"""A length beyond this is not a frame but noise on the pipe."""

_LENGTH = struct.Struct("<I")


class Frame(msgspec.Struct, frozen=True, tag_field="frame"):
    """Base of the frames."""


class Submit(Frame, frozen=True, tag="submit"):
    """To the engine: a job to do; with `stream` its tokens are wanted one by one."""

    job: AnyJob
    stream: bool = False


class Cancel(Frame, frozen=True, tag="cancel"):
    """To the engine: drop a job that has not begun, or a sample."""

    job_id: str


class Stop(Frame, frozen=True, tag="stop"):
    """To the engine: finish what has begun, forget the rest, end."""


class Ready(Frame, frozen=True, tag="ready"):
    """From the engine: the model is loaded."""

    card: ModelCard


class StartFailed(Frame, frozen=True, tag="start_failed"):
    """From the engine: it cannot start; the process ends."""

    reason: str


class Began(Frame, frozen=True, tag="began"):
    """From the engine: these jobs are being computed."""

    job_ids: list[str]


class Tokens(Frame, frozen=True, tag="tokens"):
    """From the engine: a streamed sample gained tokens."""

    job_id: str
    event: TokenEvent


class Finished(Frame, frozen=True, tag="finished"):
    """From the engine: a job's result."""

    job_id: str
    done: Done


class Failed(Frame, frozen=True, tag="failed"):
    """From the engine: a job cannot be done; the model's state is as it was."""

    job_id: str
    message: str
    category: Category


class Cancelled(Frame, frozen=True, tag="cancelled"):
    """From the engine: a job was dropped before it began."""

    job_id: str


ToEngine: TypeAlias = Submit | Cancel | Stop
FromEngine: TypeAlias = Ready | StartFailed | Began | Tokens | Finished | Failed | Cancelled

_ENCODER = msgspec.msgpack.Encoder()
_TO_ENGINE: msgspec.msgpack.Decoder[ToEngine] = msgspec.msgpack.Decoder(ToEngine)
_FROM_ENGINE: msgspec.msgpack.Decoder[FromEngine] = msgspec.msgpack.Decoder(FromEngine)


def encode(frame: Frame) -> tuple[bytes, bytes]:
    """Length and content; two parts, because the content may be large."""
    content = _ENCODER.encode(frame)
    if len(content) > MAX_FRAME_BYTES:
        raise WireError(f"a frame of {len(content)} bytes; the pipe to the engine takes {MAX_FRAME_BYTES}")
    return _LENGTH.pack(len(content)), content


def decode_to_engine(content: bytes | memoryview) -> ToEngine:
    return _TO_ENGINE.decode(content)


def decode_from_engine(content: bytes | memoryview) -> FromEngine:
    return _FROM_ENGINE.decode(content)


class FrameCutter:
    """Cuts a stream into the contents of its frames, whatever pieces it comes in."""

    def __init__(self) -> None:
        self._buffer = bytearray()

    def feed(self, data: bytes | memoryview) -> Iterator[bytes]:
        """The frames that are complete with this piece. Exhaust the iterator before the next call."""
        self._buffer += data
        position = 0
        try:
            while len(self._buffer) - position >= _LENGTH.size:
                (length,) = _LENGTH.unpack_from(self._buffer, position)
                if length > MAX_FRAME_BYTES:
                    raise WireError(f"the pipe to the engine is out of step: a frame of {length} bytes is announced")
                end = position + _LENGTH.size + length
                if len(self._buffer) < end:
                    break
                content = bytes(memoryview(self._buffer)[position + _LENGTH.size : end])
                position = end
                yield content
        finally:
            del self._buffer[:position]

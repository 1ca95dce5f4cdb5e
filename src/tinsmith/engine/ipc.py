"""Messages between the API process and an engine process: msgpack frames, each preceded by its length. No pickle.

Only encoding and decoding happen here; `backend/engine_process` and `worker/main` own the two ends of the socket.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import msgspec

from tinsmith.config import SCHEDULER_QUANTUM_S
from tinsmith.engine.protocol import AnyJob, Category, Done, ModelCard, TokenEvent
from tinsmith.errors import WireError

MAX_FRAME_BYTES = 2**31 - 1
"""A larger length is not a frame: the pipe is out of sync."""

_LENGTH = struct.Struct("<I")


class Frame(msgspec.Struct, frozen=True, tag_field="frame"):
    """Base class of all frames."""


class Submit(Frame, frozen=True, tag="submit"):
    """To the engine: run a job; with `stream`, send its tokens as they are drawn."""

    job: AnyJob
    stream: bool = False


class Cancel(Frame, frozen=True, tag="cancel"):
    """To the engine: cancel a job that has not started, a pass (at its next pause) or a sample."""

    job_id: str


class Stop(Frame, frozen=True, tag="stop"):
    """To the engine: finish running jobs, drop the others, exit."""


class Ready(Frame, frozen=True, tag="ready"):
    """From the engine: the model is loaded."""

    card: ModelCard


class StartFailed(Frame, frozen=True, tag="start_failed"):
    """From the engine: it cannot start, and the process exits. `is_final`: trying again would not help."""

    reason: str
    is_final: bool = True


class Began(Frame, frozen=True, tag="began"):
    """From the engine: these jobs are now running."""

    job_ids: list[str]


class StreamedTokens(Frame, frozen=True, tag="tokens"):
    """From the engine: new tokens of a streamed sample."""

    job_id: str
    event: TokenEvent


class Finished(Frame, frozen=True, tag="finished"):
    """From the engine: a job's result."""

    job_id: str
    done: Done


class Failed(Frame, frozen=True, tag="failed"):
    """From the engine: a job failed; the model's state is unchanged."""

    job_id: str
    message: str
    category: Category


class Cancelled(Frame, frozen=True, tag="cancelled"):
    """From the engine: a job was cancelled, perhaps while it was running, and has changed nothing."""

    job_id: str


ToEngine: TypeAlias = Submit | Cancel | Stop
FromEngine: TypeAlias = Ready | StartFailed | Began | StreamedTokens | Finished | Failed | Cancelled

_ENCODER = msgspec.msgpack.Encoder()
_TO_ENGINE: msgspec.msgpack.Decoder[ToEngine] = msgspec.msgpack.Decoder(ToEngine)
_FROM_ENGINE: msgspec.msgpack.Decoder[FromEngine] = msgspec.msgpack.Decoder(FromEngine)


def encode(frame: Frame) -> tuple[bytes, bytes]:
    """Return length and content, as two parts so that large content is not copied."""
    content = _ENCODER.encode(frame)
    if len(content) > MAX_FRAME_BYTES:
        raise WireError(
            f"a frame of {len(content)} bytes is too large for the pipe to the engine (at most {MAX_FRAME_BYTES})"
        )
    return _LENGTH.pack(len(content)), content


def decode_to_engine(content: bytes | memoryview) -> ToEngine:
    return _TO_ENGINE.decode(content)


def decode_from_engine(content: bytes | memoryview) -> FromEngine:
    return _FROM_ENGINE.decode(content)


class FrameCutter:
    """Splits a stream of bytes into frames, whatever pieces it arrives in."""

    def __init__(self) -> None:
        self._buffer = bytearray()

    def feed(self, data: bytes | memoryview) -> Iterator[bytes]:
        """Yield the frames that this piece completes. Exhaust the iterator before the next call."""
        self._buffer += data
        position = 0
        try:
            while len(self._buffer) - position >= _LENGTH.size:
                (length,) = _LENGTH.unpack_from(self._buffer, position)
                if length > MAX_FRAME_BYTES:
                    raise WireError(f"the pipe to the engine is out of sync: it announces a frame of {length} bytes")
                end = position + _LENGTH.size + length
                if len(self._buffer) < end:
                    break
                content = bytes(memoryview(self._buffer)[position + _LENGTH.size : end])
                position = end
                yield content
        finally:
            del self._buffer[:position]


@dataclass(frozen=True, kw_only=True)
class EngineSpec:
    """How to start the engine process of one base model."""

    card: ModelCard
    executor: str
    """`module:function`: the factory of the executor (see `worker/executor`)."""
    options: Mapping[str, Any] = field(default_factory=dict)
    """Arguments of the factory, as JSON values."""
    quantum_s: float = SCHEDULER_QUANTUM_S
    """Device seconds per tenant and round of the engine's scheduler."""
    environment: Mapping[str, str] = field(default_factory=dict)
    """Environment variables of the process, in addition to the inherited ones."""

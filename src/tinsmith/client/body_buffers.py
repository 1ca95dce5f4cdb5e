"""Memory for large request bodies, used again and again: on many machines fresh memory costs more than writing to it.

Does not know: what is in a body, or when it has been sent.
"""

from __future__ import annotations

import io
from collections import deque

from tinsmith.wire.protobuf import Message

MIN_BYTES = 256 * 1024
"""Smaller bodies come from memory that the process has at hand."""
MAX_BYTES = 16 * 1024 * 1024
KEPT = 2
"""Buffers that wait for their next body: as many as are usually under way at once."""


class Body:
    """A body, and the buffer that it lies in if it is a large one."""

    __slots__ = ("_buffer", "content")

    def __init__(self, content: bytes | memoryview, buffer: io.BytesIO | None = None) -> None:
        self.content = content
        self._buffer = buffer

    def give_up(self) -> io.BytesIO | None:
        """The buffer, if there is one; the content cannot be used any more then."""
        buffer, self._buffer = self._buffer, None
        if buffer is not None and isinstance(self.content, memoryview):
            self.content.release()
        return buffer


class BodyBuffers:
    """Buffers of one client; safe to use from any thread."""

    def __init__(self) -> None:
        self._free: deque[io.BytesIO] = deque(maxlen=KEPT)

    def write(self, message: Message) -> Body:
        """The message as a body."""
        if not MIN_BYTES <= message.size <= MAX_BYTES:
            return Body(message.encode())
        while True:
            try:
                buffer = self._free.pop()
            except IndexError:
                buffer = io.BytesIO()
            try:
                if buffer.seek(0, io.SEEK_END) < message.size:
                    buffer.seek(message.size - 1)
                    buffer.write(b"\0")  # as large as it has to be, in one go
                buffer.seek(0)
                buffer.writelines(message.parts)
            except BufferError:  # somebody still reads what was in it: not ours to write to
                continue
            return Body(buffer.getbuffer()[: message.size], buffer)

    def give_back(self, body: Body) -> None:
        """The body has been sent, or never will be."""
        buffer = body.give_up()
        if buffer is not None:
            self._free.append(buffer)

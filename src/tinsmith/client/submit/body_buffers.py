"""Reusable memory for large request bodies: on many machines allocating fresh memory costs more than writing to it."""

from __future__ import annotations

import io
from collections import deque

from tinsmith.wire.codecs.protobuf import MessageWriter

MIN_BYTES = 256 * 1024
"""Smaller bodies are allocated as usual: the allocator has memory for them at hand."""
MAX_BYTES = 16 * 1024 * 1024
KEPT = 2
"""Free buffers that are kept: as many as are usually in use at once."""


class RequestBody:
    """A body, and the reusable buffer that contains it if it is large."""

    __slots__ = ("_buffer", "content")

    def __init__(self, content: bytes | memoryview, buffer: io.BytesIO | None = None) -> None:
        self.content = content
        self._buffer = buffer

    def give_up(self) -> io.BytesIO | None:
        """Release the content and return its buffer, if it has one."""
        buffer, self._buffer = self._buffer, None
        if buffer is not None and isinstance(self.content, memoryview):
            self.content.release()
        return buffer


class BodyBuffers:
    """Buffers of one client; safe to use from any thread."""

    def __init__(self) -> None:
        self._free: deque[io.BytesIO] = deque(maxlen=KEPT)

    def write(self, message: MessageWriter) -> RequestBody:
        """Write a message into a body."""
        if not MIN_BYTES <= message.size <= MAX_BYTES:
            return RequestBody(message.encode())
        while True:
            try:
                buffer = self._free.pop()
            except IndexError:
                buffer = io.BytesIO()
            try:
                if buffer.seek(0, io.SEEK_END) < message.size:
                    buffer.seek(message.size - 1)
                    buffer.write(b"\0")  # allocate the full size at once
                buffer.seek(0)
                buffer.writelines(message.parts)
            except BufferError:  # its last content is still being read, so it cannot be written to
                continue
            return RequestBody(buffer.getbuffer()[: message.size], buffer)

    def give_back(self, body: RequestBody) -> None:
        """Take back the buffer of a body that has been sent, or never will be."""
        buffer = body.give_up()
        if buffer is not None:
            self._free.append(buffer)

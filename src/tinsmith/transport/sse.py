"""Server-sent events, decoded as they arrive (WHATWG HTML, 9.2.6).

Reconnecting is up to the caller.
"""

from __future__ import annotations

import codecs
from collections.abc import AsyncIterator
from dataclasses import dataclass

from tinsmith.errors import LimitExceededError
from tinsmith.transport.base import StreamedResponse

MAX_EVENT_BYTES = 16 * 1024 * 1024
_MAX_RETRY_DIGITS = 15


@dataclass(frozen=True, slots=True)
class SseEvent:
    """One event. `id` and `retry_ms` are the last ones sent, with this event or before."""

    event: str
    data: str
    id: str | None = None
    retry_ms: int | None = None


class SseDecoder:
    """Decodes bytes in pieces of any size into events. It buffers at most one event."""

    def __init__(self, max_event_bytes: int = MAX_EVENT_BYTES) -> None:
        self._max_event_bytes = max_event_bytes
        self._utf8 = codecs.getincrementaldecoder("utf-8-sig")(errors="replace")
        self._follows_cr = False
        self._line: list[str] = []
        self._line_bytes = 0
        self._data: list[str] = []
        self._data_bytes = 0
        self._event = ""
        self._id: str | None = None
        self._retry_ms: int | None = None

    def feed(self, piece: bytes) -> list[SseEvent]:
        """Take a piece and return the events that it completes."""
        text = self._utf8.decode(piece)
        if not text:
            return []
        if self._follows_cr and text[0] == "\n":
            text = text[1:]
        self._follows_cr = text[-1:] == "\r"
        first, *lines = text.replace("\r\n", "\n").replace("\r", "\n").split("\n")
        self._extend(first)
        found = []
        for following in lines:
            event = self._end_line()
            if event is not None:
                found.append(event)
            self._extend(following)
        return found

    def _extend(self, text: str) -> None:
        if not text:
            return
        self._line.append(text)
        self._line_bytes += _size(text)
        if self._line_bytes + self._data_bytes > self._max_event_bytes:
            raise LimitExceededError(
                f"an event is larger than the limit of {self._max_event_bytes} bytes", field="data"
            )

    def _end_line(self) -> SseEvent | None:
        line = "".join(self._line)
        self._line.clear()
        self._line_bytes = 0
        if not line:
            return self._end_event()
        name, _, value = line.partition(":")
        self._take_field(name, value.removeprefix(" "))
        return None

    def _take_field(self, name: str, value: str) -> None:
        """A line that starts with a colon is a comment: its name is empty, and like unknown names it is skipped."""
        if name == "data":
            self._data.append(value)
            self._data_bytes += _size(value) + 1
        elif name == "event":
            self._event = value
        elif name == "id" and "\0" not in value:
            self._id = value
        elif name == "retry" and value.isascii() and value.isdigit() and len(value) <= _MAX_RETRY_DIGITS:
            self._retry_ms = int(value)

    def _end_event(self) -> SseEvent | None:
        event, self._event = self._event or "message", ""
        if not self._data:
            return None
        data = "\n".join(self._data)
        self._data.clear()
        self._data_bytes = 0
        return SseEvent(event, data, self._id, self._retry_ms)


async def events(response: StreamedResponse, max_event_bytes: int = MAX_EVENT_BYTES) -> AsyncIterator[SseEvent]:
    """Yield the events of a response as they arrive; an unfinished one at the end is dropped."""
    decoder = SseDecoder(max_event_bytes)
    async for chunk in response.chunks():
        for event in decoder.feed(chunk):
            yield event


def _size(text: str) -> int:
    return len(text) if text.isascii() else len(text.encode())

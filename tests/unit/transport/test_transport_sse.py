"""Server-sent events: every rule of the standard, in pieces of any size."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from itertools import pairwise

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from tinsmith.errors import LimitExceededError
from tinsmith.transport.base import StreamedBody
from tinsmith.transport.sse import SseDecoder, SseEvent, events


def decode(*pieces: bytes, max_event_bytes: int = 1 << 20) -> list[SseEvent]:
    decoder = SseDecoder(max_event_bytes)
    found = [event for piece in pieces for event in decoder.feed(piece)]
    return found


@pytest.mark.parametrize(
    ("stream", "expected"),
    [
        (b"", []),
        (b"data: a\n\n", [SseEvent("message", "a")]),
        (b"data:a\n\n", [SseEvent("message", "a")]),
        (b"data:  a \n\n", [SseEvent("message", " a ")]),
        (b"data: a\r\n\r\n", [SseEvent("message", "a")]),
        (b"data: a\r\r", [SseEvent("message", "a")]),
        (b"data: a\n\r", [SseEvent("message", "a")]),
        (b"data: a\r\n\n", [SseEvent("message", "a")]),
        (b"data: a\ndata: b\n\n", [SseEvent("message", "a\nb")]),
        (b"data\n\n", [SseEvent("message", "")]),
        (b"data:\ndata:\n\n", [SseEvent("message", "\n")]),
        (b"data: a: b\n\n", [SseEvent("message", "a: b")]),
        (b"event: token\ndata: 1\n\ndata: 2\n\n", [SseEvent("token", "1"), SseEvent("message", "2")]),
        (b"event: lost\n\ndata: 1\n\n", [SseEvent("message", "1")]),
        (b"event\ndata: 1\n\n", [SseEvent("message", "1")]),
        (b": comment\ndata: 1\n:\n\n", [SseEvent("message", "1")]),
        (b"\n\n\n", []),
        (b"unknown: 1\nDATA: 2\n data: 3\n\n", []),
        (b"\xef\xbb\xbfdata: 1\n\n", [SseEvent("message", "1")]),
        (b"\xef\xbb\xbf\xef\xbb\xbfdata: 1\n\n", []),
        (b"data: \xef\xbb\xbf1\n\n", [SseEvent("message", "\ufeff1")]),
        ("data: \u00e9\u20ac\U0001f600\n\n".encode(), [SseEvent("message", "\u00e9\u20ac\U0001f600")]),
        ("data: a\u2028b\u0085c\x0bd\n\n".encode(), [SseEvent("message", "a\u2028b\u0085c\x0bd")]),
        (b"data: \xff\n\n", [SseEvent("message", "\ufffd")]),
        # The last event counts only with its blank line.
        (b"data: 1\n\ndata: 2\n", [SseEvent("message", "1")]),
        (b"data: 1\n\ndata: 2", [SseEvent("message", "1")]),
        (b"data: 1\n\ndata: \xe2\x82", [SseEvent("message", "1")]),
        # The id stays in force, and so does the time to reconnect.
        (b"id: 7\ndata: 1\n\ndata: 2\n\n", [SseEvent("message", "1", "7"), SseEvent("message", "2", "7")]),
        (b"id: 7\n\ndata: 1\nid\n\n", [SseEvent("message", "1", "")]),
        (b"id: a\0b\ndata: 1\n\n", [SseEvent("message", "1")]),
        (b"retry: 1500\n\ndata: 1\n\n", [SseEvent("message", "1", None, 1500)]),
        (b"retry: 1.5\nretry: -1\nretry: \xd9\xa1\nretry:\ndata: 1\n\n", [SseEvent("message", "1")]),
        (b"retry: " + b"9" * 5000 + b"\ndata: 1\n\n", [SseEvent("message", "1")]),
    ],
)
def test_the_rules(stream: bytes, expected: list[SseEvent]) -> None:
    assert decode(stream) == expected
    assert decode(*(stream[i : i + 1] for i in range(len(stream)))) == expected


lines = st.one_of(
    st.sampled_from(
        [b"data: x", b"data", b"event: e", b"id: 1", b"retry: 10", b":", b"", b"data:\xe2\x82\xac", b"\xff"]
    ),
    st.binary(max_size=12),
)
streams = st.lists(st.tuples(lines, st.sampled_from([b"\n", b"\r", b"\r\n", b"\n\n", b"\r\r\n"])), max_size=20).map(
    lambda pairs: b"".join(line + end for line, end in pairs)
)


@given(stream=streams, cuts=st.lists(st.integers(0, 200), max_size=12))
@example(stream=b"data: a\r\n\r\n", cuts=[8, 10])
@example(stream=b"data: \xf0\x9f\x98\x80\n\n", cuts=[7, 8, 9])
def test_any_split_gives_the_same_events(stream: bytes, cuts: list[int]) -> None:
    places = [0, *sorted(min(cut, len(stream)) for cut in cuts), len(stream)]
    pieces = [stream[start:end] for start, end in pairwise(places)]
    assert decode(*pieces) == decode(stream)


@pytest.mark.parametrize(
    "stream",
    [
        b"data: " + b"x" * 100,
        b"data: 12345\n" * 20,
        b":" + b"x" * 100 + b"\n",
        "data: {}".format("\u20ac" * 34).encode(),
    ],
)
@pytest.mark.parametrize("size", [1, 7, 1000])
def test_memory_is_bounded(stream: bytes, size: int) -> None:
    pieces = [stream[i : i + size] for i in range(0, len(stream), size)]
    with pytest.raises(LimitExceededError, match="limit of 100 bytes"):
        decode(*pieces, max_event_bytes=100)


def test_the_limit_is_for_one_event_and_comments_do_not_add_up() -> None:
    assert len(decode(b"data: 123456789\n\n" * 50, max_event_bytes=20)) == 50
    assert decode(*[b": still here\n"] * 50, max_event_bytes=20) == []


def test_a_long_line_in_many_pieces_is_cheap() -> None:
    found = decode(*[b"data: ", *[b"x" * 10] * 50_000, b"\n\n"])
    assert len(found[0].data) == 500_000


def test_events_of_an_answer_as_they_arrive() -> None:
    async def scenario() -> list[SseEvent | str]:
        seen: list[SseEvent | str] = []

        async def source() -> AsyncIterator[bytes]:
            for piece in (b"data: 1\n", b"\ndata: 2\n\nda", b"ta: 3\n\n", b"data: 4\n"):
                seen.append("piece")
                yield piece

        async for event in events(StreamedBody(200, {}, "http://localhost/", source())):
            seen.append(event)
        return seen

    one, two, three = (SseEvent("message", text) for text in "123")
    assert asyncio.run(scenario()) == ["piece", "piece", one, two, "piece", three, "piece"]


def test_events_are_bounded_too() -> None:
    async def scenario() -> None:
        async def source() -> AsyncIterator[bytes]:
            yield b"data: 123456789"

        async for _ in events(StreamedBody(200, {}, "http://localhost/", source()), max_event_bytes=5):
            pass

    with pytest.raises(LimitExceededError):
        asyncio.run(scenario())

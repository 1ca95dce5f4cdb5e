"""HTTP/1.1 as bytes: requests, and responses in any number of pieces; without a network."""

from __future__ import annotations

import gzip
import itertools
import random
import zlib
from collections.abc import Iterable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tinsmith.transport.http1 import (
    IN_PLACE_BYTES,
    MAX_HEAD_BYTES,
    MAX_LINE_BYTES,
    CutOffError,
    FormatError,
    ResponseParser,
    SizeError,
    request_head,
    target_of,
)

LIMIT = 100_000
OK = b"HTTP/1.1 200 OK\r\n"
HELLO = (200, b"hello")


def read(pieces: Iterable[bytes], method: str = "GET", limit: int = LIMIT, *, ends: bool = False) -> ResponseParser:
    answer = ResponseParser(method, limit)
    for piece in pieces:
        answer.feed(piece)
    if ends:
        answer.end()
    return answer


ANSWERS = [
    ("GET", OK + b"Content-Length: 5\r\n\r\nhello", HELLO, True),
    ("GET", OK + b"content-length:5\r\nX-A: 1\r\nx-a: 2\r\n\r\nhello", HELLO, True),
    ("GET", OK + b"Content-Length: 5\r\nConnection: Close\r\n\r\nhello", HELLO, False),
    ("GET", b"HTTP/1.0 200 OK\r\nContent-Length: 5\r\n\r\nhello", HELLO, False),
    ("GET", b"HTTP/1.0 200 OK\r\nContent-Length: 5\r\nConnection: keep-alive\r\n\r\nhello", HELLO, True),
    ("GET", b"HTTP/1.1 200\r\nContent-Length: 5\r\n\r\nhello", HELLO, True),
    ("GET", b"HTTP/1.1 200 OK\nContent-Length: 5\n\nhello", HELLO, True),
    ("GET", OK + b"X-Long: a\r\n  b\r\nContent-Length: 5\r\n\r\nhello", HELLO, True),
    ("GET", b"HTTP/1.1 100 Continue\r\n\r\n" + OK + b"Content-Length: 5\r\n\r\nhello", HELLO, True),
    ("GET", b"HTTP/1.1 103 Hints\r\nLink: a\r\n\r\n" * 3 + OK + b"Content-Length: 5\r\n\r\nhello", HELLO, True),
    ("GET", OK + b"Transfer-Encoding: chunked\r\n\r\n2\r\nhe\r\n3\r\nllo\r\n0\r\n\r\n", HELLO, True),
    ("GET", OK + b"Transfer-Encoding: Chunked\r\n\r\n05;a=b\r\nhello\r\n0;x\r\nX-T: 1\r\nX-U: 2\r\n\r\n", HELLO, True),
    ("GET", OK + b"Transfer-Encoding: chunked\r\nContent-Length: 3\r\n\r\n5\r\nhello\r\n0\r\n\r\n", HELLO, False),
    ("GET", OK + b"Transfer-Encoding: chunked\r\n\r\n0\r\n\r\n", (200, b""), True),
    ("GET", OK + b"Content-Length: 0\r\n\r\n", (200, b""), True),
    ("GET", b"HTTP/1.1 204 No Content\r\n\r\n", (204, b""), True),
    ("GET", b"HTTP/1.1 304 Not Modified\r\nContent-Length: 5\r\n\r\n", (304, b""), True),
    ("HEAD", OK + b"Content-Length: 5\r\n\r\n", (200, b""), True),
    ("HEAD", OK + b"Transfer-Encoding: chunked\r\n\r\n", (200, b""), True),
    ("POST", b"HTTP/1.1 500 Oh no\r\nContent-Length: 5\r\n\r\nhello", (500, b"hello"), True),
]


@pytest.mark.parametrize(("method", "data", "expected", "can_reuse"), ANSWERS)
def test_an_answer_is_the_same_wherever_it_is_cut(
    method: str, data: bytes, expected: tuple[int, bytes], can_reuse: bool
) -> None:
    cuts = [[data[:i], data[i:]] for i in range(len(data))]
    for pieces in ([data], [bytes([byte]) for byte in data], *cuts):
        answer = read(pieces, method)
        assert answer.is_complete, pieces
        assert (answer.status, answer.body()) == expected
        assert answer.can_reuse is can_reuse
    for i in range(len(data)):
        assert not read([data[:i]], method, ends=True).is_complete


@pytest.mark.parametrize("length", [IN_PLACE_BYTES[0] - 1, IN_PLACE_BYTES[0], 300_000])
@pytest.mark.parametrize("with_head", [0, 1, 5000])
@pytest.mark.parametrize("in_place", [True, False])
def test_a_large_body_is_received_where_it_will_lie(length: int, with_head: int, in_place: bool) -> None:
    body = bytes(i * 7 % 251 for i in range(length))
    answer = ResponseParser("GET", 2**20)
    assert answer.place() is None
    assert not answer.feed(b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n" % length + body[:with_head])
    position, sizes = with_head, itertools.cycle((1, 4096, 70_000))
    while not answer.is_complete:
        place = answer.place() if in_place else None
        assert (place is not None) == (in_place and length >= IN_PLACE_BYTES[0])
        data = body[position : position + next(sizes)]
        if place is None:
            answer.feed(data)
        else:
            assert len(place) == length - position, "there is room for the rest and no more"
            place[: len(data)] = data
            answer.received(len(data))
        position += len(data)
    assert answer.place() is None
    assert answer.can_reuse
    assert answer.body() == body
    answer.feed(b"more")
    assert not answer.can_reuse


def test_a_large_packed_body_that_is_received_in_place_is_unpacked() -> None:
    body = random.Random(0).randbytes(200_000)
    sent = gzip.compress(body)
    head = b"HTTP/1.1 200 OK\r\ncontent-encoding: gzip\r\ncontent-length: %d\r\n\r\n" % len(sent)
    answer = ResponseParser("GET", 2**20)
    answer.feed(head)
    place = answer.place()
    assert place is not None
    place[:] = sent
    assert answer.received(len(sent))
    assert answer.body() == body


def test_no_memory_is_taken_for_a_length_that_is_only_claimed() -> None:
    answer = ResponseParser("GET", 2**40)
    answer.feed(b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n" % 2**38)
    assert answer.place() is None


def test_headers() -> None:
    answer = read([OK + b"X-A: 1\r\nB:\t two \r\nx-a: 2\r\nFolded: a\r\n\tb\r\nName: caf\xc3\xa9\r\n\r\n"])
    assert answer.headers == {"x-a": "1, 2", "b": "two", "folded": "a\tb", "name": "café"}


@given(st.lists(st.binary(min_size=1, max_size=40), max_size=6), st.data())
def test_chunked_bodies_in_any_pieces(chunks: list[bytes], data: Any) -> None:
    sent = OK + b"Transfer-Encoding: chunked\r\n\r\n"
    sent += b"".join(b"%X\r\n%b\r\n" % (len(chunk), chunk) for chunk in chunks) + b"0\r\n\r\n"
    cuts = sorted(data.draw(st.sets(st.integers(1, len(sent) - 1), max_size=8)))
    bounds = [0, *cuts, len(sent)]
    answer = read(sent[start:stop] for start, stop in itertools.pairwise(bounds))
    assert answer.is_complete
    assert answer.can_reuse
    assert answer.body() == b"".join(chunks)


@given(st.lists(st.binary(max_size=60), max_size=5))
def test_noise_is_refused_or_waited_on(pieces: list[bytes]) -> None:
    answer = ResponseParser("GET", 2**20)
    try:
        for piece in [OK, *pieces]:
            answer.feed(piece)
        answer.body()
    except (FormatError, SizeError, CutOffError):
        pass


def test_a_body_may_end_with_the_connection() -> None:
    answer = read([OK + b"\r\n", b"hel", b"lo"])
    assert not answer.is_complete
    assert answer.end()
    assert answer.body() == b"hello"
    assert not answer.can_reuse


@pytest.mark.parametrize("more", [b"x", b"HTTP/1.1 200 OK\r\n\r\n"])
def test_more_than_the_answer_ends_the_connection(more: bytes) -> None:
    answer = read([OK + b"Content-Length: 5\r\n\r\nhello" + more])
    assert answer.body() == b"hello"
    assert not answer.can_reuse


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (b"SSH-2.0-OpenSSH_9.6\r\n", "does not begin with HTTP/1"),
        (b"SSH-2.0-OpenSSH_9.6\r\n\r\n", "does not begin with HTTP/1"),
        (b"\x15\x03\x01", "does not begin with HTTP/1"),
        (b"HTTP/2.0 200 OK\r\n\r\n", "does not begin with HTTP/1"),
        (b"HTTP/1.1 20 OK\r\n\r\n", "Invalid status code"),
        (b"HTTP/1.1 2000 OK\r\n\r\n", "Invalid response status"),
        (b"HTTP/1.1  200 OK\r\n\r\n", "Invalid status code"),
        (b"HTTP/1.1 -20 OK\r\n\r\n", "Invalid status code"),
        (b"http/1.1 200 OK\r\n\r\n", "does not begin with HTTP/1"),
        (b"HTTP/1.1 101 Switching\r\nUpgrade: x\r\n\r\n", "another protocol"),
        (OK + b"no colon\r\n\r\n", "Invalid header token"),
        (OK + b": nameless\r\n\r\n", "Invalid header token"),
        (OK + b"spaced : 1\r\n\r\n", "Invalid header token"),
        (OK + b"a: 1\0\r\n\r\n", "a control character"),
        (OK + b"a: 1\rb: 2\r\n\r\n", "Missing expected LF"),
        (OK + b"Content-Length: five\r\n\r\n", "Content-Length"),
        (OK + b"Content-Length: -5\r\n\r\n", "Content-Length"),
        (OK + b"Content-Length: +5\r\n\r\n", "Content-Length"),
        (OK + b"Content-Length:\r\n\r\n", "Content-Length"),
        (OK + b"Content-Length: 5\r\nContent-Length: 6\r\n\r\n", "Content-Length"),
        (OK + b"Content-Length: 5\r\nContent-Length: 5\r\n\r\nhello", "Content-Length"),
        (OK + b"Content-Length: 5, 5\r\n\r\nhello", "Content-Length"),
        (OK + b"Content-Length: 99999999999999999999999\r\n\r\n", "Content-Length"),
        (OK + b"Transfer-Encoding: gzip, chunked\r\n\r\n", "gzip, chunked"),
        (OK + b"Transfer-Encoding: chunked\r\n\r\nxyz\r\n", "Invalid character in chunk size"),
        (OK + b"Transfer-Encoding: chunked\r\n\r\n\r\n", "Invalid character in chunk size"),
        (OK + b"Transfer-Encoding: chunked\r\n\r\n-1\r\n", "Invalid character in chunk size"),
        (OK + b"Transfer-Encoding: chunked\r\n\r\n0x5\r\n", "Invalid character in chunk size"),
        (OK + b"Transfer-Encoding: chunked\r\n\r\n2\r\nhello\r\n", "after chunk data"),
        (OK + b"Transfer-Encoding: chunked\r\n\r\n2\r\nhex\n", "after chunk data"),
        (
            OK + b"Transfer-Encoding: chunked\r\n\r\n" + b"1;" + b"x" * MAX_LINE_BYTES,
            "a line around a chunk is larger than 4096 bytes",
        ),
        (b"RTSP/1.0 200 OK\r\n\r\n", "does not begin with HTTP/1"),
        (b"HTTP/1.9 200 OK\r\n\r\n", "Invalid HTTP version"),
        (b"HTTP/1.1 100 Continue\r\n\r\n" * 3000, "its head is larger than 65536 bytes"),
        (OK + b"X-A: " + b"x" * MAX_HEAD_BYTES, "its head is larger than 65536 bytes"),
        (OK + b"X-A: " + b"x" * MAX_HEAD_BYTES + b"\r\n\r\n", "its head is larger than 65536 bytes"),
        (OK + b"Transfer-Encoding: chunked\r\n\r\n0\r\nX: " + b"x" * MAX_HEAD_BYTES, "a line around a chunk is larger"),
    ],
)
def test_what_is_not_http_is_refused(data: bytes, words: str) -> None:
    with pytest.raises(FormatError, match=words):
        read([data])
    with pytest.raises(FormatError):
        read(bytes([byte]) for byte in data) if len(data) < 5000 else read([data[:100], data[100:2000], data[2000:]])


@pytest.mark.parametrize(
    "pieces",
    [
        [OK + b"Content-Length: 11\r\n\r\n"],
        [OK + b"\r\n", b"123456", b"78901"],
        [OK + b"Transfer-Encoding: chunked\r\n\r\nb\r\n12345678901"],
        [OK + b"Transfer-Encoding: chunked\r\n\r\n6\r\n123456\r\n5\r\n", b"78901"],
        [OK + b"Transfer-Encoding: chunked\r\n\r\nffffffffffffff\r\n", b"123456", b"78901"],
    ],
)
def test_bodies_are_limited(pieces: list[bytes]) -> None:
    with pytest.raises(SizeError, match="10"):
        read(pieces, limit=10)


def packed(body: bytes, coding: str) -> ResponseParser:
    return read([OK + b"Content-Encoding: %b\r\nContent-Length: %d\r\n\r\n" % (coding.encode(), len(body)), body])


TEXT = b"hello hello hello " * 100
RAW = zlib.compressobj(wbits=-15)


@pytest.mark.parametrize(
    ("body", "coding"),
    [
        (gzip.compress(TEXT, mtime=0), "gzip"),
        (gzip.compress(TEXT, mtime=0), "X-GZIP"),
        (gzip.compress(TEXT[:50], mtime=0) + gzip.compress(TEXT[50:], mtime=0), "gzip"),
        (zlib.compress(TEXT), "deflate"),
        (RAW.compress(TEXT) + RAW.flush(), "deflate"),
        (gzip.compress(zlib.compress(TEXT), mtime=0), "deflate, gzip"),
        (TEXT, "identity"),
    ],
)
def test_packed_bodies(body: bytes, coding: str) -> None:
    assert packed(body, coding).body() == TEXT


@pytest.mark.parametrize(
    ("body", "coding", "error"),
    [
        (gzip.compress(TEXT, mtime=0)[:-9], "gzip", CutOffError),
        (zlib.compress(TEXT)[:-5], "deflate", CutOffError),
        (b"hello", "gzip", FormatError),
        (gzip.compress(TEXT, mtime=0) + b"x", "gzip", CutOffError),
        (gzip.compress(TEXT, mtime=0) + b"xx", "gzip", FormatError),
        (TEXT, "br", FormatError),
        (gzip.compress(bytes(LIMIT + 1), mtime=0), "gzip", SizeError),
        (zlib.compress(bytes(100 * LIMIT)), "deflate", SizeError),
        (gzip.compress(bytes(LIMIT), mtime=0) + gzip.compress(b"1", mtime=0), "gzip", SizeError),
    ],
)
def test_packed_bodies_that_are_refused(body: bytes, coding: str, error: type[Exception]) -> None:
    with pytest.raises(error):
        packed(body, coding).body()


def test_a_packed_body_may_be_as_large_as_the_limit_or_empty() -> None:
    assert packed(gzip.compress(bytes(LIMIT), mtime=0), "gzip").body() == bytes(LIMIT)
    assert packed(b"", "gzip").body() == b""


def head(method: str = "GET", headers: dict[str, str] | None = None, length: int | None = 0) -> list[str]:
    made = request_head(method, target_of("http://h:81/a%20b?q=1#part"), headers or {}, length).decode()
    assert made.endswith("\r\n\r\n")
    return made[:-4].split("\r\n")


def test_the_head_of_a_request() -> None:
    first = ["GET /a%20b?q=1 HTTP/1.1", "host: h:81", "accept-encoding: gzip, deflate"]
    assert head() == first
    assert head(headers={"X-Key": "é", "Content-Length": "9", "Transfer-Encoding": "x"}) == [*first, "x-key: é"]
    assert head("POST")[-1] == "content-length: 0"
    assert head("POST", length=7)[-1] == "content-length: 7"
    assert head("GET", length=7)[-1] == "content-length: 7"
    assert head("POST", length=None)[-1] == "transfer-encoding: chunked"
    assert head(headers={"Host": "me", "Accept-Encoding": "br"})[1:] == ["host: me", "accept-encoding: br"]


@pytest.mark.parametrize(
    ("method", "headers"),
    [
        ("GET", {"x": "1\r\ny: 2"}),
        ("GET", {"x": "1\n"}),
        ("GET", {"x": "1\r"}),
        ("GET", {"x": "\0"}),
        ("GET", {"x y": "1"}),
        ("GET", {"x:": "1"}),
        ("GET", {"": "1"}),
        ("GET", {"x\r\ny": "1"}),
        ("GET /x HTTP/1.1\r\nx: y\r\n\r\nGET", {}),
        ("", {}),
    ],
)
def test_nothing_can_be_smuggled_into_a_head(method: str, headers: dict[str, str]) -> None:
    with pytest.raises(ValueError, match=r"line break|name of a header|method"):
        head(method, headers)


@pytest.mark.parametrize(
    ("url", "expected"),
    [
        ("http://h", ("http", "h", 80, "h", "/")),
        ("https://h/", ("https", "h", 443, "h", "/")),
        ("https://h:443/x", ("https", "h", 443, "h", "/x")),
        ("http://h:443/x?", ("http", "h", 443, "h:443", "/x")),
        ("http://h?a=b", ("http", "h", 80, "h", "/?a=b")),
        ("http://[::1]:80/x", ("http", "::1", 80, "[::1]", "/x")),
        ("http://[::1]:81/x", ("http", "::1", 81, "[::1]:81", "/x")),
        ("HTTP://Host:81/X", ("http", "host", 81, "host:81", "/X")),
        ("http://user:word@h/x", ("http", "h", 80, "h", "/x")),
    ],
)
def test_where_a_url_leads(url: str, expected: tuple[Any, ...]) -> None:
    assert target_of(url) == expected


@pytest.mark.parametrize(
    "url",
    [
        "ftp://h/",
        "h/x",
        "http://",
        "http://:80/",
        "http://h:x/",
        "http://h:99999/",
        "http://h/a\r\nb",
        "http://h/\t",
        "",
    ],
)
def test_urls_that_lead_nowhere(url: str) -> None:
    with pytest.raises(ValueError, match=r"URL|[Pp]ort"):
        target_of(url)

"""Uploads: what is written, how it is escaped, and that files are streamed."""

from __future__ import annotations

import asyncio
import io
from email import message_from_bytes
from email.policy import HTTP
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tinsmith.errors import InvalidInputError
from tinsmith.transport.multipart import PIECE_BYTES, Multipart


class Reader:
    """An async reader over bytes, which tells how much was asked for."""

    def __init__(self, content: bytes) -> None:
        self.file = io.BytesIO(content)
        self.asked: list[int] = []

    async def read(self, n: int) -> bytes:
        self.asked.append(n)
        return self.file.read(n)


def pieces(body: Multipart) -> list[bytes]:
    async def collect() -> list[bytes]:
        return [piece async for piece in body.parts()]

    return asyncio.run(collect())


def written(fields: Any) -> bytes:
    body = Multipart(fields, boundary="B")
    content = b"".join(pieces(body))
    assert body.length in (None, len(content))
    return content


def part(head: str, content: str) -> bytes:
    return f"--B\r\nContent-Disposition: form-data; {head}\r\n\r\n{content}\r\n--B--\r\n".encode()


OCTETS = "Content-Type: application/octet-stream"


@pytest.mark.parametrize(
    ("field", "expected"),
    [
        ("text", part('name="f"', "text")),
        ("", part('name="f"', "")),
        ("\u00e9\r\n", part('name="f"', "\u00e9\r\n")),
        (b"bytes", part(f'name="f"; filename="upload"\r\n{OCTETS}', "bytes")),
        (("a.txt", b"bytes"), part(f'name="f"; filename="a.txt"\r\n{OCTETS}', "bytes")),
        (("a.txt", b"bytes", "text/plain"), part('name="f"; filename="a.txt"\r\nContent-Type: text/plain', "bytes")),
        (io.BytesIO(b"file"), part(f'name="f"; filename="upload"\r\n{OCTETS}', "file")),
        (Reader(b"reader"), part(f'name="f"; filename="upload"\r\n{OCTETS}', "reader")),
        (("r", Reader(b"reader"), "x/y"), part('name="f"; filename="r"\r\nContent-Type: x/y', "reader")),
        (('a"b\\\u00e9.txt', b""), part(f'name="f"; filename="a%22b\\\u00e9.txt"\r\n{OCTETS}', "")),
    ],
)
def test_fields(field: Any, expected: bytes) -> None:
    assert written({"f": field}) == expected


def test_several_fields_in_order_and_one_name_twice() -> None:
    content = written([("b", "1"), ("a", "2"), ("b", b"3")])
    names = [line.split(b'"')[1] for line in content.split(b"\r\n") if b'name="' in line]
    assert names == [b"b", b"a", b"b"]


def test_no_fields() -> None:
    assert written({}) == b"--B--\r\n"


def test_paths_and_files_keep_their_names(tmp_path: Path) -> None:
    path = tmp_path / "weights.bin"
    path.write_bytes(b"0123456789")
    assert b'filename="weights.bin"' in written({"f": path})
    assert written({"f": path}).endswith(b"0123456789\r\n--B--\r\n")
    with path.open("rb") as file:
        file.seek(4)
        content = written({"f": file})
    assert b'filename="weights.bin"' in content
    assert content.endswith(b"\r\n\r\n456789\r\n--B--\r\n")
    assert written({"f": ("other", path)}).count(b'filename="other"') == 1


def test_names_are_quoted() -> None:
    assert b'name="a%22b"' in written({'a"b': "1"})


@pytest.mark.parametrize(
    "fields",
    [
        {"a\nb": "1"},
        {"a\rb": "1"},
        {"f": ("a\r\nb", b"1")},
        {"f": ("a", b"1", "text/plain\r\nX-Evil: 1")},
        {"f": (3, b"1")},
        {"f": 3},
        {"f": None},
        {"f": ("name", "text is not file content")},
        {"f": io.StringIO("text")},
        {"f": Path("/nonexistent/file")},
        {"f": Path("/")},
    ],
)
def test_what_is_refused(fields: Any) -> None:
    with pytest.raises(InvalidInputError):
        Multipart(fields)


def test_files_open_as_text_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    path.write_text("a")
    with path.open() as file, pytest.raises(InvalidInputError, match="binary"):
        Multipart({"f": file})


@pytest.mark.parametrize("boundary", ["", "a b", "x" * 71, "a\r\nb", "\u00e9", 'a"b'])
def test_bad_boundaries_are_refused(boundary: str) -> None:
    with pytest.raises(InvalidInputError, match="boundary"):
        Multipart({}, boundary=boundary)


def test_boundaries_are_random_unless_given() -> None:
    first, second = Multipart({}), Multipart({})
    assert first.content_type != second.content_type
    assert Multipart({}, boundary="B").content_type == "multipart/form-data; boundary=B"


def test_files_are_streamed_in_pieces(tmp_path: Path) -> None:
    content = bytes(range(256)) * (3 * PIECE_BYTES // 256) + b"end"
    path = tmp_path / "large"
    path.write_bytes(content)
    reader = Reader(content)
    for field in (content, path, reader, io.BytesIO(content)):
        found = pieces(Multipart({"f": field}, boundary="B"))
        assert max(map(len, found)) == PIECE_BYTES
        assert b"".join(found[1:-2]) == content
    assert set(reader.asked) == {PIECE_BYTES}


def test_length_is_unknown_with_a_reader_only(tmp_path: Path) -> None:
    path = tmp_path / "a"
    path.write_bytes(b"abc")
    assert Multipart({"f": path, "g": "text", "h": io.BytesIO(b"x")}).length is not None
    assert Multipart({"f": path, "g": Reader(b"abc")}).length is None


class Pipe(io.BytesIO):
    def seekable(self) -> bool:
        return False


class Bare:
    def __init__(self) -> None:
        self.left = [b"ab", b"c"]

    def read(self, size: int) -> bytes:
        return self.left.pop(0) if self.left else b""


@pytest.mark.parametrize("make", [lambda: Pipe(b"abc"), lambda: Reader(b"abc"), Bare])
def test_readers_that_cannot_be_rewound_are_sent_once(make: Any) -> None:
    body = Multipart({"f": make()}, boundary="B")
    assert body.length is None
    assert b"\r\n\r\nabc\r\n" in b"".join(pieces(body))
    with pytest.raises(InvalidInputError, match="cannot be rewound"):
        pieces(body)


def test_a_reader_that_was_not_reached_can_still_be_sent() -> None:
    async def begin(body: Multipart) -> None:
        parts = body.parts()
        await anext(parts)
        await parts.aclose()  # type: ignore[attr-defined]

    body = Multipart({"f": Reader(b"abc")}, boundary="B")
    asyncio.run(begin(body))
    assert b"abc" in b"".join(pieces(body))


def test_other_bodies_can_be_sent_again(tmp_path: Path) -> None:
    path = tmp_path / "a"
    path.write_bytes(b"abc")
    file = io.BytesIO(b"__def")
    file.seek(2)
    body = Multipart({"f": path, "g": file, "h": b"x", "i": "y"}, boundary="B")
    assert pieces(body) == pieces(body)


def test_a_file_that_shrinks_is_an_error_and_one_that_grows_is_cut(tmp_path: Path) -> None:
    path = tmp_path / "a"
    path.write_bytes(b"0123456789")
    body = Multipart({"f": path}, boundary="B")
    path.write_bytes(b"0123456789-more")
    assert b"".join(pieces(body)).endswith(b"\r\n\r\n0123456789\r\n--B--\r\n")
    path.write_bytes(b"01234")
    with pytest.raises(InvalidInputError, match="shrank by 5 bytes"):
        pieces(body)
    path.unlink()
    with pytest.raises(InvalidInputError, match="cannot be read: No such file"):
        pieces(body)


names = st.text(st.characters(exclude_characters="\r\n", exclude_categories=["Cs", "Cc"]), min_size=1, max_size=8)


@given(st.lists(st.tuples(names, st.one_of(st.text(max_size=20), st.binary(max_size=20))), min_size=1, max_size=5))
def test_another_parser_reads_what_was_written(fields: list[tuple[str, str | bytes]]) -> None:
    body = Multipart([(f"n{index}", value) for index, (_, value) in enumerate(fields)])
    head = f"Content-Type: {body.content_type}\r\n\r\n".encode()
    parsed = message_from_bytes(head + b"".join(pieces(body)), policy=HTTP)
    found = [part.get_payload(decode=True) for part in parsed.iter_parts()]
    expected = [value.encode() if isinstance(value, str) else value for _, value in fields]
    assert [normalised(item) for item in found] == [normalised(item) for item in expected]


def normalised(content: Any) -> bytes:
    """The parser of the standard library reads mail, where line ends have one form."""
    return bytes(content).replace(b"\r\n", b"\n").replace(b"\r", b"\n").rstrip(b"\n")


@given(names)
def test_a_name_never_ends_its_quotes(name: str) -> None:
    content = written({name: "value"})
    line = content.split(b"\r\n")[1]
    assert line.count(b'"') == 2


def test_the_repr_shows_no_content() -> None:
    assert repr(Multipart({"f": "secret"}, boundary="B")) == "Multipart(1 fields, length=64)"

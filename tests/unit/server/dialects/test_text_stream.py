"""Text from tokens: whole characters only, never a part of a stop string."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.openai_server import write_tokenizer

from tinsmith.server.bodies.questions import VocabularyReading
from tinsmith.server.bodies.read_openai import read_vocabulary
from tinsmith.server.dialects.text_stream import TextStream, held_back
from tinsmith.server.dialects.vocabulary import Vocabulary
from tinsmith.text.tokenizer import load_tokenizer


def vocabulary(*pieces: bytes, special: tuple[int, ...] = ()) -> Vocabulary:
    ends = np.cumsum([len(piece) for piece in pieces], dtype="<u4").tobytes()
    return Vocabulary(VocabularyReading(pieces=b"".join(pieces), ends=ends, special=list(special)))


BYTES = vocabulary(*(bytes([value]) for value in range(256)))


def streamed(raw: bytes, stops: list[str], cuts: list[int]) -> list[str]:
    stream = TextStream(BYTES, stops, frozenset())
    places = sorted({0, len(raw), *(cut % (len(raw) + 1) for cut in cuts)})
    pieces = [stream.push(raw[begin:end]) for begin, end in itertools.pairwise(places)]
    return [*pieces, stream.finish()]


@given(st.text(max_size=30), st.lists(st.integers(0, 200), max_size=10))
def test_text_comes_out_as_it_was_whatever_the_tokens_are(text: str, cuts: list[int]) -> None:
    pieces = streamed(text.encode(), [], cuts)
    assert "".join(pieces) == text
    assert all("\ufffd" not in piece for piece in pieces) or "\ufffd" in text


@given(
    st.text(alphabet="abé€", max_size=30),
    st.lists(st.text(alphabet="abé€", min_size=1, max_size=4), max_size=3),
    st.lists(st.integers(0, 200), max_size=20),
)
def test_no_part_of_a_stop_string_is_ever_given_away(text: str, stops: list[str], cuts: list[int]) -> None:
    found = [(text.find(stop) + len(stop), text.find(stop)) for stop in stops if stop in text]
    pieces = streamed(text.encode(), stops, cuts)
    assert "".join(pieces) == text[: min(found, default=(0, len(text)))[1]]


@pytest.mark.parametrize(
    ("text", "stops", "size"),
    [
        (b"abc", [b"cd"], 1),
        (b"abc", [b"xx"], 0),
        (b"ab", [b"abab"], 2),
        (b"aab", [b"bcd", b"abx"], 2),
        (b"", [b"a"], 0),
    ],
)
def test_what_could_begin_a_stop_is_held_back(text: bytes, stops: list[bytes], size: int) -> None:
    assert held_back(text, stops) == size


def test_special_tokens_are_no_text() -> None:
    table = vocabulary(b"<end>", b"a", b"b", special=(0,))
    stream = TextStream(table, [], table.special)
    assert stream.push([1, 0, 2]) + stream.finish() == "ab"
    assert table.raw(0) == b"<end>"
    assert table.raw(99) == b""


def test_a_token_that_is_part_of_a_character_is_shown_as_openai_shows_it() -> None:
    table = vocabulary(b"\xe2\x82", b"\xac", b"ok")
    assert [table.shown(token) for token in range(3)] == ["bytes:\\xe2\\x82", "bytes:\\xac", "ok"]


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(write_tokenizer(tmp_path_factory.mktemp("tokenizer")))


@given(text=st.text(max_size=40))
def test_the_table_decodes_as_the_tokenizer_does(directory: str, text: str) -> None:
    tokenizer = load_tokenizer(directory)
    table = Vocabulary(read_vocabulary(directory))
    tokens = tokenizer.encode(text.replace("\0", ""))
    stream = TextStream(table, [], table.special)
    assert stream.push(tokens) + stream.finish() == tokenizer.decode(tokens, skip_special_tokens=True)

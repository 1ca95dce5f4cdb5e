"""Stop rules: tokens, strings across token boundaries, and the three meanings of `stop`."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tinsmith.engine.models.tiny import make_tiny
from tinsmith.engine.sampling.plan import StopMatcher, StopRule, stop_rule
from tinsmith.errors import InvalidInputError
from tinsmith.text.token_bytes import read_token_bytes

TABLE = (b"<eos>", b"a", b"b", b"ab", b" stop", b"st", b"op", "é".encode()[:1], "é".encode()[1:], b"")


def ends_at(stop: object, tokens: list[int]) -> int | None:
    """The index of the token that ends the sample."""
    matcher = StopMatcher(stop_rule(stop, (0,)), TABLE)  # type: ignore[arg-type]
    return next((i for i, token in enumerate(tokens) if matcher.push(token)), None)


@pytest.mark.parametrize(
    ("stop", "tokens", "end"),
    [
        (None, [1, 2, 0, 1], 2),
        ([], [1, 0, 0, 2], None),
        ([2], [1, 1, 2], 2),
        ([2], [1, 0, 2], 1),
        ("stop", [1, 4, 1], 1),
        ("stop", [5, 6], 1),
        ("stop", [5, 9, 9, 6], 3),
        ("stop", [5, 1, 6], None),
        (["x", "bst"], [3, 5], 1),
        ("é", [1, 7, 8], 2),
        ("é", [7, 1, 8], None),
        ("aab", [1, 1, 1, 2], 3),
        ("<eos>", [1, 0], 1),
        ("a", [3], 0),
        ("zz", [0], 0),
    ],
)
def test_a_sample_ends_where_its_stop_is_complete(stop: object, tokens: list[int], end: int | None) -> None:
    assert ends_at(stop, tokens) == end


def test_a_token_without_bytes_is_harmless() -> None:
    assert not StopMatcher(StopRule(texts=(b"a",)), ()).push(7)


def test_byte_level_tokens_join_to_the_text(tmp_path: Path) -> None:
    tokenizers = pytest.importorskip("tokenizers")
    directory = make_tiny(tmp_path / "tiny")
    table = read_token_bytes(directory / "tokenizer.json")
    text = "the end\n\tof étude 漢字 🙂 and <|im_end|>"
    ids = tokenizers.Tokenizer.from_file(str(directory / "tokenizer.json")).encode(text).ids
    assert b"".join(table[token] for token in ids).decode() == text


def test_sentencepiece_tokens_join_to_the_text(tmp_path: Path) -> None:
    path = tmp_path / "tokenizer.json"
    parts = [{"type": "Replace"}, {"type": "ByteFallback"}, {"type": "Fuse"}]
    described = {
        "model": {"type": "BPE", "vocab": {"<s>": 0, "\u2581the": 1, "<0xC3>": 2, "<0xA9>": 3}},
        "added_tokens": [{"id": 0, "content": "<s>"}],
        "decoder": {"type": "Sequence", "decoders": parts},
    }
    path.write_text(json.dumps(described))
    assert read_token_bytes(path) == (b"<s>", b" the", b"\xc3", b"\xa9")


def test_unigram_vocabularies_are_lists(tmp_path: Path) -> None:
    path = tmp_path / "tokenizer.json"
    path.write_text(json.dumps({"model": {"vocab": [["<unk>", 0.0], ["\u2581a", -1.0]]}}))
    assert read_token_bytes(path) == (b"<unk>", b" a")
    path.write_text(json.dumps({"model": {}}))
    with pytest.raises(InvalidInputError, match="no vocabulary"):
        read_token_bytes(path)

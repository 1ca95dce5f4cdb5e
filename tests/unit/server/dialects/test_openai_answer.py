"""Logprobs of completions: where each token is in the text, and what stands beside it."""

from __future__ import annotations

import numpy as np

from tinsmith.server.bodies.questions import VocabularyReading
from tinsmith.server.dialects.openai_answer import CompletionScores, chat_scores
from tinsmith.server.dialects.vocabulary import Vocabulary

PIECES = (b"<end>", b"a", b"\xe2\x82", b"\xac", b"bc")
TABLE = Vocabulary(
    VocabularyReading(
        pieces=b"".join(PIECES),
        ends=np.cumsum([len(piece) for piece in PIECES], dtype="<u4").tobytes(),
        special=[0],
    )
)


def test_offsets_are_those_of_characters() -> None:
    scores = CompletionScores(TABLE)
    scores.add([1, 2, 3, 4, 0], [-1.0] * 5)
    found = scores.taken()
    assert found["tokens"] == ["a", "bytes:\\xe2\\x82", "bytes:\\xac", "bc", "<end>"]
    assert found["text_offset"] == [0, 1, 1, 2, 4]
    assert scores.taken()["tokens"] == [], "what was taken is taken"
    scores.add([1], [-1.0])
    assert scores.taken()["text_offset"] == [4], "the next part of a stream goes on from there"


def test_a_prompt_that_ends_within_a_character_shows_it_as_a_replacement() -> None:
    scores = CompletionScores(TABLE)
    scores.add([1, 2], [None, -1.0])
    scores.end_prompt()
    scores.add([4], [-1.0])
    assert scores.taken()["text_offset"] == [0, 1, 2]


def test_the_token_itself_is_always_among_the_likely_ones() -> None:
    scores = CompletionScores(TABLE)
    scores.add([1, 4], [None, -3.0], [None, [(1, -0.5), (3, -1.0)]])
    assert scores.taken()["top_logprobs"] == [None, {"a": -0.5, "bytes:\\xac": -1.0, "bc": -3.0}]


def test_a_chats_tokens_have_their_bytes() -> None:
    first, second = chat_scores(TABLE, [2, 4], [-1.0, -2.0], [[(1, -0.5)], None])
    assert first == {
        "token": "\ufffd",
        "logprob": -1.0,
        "bytes": [0xE2, 0x82],
        "top_logprobs": [{"token": "a", "logprob": -0.5, "bytes": [97]}],
    }
    assert second["top_logprobs"] == []

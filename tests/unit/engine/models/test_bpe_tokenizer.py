"""Tokenizers made from their parts: text survives a round trip, and transformers reads them as the client does."""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer

from tinsmith.engine.models import tiny as tiny_models
from tinsmith.engine.models.bpe_tokenizer import PRE_TOKENIZERS, write_tokenizer
from tinsmith.errors import InvalidInputError
from tinsmith.text.token_bytes import byte_alphabet
from tinsmith.text.tokenizer import load_tokenizer

TEXTS = [
    "Hello, world!",
    "  two spaces\tand a tab\n\n\nlines \r\n",
    "naïve café — “quotes” … 日本語 한국어 العربية 🤖👩‍👩‍👧",
    "def f(x):\n    return {x: 1_000_000 + 0x1F}  # comment\n",
    "1234567890 3.14159 2026-11-16",
    "<|im_start|>user\nhi<|im_end|>\n",
    "the and the",
    "",
]


@pytest.mark.parametrize("text", TEXTS)
def test_text_comes_back(text: str, tiny: Callable[..., Any]) -> None:
    tokenizer = Tokenizer.from_file(str(tiny().directory / "tokenizer.json"))
    assert tokenizer.decode(tokenizer.encode(text).ids, skip_special_tokens=False) == text


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None, max_examples=100)
@given(text=st.text())
def test_any_text_comes_back(text: str, tiny: Callable[..., Any]) -> None:
    tokenizer = Tokenizer.from_file(str(tiny().directory / "tokenizer.json"))
    assert tokenizer.decode(tokenizer.encode(text).ids, skip_special_tokens=False) == text


@pytest.mark.parametrize("pre", sorted(PRE_TOKENIZERS))
@pytest.mark.parametrize("text", TEXTS)
def test_every_split_loses_nothing(pre: str, text: str, tmp_path: Path) -> None:
    write_tokenizer(dataclasses.replace(tiny_models._byte_tokenizer(), pre_tokenizer=pre), tmp_path)
    tokenizer = Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    assert tokenizer.decode(tokenizer.encode(text).ids, skip_special_tokens=False) == text


def test_special_tokens_are_one_token_and_digits_are_split(tiny: Callable[..., Any]) -> None:
    tokenizer = Tokenizer.from_file(str(tiny().directory / "tokenizer.json"))
    assert tokenizer.encode("<|im_start|>12<|im_end|>").tokens == ["<|im_start|>", "1", "2", "<|im_end|>"]
    assert tokenizer.encode(" the").tokens == ["\u0120the"]
    assert tokenizer.decode([1, 2]) == ""


def test_the_client_and_transformers_read_it_alike(tiny: Callable[..., Any]) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        import transformers

        theirs = transformers.AutoTokenizer.from_pretrained(tiny().directory)
    ours = load_tokenizer(tiny().directory)
    chat = [{"role": "user", "content": "the 12"}]
    for text in TEXTS:
        assert ours.encode(text) == theirs.encode(text)
    assert ours.apply_chat_template(chat, tokenize=False, add_generation_prompt=True) == (
        theirs.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
    )
    assert (ours.bos_token, ours.eos_token_id, theirs.eos_token_id) == ("<|im_start|>", 2, 2)


def test_a_beginning_of_text_is_added_when_the_model_wants_it(tmp_path: Path) -> None:
    write_tokenizer(dataclasses.replace(tiny_models._byte_tokenizer(), add_bos=True), tmp_path)
    tokenizer = Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    assert tokenizer.encode("a").tokens == ["<|im_start|>", "a"]
    assert tokenizer.encode("a", add_special_tokens=False).tokens == ["a"]


def test_an_unknown_split_is_refused_by_name() -> None:
    with pytest.raises(InvalidInputError, match="'tekken' is not supported"):
        dataclasses.replace(tiny_models._byte_tokenizer(), pre_tokenizer="tekken")


def test_the_byte_alphabet_is_that_of_the_library() -> None:
    from tokenizers.pre_tokenizers import ByteLevel

    assert sorted(byte_alphabet()) == sorted(ByteLevel.alphabet())
    assert byte_alphabet()[32] == "\u0120"

"""The bytes of each token, read from a `tokenizer.json`: stop strings are matched on them, and sampled text is made of
them.

Bytes rather than characters, because one character may be spread over several tokens. Supports byte-level vocabularies
(GPT-2, Llama 3, Qwen, SmolLM) and SentencePiece-like ones (Llama 2, Mistral).
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tinsmith.errors import InvalidInputError

_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")
_SPACE = "\u2581"  # what SentencePiece writes for a space


def byte_alphabet() -> list[str]:
    """Return the character that stands for each byte: itself if it is printable, else one from U+0100 on."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = (byte for byte in range(256) if byte not in printable)
    stand_ins = {byte: chr(0x100 + place) for place, byte in enumerate(others)}
    return [chr(byte) if byte in printable else stand_ins[byte] for byte in range(256)]


_BYTES_BY_CHARACTER = {character: byte for byte, character in enumerate(byte_alphabet())}


def read_token_bytes(tokenizer_json: Path) -> tuple[bytes, ...]:
    """Return the bytes of each token id: none for unused ids, and the name of the token for special tokens."""
    described = json.loads(tokenizer_json.read_text(encoding="utf-8"))
    vocabulary = _vocabulary(described.get("model", {}), tokenizer_json)
    added = {entry["id"]: entry["content"] for entry in described.get("added_tokens", [])}
    is_byte_level = "ByteLevel" in _kinds(described.get("decoder")) | _kinds(described.get("pre_tokenizer"))
    size = max([*vocabulary.values(), *added], default=-1) + 1
    table = [b""] * size
    for text, token in vocabulary.items():
        table[token] = _from_byte_level(text) if is_byte_level else _from_sentencepiece(text)
    for token, text in added.items():
        table[token] = text.encode()
    return tuple(table)


def read_special_tokens(tokenizer_json: Path) -> frozenset[int]:
    """Return the tokens that are no text, such as the ends of turns: a sample's text never contains their names."""
    described = json.loads(tokenizer_json.read_text(encoding="utf-8"))
    return frozenset(entry["id"] for entry in described.get("added_tokens", []) if entry.get("special"))


def _vocabulary(model: Mapping[str, Any], path: Path) -> dict[str, int]:
    vocabulary = model.get("vocab")
    if isinstance(vocabulary, Mapping):
        return dict(vocabulary)
    if isinstance(vocabulary, Sequence) and not isinstance(vocabulary, str):  # Unigram: pairs of string and score
        return {entry[0]: token for token, entry in enumerate(vocabulary)}
    raise InvalidInputError(f"{path}: the tokenizer has no vocabulary (model.vocab)")


def _kinds(part: Any) -> set[str]:
    """Return the types in a part of a tokenizer, including those inside a `Sequence`."""
    if not isinstance(part, Mapping):
        return set()
    nested = [*part.get("decoders", []), *part.get("pretokenizers", [])]
    return {part.get("type", "")}.union(*(_kinds(inner) for inner in nested))


def _from_byte_level(text: str) -> bytes:
    """Decode a token in which each character stands for a byte; return other text as UTF-8."""
    try:
        return bytes(_BYTES_BY_CHARACTER[character] for character in text)
    except KeyError:
        return text.encode()


def _from_sentencepiece(text: str) -> bytes:
    found = _BYTE_TOKEN.fullmatch(text)
    return bytes([int(found[1], 16)]) if found else text.replace(_SPACE, " ").encode()

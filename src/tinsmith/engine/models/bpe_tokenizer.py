"""Writes byte-level BPE tokenizers as Hugging Face files, from a vocabulary and merges.

Families differ in how they split text before merging. GGUF files only name that split, so the patterns are listed here.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tinsmith.errors import InvalidInputError

_BYTE_LEVEL = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
_BYTES_ONLY = {**_BYTE_LEVEL, "use_regex": False}
_QWEN2 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_LLAMA3 = _QWEN2.replace(r"\p{N}| ", r"\p{N}{1,3}| ")


def _split(pattern: str) -> dict[str, Any]:
    return {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}


PRE_TOKENIZERS: Mapping[str, list[dict[str, Any]]] = {
    "smollm": [{"type": "Digits", "individual_digits": True}, _BYTE_LEVEL],
    "gpt-2": [_BYTE_LEVEL],
    "qwen2": [_split(_QWEN2), _BYTES_ONLY],
    "llama-bpe": [_split(_LLAMA3), _BYTES_ONLY],
}
"""How to split text before merging, by the name in GGUF files (`tokenizer.ggml.pre`)."""
_NORMALIZED_NFC = frozenset({"qwen2"})
_IGNORES_MERGES = frozenset({"llama-bpe"})


@dataclass(frozen=True, slots=True, kw_only=True)
class BpeTokenizer:
    """The parts of a byte-level BPE tokenizer; a token's id is its index in `tokens`."""

    tokens: tuple[str, ...]
    merges: tuple[tuple[str, str], ...]
    special_ids: tuple[int, ...]
    """Control tokens, which decoding leaves out."""
    added_ids: tuple[int, ...] = ()
    """Tokens that are matched as a whole and kept by decoding."""
    pre_tokenizer: str = "gpt-2"
    add_bos: bool = False
    bos_id: int | None = None
    eos_id: int | None = None
    unk_id: int | None = None
    pad_id: int | None = None
    chat_template: str | None = None

    def __post_init__(self) -> None:
        if self.pre_tokenizer not in PRE_TOKENIZERS:
            raise InvalidInputError(
                f"tokenizer.ggml.pre: {self.pre_tokenizer!r} is not supported (supported: "
                f"{', '.join(sorted(PRE_TOKENIZERS))}); load the model from its Hugging Face directory instead",
                field="tokenizer.ggml.pre",
            )

    def tokenizer_json(self) -> dict[str, Any]:
        """Return the contents of tokenizer.json."""
        added = sorted({*self.special_ids, *self.added_ids})
        return {
            "version": "1.0",
            "truncation": None,
            "padding": None,
            "added_tokens": [self._added_token(token_id) for token_id in added],
            "normalizer": {"type": "NFC"} if self.pre_tokenizer in _NORMALIZED_NFC else None,
            "pre_tokenizer": {"type": "Sequence", "pretokenizers": PRE_TOKENIZERS[self.pre_tokenizer]},
            "post_processor": self._post_processor(),
            "decoder": {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True},
            "model": {
                "type": "BPE",
                "dropout": None,
                "unk_token": None,
                "continuing_subword_prefix": None,
                "end_of_word_suffix": None,
                "fuse_unk": False,
                "byte_fallback": False,
                "ignore_merges": self.pre_tokenizer in _IGNORES_MERGES,
                "vocab": {token: token_id for token_id, token in enumerate(self.tokens)},
                "merges": [list(merge) for merge in self.merges],
            },
        }

    def tokenizer_config(self) -> dict[str, Any]:
        """Return the contents of tokenizer_config.json."""
        named = {"bos_token": self.bos_id, "eos_token": self.eos_id, "unk_token": self.unk_id, "pad_token": self.pad_id}
        return {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "add_prefix_space": False,
            "clean_up_tokenization_spaces": False,
            **{name: self.tokens[token_id] for name, token_id in named.items() if token_id is not None},
            **({} if self.chat_template is None else {"chat_template": self.chat_template}),
        }

    def _added_token(self, token_id: int) -> dict[str, Any]:
        return {
            "id": token_id,
            "content": self.tokens[token_id],
            "single_word": False,
            "lstrip": False,
            "rstrip": False,
            "normalized": False,
            "special": token_id in self.special_ids,
        }

    def _post_processor(self) -> dict[str, Any] | None:
        if not self.add_bos or self.bos_id is None:
            return {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": False, "use_regex": True}
        bos = self.tokens[self.bos_id]
        one = [{"SpecialToken": {"id": bos, "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}]
        return {
            "type": "TemplateProcessing",
            "single": one,
            "pair": [*one, {"SpecialToken": {"id": bos, "type_id": 1}}, {"Sequence": {"id": "B", "type_id": 1}}],
            "special_tokens": {bos: {"id": bos, "ids": [self.bos_id], "tokens": [bos]}},
        }


def write_tokenizer(tokenizer: BpeTokenizer, directory: Path) -> None:
    """Write tokenizer.json and tokenizer_config.json."""
    directory.mkdir(parents=True, exist_ok=True)
    content = json.dumps(tokenizer.tokenizer_json(), ensure_ascii=False, indent=1)
    (directory / "tokenizer.json").write_text(content + "\n", encoding="utf-8")
    config = json.dumps(tokenizer.tokenizer_config(), ensure_ascii=False, indent=2)
    (directory / "tokenizer_config.json").write_text(config + "\n", encoding="utf-8")

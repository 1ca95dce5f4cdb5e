"""Reads the weights, configuration and tokenizer of a GGUF file, with Hugging Face's names and layouts.

Quantised tensors are read in the format of the file or expanded to float32.
"""

from __future__ import annotations

import functools
import re
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from gguf import GGUFReader, GGUFValueType, ReaderTensor, dequantize

from tinsmith.engine.cpu.formats import FORMATS, PLAIN, Blocks, Format, Weights
from tinsmith.engine.models.bpe_tokenizer import BpeTokenizer
from tinsmith.engine.models.config import ModelConfig, RopeConfig
from tinsmith.engine.models.decoder import weight_shapes
from tinsmith.errors import InvalidInputError

ARCHITECTURES: Mapping[str, str] = {
    "llama": "LlamaForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
}
_LAYER = re.compile(r"model\.layers\.(\d+)\.(.+)\.(weight|bias)")
_LAYER_NAMES: Mapping[str, str] = {
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
}
_TOP_NAMES: Mapping[str, str] = {
    "model.embed_tokens.weight": "token_embd.weight",
    "model.norm.weight": "output_norm.weight",
    "lm_head.weight": "output.weight",
}
_ROPE_FACTORS = "rope_freqs.weight"
CONTROL, USER_DEFINED = 3, 4
"""Values of `tokenizer.ggml.token_type`."""


class _Reader(GGUFReader):
    """The package's reader, made fast for vocabularies: it takes seconds for the arrays of 100,000 strings.

    Slices of a plain array take a fraction of the time of those of a memory map, and arrays are read by a short loop.
    """

    @property
    def data(self) -> Any:
        return self._plain

    @data.setter
    def data(self, mapped: Any) -> None:
        self._plain = mapped.view(np.ndarray)

    def _get_field_parts(self, orig_offs: int, raw_type: int) -> tuple[int, list[Any], list[int], list[GGUFValueType]]:
        """Return the size of a field, its parts, which of them are its value, and its types."""
        if raw_type != GGUFValueType.ARRAY or self.byte_order != "I":
            return super()._get_field_parts(orig_offs, raw_type)
        kind, count = self._get(orig_offs, np.uint32), self._get(orig_offs + 4, np.uint64)
        item, parts, data, start = GGUFValueType(int(kind[0])), [kind, count], self._plain, orig_offs + 12
        if item in self.gguf_scalar_to_np:
            parts.append(self._get(start, self.gguf_scalar_to_np[item], int(count[0])))
        elif item != GGUFValueType.STRING:
            return super()._get_field_parts(orig_offs, raw_type)
        else:
            for _ in range(int(count[0])):
                length = data[start : start + 8]
                end = start + 8 + int.from_bytes(length.tobytes(), sys.byteorder)
                if end > len(data):
                    raise IndexError("a string of an array is longer than the file")
                parts += length, data[start + 8 : end]
                start = end
        values = list(range(2, 3) if item in self.gguf_scalar_to_np else range(3, len(parts), 2))
        return sum(part.nbytes for part in parts), parts, values, [GGUFValueType.ARRAY, item]


class GgufFile:
    """One GGUF file, mapped into memory."""

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            reader = _Reader(path)
        except (OSError, ValueError, IndexError, KeyError) as error:
            raise InvalidInputError(f"{path} cannot be read as GGUF: {error}") from error
        self._fields = reader.fields
        self._tensors: dict[str, ReaderTensor] = {tensor.name: tensor for tensor in reader.tensors}
        self.config = self._config()
        self._check()

    def read(self, name: str) -> torch.Tensor:
        """Return a weight by its Hugging Face name, as float32."""
        return self._in_order(name, self._expanded(gguf_name(name)))

    def read_stored(self, name: str) -> Weights:
        """Return a weight by its Hugging Face name in the format of the file, or in float32 if it cannot be kept so."""
        tensor = self._tensors[gguf_name(name)]
        stored = self.format_of(name)
        if stored.name != tensor.tensor_type.name or len(tensor.shape) != 2:
            return self.read(name)
        data = torch.from_numpy(tensor.data.copy())
        if stored.scale is None:
            return self._in_order(name, data if data.dtype == stored.dtype else data.view(stored.dtype))
        return Blocks(stored, self._in_order(name, data), (len(data), int(tensor.shape[0])))

    def format_of(self, name: str) -> Format:
        """Return the format in which a weight can be kept: the file's, or float32."""
        return FORMATS.get(self._tensors[gguf_name(name)].tensor_type.name, PLAIN)

    def _in_order(self, name: str, rows: torch.Tensor) -> torch.Tensor:
        """Return a weight's rows, or their bytes, in the order of Hugging Face."""
        if self._is_interleaved and ".q_proj." in name:
            return _rotate_half_order(rows, self.config.num_heads)
        if self._is_interleaved and ".k_proj." in name:
            return _rotate_half_order(rows, self.config.num_kv_heads)
        return rows

    def tokenizer(self) -> BpeTokenizer:
        """Return the tokenizer's parts; only byte-level BPE is supported."""
        kind = self._value("tokenizer.ggml.model")
        if kind != "gpt2":
            raise InvalidInputError(
                f"{self.path}: tokenizer.ggml.model {kind!r} is not supported (supported: gpt2, byte-level BPE); "
                "load the model from its Hugging Face directory instead",
                field="tokenizer.ggml.model",
            )
        types = self._value("tokenizer.ggml.token_type", [])
        return BpeTokenizer(
            tokens=tuple(self._required("tokenizer.ggml.tokens")),
            merges=tuple(_pair(merge) for merge in self._required("tokenizer.ggml.merges")),
            special_ids=tuple(i for i, kind in enumerate(types) if kind == CONTROL),
            added_ids=tuple(i for i, kind in enumerate(types) if kind == USER_DEFINED),
            pre_tokenizer=self._value("tokenizer.ggml.pre", "default"),
            add_bos=bool(self._value("tokenizer.ggml.add_bos_token", False)),
            bos_id=self._value("tokenizer.ggml.bos_token_id"),
            eos_id=self._value("tokenizer.ggml.eos_token_id"),
            unk_id=self._value("tokenizer.ggml.unknown_token_id"),
            pad_id=self._value("tokenizer.ggml.padding_token_id"),
            chat_template=self._value("tokenizer.chat_template"),
        )

    @functools.cached_property
    def _is_interleaved(self) -> bool:
        """Return whether query and key rows are in pairs, as llama.cpp expects for this architecture."""
        return bool(self._value("general.architecture") == "llama")

    def _expanded(self, name: str) -> torch.Tensor:
        tensor = self._tensors[name]
        return torch.from_numpy(dequantize(tensor.data, tensor.tensor_type).copy()).float()

    def _value(self, key: str, default: Any = None) -> Any:
        field = self._fields.get(key)
        return default if field is None else field.contents()

    def _required(self, key: str) -> Any:
        if key not in self._fields:
            raise InvalidInputError(f"{self.path}: metadata {key} is missing", field=key)
        return self._value(key)

    def _config(self) -> ModelConfig:
        name = self._required("general.architecture")
        if name not in ARCHITECTURES:
            raise InvalidInputError(
                f"{self.path}: architecture {name!r} is not supported (supported: {', '.join(ARCHITECTURES)})",
                field="general.architecture",
            )
        get: Callable[[str], Any] = lambda key: self._required(f"{name}.{key}")  # noqa: E731
        heads = get("attention.head_count")
        if isinstance(heads, list):
            raise InvalidInputError(f"{self.path}: layers with different numbers of heads are not supported")
        hidden = get("embedding_length")
        head_dim = self._value(f"{name}.attention.key_length", hidden // heads)
        if self._value(f"{name}.rope.dimension_count", head_dim) != head_dim:
            raise InvalidInputError(f"{self.path}: {name}.rope.dimension_count: only whole heads can be rotated")
        if self._value(f"{name}.expert_count", 0):
            raise InvalidInputError(f"{self.path}: {name}.expert_count: mixtures of experts are not supported")
        return ModelConfig(
            architecture=ARCHITECTURES[name],
            vocab_size=int(self._tensors["token_embd.weight"].shape[1]),
            hidden_size=hidden,
            num_layers=get("block_count"),
            num_heads=heads,
            num_kv_heads=self._value(f"{name}.attention.head_count_kv", heads),
            head_dim=head_dim,
            intermediate_size=get("feed_forward_length"),
            max_context_length=get("context_length"),
            rope=self._rope(name),
            norm_eps=_shortest(get("attention.layer_norm_rms_epsilon")),
            has_qk_norm="blk.0.attn_q_norm.weight" in self._tensors,
            has_qkv_bias="blk.0.attn_q.bias" in self._tensors,
            has_output_bias="blk.0.attn_output.bias" in self._tensors,
            has_mlp_bias="blk.0.ffn_gate.bias" in self._tensors,
            tie_embeddings="output.weight" not in self._tensors,
            sliding_windows=self._windows(name),
            bos_token_id=self._value("tokenizer.ggml.bos_token_id"),
            eos_token_ids=tuple(
                dict.fromkeys(
                    token_id
                    for key in ("eos_token_id", "eot_token_id")
                    if (token_id := self._value(f"tokenizer.ggml.{key}")) is not None
                )
            ),
            pad_token_id=self._value("tokenizer.ggml.padding_token_id"),
        )

    def _windows(self, name: str) -> tuple[int | None, ...]:
        window = self._value(f"{name}.attention.sliding_window")
        return (window,) * self._required(f"{name}.block_count") if window else ()

    def _rope(self, name: str) -> RopeConfig:
        theta = _shortest(self._value(f"{name}.rope.freq_base", 10000.0))
        if _ROPE_FACTORS in self._tensors:
            return RopeConfig(kind="factors", theta=theta, factors=tuple(self._expanded(_ROPE_FACTORS).tolist()))
        kind = self._value(f"{name}.rope.scaling.type", "none")
        if kind == "none":
            return RopeConfig(theta=theta)
        if kind not in ("linear", "yarn"):
            raise InvalidInputError(
                f"{self.path}: rope type {kind!r} is not supported (supported: none, linear, yarn)",
                field=f"{name}.rope.scaling.type",
            )
        return RopeConfig(
            kind=kind,
            theta=theta,
            factor=_shortest(self._required(f"{name}.rope.scaling.factor")),
            original_context_length=self._value(
                f"{name}.rope.scaling.original_context_length", self._required(f"{name}.context_length")
            ),
        )

    def _check(self) -> None:
        """Raise unless every weight is there with its shape, and no other."""
        expected = {gguf_name(name): shape for name, shape in weight_shapes(self.config).items()}
        for name, shape in expected.items():
            if name not in self._tensors:
                raise InvalidInputError(f"{self.path}: tensor {name} is missing")
            found = tuple(int(dim) for dim in reversed(self._tensors[name].shape))
            if found != shape:
                raise InvalidInputError(f"{self.path}: {name} has shape {list(found)}, expected {list(shape)}")
        surplus = sorted(set(self._tensors) - set(expected) - {_ROPE_FACTORS})
        if surplus:
            raise InvalidInputError(
                f"{self.path}: tensor {surplus[0]} is not part of {self.config.architecture} "
                f"({len(surplus)} such tensors in all)"
            )


def gguf_name(name: str) -> str:
    """Return the GGUF name of a weight, given its Hugging Face name."""
    match = _LAYER.fullmatch(name)
    return f"blk.{match[1]}.{_LAYER_NAMES[match[2]]}.{match[3]}" if match else _TOP_NAMES[name]


def _rotate_half_order(tensor: torch.Tensor, heads: int) -> torch.Tensor:
    """Reorder each head's rows from pairs (0, 1), (2, 3)... to halves: all first members, then all second ones."""
    rows = tensor.view(heads, tensor.shape[0] // heads // 2, 2, -1)
    return rows.transpose(1, 2).reshape(tensor.shape)


def _pair(merge: str) -> tuple[str, str]:
    left, _, right = merge.partition(" ")
    return left, right


def _shortest(value: float) -> float:
    """Return the decimal number that a float32 stands for: 1e-05 for 9.99999974e-06."""
    return float(f"{value:.7g}")

"""Writes a Hugging Face directory as one GGUF file for llama.cpp, and compares the file with its source.

Matrices are float32 or float16, vectors always float32; quantised formats are not supported. `gguf_read` is the
inverse.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from gguf import GGUFWriter, RopeScalingType, TokenType

from tinsmith.engine.models.bpe_tokenizer import PRE_TOKENIZERS
from tinsmith.engine.models.config import ModelConfig
from tinsmith.engine.models.decoder import weight_shapes
from tinsmith.engine.models.gguf_read import GgufFile, gguf_name
from tinsmith.engine.models.hf_directory import SafetensorsDirectory
from tinsmith.engine.models.load import read_chat_template
from tinsmith.errors import InvalidInputError, TinkerError

ARCHITECTURES: Mapping[str, str] = {
    "LlamaForCausalLM": "llama",
    "MistralForCausalLM": "llama",
    "Qwen2ForCausalLM": "qwen2",
    "Qwen3ForCausalLM": "qwen3",
}
FILE_TYPES = {"f32": 0, "f16": 1}
"""Values of `general.file_type`."""


def write_gguf(directory: Path, path: Path, dtype: str) -> None:
    """Write the model and tokenizer of a directory into a new file."""
    files = SafetensorsDirectory(directory)
    config = files.config
    arch = ARCHITECTURES.get(config.architecture)
    if arch is None or config.sliding_windows:
        raise InvalidInputError(
            f"{config.architecture} cannot be written as GGUF (supported: {', '.join(ARCHITECTURES)}, without "
            "sliding windows); export it as merged, and convert that with llama.cpp"
        )
    writer = GGUFWriter(path, arch)
    try:
        _add_config(writer, config, FILE_TYPES[dtype])
        _add_tokenizer(writer, directory, config)
        for name in weight_shapes(config):
            writer.add_tensor(gguf_name(name), _stored(name, files.read(name), config, arch, dtype).numpy())
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
    finally:
        writer.close()


def check_gguf(directory: Path, path: Path, dtype: str) -> float:
    """Read every tensor back and return the largest difference; raise if it is more than rounding explains."""
    files, written = SafetensorsDirectory(directory), GgufFile(path)
    largest = 0.0
    for name in weight_shapes(files.config):
        weight, found = files.read(name).float(), written.read(name)
        rounded = weight.half().float() if dtype == "f16" and weight.dim() > 1 else weight
        if not torch.equal(rounded, found):
            raise TinkerError(f"{path.name}: {gguf_name(name)} differs from its source after it was written")
        largest = max(largest, float((weight - found).abs().max()))
    written.tokenizer()
    return largest


def _stored(name: str, weight: torch.Tensor, config: ModelConfig, arch: str, dtype: str) -> torch.Tensor:
    weight = weight.float()
    if arch == "llama" and ".q_proj." in name:
        weight = _pair_order(weight, config.num_heads)
    elif arch == "llama" and ".k_proj." in name:
        weight = _pair_order(weight, config.num_kv_heads)
    return weight.half() if dtype == "f16" and weight.dim() > 1 else weight


def _pair_order(tensor: torch.Tensor, heads: int) -> torch.Tensor:
    """Reorder each head's rows from halves to pairs (0, 1), (2, 3)..., as llama.cpp rotates them."""
    rows = tensor.view(heads, 2, tensor.shape[0] // heads // 2, -1)
    return rows.transpose(1, 2).reshape(tensor.shape).contiguous()


def _add_config(writer: GGUFWriter, config: ModelConfig, file_type: int) -> None:
    writer.add_file_type(file_type)
    writer.add_vocab_size(config.vocab_size)
    writer.add_context_length(config.max_context_length)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_heads)
    writer.add_head_count_kv(config.num_kv_heads)
    writer.add_key_length(config.head_dim)
    writer.add_value_length(config.head_dim)
    writer.add_layer_norm_rms_eps(config.norm_eps)
    writer.add_rope_dimension_count(config.head_dim)
    writer.add_rope_freq_base(config.rope.theta)
    rope = config.rope
    if rope.kind == "default":
        return
    if rope.kind not in ("linear", "yarn"):
        raise InvalidInputError(f"rope type {rope.kind!r} cannot be written as GGUF; export it as merged instead")
    writer.add_rope_scaling_type(RopeScalingType.LINEAR if rope.kind == "linear" else RopeScalingType.YARN)
    writer.add_rope_scaling_factor(rope.factor)
    writer.add_rope_scaling_orig_ctx_len(rope.original_context_length or config.max_context_length)


def _add_tokenizer(writer: GGUFWriter, directory: Path, config: ModelConfig) -> None:
    described = json.loads((directory / "tokenizer.json").read_text(encoding="utf-8"))
    if described.get("model", {}).get("type") != "BPE":
        raise InvalidInputError("tokenizer.json: only byte-level BPE tokenizers can be written as GGUF")
    tokens = {token_id: token for token, token_id in described["model"]["vocab"].items()}
    types = dict.fromkeys(tokens, TokenType.NORMAL)
    for added in described.get("added_tokens", ()):
        tokens[added["id"]] = added["content"]
        types[added["id"]] = TokenType.CONTROL if added["special"] else TokenType.USER_DEFINED
    ids = range(config.vocab_size)
    if max(tokens) >= config.vocab_size:
        raise InvalidInputError("tokenizer.json has more tokens than the model, which cannot be written as GGUF")
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(_pre_tokenizer(described))
    writer.add_token_list([tokens.get(token_id, f"[PAD{token_id}]") for token_id in ids])
    writer.add_token_types([types.get(token_id, TokenType.UNUSED) for token_id in ids])
    merges = described["model"]["merges"]
    writer.add_token_merges([merge if isinstance(merge, str) else " ".join(merge) for merge in merges])
    _add_special(writer, directory, config, described.get("post_processor") or {})


def _add_special(writer: GGUFWriter, directory: Path, config: ModelConfig, processor: Mapping[str, Any]) -> None:
    if config.bos_token_id is not None:
        writer.add_bos_token_id(config.bos_token_id)
    if config.eos_token_ids:
        writer.add_eos_token_id(config.eos_token_ids[0])
    if len(config.eos_token_ids) > 1:
        writer.add_eot_token_id(config.eos_token_ids[1])
    if config.pad_token_id is not None:
        writer.add_pad_token_id(config.pad_token_id)
    begins_with = processor.get("single", [{}])[0]
    writer.add_add_bos_token("SpecialToken" in begins_with)
    template = read_chat_template(directory)
    if template is not None:
        writer.add_chat_template(template)


def _pre_tokenizer(described: Mapping[str, Any]) -> str:
    """Return the GGUF name for how a tokenizer splits text."""
    found = described.get("pre_tokenizer") or {}
    parts = found.get("pretokenizers", [found])
    for name, known in PRE_TOKENIZERS.items():
        if parts == known:
            return name
    raise InvalidInputError(
        "tokenizer.json splits text in a way that is not supported "
        f"(known: {', '.join(sorted(PRE_TOKENIZERS))}); export it as merged, and convert that with llama.cpp"
    )

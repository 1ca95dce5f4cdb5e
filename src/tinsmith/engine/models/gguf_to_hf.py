"""Converts a GGUF file to a Hugging Face directory: float32 safetensors, config and tokenizer, with a list of digests.

A directory is written complete or not at all, and `is_intact` checks it against the digests.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from tinsmith.engine.models.bpe_tokenizer import write_tokenizer
from tinsmith.engine.models.config import ModelConfig, RopeConfig
from tinsmith.engine.models.decoder import weight_shapes
from tinsmith.engine.models.gguf_read import GgufFile
from tinsmith.errors import InvalidInputError

DIGESTS = "digests.json"
ORIGINAL = "original.gguf"
"""The GGUF file itself in a converted directory: an engine reads its weights, which are the same but smaller."""
MODEL_TYPES: Mapping[str, str] = {
    "LlamaForCausalLM": "llama",
    "Qwen2ForCausalLM": "qwen2",
    "Qwen3ForCausalLM": "qwen3",
}


def convert_gguf(source: Path, directory: Path, *, keeps_original: bool = False) -> None:
    """Write the model of a GGUF file as a Hugging Face directory; an existing one is replaced."""
    file = GgufFile(source)
    values = hf_config(file.config)
    directory.parent.mkdir(parents=True, exist_ok=True)
    unfinished = Path(tempfile.mkdtemp(prefix=f".{directory.name}-", dir=directory.parent))
    try:
        weights = {name: file.read(name).contiguous() for name in weight_shapes(file.config)}
        _write_weights(weights, unfinished / "model.safetensors")
        (unfinished / "config.json").write_text(json.dumps(values, indent=2) + "\n")
        write_tokenizer(file.tokenizer(), unfinished)
        if keeps_original:
            shutil.copyfile(source, unfinished / ORIGINAL)
        digests = {path.name: file_digest(path) for path in sorted(unfinished.iterdir())}
        (unfinished / DIGESTS).write_text(json.dumps(digests, indent=2) + "\n")
        for path in (*unfinished.iterdir(), unfinished):
            _sync(path)
        unfinished.chmod(0o755)
        if directory.exists():
            shutil.rmtree(directory)
        unfinished.rename(directory)
        _sync(directory.parent)
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)


def original_of(directory: Path) -> Path | None:
    """Return the GGUF file that a directory was converted from, if it was kept."""
    path = directory / ORIGINAL
    return path if path.exists() and (directory / DIGESTS).exists() else None


def _write_weights(weights: Mapping[str, Tensor], path: Path) -> None:
    try:
        save_file(dict(weights), path, metadata={"format": "pt"})
    except SafetensorError as error:  # a full disk, for instance, which other files report as an OSError
        raise OSError(errno.EIO, str(error), str(path)) from error


def is_intact(directory: Path) -> bool:
    """Return whether a converted directory exists, with every file as it was written."""
    try:
        digests = json.loads((directory / DIGESTS).read_text())
        return bool(digests) and all(file_digest(directory / name) == digest for name, digest in digests.items())
    except (OSError, ValueError, AttributeError):
        return False


def file_digest(path: Path) -> str:
    with path.open("rb") as opened:
        return hashlib.file_digest(opened, "sha256").hexdigest()


def hf_config(config: ModelConfig) -> dict[str, Any]:
    """Return the contents of `config.json`, from which `config_from_hf` reads the same ModelConfig."""
    if config.architecture not in MODEL_TYPES or config.sliding_windows:
        raise InvalidInputError(
            f"a GGUF file with {config.architecture} cannot be converted to a Hugging Face directory"
        )
    bias: dict[str, Any] = {"attention_bias": config.has_output_bias}
    if config.architecture == "LlamaForCausalLM":
        if config.has_qkv_bias != config.has_output_bias:
            raise InvalidInputError(
                "LlamaForCausalLM: config.json cannot express that only some of q, k and v have a bias"
            )
        bias["mlp_bias"] = config.has_mlp_bias
    return {
        "architectures": [config.architecture],
        "model_type": MODEL_TYPES[config.architecture],
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "intermediate_size": config.intermediate_size,
        "max_position_embeddings": config.max_context_length,
        "rms_norm_eps": config.norm_eps,
        "hidden_act": "silu",
        "rope_theta": config.rope.theta,
        "rope_scaling": _rope_scaling(config.rope),
        "tie_word_embeddings": config.tie_embeddings,
        "bos_token_id": config.bos_token_id,
        "eos_token_id": list(config.eos_token_ids),
        "pad_token_id": config.pad_token_id,
        "dtype": "float32",
        **bias,
    }


def _rope_scaling(rope: RopeConfig) -> dict[str, Any] | None:
    if rope.kind == "default":
        return None
    if rope.kind not in ("linear", "yarn"):
        raise InvalidInputError(f"rope type {rope.kind!r} of a GGUF file cannot be expressed in config.json")
    return {
        "rope_type": rope.kind,
        "factor": rope.factor,
        "original_max_position_embeddings": rope.original_context_length,
    }


def _sync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)

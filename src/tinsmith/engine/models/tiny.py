"""Writes tiny random models as complete Hugging Face directories, with a working tokenizer and chat template.

They serve tests, and trying out a server without a download.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from tinsmith.engine.models.bpe_tokenizer import BpeTokenizer, write_tokenizer
from tinsmith.engine.models.decoder import weight_shapes
from tinsmith.engine.models.families import config_from_hf
from tinsmith.errors import InvalidInputError
from tinsmith.text.token_bytes import byte_alphabet

_GEMMA = {
    "hidden_act": "gelu_pytorch_tanh",
    "hidden_activation": "gelu_pytorch_tanh",
    "tie_word_embeddings": True,
    "pad_token_id": 2,
}
FAMILIES: Mapping[str, dict[str, Any]] = {
    "llama": {"architectures": ["LlamaForCausalLM"], "model_type": "llama"},
    "smollm": {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "tie_word_embeddings": True},
    "qwen2": {"architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2"},
    "qwen3": {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "tie_word_embeddings": True},
    "mistral": {"architectures": ["MistralForCausalLM"], "model_type": "mistral", "sliding_window": None},
    "smollm3": {"architectures": ["SmolLM3ForCausalLM"], "model_type": "smollm3", "pad_token_id": 2},
    "granite": {
        "architectures": ["GraniteForCausalLM"],
        "model_type": "granite",
        "embedding_multiplier": 6.0,
        "attention_multiplier": 0.25,
        "residual_multiplier": 0.22,
        "logits_scaling": 3.0,
        "tie_word_embeddings": True,
    },
    "olmo2": {"architectures": ["Olmo2ForCausalLM"], "model_type": "olmo2", "pad_token_id": 2},
    "phi3": {"architectures": ["Phi3ForCausalLM"], "model_type": "phi3", "pad_token_id": 2},
    "gemma2": {
        "architectures": ["Gemma2ForCausalLM"],
        "model_type": "gemma2",
        "attn_logit_softcapping": 2.0,
        "final_logit_softcapping": 3.0,
        "query_pre_attn_scalar": 4,
        "sliding_window": 20,
        **_GEMMA,
    },
    "gemma3": {
        "architectures": ["Gemma3ForCausalLM"],
        "model_type": "gemma3_text",
        "query_pre_attn_scalar": 4,
        "sliding_window": 20,
        "sliding_window_pattern": 2,
        "rope_theta": 1e6,
        "rope_local_base_freq": 1e4,
        **_GEMMA,
    },
}
SIZES: Mapping[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-5,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
SPECIAL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
CHAT_TEMPLATE = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def make_tiny(directory: Path, family: str = "llama", seed: int = 0, **sizes: Any) -> Path:
    """Write a tiny model; `sizes` override keys of `config.json`. The same arguments give the same files."""
    if family not in FAMILIES:
        raise InvalidInputError(f"family: {family!r} is not one of {', '.join(FAMILIES)}", field="family")
    tokenizer = _byte_tokenizer()
    values = {"vocab_size": len(tokenizer.tokens), **SIZES, **FAMILIES[family], **sizes}
    config = config_from_hf(values)
    generator = torch.Generator().manual_seed(seed)
    middle = 0 if config.has_offset_norms else 1
    weights = {name: _random(name, shape, generator, middle) for name, shape in weight_shapes(config).items()}
    directory.mkdir(parents=True, exist_ok=True)
    save_file(weights, directory / "model.safetensors", metadata={"format": "pt"})
    (directory / "config.json").write_text(json.dumps({**values, "dtype": "float32"}, indent=2) + "\n")
    write_tokenizer(tokenizer, directory)
    return directory


def _random(name: str, shape: tuple[int, ...], generator: torch.Generator, middle: int) -> torch.Tensor:
    """Return random weights: norms near `middle`, small biases, and matrices that keep the size of activations."""
    noise = torch.randn(shape, generator=generator)
    if "norm" in name:
        return middle + 0.1 * noise
    if name.endswith("bias"):
        return 0.1 * noise
    return noise * (0.5 if "embed" in name else shape[-1] ** -0.5)


def _byte_tokenizer() -> BpeTokenizer:
    """Return a tokenizer with three special tokens, one token per byte, and a few merges."""
    merges = (("t", "h"), ("th", "e"), ("\u0120", "the"), ("a", "n"), ("an", "d"))
    tokens = (*SPECIAL_TOKENS, *byte_alphabet(), *(left + right for left, right in merges))
    return BpeTokenizer(
        tokens=tokens,
        merges=merges,
        special_ids=(0, 1, 2),
        pre_tokenizer="smollm",
        bos_id=1,
        eos_id=2,
        unk_id=0,
        pad_id=2,
        chat_template=CHAT_TEMPLATE,
    )

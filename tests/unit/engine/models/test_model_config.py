"""Unsupported settings are refused by name; both spellings of rope settings mean the same."""

from __future__ import annotations

from typing import Any

import pytest

from tinsmith.engine.models.config import RopeConfig, config_from_hf
from tinsmith.errors import InvalidInputError

LLAMA: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 100,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 64,
    "max_position_embeddings": 128,
}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"architectures": ["MambaForCausalLM"]}, "architecture MambaForCausalLM is not supported"),
        ({"architectures": [], "model_type": "x"}, "architecture model_type 'x' is not supported"),
        ({"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}}, "rope type 'dynamic' is not supported"),
        ({"rope_parameters": {"rope_type": "longrope"}}, "rope type 'longrope' is not supported"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor: only 1.0"),
        ({"hidden_act": "gelu"}, "hidden_act: 'gelu' is not supported"),
        ({"quantization_config": {"bits": 4}}, "quantised safetensors are not supported"),
        ({"num_key_value_heads": 3}, "4 query heads are not a multiple of 3"),
        ({"head_dim": 7}, "head_dim: must be even"),
        ({"hidden_size": None}, "config.json has no hidden_size"),
        ({"vocab_size": 0}, "vocab_size: must be a whole number above 0"),
        (
            {"architectures": ["Qwen2ForCausalLM"], "use_sliding_window": True, "layer_types": ["chunked_attention"]},
            "layer_types: 'chunked_attention' is not supported",
        ),
    ],
)
def test_refusals(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidInputError, match=message):
        config_from_hf({**LLAMA, **changes})


def test_old_and_new_spelling_of_rope() -> None:
    scaling = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 64}
    old = config_from_hf({**LLAMA, "rope_theta": 5e5, "rope_scaling": {"type": "llama3", **scaling}})
    new = config_from_hf({**LLAMA, "rope_parameters": {"rope_type": "llama3", "rope_theta": 5e5, **scaling}})
    assert old == new
    assert old.rope == RopeConfig(kind="llama3", theta=5e5, factor=8.0, original_context_length=64)


def test_several_ends_of_text() -> None:
    assert config_from_hf({**LLAMA, "eos_token_id": [2, 7]}).eos_token_ids == (2, 7)
    assert config_from_hf({**LLAMA, "eos_token_id": 2}).eos_token_ids == (2,)
    assert config_from_hf(LLAMA).eos_token_ids == ()

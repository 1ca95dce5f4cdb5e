"""Unsupported settings are refused by name; both spellings of rope settings mean the same."""

from __future__ import annotations

import math
import re
from pathlib import Path
from typing import Any

import pytest

from tinsmith.engine.models.config import RopeConfig
from tinsmith.engine.models.families import ARCHITECTURES, config_from_hf
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


GEMMA2, GEMMA3 = {"architectures": ["Gemma2ForCausalLM"]}, {"architectures": ["Gemma3ForCausalLM"]}
GRANITE = {"architectures": ["GraniteForCausalLM"]}
PHI3 = {"architectures": ["Phi3ForCausalLM"]}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"architectures": ["MambaForCausalLM"]}, "architecture MambaForCausalLM is not supported"),
        ({"architectures": [], "model_type": "x"}, "architecture model_type 'x' is not supported"),
        ({"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}}, "rope type 'dynamic' is not supported"),
        ({"rope_parameters": {"rope_type": "longrope"}}, "rope type 'longrope' is not supported"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor: only 1.0"),
        ({"hidden_act": "gelu"}, "hidden_act: 'gelu' is not supported"),
        (GEMMA2 | {"use_bidirectional_attention": True}, "use_bidirectional_attention: .* are not supported"),
        (GEMMA2 | {"hidden_activation": "gelu"}, "hidden_activation: 'gelu' is not supported for Gemma2ForCausalLM"),
        (GEMMA2 | {"hidden_act": "silu"}, "hidden_act: 'silu' is not supported for Gemma2ForCausalLM"),
        (GEMMA2 | {"sliding_window": None}, "sliding_window: must be a number of tokens for Gemma"),
        (GEMMA2 | {"layer_types": ["chunked_attention"]}, "layer_types: 'chunked_attention' is not supported"),
        (
            {"architectures": ["Gemma3ForConditionalGeneration"]},
            r"architecture Gemma3ForConditionalGeneration \(it reads images\) is not supported",
        ),
        (GEMMA2 | {"final_logit_softcapping": -1.0}, "final_logit_softcapping: must be a number above 0, got -1.0"),
        (GRANITE | {"logits_scaling": 0}, "logits_scaling: must be a number above 0, got 0"),
        (GEMMA3 | {"rope_parameters": {"rope_type": "default"}}, "rope_parameters: 'rope_type' is not a type of layer"),
        ({"rope_parameters": {"full_attention": {}}}, "rope_parameters: settings per type of layer"),
        ({"architectures": ["Gemma3nForCausalLM"]}, "architecture Gemma3nForCausalLM is not supported"),
        ({"architectures": ["OlmoForCausalLM"]}, "architecture OlmoForCausalLM is not supported"),
        ({"architectures": ["GraniteMoeForCausalLM"]}, "architecture GraniteMoeForCausalLM is not supported"),
        ({"architectures": ["Phi4MMForCausalLM"]}, "architecture Phi4MMForCausalLM .* is not supported"),
        (PHI3 | {"partial_rotary_factor": 0.4}, "partial_rotary_factor: 3 of 8 numbers"),
        (PHI3 | {"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}}, "rope type 'dynamic' is not supported"),
        (PHI3 | {"rope_scaling": {"rope_type": "longrope"}}, "config.json has no short_factor"),
        (
            PHI3 | {"rope_scaling": {"rope_type": "longrope", "short_factor": [1.0]}},
            "rope factors: 1 numbers do not divide 4 frequencies",
        ),
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


def test_longrope_ends_the_context_where_other_angles_would_begin() -> None:
    scaling = {"type": "longrope", "short_factor": [1.0, 2.0, 3.0, 4.0], "long_factor": [9.0] * 4}
    long = {"max_position_embeddings": 131072, "original_max_position_embeddings": 4096}
    config = config_from_hf({**LLAMA, **PHI3, **long, "rope_scaling": scaling})
    assert config.max_context_length == 4096
    assert config.rope.factors == (1.0, 2.0, 3.0, 4.0)
    assert config.rope.attention_factor == pytest.approx((1 + math.log(32) / math.log(4096)) ** 0.5)


def test_the_list_for_users_is_complete() -> None:
    listed = (Path(__file__).parents[4] / "docs/reference/support.md").read_text()
    assert set(re.findall(r"`(\w+ForCausalLM)`", listed)) == ARCHITECTURES


def test_several_ends_of_text() -> None:
    assert config_from_hf({**LLAMA, "eos_token_id": [2, 7]}).eos_token_ids == (2, 7)
    assert config_from_hf({**LLAMA, "eos_token_id": 2}).eos_token_ids == (2,)
    assert config_from_hf(LLAMA).eos_token_ids == ()

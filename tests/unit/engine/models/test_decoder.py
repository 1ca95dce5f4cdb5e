"""Logits equal those of transformers on the same weights, and packing does not change them."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from support.model_reference import Reference

from tinsmith.engine.models.attention import PackedAttention
from tinsmith.engine.models.decoder import Decoder

LLAMA3 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 64}
LONGROPE: dict[str, Any] = {
    "max_position_embeddings": 256,
    "original_max_position_embeddings": 64,
    "partial_rotary_factor": 0.75,
    "rope_scaling": {
        "rope_type": "longrope",
        "short_factor": [1.0, 1.5, 2.0],
        "long_factor": [2.0, 3.0, 4.0],
    },
}
MODELS: list[tuple[str, dict[str, Any]]] = [
    ("llama", {}),
    ("llama", {"num_key_value_heads": 4}),
    ("llama", {"num_key_value_heads": 1, "head_dim": 16}),
    ("llama", {"attention_bias": True, "mlp_bias": True}),
    ("llama", {"rope_parameters": {"rope_type": "llama3", "rope_theta": 500000.0, **LLAMA3}}),
    ("llama", {"rope_theta": 50000.0, "rope_scaling": {"rope_type": "linear", "factor": 2.0}}),
    ("smollm", {}),
    ("qwen2", {}),
    ("qwen2", {"use_sliding_window": True, "sliding_window": 4, "max_window_layers": 1}),
    (
        "qwen2",
        {
            "rope_parameters": {
                "rope_type": "yarn",
                "rope_theta": 10000.0,
                "factor": 4.0,
                "original_max_position_embeddings": 64,
            }
        },
    ),
    ("qwen3", {}),
    ("qwen3", {"head_dim": 16, "attention_bias": True}),
    ("mistral", {}),
    ("mistral", {"sliding_window": 5}),
    ("smollm3", {"num_hidden_layers": 5}),
    ("granite", {}),
    ("granite", {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": False, "logits_scaling": 8.0}),
    ("olmo2", {}),
    ("olmo2", {"num_key_value_heads": 1, "tie_word_embeddings": True}),
    ("phi3", {}),
    ("phi3", {"sliding_window": 5, "partial_rotary_factor": 0.5}),
    ("phi3", {"partial_rotary_factor": 0.75, "tie_word_embeddings": True}),
    ("phi3", LONGROPE),
    ("gemma2", {}),
    ("gemma2", {"sliding_window": 4, "num_hidden_layers": 3}),
    ("gemma2", {"attn_logit_softcapping": None, "final_logit_softcapping": None}),
    ("gemma3", {}),
    ("gemma3", {"sliding_window": 4, "num_hidden_layers": 5, "sliding_window_pattern": 3}),
    ("gemma3", {"rope_scaling": {"rope_type": "linear", "factor": 8.0}}),
    (
        "gemma3",
        {
            "layer_types": ["full_attention", "sliding_attention"],
            "sliding_window": 7,
            "rope_parameters": {
                "full_attention": {"rope_type": "linear", "factor": 4.0, "rope_theta": 1e5},
                "sliding_attention": {"rope_type": "default", "rope_theta": 5e3},
            },
        },
    ),
]


def logits(decoder: Decoder, sequences: list[torch.Tensor]) -> torch.Tensor:
    attention = PackedAttention(decoder.config, [len(sequence) for sequence in sequences])
    with torch.no_grad():
        hidden = decoder.hidden(torch.cat(sequences), attention.positions(decoder.device), attention)
        return decoder.unembed(hidden)


@pytest.mark.parametrize(("family", "sizes"), MODELS, ids=lambda value: value if isinstance(value, str) else str(value))
def test_logits_equal_those_of_transformers(family: str, sizes: dict[str, Any], tiny: Callable[..., Any]) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        import transformers

        made = tiny(family, **sizes)
        theirs = transformers.AutoModelForCausalLM.from_pretrained(
            made.directory, dtype=torch.float32, attn_implementation="eager"
        ).eval()
    tokens = torch.randint(0, 264, (40,), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        expected = theirs(tokens[None]).logits[0]
    assert (logits(made.decoder, [tokens]) - expected).abs().max() <= 1e-5
    assert made.decoder.config.parameter_count() == theirs.num_parameters()


@pytest.mark.parametrize(("family", "sizes"), MODELS, ids=lambda value: value if isinstance(value, str) else str(value))
def test_packed_sequences_do_not_see_each_other(family: str, sizes: dict[str, Any], tiny: Callable[..., Any]) -> None:
    made = tiny(family, **sizes)
    generator = torch.Generator().manual_seed(1)
    sequences = [torch.randint(0, 264, (length,), generator=generator) for length in (7, 1, 12, 3)]
    reference = Reference.of(made.directory)
    expected = torch.cat([reference.logprobs(sequence) for sequence in sequences])
    found = torch.log_softmax(logits(made.decoder, sequences), dim=-1)
    assert (found - expected).abs().max() <= 2e-5


def test_logits_without_gradients_are_the_same(tiny: Callable[..., Any]) -> None:
    decoder = tiny().decoder
    hidden = torch.randn(3, 32, generator=torch.Generator().manual_seed(0))
    assert torch.allclose(decoder.logits(hidden), decoder.unembed(hidden), atol=1e-5)
    assert decoder.logits(hidden).shape == (3, decoder.config.vocab_size)


@pytest.mark.parametrize("family", ["qwen3", "granite", "olmo2", "phi3", "gemma2", "gemma3"])
def test_bfloat16_runs_and_stays_near(family: str, tiny: Callable[..., Any]) -> None:
    made = tiny(family)
    from tinsmith.engine.models.load import load_model

    half = load_model(made.directory, dtype=torch.bfloat16, cache_dir=made.directory).decoder
    tokens = torch.arange(20)
    found = logits(half, [tokens])
    assert found.dtype == torch.float32
    assert (found - logits(made.decoder, [tokens])).abs().max() <= 0.5

"""Reads a Hugging Face `config.json` as a ModelConfig: one function per family of architectures.

Architectures and settings that are not supported are rejected by name.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping
from typing import Any

from tinsmith.engine.models.config import ROPE_KINDS, Activation, ModelConfig, RopeConfig
from tinsmith.errors import InvalidInputError


def config_from_hf(values: Mapping[str, Any]) -> ModelConfig:
    """Return the ModelConfig of a Hugging Face `config.json`."""
    names = values.get("architectures") or []
    architecture = names[0] if names else f"model_type {values.get('model_type')!r}"
    family = _FAMILIES.get(architecture)
    if family is None:
        reason = f" ({_REASONS[architecture]})" if architecture in _REASONS else ""
        raise InvalidInputError(
            f"architecture {architecture}{reason} is not supported (supported: {', '.join(sorted(_FAMILIES))})",
            field="architectures",
        )
    if values.get("quantization_config") is not None:
        raise InvalidInputError(
            "quantization_config: quantised safetensors are not supported; use the original weights or a GGUF file",
            field="quantization_config",
        )
    heads = _required(values, "num_attention_heads")
    layers = _required(values, "num_hidden_layers")
    fields = {
        "architecture": architecture,
        "vocab_size": _required(values, "vocab_size"),
        "hidden_size": _required(values, "hidden_size"),
        "num_layers": layers,
        "num_heads": heads,
        "num_kv_heads": _or(values.get("num_key_value_heads"), heads),
        "head_dim": _or(values.get("head_dim"), _required(values, "hidden_size") // heads),
        "intermediate_size": _required(values, "intermediate_size"),
        "max_context_length": _required(values, "max_position_embeddings"),
        "norm_eps": values.get("rms_norm_eps", 1e-6),
        "bos_token_id": values.get("bos_token_id"),
        "eos_token_ids": token_ids(values.get("eos_token_id")),
        "pad_token_id": values.get("pad_token_id"),
    }
    own = family(values, layers)
    known = _ACTIVATIONS[own.get("activation", "silu")]
    for name in ("hidden_act", "hidden_activation"):
        if values.get(name) not in (None, *known):
            raise InvalidInputError(
                f"{name}: {values[name]!r} is not supported for {architecture} (supported: {known[0]})", field=name
            )
    return ModelConfig(**(fields | own))


def _required(values: Mapping[str, Any], name: str) -> Any:
    if values.get(name) is None:
        raise InvalidInputError(f"config.json has no {name}", field=name)
    return values[name]


def _positive(values: Mapping[str, Any], name: str, default: float | None = None) -> float:
    """Return a factor or bound, which only a number above 0 can be."""
    value = values.get(name, default)
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value < math.inf:
        raise InvalidInputError(f"{name}: must be a number above 0, got {value!r}", field=name)
    return float(value)


def _or(value: Any, default: Any) -> Any:
    return default if value is None else value


def token_ids(value: Any) -> tuple[int, ...]:
    """Return the ids in a setting that has one, several or none."""
    if value is None:
        return ()
    return tuple(value) if isinstance(value, (list, tuple)) else (value,)


def _llama(values: Mapping[str, Any], layers: int) -> dict[str, Any]:
    bias = bool(values.get("attention_bias", False))
    return {
        "rope": rope_from_hf(values),
        "has_qkv_bias": bias,
        "has_output_bias": bias,
        "has_mlp_bias": bool(values.get("mlp_bias", False)),
        "tie_embeddings": bool(values.get("tie_word_embeddings", False)),
    }


def _mistral(values: Mapping[str, Any], layers: int) -> dict[str, Any]:
    if values.get("layer_types"):
        raise InvalidInputError("layer_types: not defined for MistralForCausalLM", field="layer_types")
    window = values.get("sliding_window", 4096)
    return {
        "rope": rope_from_hf(values),
        "tie_embeddings": bool(values.get("tie_word_embeddings", False)),
        "sliding_windows": (window,) * layers if window is not None else (),
    }


def _qwen2(values: Mapping[str, Any], layers: int) -> dict[str, Any]:
    return {
        "rope": rope_from_hf(values),
        "has_qkv_bias": True,
        "tie_embeddings": bool(values.get("tie_word_embeddings", False)),
        "sliding_windows": _windows(values, layers, lambda layer: layer >= values.get("max_window_layers", 28)),
    }


def _qwen3(values: Mapping[str, Any], layers: int) -> dict[str, Any]:
    bias = bool(values.get("attention_bias", False))
    return {
        **_qwen2(values, layers),
        "has_qk_norm": True,
        "has_qkv_bias": bias,
        "has_output_bias": bias,
        **({"head_dim": 128} if values.get("head_dim") is None else {}),
    }


def _granite(values: Mapping[str, Any], layers: int) -> dict[str, Any]:
    return {
        **_llama(values, layers),
        "embedding_scale": _positive(values, "embedding_multiplier", 1.0),
        "residual_scale": _positive(values, "residual_multiplier", 1.0),
        "attention_scale": _positive(values, "attention_multiplier", 1.0),
        "logit_scale": 1 / _positive(values, "logits_scaling", 1.0),
    }


def _olmo2(values: Mapping[str, Any], layers: int) -> dict[str, Any]:
    return {
        **_llama(values, layers),
        "norm_eps": values.get("rms_norm_eps", 1e-5),
        "has_mlp_bias": False,
        "has_input_norms": False,
        "has_output_norms": True,
        "has_qk_norm": True,
        "is_qk_norm_wide": True,
    }


def _phi3(values: Mapping[str, Any], layers: int) -> dict[str, Any]:
    window = values.get("sliding_window")
    given: dict[str, Any] = {**(values.get("rope_scaling") or {}), **(values.get("rope_parameters") or {})}
    head_dim = _or(values.get("head_dim"), _required(values, "hidden_size") // _required(values, "num_attention_heads"))
    part = _or(given.get("partial_rotary_factor"), _or(values.get("partial_rotary_factor"), 1.0))
    rotary_dim = int(head_dim * part) if part != 1 else None
    plain = {**values, "partial_rotary_factor": None}
    fields: dict[str, Any] = {
        "norm_eps": values.get("rms_norm_eps", 1e-5),
        "has_fused_linears": True,
        "tie_embeddings": bool(values.get("tie_word_embeddings", False)),
        "sliding_windows": (window,) * layers if window is not None else (),
    }
    if (given.get("rope_type") or given.get("type")) not in ("longrope", "su", "yarn"):
        given.pop("partial_rotary_factor", None)
        rope = rope_from_hf({**plain, "rope_scaling": None, "rope_parameters": given})
        return {**fields, "rope": dataclasses.replace(rope, rotary_dim=rotary_dim)}
    context = _required(values, "max_position_embeddings")
    original = int(_or(values.get("original_max_position_embeddings"), 4096))
    return {
        **fields,
        "max_context_length": min(context, original),
        "rope": RopeConfig(
            kind="factors",
            theta=float(_or(given.get("rope_theta"), _or(values.get("rope_theta"), 10000.0))),
            factors=tuple(float(factor) for factor in _required(given, "short_factor")),
            attention_factor=_longrope_factor(given, context, original),
            rotary_dim=rotary_dim,
        ),
    }


def _longrope_factor(given: Mapping[str, Any], context: int, original: int) -> float:
    """Return what longrope multiplies cosines and sines by, which does not depend on the length of a sequence.

    The frequencies do: beyond the original context all tokens of a sequence would be rotated by other angles, including
    those whose keys are cached. So the engine ends the context there, where the model is exact.
    """
    if given.get("attention_factor") is not None:
        return float(given["attention_factor"])
    factor = float(_or(given.get("factor"), context / original))
    return 1.0 if factor <= 1 else math.sqrt(1 + math.log(factor) / math.log(original))


def _gemma2(values: Mapping[str, Any], layers: int) -> dict[str, Any]:
    return {
        **_gemma(values, layers, is_sliding=lambda layer: layer % 2 == 0),
        "rope": rope_from_hf(values),
        **_softcaps({"attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0, **values}),
    }


def _gemma3(values: Mapping[str, Any], layers: int) -> dict[str, Any]:
    pattern = values.get("sliding_window_pattern") or 6
    given: dict[str, Any] = dict(values.get("rope_parameters") or {})
    strange = sorted(set(given) - {"full_attention", "sliding_attention"})
    if strange:
        raise InvalidInputError(
            f"rope_parameters: {strange[0]!r} is not a type of layer of Gemma 3", field="rope_parameters"
        )
    plain = {name: value for name, value in values.items() if name not in ("rope_parameters", "rope_scaling")}
    full = {**(given.get("full_attention") or {}), **(values.get("rope_scaling") or {})}
    local = {**plain, "rope_theta": _or(values.get("rope_local_base_freq"), 10_000.0)}
    return {
        **_gemma(values, layers, is_sliding=lambda layer: (layer + 1) % pattern != 0),
        "rope": rope_from_hf({**plain, "rope_parameters": full}, default_theta=1_000_000.0),
        "window_rope": rope_from_hf({**local, "rope_parameters": given.get("sliding_attention")}),
        "has_qk_norm": True,
        **_softcaps(values),
    }


def _softcaps(values: Mapping[str, Any]) -> dict[str, float]:
    """Read the bounds of scores and logits, which may be null."""
    names = {"attention_softcap": "attn_logit_softcapping", "logit_softcap": "final_logit_softcapping"}
    return {own: _positive(values, name) for own, name in names.items() if values.get(name) is not None}


def _gemma(values: Mapping[str, Any], layers: int, is_sliding: Callable[[int], bool]) -> dict[str, Any]:
    """Return what Gemma 2 and 3 have in common."""
    if values.get("use_bidirectional_attention"):
        raise InvalidInputError(
            "use_bidirectional_attention: models whose tokens see later ones are not supported",
            field="use_bidirectional_attention",
        )
    if values.get("sliding_window", 4096) is None:
        raise InvalidInputError(
            "sliding_window: must be a number of tokens for Gemma, got null", field="sliding_window"
        )
    bias = bool(values.get("attention_bias", False))
    return {
        "head_dim": _or(values.get("head_dim"), 256),
        "has_qkv_bias": bias,
        "has_output_bias": bias,
        "has_output_norms": True,
        "has_offset_norms": True,
        "activation": "gelu_tanh",
        "embedding_scale": math.sqrt(_required(values, "hidden_size")),
        "attention_scale": _positive(values, "query_pre_attn_scalar", 256) ** -0.5,
        "tie_embeddings": bool(values.get("tie_word_embeddings", True)),
        "sliding_windows": _windows({**values, "use_sliding_window": True}, layers, is_sliding),
    }


def _smollm3(values: Mapping[str, Any], layers: int) -> dict[str, Any]:
    interval = values.get("no_rope_layer_interval", 4)
    marks = values.get("no_rope_layers") or [(layer + 1) % interval != 0 for layer in range(layers)]
    return {
        **_llama(values, layers),
        "rope": rope_from_hf(values, default_theta=2_000_000.0),
        "tie_embeddings": bool(values.get("tie_word_embeddings", True)),
        "rope_layers": tuple(bool(mark) for mark in marks[:layers]),
        "sliding_windows": _windows(values, layers, lambda layer: not marks[layer]),
    }


_FAMILIES: Mapping[str, Callable[[Mapping[str, Any], int], dict[str, Any]]] = {
    "Gemma2ForCausalLM": _gemma2,
    "Gemma3ForCausalLM": _gemma3,
    "GraniteForCausalLM": _granite,
    "LlamaForCausalLM": _llama,
    "MistralForCausalLM": _mistral,
    "Olmo2ForCausalLM": _olmo2,
    "Phi3ForCausalLM": _phi3,
    "Qwen2ForCausalLM": _qwen2,
    "Qwen3ForCausalLM": _qwen3,
    "SmolLM3ForCausalLM": _smollm3,
}
ARCHITECTURES = frozenset(_FAMILIES)
_REASONS: Mapping[str, str] = {
    "Gemma3ForConditionalGeneration": "it reads images",
    "Phi4MMForCausalLM": "it reads images and sound",
    "Phi4MultimodalForCausalLM": "it reads images and sound",
}
"""Why relatives of supported architectures are not."""
_ACTIVATIONS: Mapping[Activation, tuple[str, ...]] = {
    "silu": ("silu", "swish"),
    "gelu_tanh": ("gelu_pytorch_tanh",),
}


def _windows(values: Mapping[str, Any], layers: int, is_sliding: Callable[[int], bool]) -> tuple[int | None, ...]:
    """Return the window of each layer, if `use_sliding_window` enables them at all."""
    window = values.get("sliding_window", 4096)
    if not values.get("use_sliding_window", False) or window is None:
        return ()
    kinds = values.get("layer_types") or [
        "sliding_attention" if is_sliding(layer) else "full_attention" for layer in range(layers)
    ]
    unknown = sorted(set(kinds) - {"sliding_attention", "full_attention"})
    if unknown:
        raise InvalidInputError(f"layer_types: {unknown[0]!r} is not supported", field="layer_types")
    return tuple(window if kind == "sliding_attention" else None for kind in kinds[:layers])


def rope_from_hf(values: Mapping[str, Any], default_theta: float = 10000.0) -> RopeConfig:
    """Read either form: `rope_parameters` (transformers 5), or `rope_theta` with `rope_scaling`."""
    given: dict[str, Any] = {**(values.get("rope_scaling") or {}), **(values.get("rope_parameters") or {})}
    if any(isinstance(value, dict) for value in given.values()):
        raise InvalidInputError(
            "rope_parameters: settings per type of layer are not supported", field="rope_parameters"
        )
    kind: Any = given.get("rope_type") or given.get("type") or "default"
    if kind not in ROPE_KINDS or kind == "factors":
        raise InvalidInputError(
            f"rope type {kind!r} is not supported (supported: default, linear, llama3, yarn)", field="rope_parameters"
        )
    if float(_or(given.get("partial_rotary_factor"), values.get("partial_rotary_factor") or 1.0)) != 1.0:
        raise InvalidInputError("partial_rotary_factor: only 1.0 is supported", field="partial_rotary_factor")
    theta = float(_or(given.get("rope_theta"), _or(values.get("rope_theta"), default_theta)))
    if kind == "default":
        return RopeConfig(theta=theta)
    context = _or(given.get("original_max_position_embeddings"), values.get("original_max_position_embeddings"))
    context = int(_or(context, _required(values, "max_position_embeddings")))
    factor = given.get("factor")
    if factor is None:
        factor = _required(values, "max_position_embeddings") / context
    return RopeConfig(
        kind=kind,
        theta=theta,
        factor=float(factor),
        original_context_length=context,
        low_freq_factor=float(given.get("low_freq_factor", 1.0)),
        high_freq_factor=float(given.get("high_freq_factor", 4.0)),
        beta_fast=float(given.get("beta_fast") or 32.0),
        beta_slow=float(given.get("beta_slow") or 1.0),
        attention_factor=given.get("attention_factor"),
        mscale=given.get("mscale"),
        mscale_all_dim=given.get("mscale_all_dim"),
        truncate=bool(given.get("truncate", True)),
    )

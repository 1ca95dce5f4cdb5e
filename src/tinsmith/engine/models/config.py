"""ModelConfig: the architecture of a decoder, read from a Hugging Face `config.json`.

Architectures and settings that are not supported are rejected by name. `gguf_read` makes a ModelConfig of a GGUF file.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias, get_args

from tinsmith.errors import InvalidInputError

RopeKind: TypeAlias = Literal["default", "linear", "llama3", "yarn", "factors"]
ROPE_KINDS: tuple[str, ...] = get_args(RopeKind)


@dataclass(frozen=True, slots=True, kw_only=True)
class RopeConfig:
    """How positions rotate queries and keys. Fields that a kind does not use keep their defaults."""

    kind: RopeKind = "default"
    theta: float = 10000.0
    factor: float = 1.0
    """How much the context is stretched (linear, llama3, yarn)."""
    original_context_length: int = 0
    """Context before stretching (llama3, yarn)."""
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: float | None = None
    """Multiplies cosines and sines (yarn); None: derived from `factor` and the two below."""
    mscale: float | None = None
    mscale_all_dim: float | None = None
    truncate: bool = True
    factors: tuple[float, ...] = ()
    """A divisor per frequency (factors; GGUF files have these for Llama 3)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """Everything that defines a decoder's computation except its weights."""

    architecture: str
    """The Hugging Face class name, such as LlamaForCausalLM."""
    vocab_size: int
    hidden_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int
    max_context_length: int
    """Tokens in the longest possible sequence."""
    rope: RopeConfig = RopeConfig()
    norm_eps: float = 1e-6
    has_qk_norm: bool = False
    """RMS norm of each query and key head, before the rotation (Qwen3)."""
    has_qkv_bias: bool = False
    has_output_bias: bool = False
    has_mlp_bias: bool = False
    tie_embeddings: bool = False
    sliding_windows: tuple[int | None, ...] = ()
    """Per layer: how many tokens a query sees, including itself; None or empty: all earlier ones."""
    rope_layers: tuple[bool, ...] = ()
    """Per layer: whether it uses rotary positions; empty: all do (SmolLM3 skips some)."""
    bos_token_id: int | None = None
    eos_token_ids: tuple[int, ...] = ()
    pad_token_id: int | None = None

    def __post_init__(self) -> None:
        for name in (
            "vocab_size",
            "hidden_size",
            "num_layers",
            "num_heads",
            "num_kv_heads",
            "head_dim",
            "intermediate_size",
            "max_context_length",
        ):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise InvalidInputError(f"{name}: must be a whole number above 0, got {value!r}", field=name)
        if self.num_heads % self.num_kv_heads:
            raise InvalidInputError(
                f"num_heads: {self.num_heads} query heads are not a multiple of {self.num_kv_heads} key/value heads",
                field="num_heads",
            )
        if self.head_dim % 2:
            raise InvalidInputError(f"head_dim: must be even, got {self.head_dim}", field="head_dim")

    @property
    def query_size(self) -> int:
        """The width of all query heads together."""
        return self.num_heads * self.head_dim

    @property
    def kv_size(self) -> int:
        """The width of all key (or value) heads together."""
        return self.num_kv_heads * self.head_dim

    def sliding_window(self, layer: int) -> int | None:
        return self.sliding_windows[layer] if self.sliding_windows else None

    def has_rope(self, layer: int) -> bool:
        return self.rope_layers[layer] if self.rope_layers else True

    def module_shape(self, module: str) -> tuple[int, int]:
        """Return (outputs, inputs) of a linear, by its Hugging Face name."""
        D, E = self.hidden_size, self.intermediate_size
        shapes = {
            "q_proj": (self.query_size, D),
            "k_proj": (self.kv_size, D),
            "v_proj": (self.kv_size, D),
            "o_proj": (D, self.query_size),
            "gate_proj": (E, D),
            "up_proj": (E, D),
            "down_proj": (D, E),
            "lm_head": (self.vocab_size, D),
        }
        return shapes[module]

    def parameter_count(self) -> int:
        """Return the number of weights; tied ones count once."""
        D = self.hidden_size
        linears = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
        per_layer = sum(rows * columns for rows, columns in map(self.module_shape, linears)) + 2 * D
        per_layer += 2 * self.head_dim if self.has_qk_norm else 0
        per_layer += (self.query_size + 2 * self.kv_size) if self.has_qkv_bias else 0
        per_layer += D if self.has_output_bias else 0
        per_layer += (2 * self.intermediate_size + D) if self.has_mlp_bias else 0
        embeddings = self.vocab_size * D * (1 if self.tie_embeddings else 2)
        return self.num_layers * per_layer + embeddings + D


def config_from_hf(values: Mapping[str, Any]) -> ModelConfig:
    """Return the ModelConfig of a Hugging Face `config.json`."""
    names = values.get("architectures") or []
    architecture = names[0] if names else f"model_type {values.get('model_type')!r}"
    family = _FAMILIES.get(architecture)
    if family is None:
        raise InvalidInputError(
            f"architecture {architecture} is not supported (supported: {', '.join(sorted(_FAMILIES))})",
            field="architectures",
        )
    if values.get("quantization_config") is not None:
        raise InvalidInputError(
            "quantization_config: quantised safetensors are not supported; use the original weights or a GGUF file",
            field="quantization_config",
        )
    if values.get("hidden_act", "silu") not in ("silu", "swish"):
        raise InvalidInputError(
            f"hidden_act: {values['hidden_act']!r} is not supported (supported: silu)", field="hidden_act"
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
    return ModelConfig(**(fields | family(values, layers)))


def _required(values: Mapping[str, Any], name: str) -> Any:
    if values.get(name) is None:
        raise InvalidInputError(f"config.json has no {name}", field=name)
    return values[name]


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
    "LlamaForCausalLM": _llama,
    "MistralForCausalLM": _mistral,
    "Qwen2ForCausalLM": _qwen2,
    "Qwen3ForCausalLM": _qwen3,
    "SmolLM3ForCausalLM": _smollm3,
}
ARCHITECTURES = frozenset(_FAMILIES)


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

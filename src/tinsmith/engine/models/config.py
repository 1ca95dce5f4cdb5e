"""ModelConfig: everything that tells one decoder from another, as data.

`families` reads it from a Hugging Face `config.json`, `gguf_read` from a GGUF file.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, TypeAlias, get_args

from tinsmith.errors import InvalidInputError

RopeKind: TypeAlias = Literal["default", "linear", "llama3", "yarn", "factors"]
ROPE_KINDS: tuple[str, ...] = get_args(RopeKind)
Activation: TypeAlias = Literal["silu", "gelu_tanh"]
GROUPS: Mapping[str, tuple[str, ...]] = {
    "qkv": ("q_proj", "k_proj", "v_proj"),
    "output": ("o_proj",),
    "gate_up": ("gate_proj", "up_proj"),
    "down": ("down_proj",),
}
"""A layer's linears: modules that read the same input form a group, which is computed as one product."""
FUSED_GROUPS: Mapping[str, tuple[str, ...]] = {**GROUPS, "qkv": ("qkv_proj",), "gate_up": ("gate_up_proj",)}
"""The same for models in whose files such modules are one (Phi-3)."""
LM_HEAD = "lm_head"


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
    """Multiplies cosines and sines (yarn, factors). None: for yarn derived from `factor` and the two below, else 1."""
    mscale: float | None = None
    mscale_all_dim: float | None = None
    truncate: bool = True
    factors: tuple[float, ...] = ()
    """A divisor per frequency (factors; GGUF files have these for Llama 3)."""
    rotary_dim: int | None = None
    """How many numbers of a head are rotated, the first ones; None: all (Phi-4-mini rotates three quarters)."""


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
    has_input_norms: bool = True
    """RMS norms of what attention and MLP read (all but OLMo 2)."""
    has_output_norms: bool = False
    """RMS norms of what attention and MLP add to the residual (OLMo 2, Gemma)."""
    has_offset_norms: bool = False
    """Norm weights are stored less one; `build_decoder` adds it when it reads them (Gemma)."""
    has_qk_norm: bool = False
    """RMS norm of each query and key head, before the rotation (Qwen3, Gemma 3)."""
    is_qk_norm_wide: bool = False
    """That norm is over all query heads together, and over all key heads together (OLMo 2)."""
    has_fused_linears: bool = False
    """The modules are those of FUSED_GROUPS (Phi-3)."""
    activation: Activation = "silu"
    """What the MLP's gate goes through."""
    embedding_scale: float = 1.0
    residual_scale: float = 1.0
    """Multiplies what attention and MLP add to the residual (Granite)."""
    attention_scale: float | None = None
    """Multiplies the products of queries and keys; None: 1 / sqrt(head_dim)."""
    attention_softcap: float = 0.0
    """Bounds these products: s becomes cap * tanh(s / cap); 0: no bound (Gemma 2)."""
    logit_scale: float = 1.0
    logit_softcap: float = 0.0
    """Bounds the scaled logits in the same way (Gemma 2)."""
    has_qkv_bias: bool = False
    has_output_bias: bool = False
    has_mlp_bias: bool = False
    tie_embeddings: bool = False
    sliding_windows: tuple[int | None, ...] = ()
    """Per layer: how many tokens a query sees, including itself; None or empty: all earlier ones."""
    rope_layers: tuple[bool, ...] = ()
    """Per layer: whether it uses rotary positions; empty: all do (SmolLM3 skips some)."""
    window_rope: RopeConfig | None = None
    """The rotation in layers with a sliding window; None: the same as in the others (Gemma 3 has its own)."""
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
        for rope in self.ropes:
            rotary = self.head_dim if rope.rotary_dim is None else rope.rotary_dim
            if rotary % 2 or not 0 < rotary <= self.head_dim:
                raise InvalidInputError(
                    f"partial_rotary_factor: {rotary} of {self.head_dim} numbers of a head cannot be rotated in pairs",
                    field="partial_rotary_factor",
                )
            if rope.factors and len(rope.factors) != rotary // 2:
                raise InvalidInputError(
                    f"rope factors: {len(rope.factors)} numbers do not divide {rotary // 2} frequencies", field="rope"
                )

    @property
    def query_size(self) -> int:
        """The width of all query heads together."""
        return self.num_heads * self.head_dim

    @property
    def kv_size(self) -> int:
        """The width of all key (or value) heads together."""
        return self.num_kv_heads * self.head_dim

    @property
    def qk_norm_sizes(self) -> tuple[int, int]:
        """How many weights the norms of queries and of keys have."""
        return (self.query_size, self.kv_size) if self.is_qk_norm_wide else (self.head_dim, self.head_dim)

    def sliding_window(self, layer: int) -> int | None:
        return self.sliding_windows[layer] if self.sliding_windows else None

    @property
    def ropes(self) -> tuple[RopeConfig, ...]:
        """All rotations of the model."""
        return (self.rope,) if self.window_rope is None else (self.rope, self.window_rope)

    def rope_index(self, layer: int) -> int | None:
        """Return which of `ropes` a layer uses; None: it has no rotation."""
        if self.rope_layers and not self.rope_layers[layer]:
            return None
        return 0 if self.window_rope is None or self.sliding_window(layer) is None else 1

    @property
    def score_scale(self) -> float:
        """What products of queries and keys are multiplied by."""
        return 1 / math.sqrt(self.head_dim) if self.attention_scale is None else self.attention_scale

    def modules(self, group: str) -> tuple[str, ...]:
        """Return the modules of a group of a layer's linears, or of the unembedding."""
        return (LM_HEAD,) if group == LM_HEAD else (FUSED_GROUPS if self.has_fused_linears else GROUPS)[group]

    def module_shape(self, module: str) -> tuple[int, int]:
        """Return (outputs, inputs) of a linear, by its Hugging Face name."""
        D, E = self.hidden_size, self.intermediate_size
        shapes = {
            "q_proj": (self.query_size, D),
            "k_proj": (self.kv_size, D),
            "v_proj": (self.kv_size, D),
            "qkv_proj": (self.query_size + 2 * self.kv_size, D),
            "gate_up_proj": (2 * E, D),
            "o_proj": (D, self.query_size),
            "gate_proj": (E, D),
            "up_proj": (E, D),
            "down_proj": (D, E),
            LM_HEAD: (self.vocab_size, D),
        }
        return shapes[module]

    def parameter_count(self) -> int:
        """Return the number of weights; tied ones count once."""
        D = self.hidden_size
        linears = (module for modules in GROUPS.values() for module in modules)
        per_layer = sum(rows * columns for rows, columns in map(self.module_shape, linears))
        per_layer += 2 * D * (self.has_input_norms + self.has_output_norms)
        per_layer += sum(self.qk_norm_sizes) if self.has_qk_norm else 0
        per_layer += (self.query_size + 2 * self.kv_size) if self.has_qkv_bias else 0
        per_layer += D if self.has_output_bias else 0
        per_layer += (2 * self.intermediate_size + D) if self.has_mlp_bias else 0
        embeddings = self.vocab_size * D * (1 if self.tie_embeddings else 2)
        return self.num_layers * per_layer + embeddings + D

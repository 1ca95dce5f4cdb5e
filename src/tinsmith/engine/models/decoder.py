"""The decoder: the frozen base weights, and the reference forward pass that training and sampling are compared with.

Linears that read the same input are stored as one matrix (queries, keys and values; gate and up). Causality and caching
are left to the `attend` argument.

Shapes: T tokens, D hidden, E outputs of a linear, I intermediate, H query heads, K key/value heads, C head dim,
V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol, TypeAlias

import torch
from torch.nn.functional import linear, silu

from tinsmith.engine.cpu.formats import Weights, widened
from tinsmith.engine.cpu.linear import StoredProduct, product_kind, stored_product
from tinsmith.engine.models.attention import Rope, rotate
from tinsmith.engine.models.config import ModelConfig

Attend: TypeAlias = Callable[[int, torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
"""attend(layer, q_THC, k_TKC, v_TKC) returns out_THC, for rotated queries and keys; the scale is 1 / sqrt(C)."""
ReadTensor: TypeAlias = Callable[[str], Weights]
"""Returns a weight by its Hugging Face name, in the format of its file."""


class Adapter(Protocol):
    """An adapter, which changes the output of linears."""

    def apply(self, layer: int | None, module: str, x_TD: torch.Tensor, y_TE: torch.Tensor) -> torch.Tensor:
        """Return y_TE plus this adapter's output for x_TD; without autograd, y_TE may be changed in place.

        Modules have their Hugging Face names; `lm_head` has layer None.
        """
        ...


@dataclass(frozen=True, slots=True)
class Linear:
    """One matrix product with an optional bias; several modules may be stacked in it."""

    product: StoredProduct
    """The product without gradients, with the fastest kernel. It holds the weights, in the format of their file."""
    bias_E: torch.Tensor | None = None

    def __call__(self, x_TD: torch.Tensor) -> torch.Tensor:
        return linear(x_TD, self.weight_ED, self.bias_E)

    @property
    def weight_ED(self) -> torch.Tensor:
        """The weights in the number format of the decoder; it may be a copy."""
        return self.product.weight_ED

    def back(self, g_TE: torch.Tensor) -> torch.Tensor:
        """Return g_TE W: the gradient of the input, given that of the output."""
        return self.product.back(g_TE)


@dataclass(frozen=True, slots=True)
class Layer:
    """The weights of one layer."""

    input_norm_D: torch.Tensor
    qkv: Linear
    query_norm_C: torch.Tensor | None
    key_norm_C: torch.Tensor | None
    output: Linear
    mlp_norm_D: torch.Tensor
    gate_up: Linear
    down: Linear


def rms_norm(x_TD: torch.Tensor, weight_D: torch.Tensor, eps: float) -> torch.Tensor:
    """Return x / rms(x) * weight, with the mean in float32."""
    return torch.rms_norm(x_TD, (x_TD.shape[-1],), weight_D, eps)


class Decoder:
    """A decoder of the Llama kind; its config says which one."""

    def __init__(
        self,
        config: ModelConfig,
        embedding: Linear,
        layers: tuple[Layer, ...],
        norm_D: torch.Tensor,
        unembedding: Linear,
    ) -> None:
        self.config = config
        self.embedding = embedding
        """Its outputs are the tokens; the same object as `unembedding` if the two are tied."""
        self.layers = layers
        self.norm_D = norm_D
        self.unembedding = unembedding
        self.rope = Rope(config.rope, config.head_dim, self.device, self.dtype)

    @property
    def device(self) -> torch.device:
        return self.norm_D.device

    @property
    def dtype(self) -> torch.dtype:
        return self.norm_D.dtype

    @property
    def embedding_VD(self) -> torch.Tensor:
        """The embeddings in the number format of the decoder; it may be a copy."""
        return self.embedding.weight_ED

    @property
    def vocab_size(self) -> int:
        return self.config.vocab_size

    @property
    def products(self) -> str:
        """Return which kernels multiply by the weights, forward and backward: the bits of results depend on it."""
        kind = product_kind(self.device, self.dtype)
        return kind if kind == "compiled" else f"{kind} torch"

    @property
    def bytes_by_format(self) -> dict[str, int]:
        """Return the memory that matrices use, by the format in which they are kept."""
        linears = [linear for layer in self.layers for linear in (layer.qkv, layer.output, layer.gate_up, layer.down)]
        products = {id(linear.product): linear.product for linear in (self.embedding, *linears, self.unembedding)}
        found: dict[str, int] = {}
        for product in products.values():
            for name, size in product.bytes_by_format.items():
                found[name] = found.get(name, 0) + size
        return found

    def embed(self, tokens_T: torch.Tensor) -> torch.Tensor:
        """Return x_TD, the embeddings of tokens."""
        return self.embedding.product.rows(tokens_T)

    def hidden(
        self, tokens_T: torch.Tensor, positions_T: torch.Tensor, attend: Attend, adapter: Adapter | None = None
    ) -> torch.Tensor:
        """Return hidden_TD after the final norm."""
        x_TD = self.embed(tokens_T)
        angles = self.rope.angles(positions_T)
        for index, layer in enumerate(self.layers):
            normed_TD = rms_norm(x_TD, layer.input_norm_D, self.config.norm_eps)
            q_THC, k_TKC, v_TKC = self._queries_keys_values(index, layer, normed_TD, angles, adapter)
            attended_TE = attend(index, q_THC, k_TKC, v_TKC).flatten(1)
            x_TD = x_TD + _adapted(adapter, index, "o_proj", attended_TE, layer.output(attended_TE))
            normed_TD = rms_norm(x_TD, layer.mlp_norm_D, self.config.norm_eps)
            x_TD = x_TD + self._mlp(index, layer, normed_TD, adapter)
        return rms_norm(x_TD, self.norm_D, self.config.norm_eps)

    def unembed(self, hidden_TD: torch.Tensor, adapter: Adapter | None = None) -> torch.Tensor:
        """Return logits_TV in float32."""
        return _adapted(adapter, None, "lm_head", hidden_TD, self.unembedding(hidden_TD).float())

    def logits(self, hidden_TD: torch.Tensor, adapter: Adapter | None = None) -> torch.Tensor:
        """Return logits_TV in float32, without gradients, with the fastest kernel."""
        return _adapted(adapter, None, "lm_head", hidden_TD, self.unembedding.product(hidden_TD).float())

    def _queries_keys_values(
        self,
        index: int,
        layer: Layer,
        normed_TD: torch.Tensor,
        angles: tuple[torch.Tensor, torch.Tensor],
        adapter: Adapter | None,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        q_size, kv_size = self.config.query_size, self.config.kv_size
        stacked_TE = layer.qkv(normed_TD)
        parts = stacked_TE[:, :q_size], stacked_TE[:, q_size:-kv_size], stacked_TE[:, -kv_size:]
        adapted = [
            _adapted(adapter, index, module, normed_TD, part_TE)
            for module, part_TE in zip(("q_proj", "k_proj", "v_proj"), parts, strict=True)
        ]
        q_THC, k_TKC, v_TKC = (part_TE.view(len(part_TE), -1, self.config.head_dim) for part_TE in adapted)
        if layer.query_norm_C is not None and layer.key_norm_C is not None:
            q_THC = rms_norm(q_THC, layer.query_norm_C, self.config.norm_eps)
            k_TKC = rms_norm(k_TKC, layer.key_norm_C, self.config.norm_eps)
        if self.config.has_rope(index):
            q_THC, k_TKC = rotate(q_THC, *angles), rotate(k_TKC, *angles)
        return q_THC, k_TKC, v_TKC

    def _mlp(self, index: int, layer: Layer, normed_TD: torch.Tensor, adapter: Adapter | None) -> torch.Tensor:
        gate_TI, up_TI = layer.gate_up(normed_TD).chunk(2, dim=1)
        gate_TI = _adapted(adapter, index, "gate_proj", normed_TD, gate_TI)
        up_TI = _adapted(adapter, index, "up_proj", normed_TD, up_TI)
        active_TI = silu(gate_TI) * up_TI
        return _adapted(adapter, index, "down_proj", active_TI, layer.down(active_TI))


def _adapted(
    adapter: Adapter | None, layer: int | None, module: str, x_TD: torch.Tensor, y_TE: torch.Tensor
) -> torch.Tensor:
    return y_TE if adapter is None else adapter.apply(layer, module, x_TD, y_TE)


def build_decoder(
    config: ModelConfig,
    read: ReadTensor,
    device: torch.device | str = "cpu",
    dtype: torch.dtype = torch.float32,
) -> Decoder:
    """Build a decoder from weights by name; each is read once, and laid out before the next one is read."""

    def get(name: str) -> torch.Tensor:
        return widened(read(name)).to(device=device, dtype=dtype)

    def product(*names: str, bias_E: torch.Tensor | None = None) -> Linear:
        return Linear(stored_product([read(name) for name in names], bias_E, torch.device(device), dtype), bias_E)

    def stacked(prefix: str, modules: tuple[str, ...], has_bias: bool) -> Linear:
        biases = [get(f"{prefix}.{module}.bias") for module in modules] if has_bias else []
        names = [f"{prefix}.{module}.weight" for module in modules]
        return product(*names, bias_E=torch.cat(biases) if biases else None)

    def layer(index: int) -> Layer:
        prefix = f"model.layers.{index}"
        attention, mlp = f"{prefix}.self_attn", f"{prefix}.mlp"
        return Layer(
            input_norm_D=get(f"{prefix}.input_layernorm.weight"),
            qkv=stacked(attention, ("q_proj", "k_proj", "v_proj"), config.has_qkv_bias),
            query_norm_C=get(f"{attention}.q_norm.weight") if config.has_qk_norm else None,
            key_norm_C=get(f"{attention}.k_norm.weight") if config.has_qk_norm else None,
            output=stacked(attention, ("o_proj",), config.has_output_bias),
            mlp_norm_D=get(f"{prefix}.post_attention_layernorm.weight"),
            gate_up=stacked(mlp, ("gate_proj", "up_proj"), config.has_mlp_bias),
            down=stacked(mlp, ("down_proj",), config.has_mlp_bias),
        )

    embedding = product("model.embed_tokens.weight")
    return Decoder(
        config,
        embedding,
        tuple(layer(index) for index in range(config.num_layers)),
        get("model.norm.weight"),
        embedding if config.tie_embeddings else product("lm_head.weight"),
    )


def weight_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Return the shape of every weight by its Hugging Face name."""
    D, C = config.hidden_size, config.head_dim
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (config.vocab_size, D)}
    biased = {
        "self_attn.q_proj": config.has_qkv_bias,
        "self_attn.k_proj": config.has_qkv_bias,
        "self_attn.v_proj": config.has_qkv_bias,
        "self_attn.o_proj": config.has_output_bias,
        "mlp.gate_proj": config.has_mlp_bias,
        "mlp.up_proj": config.has_mlp_bias,
        "mlp.down_proj": config.has_mlp_bias,
    }
    for index in range(config.num_layers):
        prefix = f"model.layers.{index}"
        for module, has_bias in biased.items():
            rows, columns = config.module_shape(module.partition(".")[2])
            shapes[f"{prefix}.{module}.weight"] = (rows, columns)
            if has_bias:
                shapes[f"{prefix}.{module}.bias"] = (rows,)
        if config.has_qk_norm:
            shapes[f"{prefix}.self_attn.q_norm.weight"] = shapes[f"{prefix}.self_attn.k_norm.weight"] = (C,)
        shapes[f"{prefix}.input_layernorm.weight"] = shapes[f"{prefix}.post_attention_layernorm.weight"] = (D,)
    shapes["model.norm.weight"] = (D,)
    if not config.tie_embeddings:
        shapes["lm_head.weight"] = (config.vocab_size, D)
    return shapes

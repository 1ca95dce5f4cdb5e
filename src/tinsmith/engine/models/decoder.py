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

import numpy as np
import torch
from torch.nn.functional import gelu, linear, silu

from tinsmith.engine.cpu.formats import Weights, widened
from tinsmith.engine.cpu.linear import StoredProduct, can_compile, can_pack, product_kind, stored_product
from tinsmith.engine.models.attention import Angles, Rope, rotate, softcap
from tinsmith.engine.models.config import LM_HEAD, ModelConfig

Attend: TypeAlias = Callable[[int, torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
"""attend(layer, q_THC, k_TKC, v_TKC) returns out_THC, for rotated queries and keys; it scales and bounds the scores."""
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
    """The weights of one layer. Norms that a model does not have are None."""

    input_norm_D: torch.Tensor | None
    qkv: Linear
    query_norm_C: torch.Tensor | None
    """As long as all query heads together, if the norm is over all of them."""
    key_norm_C: torch.Tensor | None
    output: Linear
    output_norm_D: torch.Tensor | None
    mlp_norm_D: torch.Tensor | None
    gate_up: Linear
    down: Linear
    down_norm_D: torch.Tensor | None


def rms_norm(x_TD: torch.Tensor, weight_D: torch.Tensor, eps: float) -> torch.Tensor:
    """Return x / rms(x) * weight, with the mean in float32."""
    return torch.rms_norm(x_TD, (x_TD.shape[-1],), weight_D, eps)


def optional_norm(x_TD: torch.Tensor, weight_D: torch.Tensor | None, eps: float) -> torch.Tensor:
    """Return the norm of x, or x where a model has none."""
    return x_TD if weight_D is None else rms_norm(x_TD, weight_D, eps)


def heads_norm(x_THC: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """Return the norm of each head, or of all heads together, as the number of weights says."""
    if len(weight) == x_THC.shape[-1]:
        return rms_norm(x_THC, weight, eps)
    return rms_norm(x_THC.flatten(1), weight, eps).view(x_THC.shape)


def activated(gate_TI: torch.Tensor, config: ModelConfig) -> torch.Tensor:
    return silu(gate_TI) if config.activation == "silu" else gelu(gate_TI, approximate="tanh")


def finished_logits(logits_TV: torch.Tensor, config: ModelConfig) -> torch.Tensor:
    """Scale and bound what the unembedding returned, in place unless autograd needs it."""
    if config.logit_scale != 1.0:
        is_free = not logits_TV.requires_grad
        logits_TV = logits_TV.mul_(config.logit_scale) if is_free else logits_TV * config.logit_scale
    if not config.logit_softcap:
        return logits_TV
    if torch.is_grad_enabled() or not can_pack(logits_TV.device, logits_TV.dtype) or not can_compile():
        return softcap(logits_TV, config.logit_softcap)
    from tinsmith.engine.cpu.elementwise import bound, use_threads

    logits_TV = logits_TV.contiguous()
    use_threads(logits_TV.numel())
    bound(logits_TV.numpy(), np.float32(config.logit_softcap))
    return logits_TV


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
        self._ropes = [Rope(rope, config.head_dim, self.device, self.dtype) for rope in config.ropes]
        self._embedding_scale = torch.tensor(config.embedding_scale, device=self.device, dtype=self.dtype)

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
        """Return x_TD, which the first layer reads."""
        x_TD = self.embedding.product.rows(tokens_T)
        return x_TD if self.config.embedding_scale == 1.0 else x_TD * self._embedding_scale

    def angles(self, positions_T: torch.Tensor) -> tuple[Angles, ...]:
        """Return the angles of each of the model's rotations; `rope_index` says which one a layer uses."""
        return tuple(rope.angles(positions_T) for rope in self._ropes)

    def hidden(
        self, tokens_T: torch.Tensor, positions_T: torch.Tensor, attend: Attend, adapter: Adapter | None = None
    ) -> torch.Tensor:
        """Return hidden_TD after the final norm."""
        x_TD, angles = self.embed(tokens_T), self.angles(positions_T)
        eps, scale = self.config.norm_eps, self.config.residual_scale
        for index, layer in enumerate(self.layers):
            normed_TD = optional_norm(x_TD, layer.input_norm_D, eps)
            q_THC, k_TKC, v_TKC = self._queries_keys_values(index, layer, normed_TD, angles, adapter)
            attended_TE = attend(index, q_THC, k_TKC, v_TKC).flatten(1)
            added_TD = _adapted(adapter, index, "o_proj", attended_TE, layer.output(attended_TE))
            x_TD = torch.add(x_TD, optional_norm(added_TD, layer.output_norm_D, eps), alpha=scale)
            added_TD = self._mlp(index, layer, optional_norm(x_TD, layer.mlp_norm_D, eps), adapter)
            x_TD = torch.add(x_TD, optional_norm(added_TD, layer.down_norm_D, eps), alpha=scale)
        return rms_norm(x_TD, self.norm_D, eps)

    def unembed(self, hidden_TD: torch.Tensor, adapter: Adapter | None = None) -> torch.Tensor:
        """Return logits_TV in float32."""
        logits_TV = _adapted(adapter, None, LM_HEAD, hidden_TD, self.unembedding(hidden_TD).float())
        return finished_logits(logits_TV, self.config)

    def logits(self, hidden_TD: torch.Tensor, adapter: Adapter | None = None) -> torch.Tensor:
        """Return logits_TV in float32, without gradients, with the fastest kernel."""
        logits_TV = _adapted(adapter, None, LM_HEAD, hidden_TD, self.unembedding.product(hidden_TD).float())
        return finished_logits(logits_TV, self.config)

    def slopes(self, logits_TV: torch.Tensor) -> torch.Tensor | float:
        """Return the derivative of `logits` by what the unembedding returned."""
        config = self.config
        if not config.logit_softcap:
            return config.logit_scale
        return (logits_TV / config.logit_softcap).square_().neg_().add_(1.0).mul_(config.logit_scale)

    def _queries_keys_values(
        self,
        index: int,
        layer: Layer,
        normed_TD: torch.Tensor,
        angles: tuple[Angles, ...],
        adapter: Adapter | None,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        config, sizes = self.config, (self.config.query_size, self.config.kv_size, self.config.kv_size)
        parts = self._group(index, "qkv", layer.qkv, normed_TD, sizes, adapter)
        q_THC, k_TKC, v_TKC = (part_TE.view(len(part_TE), -1, config.head_dim) for part_TE in parts)
        if layer.query_norm_C is not None and layer.key_norm_C is not None:
            q_THC = heads_norm(q_THC, layer.query_norm_C, config.norm_eps)
            k_TKC = heads_norm(k_TKC, layer.key_norm_C, config.norm_eps)
        which = config.rope_index(index)
        if which is not None:
            q_THC, k_TKC = rotate(q_THC, *angles[which]), rotate(k_TKC, *angles[which])
        return q_THC, k_TKC, v_TKC

    def _group(
        self,
        index: int,
        group: str,
        base: Linear,
        x_TD: torch.Tensor,
        sizes: tuple[int, ...],
        adapter: Adapter | None,
    ) -> list[torch.Tensor]:
        """Return the parts of a group's output, of the given sizes; each module may be one part or all of them."""
        modules = self.config.modules(group)
        y_TE = base(x_TD)
        if len(modules) == 1:
            return list(torch.split_with_sizes(_adapted(adapter, index, modules[0], x_TD, y_TE), sizes, dim=1))
        parts = zip(modules, torch.split_with_sizes(y_TE, sizes, dim=1), strict=True)
        return [_adapted(adapter, index, module, x_TD, part_TE) for module, part_TE in parts]

    def _mlp(self, index: int, layer: Layer, normed_TD: torch.Tensor, adapter: Adapter | None) -> torch.Tensor:
        sizes = (self.config.intermediate_size, self.config.intermediate_size)
        gate_TI, up_TI = self._group(index, "gate_up", layer.gate_up, normed_TD, sizes, adapter)
        active_TI = activated(gate_TI, self.config) * up_TI
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

    def norm(name: str, is_there: bool = True) -> torch.Tensor | None:
        """Read a norm's weight; if it is stored less one, add that in float32, which changes no result there."""
        if not is_there:
            return None
        return (
            (widened(read(name)).float() + 1).to(device=device, dtype=dtype) if config.has_offset_norms else get(name)
        )

    def stacked(prefix: str, group: str, has_bias: bool) -> Linear:
        modules = config.modules(group)
        biases = [get(f"{prefix}.{module}.bias") for module in modules] if has_bias else []
        names = [f"{prefix}.{module}.weight" for module in modules]
        return product(*names, bias_E=torch.cat(biases) if biases else None)

    def layer(index: int) -> Layer:
        prefix = f"model.layers.{index}"
        attention, mlp = f"{prefix}.self_attn", f"{prefix}.mlp"
        before, after = config.has_input_norms, config.has_output_norms
        return Layer(
            input_norm_D=norm(f"{prefix}.input_layernorm.weight", before),
            qkv=stacked(attention, "qkv", config.has_qkv_bias),
            query_norm_C=norm(f"{attention}.q_norm.weight", config.has_qk_norm),
            key_norm_C=norm(f"{attention}.k_norm.weight", config.has_qk_norm),
            output=stacked(attention, "output", config.has_output_bias),
            output_norm_D=norm(f"{prefix}.post_attention_layernorm.weight", after),
            mlp_norm_D=norm(f"{prefix}.{mlp_norm_name(config)}.weight", before),
            gate_up=stacked(mlp, "gate_up", config.has_mlp_bias),
            down=stacked(mlp, "down", config.has_mlp_bias),
            down_norm_D=norm(f"{prefix}.post_feedforward_layernorm.weight", after),
        )

    embedding = product("model.embed_tokens.weight")
    norm_D = norm("model.norm.weight")
    assert norm_D is not None
    return Decoder(
        config,
        embedding,
        tuple(layer(index) for index in range(config.num_layers)),
        norm_D,
        embedding if config.tie_embeddings else product("lm_head.weight"),
    )


def mlp_norm_name(config: ModelConfig) -> str:
    """Return the name of the norm before the MLP, which files call by its place after the attention if they can."""
    return "pre_feedforward_layernorm" if config.has_output_norms else "post_attention_layernorm"


def weight_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Return the shape of every weight by its Hugging Face name."""
    D = config.hidden_size
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (config.vocab_size, D)}
    groups = {
        "self_attn": {"qkv": config.has_qkv_bias, "output": config.has_output_bias},
        "mlp": {"gate_up": config.has_mlp_bias, "down": config.has_mlp_bias},
    }
    biased = {
        f"{block}.{module}": has_bias
        for block, found in groups.items()
        for group, has_bias in found.items()
        for module in config.modules(group)
    }
    norms = ["input_layernorm", mlp_norm_name(config)] if config.has_input_norms else []
    norms += ["post_attention_layernorm", "post_feedforward_layernorm"] if config.has_output_norms else []
    for index in range(config.num_layers):
        prefix = f"model.layers.{index}"
        for module, has_bias in biased.items():
            rows, columns = config.module_shape(module.partition(".")[2])
            shapes[f"{prefix}.{module}.weight"] = (rows, columns)
            if has_bias:
                shapes[f"{prefix}.{module}.bias"] = (rows,)
        if config.has_qk_norm:
            for name, size in zip(("q_norm", "k_norm"), config.qk_norm_sizes, strict=True):
                shapes[f"{prefix}.self_attn.{name}.weight"] = (size,)
        shapes.update({f"{prefix}.{name}.weight": (D,) for name in norms})
    shapes["model.norm.weight"] = (D,)
    if not config.tie_embeddings:
        shapes["lm_head.weight"] = (config.vocab_size, D)
    return shapes

"""The decoder as the sampler runs it: no gradients, few and large operations, several adapters in one batch.

It computes what `models/decoder` computes, from the same weights; tests/unit/engine/sampling/test_sampling_decoder.py
compares them. Each adapter changes only the rows that belong to it (`RowAdapters`), in a frozen, inference-only form
(`FrozenAdapter`). Causality and caching are left to the `attend` argument.

Shapes: T rows, D hidden or inputs, H query heads, K key/value heads, C head dim, I intermediate, V vocabulary, E
outputs (of a group of modules), R rank, G modules of a group.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch.nn.functional import pad

from tinsmith.engine.cpu.linear import Product, kept_bytes, panel_width, weight_product
from tinsmith.engine.lora import LoraAdapter, LoraGroup
from tinsmith.engine.models.attention import Angles
from tinsmith.engine.models.config import LM_HEAD, ModelConfig
from tinsmith.engine.models.decoder import (
    Attend,
    Decoder,
    Layer,
    activated,
    finished_logits,
    heads_norm,
    optional_norm,
    rms_norm,
)
from tinsmith.engine.sampling.block_attention import BlockAttention, BlockCache, NewTokens


class FrozenAdapter:
    """A copy of an adapter, which later training of the original does not change.

    The modules of a group become one pair of products: their A stacked, their B as one block-diagonal matrix.
    """

    def __init__(self, adapter: LoraAdapter, device: torch.device, dtype: torch.dtype) -> None:
        self._groups: dict[tuple[int | None, str], tuple[Product, Product]] = {}
        self._places: npt.NDArray[np.int64] | None = None
        self.size_bytes = 0
        """The memory that the products use, including padding."""
        unit = panel_width(device, dtype)
        for key, group in adapter.groups.items():
            missing = (
                -len(group.A_GRD) % unit
            )  # padded with zeros, so that the second product takes whole panels of the first
            down_GRD = pad(group.A_GRD.detach(), (0, 0, 0, missing)).to(device, dtype, copy=True)
            up_EGR = pad(_block_diagonal(group) * adapter.scale, (0, missing)).to(device, dtype)
            self._groups[key] = weight_product(down_GRD), weight_product(up_EGR)
            self.size_bytes += kept_bytes(self._groups[key][0], down_GRD) + kept_bytes(self._groups[key][1], up_EGR)

    def places(self, layers: int, groups: Sequence[str]) -> npt.NDArray[np.int64]:
        """Return the addresses of both products and the width between them, [3, layers, groups]; 0 if there is none."""
        if self._places is None:
            from tinsmith.engine.cpu.product import PackedWeights

            self._places = np.zeros((3, layers, len(groups)), np.int64)
            for (layer, group), (down, up) in self._groups.items():
                if layer is not None:
                    assert isinstance(down, PackedWeights)
                    assert isinstance(up, PackedWeights)
                    self._places[:, layer, groups.index(group)] = down.address, up.address, down.width
        return self._places

    def add_to(self, layer: int | None, group: str, x_TD: torch.Tensor, y_TE: torch.Tensor) -> None:
        """Add this adapter's output for x_TD to y_TE, in place."""
        pair = self._groups.get((layer, group))
        if pair is not None:
            down, up = pair
            y_TE.add_(up(down(x_TD)))


def frozen_bytes(config: ModelConfig, groups: Iterable[str], rank: int, unit: int) -> int:
    """Estimate the size of a frozen adapter of these groups before it is read; `unit` is `panel_width`."""
    cells = 0
    for group in groups:
        shapes = [config.module_shape(module) for module in config.modules(group)]
        low = _filled_up(len(shapes) * rank, unit)
        cells += low * (shapes[0][1] + _filled_up(sum(outputs for outputs, _ in shapes), unit))
    return 4 * cells


def _filled_up(size: int, unit: int) -> int:
    return -(-size // unit) * unit


def _block_diagonal(group: LoraGroup) -> torch.Tensor:
    joined: torch.Tensor = torch.block_diag(*(B_ER.detach() for B_ER in group.Bs_ER))  # type: ignore[no-untyped-call]
    return joined


@dataclass(frozen=True, slots=True)
class RowAdapters:
    """Adapters and their rows, as (first row, row after the last, adapter); other rows use the base model alone."""

    parts: Sequence[tuple[int, int, FrozenAdapter]]

    def apply(self, layer: int | None, group: str, x_TD: torch.Tensor, y_TE: torch.Tensor) -> None:
        """Add each adapter's output to its rows of y_TE, in place."""
        for start, stop, adapter in self.parts:
            adapter.add_to(layer, group, x_TD[start:stop], y_TE[start:stop])


NO_ADAPTERS = RowAdapters(())
__all__ = ["LM_HEAD", "NO_ADAPTERS", "FrozenAdapter", "RowAdapters"]


@dataclass(frozen=True, slots=True)
class _Layer:
    weights: Layer
    qkv: Product
    output: Product
    gate_up: Product
    down: Product


class InferenceDecoder:
    """A decoder for sampling, built from the training one, whose weights it shares or copies."""

    def __init__(self, decoder: Decoder) -> None:
        self.config = decoder.config
        self.device, self.dtype = decoder.device, decoder.dtype
        self._embed, self._angles = decoder.embed, decoder.angles
        self._norm_D = decoder.norm_D
        self._layers = tuple(_prepared(layer) for layer in decoder.layers)
        self._unembedding = decoder.unembedding.product

    def hidden(
        self,
        tokens_T: torch.Tensor,
        positions_T: torch.Tensor,
        attend: Attend,
        adapters: RowAdapters = NO_ADAPTERS,
    ) -> torch.Tensor:
        """Return hidden_TD after the final norm."""
        eps, x_TD = self.config.norm_eps, self._embed(tokens_T)
        angles = tuple(_signed(*kind) for kind in self._angles(positions_T))
        for index, layer in enumerate(self._layers):
            normed_TD = optional_norm(x_TD, layer.weights.input_norm_D, eps)
            q_THC, k_TKC, v_TKC = self._queries_keys_values(index, layer, normed_TD, angles, adapters)
            attended_TE = attend(index, q_THC, k_TKC, v_TKC).flatten(1)
            y_TD = layer.output(attended_TE)
            adapters.apply(index, "output", attended_TE, y_TD)
            x_TD = self._added(y_TD, layer.weights.output_norm_D, x_TD)
            normed_TD = optional_norm(x_TD, layer.weights.mlp_norm_D, eps)
            x_TD = self._added(self._mlp(index, layer, normed_TD, adapters), layer.weights.down_norm_D, x_TD)
        return rms_norm(x_TD, self._norm_D, eps)

    def hidden_cached(
        self,
        tokens_T: torch.Tensor,
        positions_T: torch.Tensor,
        cache: BlockCache,
        batch: Sequence[NewTokens],
        adapters: RowAdapters = NO_ADAPTERS,
    ) -> torch.Tensor:
        """Return hidden_TD of new tokens of several sequences, and add their keys and values to the cache."""
        return self.hidden(tokens_T, positions_T, BlockAttention(cache, batch), adapters)

    def unembed(self, hidden_TD: torch.Tensor, adapters: RowAdapters = NO_ADAPTERS) -> torch.Tensor:
        """Return logits_TV in float32."""
        logits_TV = self._unembedding(hidden_TD)
        adapters.apply(None, LM_HEAD, hidden_TD, logits_TV)
        return finished_logits(logits_TV.float(), self.config)

    def _added(self, y_TD: torch.Tensor, weight_D: torch.Tensor | None, x_TD: torch.Tensor) -> torch.Tensor:
        """Add a result to the residual, after its norm if the model has one there."""
        y_TD, scale = optional_norm(y_TD, weight_D, self.config.norm_eps), self.config.residual_scale
        return (y_TD if scale == 1.0 else y_TD.mul_(scale)).add_(x_TD)

    def _queries_keys_values(
        self,
        index: int,
        layer: _Layer,
        normed_TD: torch.Tensor,
        angles: tuple[Angles, ...],
        adapters: RowAdapters,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        config = self.config
        stacked_TE = layer.qkv(normed_TD)
        adapters.apply(index, "qkv", normed_TD, stacked_TE)
        heads_THC = stacked_TE.view(len(stacked_TE), -1, config.head_dim)  # queries, then keys, then values
        turned = config.num_heads + config.num_kv_heads
        turned_THC, v_TKC = heads_THC[:, :turned], heads_THC[:, turned:]
        weights = layer.weights
        if weights.query_norm_C is not None and weights.key_norm_C is not None:
            q_THC = heads_norm(turned_THC[:, : config.num_heads], weights.query_norm_C, config.norm_eps)
            k_TKC = heads_norm(turned_THC[:, config.num_heads :], weights.key_norm_C, config.norm_eps)
            turned_THC = torch.cat((q_THC, k_TKC), dim=1)
        which = config.rope_index(index)
        if which is not None:
            turned_THC = _rotated(turned_THC, *angles[which])
        return turned_THC[:, : config.num_heads], turned_THC[:, config.num_heads :], v_TKC

    def _mlp(self, index: int, layer: _Layer, normed_TD: torch.Tensor, adapters: RowAdapters) -> torch.Tensor:
        stacked_TE = layer.gate_up(normed_TD)
        adapters.apply(index, "gate_up", normed_TD, stacked_TE)
        gate_TI, up_TI = stacked_TE.chunk(2, dim=1)
        active_TI = activated(gate_TI, self.config).mul_(up_TI)
        y_TD = layer.down(active_TI)
        adapters.apply(index, "down", active_TI, y_TD)
        return y_TD


def _signed(cos_T1F: torch.Tensor, sin_T1F: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return cos_T1C and sin_T1C for `_rotated`."""
    return torch.cat((cos_T1F, cos_T1F), dim=2), torch.cat((-sin_T1F, sin_T1F), dim=2)


def _rotated(x_THC: torch.Tensor, cos_T1C: torch.Tensor, sin_T1C: torch.Tensor) -> torch.Tensor:
    """Apply the rotation of `models/attention` in fewer operations, with the same rounding."""
    width = cos_T1C.shape[2]
    if width < x_THC.shape[2]:
        return torch.cat((_rotated(x_THC[..., :width], cos_T1C, sin_T1C), x_THC[..., width:]), dim=2)
    first_THF, second_THF = x_THC.chunk(2, dim=2)
    swapped_THC = torch.cat((second_THF, first_THF), dim=2)
    return (x_THC * cos_T1C).add_(swapped_THC.mul_(sin_T1C))


def _prepared(layer: Layer) -> _Layer:
    return _Layer(layer, layer.qkv.product, layer.output.product, layer.gate_up.product, layer.down.product)

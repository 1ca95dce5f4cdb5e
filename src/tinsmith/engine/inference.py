"""The decoder as the sampler runs it: few, large operations, weights laid out for few rows.

Owns: the forward pass without gradients, with several adapters in one batch. It is the arithmetic of `models.decoder`
over the same weights; the two are compared by tests/unit/engine/test_inference.py.
Does not know: causality and caches (the `attend` argument, `BlockAttention` for samples), sampling.

Shapes: T rows, D hidden, H query heads, K key/value heads, C head dim, I intermediate, V vocabulary, E outputs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch.nn.functional import embedding, silu

from tinsmith.engine.block_attention import BlockAttention, BlockCache, NewTokens
from tinsmith.engine.models.decoder import Attend, Decoder, Layer, rms_norm
from tinsmith.engine.packed_linear import Product
from tinsmith.engine.row_adapters import LM_HEAD, NO_ADAPTERS, RowAdapters


@dataclass(frozen=True, slots=True)
class _Layer:
    weights: Layer
    qkv: Product
    output: Product
    gate_up: Product
    down: Product


class InferenceDecoder:
    """A decoder for sampling; built from the one that trains, whose weights it shares or copies."""

    def __init__(self, decoder: Decoder) -> None:
        self.config = decoder.config
        self.device, self.dtype = decoder.device, decoder.dtype
        self._embedding_VD = decoder.embedding_VD
        self._norm_D = decoder.norm_D
        self._rope = decoder.rope
        self._layers = tuple(_prepared(layer) for layer in decoder.layers)
        self._unembedding = decoder.unembedding.product

    def hidden(
        self,
        tokens_T: torch.Tensor,
        positions_T: torch.Tensor,
        attend: Attend,
        adapters: RowAdapters = NO_ADAPTERS,
    ) -> torch.Tensor:
        """hidden_TD after the final norm."""
        eps = self.config.norm_eps
        x_TD = embedding(tokens_T, self._embedding_VD)
        angles = _signed(*self._rope.angles(positions_T))
        for index, layer in enumerate(self._layers):
            normed_TD = rms_norm(x_TD, layer.weights.input_norm_D, eps)
            q_THC, k_TKC, v_TKC = self._queries_keys_values(index, layer, normed_TD, angles, adapters)
            attended_TE = attend(index, q_THC, k_TKC, v_TKC).flatten(1)
            y_TD = layer.output(attended_TE)
            adapters.apply(index, "output", attended_TE, y_TD)
            x_TD = y_TD.add_(x_TD)
            normed_TD = rms_norm(x_TD, layer.weights.mlp_norm_D, eps)
            x_TD = self._mlp(index, layer, normed_TD, adapters).add_(x_TD)
        return rms_norm(x_TD, self._norm_D, eps)

    def hidden_cached(
        self,
        tokens_T: torch.Tensor,
        positions_T: torch.Tensor,
        cache: BlockCache,
        batch: Sequence[NewTokens],
        adapters: RowAdapters = NO_ADAPTERS,
    ) -> torch.Tensor:
        """hidden_TD of new tokens of several sequences, whose keys and values are kept in the cache."""
        return self.hidden(tokens_T, positions_T, BlockAttention(cache, batch), adapters)

    def unembed(self, hidden_TD: torch.Tensor, adapters: RowAdapters = NO_ADAPTERS) -> torch.Tensor:
        """logits_TV in float32."""
        logits_TV = self._unembedding(hidden_TD)
        adapters.apply(None, LM_HEAD, hidden_TD, logits_TV)
        return logits_TV.float()

    def _queries_keys_values(
        self,
        index: int,
        layer: _Layer,
        normed_TD: torch.Tensor,
        angles: tuple[torch.Tensor, torch.Tensor],
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
            q_THC = rms_norm(turned_THC[:, : config.num_heads], weights.query_norm_C, config.norm_eps)
            k_TKC = rms_norm(turned_THC[:, config.num_heads :], weights.key_norm_C, config.norm_eps)
            turned_THC = torch.cat((q_THC, k_TKC), dim=1)
        if config.has_rope(index):
            turned_THC = _rotated(turned_THC, *angles)
        return turned_THC[:, : config.num_heads], turned_THC[:, config.num_heads :], v_TKC

    def _mlp(self, index: int, layer: _Layer, normed_TD: torch.Tensor, adapters: RowAdapters) -> torch.Tensor:
        stacked_TE = layer.gate_up(normed_TD)
        adapters.apply(index, "gate_up", normed_TD, stacked_TE)
        gate_TI, up_TI = stacked_TE.chunk(2, dim=1)
        active_TI = silu(gate_TI).mul_(up_TI)
        y_TD = layer.down(active_TI)
        adapters.apply(index, "down", active_TI, y_TD)
        return y_TD


def _signed(cos_T1F: torch.Tensor, sin_T1F: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """cos_T1C and sin_T1C for `_rotated`."""
    return torch.cat((cos_T1F, cos_T1F), dim=2), torch.cat((-sin_T1F, sin_T1F), dim=2)


def _rotated(x_THC: torch.Tensor, cos_T1C: torch.Tensor, sin_T1C: torch.Tensor) -> torch.Tensor:
    """The rotation of `models.rope` in fewer operations, with the same roundings."""
    first_THF, second_THF = x_THC.chunk(2, dim=2)
    swapped_THC = torch.cat((second_THF, first_THF), dim=2)
    return (x_THC * cos_T1C).add_(swapped_THC.mul_(sin_T1C))


def _prepared(layer: Layer) -> _Layer:
    return _Layer(layer, layer.qkv.product, layer.output.product, layer.gate_up.product, layer.down.product)

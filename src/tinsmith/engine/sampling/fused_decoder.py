"""The sampler's decoder on a CPU in float32, with compiled kernels: `inference_decoder` chooses it where it works.

All layers of a step are one call of `cpu/layers`; this prepares its arguments. It computes what `decoder` computes,
from the same weights and cache; tests/unit/engine/sampling/test_sampling_decoder.py compares the two.

Shapes: as in `decoder` and `cpu/layers`.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
import torch

from tinsmith.engine.cpu.linear import Product, can_compile, can_pack
from tinsmith.engine.models.decoder import Decoder, Layer
from tinsmith.engine.sampling.block_attention import BlockCache, NewTokens
from tinsmith.engine.sampling.decoder import NO_ADAPTERS, InferenceDecoder, RowAdapters

if TYPE_CHECKING:
    from tinsmith.engine.cpu.layers import Adapted, StepRows, Weights
    from tinsmith.engine.cpu.product import PackedWeights

Floats = npt.NDArray[np.float32]
Integers = npt.NDArray[np.int64]

HEAD_MULTIPLE = 8
"""The kernels need a head dim that is a multiple of this."""


def inference_decoder(decoder: Decoder) -> InferenceDecoder:
    """Return the fastest decoder for sampling on this machine."""
    can_fuse = can_pack(decoder.device, decoder.dtype) and can_compile()
    return (
        FusedDecoder(decoder) if can_fuse and not decoder.config.head_dim % HEAD_MULTIPLE else InferenceDecoder(decoder)
    )


class FusedDecoder(InferenceDecoder):
    """A decoder for sampling whose layers are one compiled call."""

    def __init__(self, decoder: Decoder) -> None:
        super().__init__(decoder)
        self._weights = self._laid_out()
        self._last_norm_D: Floats = decoder.norm_D.numpy()

    def hidden_cached(
        self,
        tokens_T: torch.Tensor,
        positions_T: torch.Tensor,
        cache: BlockCache,
        batch: Sequence[NewTokens],
        adapters: RowAdapters = NO_ADAPTERS,
    ) -> torch.Tensor:
        from tinsmith.engine.cpu.elementwise import add_norm, use_threads
        from tinsmith.engine.cpu.layers import Buffers, run_layers

        rows, config, first = len(tokens_T), self.config, self._layers[0]
        x_TD = self._embed(tokens_T)
        widths = (config.hidden_size, _width(first.qkv), config.query_size, _width(first.gate_up))
        normed_TD, qkv_TE, attended_TE, gate_up_TE = (torch.empty(rows, width) for width in widths)
        active_TI, y_TD = torch.empty(rows, config.intermediate_size), torch.zeros(rows, _width(first.down))
        written = (x_TD, normed_TD, qkv_TE, attended_TE, gate_up_TE, active_TI, y_TD)
        tensors = (cache.keys_LNKCB, cache.values_LNKBC, *written)
        buffers = Buffers(*(tensor.numpy() for tensor in tensors))
        step = self._step(positions_T, batch, cache.block_size)
        run_layers(self._weights, step, self._adapted(adapters), buffers)
        use_threads(normed_TD.numel())
        scale, eps = self._weights.residual_scale, self._weights.eps
        add_norm(buffers.x_TD, buffers.y_TD, scale, self._last_norm_D, eps, buffers.normed_TD)
        return normed_TD

    def _step(self, positions_T: torch.Tensor, batch: Sequence[NewTokens], block_size: int) -> StepRows:
        from tinsmith.engine.cpu.cached_attention import pieces_of
        from tinsmith.engine.cpu.elementwise import thread_limit
        from tinsmith.engine.cpu.layers import StepRows

        threads = thread_limit()
        angles = [
            (cos_T1F.squeeze(1).numpy(), sin_T1F.squeeze(1).numpy()) for cos_T1F, sin_T1F in self._angles(positions_T)
        ]
        none_TF = np.zeros_like(angles[0][0])
        pieces = pieces_of([(new.row, new.count, new.start) for new in batch], threads)
        table_SW = _table(batch, block_size)
        position_T = positions_T.numpy()
        owner_T = np.repeat(np.arange(len(batch)), [new.count for new in batch])
        return StepRows(
            np.stack((none_TF + 1, *(cos_TF for cos_TF, _ in angles))),
            np.stack((none_TF, *(sin_TF for _, sin_TF in angles))),
            table_SW[owner_T, position_T // block_size],
            position_T % block_size,
            *pieces,
            table_SW,
            int(position_T.sum() + len(position_T)) * 2 * self.config.query_size,
            threads,
        )

    def _adapted(self, adapters: RowAdapters) -> Adapted:
        from tinsmith.engine.cpu.layers import GROUPS, Adapted

        layers = self.config.num_layers
        places = [adapter.places(layers, GROUPS) for _, _, adapter in adapters.parts]
        first_M, end_M = (np.array([part[side] for part in adapters.parts], np.int64) for side in (0, 1))
        found_MALP = np.array(places, np.int64).reshape(-1, 3, layers, len(GROUPS))
        return Adapted(first_M, end_M, *(np.ascontiguousarray(found_MALP[:, kind]) for kind in range(3)))

    def _laid_out(self) -> Weights:
        """Return all layers' weights in the form that the kernels need."""
        from tinsmith.engine.cpu.layers import Weights

        config, layers = self.config, [layer.weights for layer in self._layers]
        products = [[layer.qkv, layer.output, layer.gate_up, layer.down] for layer in self._layers]
        turns = [config.rope_index(index) for index in range(len(layers))]
        wide = [(layer.query_norm_C, layer.key_norm_C) if config.is_qk_norm_wide else (None, None) for layer in layers]
        return Weights(
            np.array([[_packed(product).address for product in row] for row in products], np.int64),
            (_biases(products, 0), _biases(products, 1), _biases(products, 2), _biases(products, 3)),
            _stacked(layer.input_norm_D for layer in layers),
            _stacked(layer.output_norm_D for layer in layers),
            _stacked(layer.mlp_norm_D for layer in layers),
            _stacked(layer.down_norm_D for layer in layers),
            np.stack([self._head_norms(layer) for layer in layers]),
            _stacked(query_norm_E for query_norm_E, _ in wide),
            _stacked(key_norm_E for _, key_norm_E in wide),
            np.float32(config.norm_eps),
            np.float32(config.residual_scale),
            np.float32(config.score_scale),
            np.float32(config.attention_softcap),
            int(config.activation == "gelu_tanh"),
            np.array([config.sliding_window(index) or 0 for index in range(len(layers))], np.int64),
            np.array([0 if turn is None else 1 + turn for turn in turns], np.int64),
        )

    def _head_norms(self, layer: Layer) -> Floats:
        """Return norms_HC of query and key heads; no rows if the model has no norm for each head."""
        config = self.config
        if layer.query_norm_C is None or layer.key_norm_C is None or config.is_qk_norm_wide:
            return np.empty((0, config.head_dim), np.float32)
        parts = (layer.query_norm_C, config.num_heads), (layer.key_norm_C, config.num_kv_heads)
        return np.concatenate([np.tile(norm_C.numpy(), (heads, 1)) for norm_C, heads in parts])


def _stacked(norms: Iterable[torch.Tensor | None]) -> Floats:
    """Return the norms of all layers; no columns if the model has none."""
    return np.stack([np.empty(0, np.float32) if norm_D is None else norm_D.numpy() for norm_D in norms])


def _packed(product: Product) -> PackedWeights:
    from tinsmith.engine.cpu.product import PackedWeights

    assert isinstance(product, PackedWeights), "the kernels take packed weights only"
    return product


def _width(product: Product) -> int:
    return _packed(product).width


def _biases(products: Sequence[Sequence[Product]], part: int) -> Floats:
    """Return biases_LE of one part of each layer; no rows if there are none."""
    found = [_packed(row[part]).bias_E for row in products]
    present = [bias_E.numpy() for bias_E in found if bias_E is not None]
    assert len(present) in (0, len(found)), "some layers have a bias and some have none"
    return np.stack(present) if present else np.empty((0, 0), np.float32)


def _table(batch: Sequence[NewTokens], block_size: int) -> Integers:
    """Return table_SW, the blocks of each sequence."""
    widths = [-(-(new.start + new.count) // block_size) for new in batch]
    table_SW = np.zeros((len(batch), max(widths)), np.int64)
    for row, (new, width) in enumerate(zip(batch, widths, strict=True)):
        table_SW[row, :width] = new.blocks[:width]
    return table_SW

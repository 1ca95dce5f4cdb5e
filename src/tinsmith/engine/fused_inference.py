"""The sampler's decoder on a CPU in float32: products by `cpu_product`, everything between them by
`cpu_kernels`.

Owns: the choice between this and the plain decoder, and one step's pass through the layers. It is the arithmetic of
`inference` over the same weights and cache; the two are compared by tests/unit/engine/test_inference.py.
Does not know: sampling, which tokens run.

Shapes: as in `inference` and `cpu_kernels`.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
from torch.nn.functional import embedding

from tinsmith.engine.block_attention import BlockCache, NewTokens
from tinsmith.engine.dtype_choice import processor
from tinsmith.engine.inference import InferenceDecoder
from tinsmith.engine.models.decoder import Decoder, Layer
from tinsmith.engine.packed_linear import can_compile, can_pack
from tinsmith.engine.row_adapters import NO_ADAPTERS, RowAdapters
from tinsmith.engine.row_ops import compile_rows
from tinsmith.engine.sampling_math import DrawRule, draw_from

logger = logging.getLogger(__name__)

Floats = npt.NDArray[np.float32]
Integers = npt.NDArray[np.int64]

HEAD_MULTIPLE = 8
"""What the kernels need a head dim to be a multiple of."""
SOURCES = (
    "cpu_attention.py",
    "cpu_drawing.py",
    "cpu_kernels.py",
    "cpu_product.py",
    "cpu_tile.py",
    "row_kernels.py",
)
"""Files with kernels."""
NOTE = "kernels.txt"
"""In the cache directory: for which machine and versions the kernels were compiled last."""


def inference_decoder(decoder: Decoder) -> InferenceDecoder:
    """The fastest decoder for sampling that this machine has."""
    can_fuse = can_pack(decoder.device, decoder.dtype) and can_compile()
    return (
        FusedDecoder(decoder) if can_fuse and not decoder.config.head_dim % HEAD_MULTIPLE else InferenceDecoder(decoder)
    )


def compile_kernels(decoder: InferenceDecoder, cache: BlockCache, cache_dir: Path) -> None:
    """Compile all kernels now, unless that was done on this machine before: a first request should not wait.

    The block that is written to is nobody's yet.
    """
    if not isinstance(decoder, FusedDecoder):
        return
    note = cache_dir / NOTE
    sources = [Path(__file__).with_name(name).stat().st_mtime_ns for name in SOURCES]
    wanted = f"{processor()}; numba {version('numba')}; {decoder.config.head_dim} {cache.block_size}; {sources}"
    if note.exists() and wanted in note.read_text().splitlines():
        return
    logger.info("compiling kernels for this processor, once", extra={"event": "compiling"})
    with torch.inference_mode():
        zero_T = torch.zeros(1, dtype=torch.int64)
        logits_TV = decoder.unembed(decoder.hidden_cached(zero_T, zero_T, cache, [NewTokens(0, 0, 1, [0])]))
        draw_from(logits_TV, [0], [DrawRule()], np.zeros(1))
    compile_rows()
    cache_dir.mkdir(parents=True, exist_ok=True)
    with note.open("a") as lines:
        lines.write(f"{wanted}\n")


@dataclass(frozen=True, slots=True)
class _Norms:
    """A layer's norm weights as the kernels take them."""

    input_D: Floats
    heads_HC: Floats
    mlp_D: Floats


@dataclass(frozen=True, slots=True)
class _Places:
    """Where a step's rows belong in the cache."""

    block_T: Integers
    slot_T: Integers
    table_SW: Integers


class FusedDecoder(InferenceDecoder):
    """A decoder for sampling whose layers are four products and five kernels each."""

    def __init__(self, decoder: Decoder) -> None:
        super().__init__(decoder)
        self._norms = tuple(self._layer_norms(layer) for layer in decoder.layers)
        self._last_norm_D: Floats = decoder.norm_D.numpy()

    def hidden_cached(
        self,
        tokens_T: torch.Tensor,
        positions_T: torch.Tensor,
        cache: BlockCache,
        batch: Sequence[NewTokens],
        adapters: RowAdapters = NO_ADAPTERS,
    ) -> torch.Tensor:
        from tinsmith.engine.cpu_attention import attend_kernel, pieces_of
        from tinsmith.engine.cpu_kernels import add_norm, gate, turn_and_keep, use_threads

        config, eps = self.config, np.float32(self.config.norm_eps)
        attend = attend_kernel(config.head_dim, cache.block_size)
        places = _places(positions_T.numpy(), batch, cache.block_size)
        pieces = pieces_of(batch, torch.get_num_threads())
        turning, still = self._angles(positions_T)
        keys_LNKCB, values_LNKBC = cache.keys_LNKCB.numpy(), cache.values_LNKBC.numpy()
        rows = len(tokens_T)
        looked_at = int(positions_T.sum() + rows) * 2 * config.query_size  # numbers of keys and values
        x_TD = embedding(tokens_T, self._embedding_VD).numpy()
        normed_TD, attended_TE = torch.empty(rows, config.hidden_size), torch.empty(rows, config.query_size)
        active_TI = torch.empty(rows, config.intermediate_size)
        y_TD = torch.zeros(rows, config.hidden_size)
        for index, (layer, norms) in enumerate(zip(self._layers, self._norms, strict=True)):
            keys_NKCB, values_NKBC = keys_LNKCB[index], values_LNKBC[index]
            use_threads(normed_TD.numel())
            add_norm(x_TD, y_TD.numpy(), norms.input_D, eps, normed_TD.numpy())
            qkv_TE = layer.qkv(normed_TD)
            adapters.apply(index, "qkv", normed_TD, qkv_TE)
            stacked_TE = qkv_TE.numpy()
            use_threads(stacked_TE.size)
            angles = turning if config.has_rope(index) else still
            turn_and_keep(
                stacked_TE, norms.heads_HC, eps, *angles, places.block_T, places.slot_T, keys_NKCB, values_NKBC
            )
            use_threads(looked_at)
            attend(
                stacked_TE,
                pieces.row_I,
                pieces.count_I,
                pieces.position_I,
                pieces.owner_I,
                places.table_SW,
                config.sliding_window(index) or 0,
                keys_NKCB,
                values_NKBC,
                attended_TE.numpy(),
            )
            y_TD = layer.output(attended_TE)
            adapters.apply(index, "output", attended_TE, y_TD)
            use_threads(normed_TD.numel())
            add_norm(x_TD, y_TD.numpy(), norms.mlp_D, eps, normed_TD.numpy())
            gate_up_TE = layer.gate_up(normed_TD)
            adapters.apply(index, "gate_up", normed_TD, gate_up_TE)
            use_threads(active_TI.numel())
            gate(gate_up_TE.numpy(), active_TI.numpy())
            y_TD = layer.down(active_TI)
            adapters.apply(index, "down", active_TI, y_TD)
        use_threads(normed_TD.numel())
        add_norm(x_TD, y_TD.numpy(), self._last_norm_D, eps, normed_TD.numpy())
        return normed_TD

    def _layer_norms(self, layer: Layer) -> _Norms:
        config = self.config
        heads_HC = np.empty((0, config.head_dim), np.float32)
        if layer.query_norm_C is not None and layer.key_norm_C is not None:
            parts = (layer.query_norm_C, config.num_heads), (layer.key_norm_C, config.num_kv_heads)
            heads_HC = np.concatenate([np.tile(norm_C.numpy(), (heads, 1)) for norm_C, heads in parts])
        return _Norms(layer.input_norm_D.numpy(), heads_HC, layer.mlp_norm_D.numpy())

    def _angles(self, positions_T: torch.Tensor) -> tuple[tuple[Floats, Floats], tuple[Floats, Floats]]:
        """Cosines and sines as cos_TF, sin_TF: those of the positions, and those that turn nothing."""
        cos_TF, sin_TF = (part_T1F.squeeze(1).numpy() for part_T1F in self._rope.angles(positions_T))
        return (cos_TF, sin_TF), (np.ones_like(cos_TF), np.zeros_like(sin_TF))


def _places(positions_T: Integers, batch: Sequence[NewTokens], block_size: int) -> _Places:
    owner_T = np.repeat(np.arange(len(batch)), [new.count for new in batch])
    widths = [-(-(new.start + new.count) // block_size) for new in batch]
    table_SW = np.zeros((len(batch), max(widths)), np.int64)
    for row, (new, width) in enumerate(zip(batch, widths, strict=True)):
        table_SW[row, :width] = new.blocks[:width]
    block_T = table_SW[owner_T, positions_T // block_size]
    return _Places(block_T, positions_T % block_size, table_SW)

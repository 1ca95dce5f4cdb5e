"""The number formats in which weights are stored in files and kept in memory, and how they become float32.

A quantised weight is a small integer times a scale, plus a minimum in some formats; a block of consecutive inputs
shares both. `Blocks` is a matrix as it stands in a GGUF file. For products, weights of any format are laid out in
panels of P outputs (see `product`): for each block of B inputs, the numbers of P outputs side by side for the first
input, then for the next, and at the end of the block P scales and P minimums. A panel is one contiguous stream.

Exactness: all formats are a multiplication and an addition away from float32, each rounded once, as in the reference
dequantisation of the gguf package. The tests compare them bit for bit.

Shapes: E outputs, D inputs, N panels of P outputs, G blocks of B inputs per row, S bytes of the numbers of an input.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import torch

FLOAT32 = 0
"""The code of plain numbers, which need no widening."""
_K_INPUTS = 256
"""Inputs of a block of the K formats, which consists of smaller blocks with scales of their own."""


@dataclass(frozen=True, slots=True)
class Format:
    """How the weights of a panel are stored."""

    code: int
    """By which kernels tell formats apart."""
    name: str
    bits: int
    """Of one number, without its scale."""
    dtype: torch.dtype
    """Of the numbers; 4-bit numbers are unsigned, two in a byte."""
    block: int = 1
    """How many inputs share a scale."""
    scale: torch.dtype | None = None
    """How scales and minimums are stored; None: there is no scale."""
    has_minimum: bool = False
    zero: int = 0
    """Subtracted from each number before it is scaled."""

    def step_bytes(self, panel: int) -> int:
        """Return the size of one input's numbers."""
        return panel * self.bits // 8

    def scale_bytes(self, panel: int) -> int:
        """Return the size of a block's scales, or of its minimums."""
        return 0 if self.scale is None else panel * self.scale.itemsize

    def block_bytes(self, panel: int) -> int:
        return self.block * self.step_bytes(panel) + (1 + self.has_minimum) * self.scale_bytes(panel)


PLAIN = Format(FLOAT32, "F32", 32, torch.float32)
FORMATS: Mapping[str, Format] = {
    stored.name: stored
    for stored in (
        PLAIN,
        Format(1, "BF16", 16, torch.bfloat16),
        Format(2, "F16", 16, torch.float16),
        Format(3, "Q8_0", 8, torch.int8, 32, torch.float16),
        Format(4, "Q4_0", 4, torch.uint8, 32, torch.float16, zero=8),
        Format(5, "Q4_1", 4, torch.uint8, 32, torch.float16, has_minimum=True),
        Format(6, "Q4_K", 4, torch.uint8, 32, torch.float32, has_minimum=True),
        Format(7, "Q5_K", 8, torch.int8, 32, torch.float32, has_minimum=True),
        Format(8, "Q6_K", 8, torch.int8, 16, torch.float32),
    )
}
"""By their names in GGUF files. Scales of the K formats are products of two stored numbers and are kept as such."""
_OF_DTYPE = {stored.dtype: stored for stored in FORMATS.values() if stored.scale is None}


@dataclass(frozen=True, slots=True)
class Blocks:
    """A quantised matrix: the bytes of its rows, as a GGUF file stores them."""

    format: Format
    rows: torch.Tensor
    """[E, bytes of a row], uint8; a read-only view of the file is enough."""
    shape: tuple[int, int]

    def __getitem__(self, order: torch.Tensor | slice) -> Blocks:
        """Return some rows."""
        rows = self.rows[order]
        return Blocks(self.format, rows, (len(rows), self.shape[1]))

    def parts(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
        """Return numbers_ED, scales_EG and minimums_EG (None if the format has none)."""
        return _PARTS[self.format.name](self.rows)

    def widened(self) -> torch.Tensor:
        """Return the weights in float32."""
        numbers_ED, scales_EG, minimums_EG = self.parts()
        wide_EGB = _unflat(numbers_ED, 1, (-1, self.format.block)).float()
        return _scaled(wide_EGB - self.format.zero, scales_EG[..., None], _with_end(minimums_EG)).flatten(1)


Weights: TypeAlias = "torch.Tensor | Blocks"
"""A matrix in the format of its file."""


def format_of(weights: Weights) -> Format:
    """Return the format in which a matrix is kept."""
    return weights.format if isinstance(weights, Blocks) else _OF_DTYPE.get(weights.dtype, PLAIN)


def widened(weights: Weights) -> torch.Tensor:
    """Return a matrix in float32, or as the file has it if its numbers are not quantised."""
    return weights.widened() if isinstance(weights, Blocks) else weights


def joined(parts: Sequence[Weights]) -> list[Weights]:
    """Stack matrices that stand below each other, as far as their formats are the same."""
    found: list[Weights] = []
    for part in parts:
        before = found[-1] if found else None
        if isinstance(part, Blocks) and isinstance(before, Blocks) and part.format == before.format:
            rows = before.shape[0] + part.shape[0]
            found[-1] = Blocks(part.format, torch.cat((before.rows, part.rows)), (rows, part.shape[1]))
        elif isinstance(part, torch.Tensor) and isinstance(before, torch.Tensor) and part.dtype == before.dtype:
            found[-1] = torch.cat((before, part))
        else:
            found.append(part)
    return found


def panel_bytes(stored: Format, depth: int, panel: int) -> int:
    """Return the size of one panel of weights with this many inputs."""
    return depth // stored.block * stored.block_bytes(panel)


def packed_bytes(stored: Format, shape: tuple[int, int], panel: int) -> int:
    """Return the size of a matrix in panels."""
    return -(-shape[0] // panel) * panel_bytes(stored, shape[1], panel)


def write_panels(weights: Weights, room_NX: torch.Tensor, panel: int) -> None:
    """Lay weights out in panels of P = `panel` outputs; X is the bytes of a panel. Missing outputs become zeros."""
    stored = format_of(weights)
    numbers_NGBS, scales_NGP, minimums_NGP = _views(stored, room_NX, panel)
    for first in range(0, len(room_NX), _SLAB):
        slab, outputs = slice(first, first + _SLAB), slice(first * panel, (first + _SLAB) * panel)
        some = weights[outputs]
        values, scales, minimums = some.parts() if isinstance(some, Blocks) else (some, None, None)
        values_NGBP = _by_panel(_unflat(values, 1, (-1, stored.block)), panel).transpose(2, 3)
        if stored.bits == 4:
            low, high = values_NGBP.chunk(2, 3)
            values_NGBP = low | high << 4
        numbers_NGBS[slab] = values_NGBP
        for view_NGP, cells in ((scales_NGP, scales), (minimums_NGP, minimums)):
            if view_NGP is not None and cells is not None:
                view_NGP[slab] = _by_panel(cells, panel)


def read_panels(
    stored: Format, room_NX: torch.Tensor, panel: int, outputs_T: torch.Tensor | None = None
) -> torch.Tensor:
    """Return a copy of weights_TD of some outputs in float32, or of all, with those that pad the last panel."""
    numbers_NGBS, scales_NGP, minimums_NGP = _views(stored, room_NX, panel)

    def of(view: torch.Tensor) -> torch.Tensor:
        """Return the chosen outputs, which are the view's last dimension, as the first."""
        if outputs_T is None:
            return view.movedim(-1, 1).flatten(0, 1)
        return view.movedim(-1, 1)[outputs_T // panel, outputs_T % panel]

    if stored.bits == 4 and outputs_T is not None:
        wide_TGB = _row_nibbles(numbers_NGBS, outputs_T // panel, outputs_T % panel).float()
    else:
        wide_TGB = of(_nibbles(numbers_NGBS) if stored.bits == 4 else numbers_NGBS).float()
    if scales_NGP is None:
        return wide_TGB.flatten(1).contiguous()
    minimums_TG = None if minimums_NGP is None else of(minimums_NGP)
    return _scaled(wide_TGB - stored.zero, of(scales_NGP)[..., None], _with_end(minimums_TG)).flatten(1).contiguous()


_SLAB = 256
"""Panels that are laid out at a time, so that little memory is needed besides the result."""


def _views(
    stored: Format, room_NX: torch.Tensor, panel: int
) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]:
    """Return numbers_NGBS, scales_NGP and minimums_NGP as parts of the panels' memory."""
    step, width = stored.step_bytes(panel), stored.scale_bytes(panel)
    blocks_NGX, end = _unflat(room_NX, 1, (-1, stored.block_bytes(panel))), stored.block * step
    numbers_NGBS = _unflat(blocks_NGX[:, :, :end], 2, (stored.block, step)).view(stored.dtype)
    if stored.scale is None:
        return numbers_NGBS, None, None
    scales_NGP = blocks_NGX[:, :, end : end + width].view(stored.scale)
    return numbers_NGBS, scales_NGP, blocks_NGX[:, :, end + width :].view(stored.scale) if stored.has_minimum else None


def _by_panel(cells_EG: torch.Tensor, panel: int) -> torch.Tensor:
    """Return cells_NGP..., with zeros for outputs that are missing in the last panel."""
    missing = -len(cells_EG) % panel
    if missing:
        cells_EG = torch.cat((cells_EG, cells_EG.new_zeros(missing, *cells_EG.shape[1:])))
    return _unflat(cells_EG, 0, (-1, panel)).transpose(1, 2)


def _unflat(tensor: torch.Tensor, dim: int, sizes: tuple[int, ...]) -> torch.Tensor:
    """Split a dimension in several."""
    return tensor.unflatten(dim, sizes)  # type: ignore[no-untyped-call, no-any-return]


def _with_end(minimums: torch.Tensor | None) -> torch.Tensor | None:
    return None if minimums is None else minimums[..., None]


def _scaled(numbers: torch.Tensor, scales: torch.Tensor, minimums: torch.Tensor | None) -> torch.Tensor:
    """Return numbers * scales + minimums, rounded after each operation."""
    products = numbers.mul_(scales.float())
    return products if minimums is None else products.add_(minimums.float())


_Parts = tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]


def _split(rows: torch.Tensor, *sizes: int) -> list[torch.Tensor]:
    """Return the fields of all file blocks, [E, file blocks, bytes of the field]."""
    return [part.contiguous() for part in torch.split(_unflat(rows, 1, (-1, sum(sizes))), list(sizes), 2)]


def _nibbles(packed: torch.Tensor) -> torch.Tensor:
    """Return the low halves of the bytes in the last dimension, followed by the high halves."""
    return torch.cat((packed & 15, packed >> 4), -1)


def _row_nibbles(pairs_NGBS: torch.Tensor, n_T: torch.Tensor, p_T: torch.Tensor) -> torch.Tensor:
    """Return the numbers of the outputs p in the panels n."""
    step = pairs_NGBS.shape[3]
    pairs_TGB = pairs_NGBS.movedim(3, 1)[n_T, p_T % step]
    return torch.where((p_T >= step)[:, None, None], pairs_TGB >> 4, pairs_TGB & 15)


def _halves(pair: torch.Tensor) -> torch.Tensor:
    """Return the float16 numbers of fields of two bytes."""
    return pair.view(torch.float16).squeeze(2)


def _q8_0(rows: torch.Tensor) -> _Parts:
    scale, numbers = _split(rows, 2, 32)
    return numbers.view(torch.int8).flatten(1), _halves(scale), None


def _q4_0(rows: torch.Tensor) -> _Parts:
    scale, numbers = _split(rows, 2, 16)
    return _nibbles(numbers).flatten(1), _halves(scale), None


def _q4_1(rows: torch.Tensor) -> _Parts:
    scale, minimum, numbers = _split(rows, 2, 2, 16)
    return _nibbles(numbers).flatten(1), _halves(scale), _halves(minimum)


def _small_scales(packed: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the eight scales and eight minimums of 6 bits each in fields of 12 bytes."""
    scales, minimums, rest = torch.split(packed, 4, 2)
    return (
        torch.cat((scales & 63, (rest & 15) | (scales >> 2 & 48)), 2),
        torch.cat((minimums & 63, (rest >> 4) | (minimums >> 2 & 48)), 2),
    )


def _k_scales(scale: torch.Tensor, minimum: torch.Tensor, packed: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return scales_EG and minimums_EG; the format subtracts its minimums, so they change their sign here."""
    scales, minimums = _small_scales(packed)
    wide_scale, wide_minimum = (_halves(pair).float().unsqueeze(2) for pair in (scale, minimum))
    return (wide_scale * scales.float()).flatten(1), (wide_minimum * minimums.float()).neg_().flatten(1)


def _q4_k(rows: torch.Tensor) -> _Parts:
    scale, minimum, packed, numbers = _split(rows, 2, 2, 12, 128)
    return _nibbles(_unflat(numbers, 2, (4, 32))).flatten(1), *_k_scales(scale, minimum, packed)


def _q5_k(rows: torch.Tensor) -> _Parts:
    scale, minimum, packed, high, numbers = _split(rows, 2, 2, 12, 32, 128)
    low = _unflat(_nibbles(_unflat(numbers, 2, (4, 32))), 3, (2, 32)).flatten(2, 3)
    shifts = torch.arange(8, dtype=torch.uint8)[:, None]
    top = (high[:, :, None] >> shifts & 1) << 4
    return (low | top).view(torch.int8).flatten(1), *_k_scales(scale, minimum, packed)


def _q6_k(rows: torch.Tensor) -> _Parts:
    numbers, high, packed, scale = _split(rows, 128, 64, 16, 2)
    low = _unflat(_nibbles(_unflat(numbers, 2, (2, 64))), 3, (4, 32))
    shifts = torch.arange(0, 8, 2, dtype=torch.uint8)[:, None]
    top = (_unflat(high, 2, (2, 1, 32)) >> shifts & 3) << 4
    scales = _halves(scale).float().unsqueeze(2) * packed.view(torch.int8).float()
    return (low | top).view(torch.int8).flatten(1) - 32, scales.flatten(1), None


_PARTS: Mapping[str, Callable[[torch.Tensor], _Parts]] = {
    "Q8_0": _q8_0,
    "Q4_0": _q4_0,
    "Q4_1": _q4_1,
    "Q4_K": _q4_k,
    "Q5_K": _q5_k,
    "Q6_K": _q6_k,
}

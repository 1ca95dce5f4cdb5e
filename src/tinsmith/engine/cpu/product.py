"""Products of a few or many float32 rows with frozen weights, on a CPU.

The trick. A product with few rows is as fast as the weights can be read from memory, so they are stored in the order in
which the inner loop (`tile`) reads them. W is cut into panels of P outputs; within a panel, the P numbers that belong
to one input lie side by side, then those of the next input, and so on. A panel is then one contiguous stream, each step
of the tile reads two full vectors of it, and threads take different panels. While one panel is multiplied, the
next is prefetched.

Weights keep the format of their file (`formats`) and are widened on the way, a piece of a panel at a time (`widen`).

Every output is one chain of fused multiply-adds over the inputs, in order, whatever the number of rows, columns or
threads: a row's result does not depend on the other rows.

The kernel is compiled by numba on first use and cached on disk. Measured on two cores, it is 1.3 to 1.8 times as fast
as oneDNN's product for 1 to 32 rows, and as fast for 256 (`bench/engine_products.py`).

Shapes: T rows, D inputs, E outputs, N panels of P outputs.
"""

from __future__ import annotations

import contextlib
import functools
import mmap
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from llvmlite import binding, ir
from numba import njit, prange, types
from numba.extending import intrinsic

from tinsmith.engine.cpu.elementwise import use_threads
from tinsmith.engine.cpu.formats import (
    FLOAT32,
    FORMATS,
    Blocks,
    Format,
    Weights,
    format_of,
    joined,
    panel_bytes,
    read_panels,
    widened,
    write_panels,
)
from tinsmith.engine.cpu.tile import BYTES, LINE, make_product
from tinsmith.engine.cpu.widen import make_turn, make_widening

Floats = npt.NDArray[np.float32]


@functools.cache
def can_multiply() -> bool:
    """Return whether this processor multiplies and adds in one instruction; otherwise the product would be slow."""
    found = binding.get_host_cpu_features()
    return bool(found.get("fma") or found.get("neon"))


LANES = 16 if binding.get_host_cpu_features().get("avx512f") else 8
"""Numbers in a vector register."""
_VECTORS = 2
PANEL = LANES * _VECTORS
_STREAMED = 4
"""Up to this many rows, a panel is finished too soon for prefetching; the processor's own prefetcher is enough."""

_PAGE = 2**21
"""Bytes of a huge page."""

_CHUNK = 128
"""Inputs that are widened together: with a panel's outputs, half of the smallest first-level cache in use (32 KB)."""

_product = make_product(LANES, _VECTORS)
_turn = make_turn(LANES, _VECTORS)
_f32, _bf16, _f16, _q8_0, _q4_0, _q4_1, _q4_k, _q5_k, _q6_k = (
    make_widening(FORMATS[name], LANES, _VECTORS)
    for name in ("F32", "BF16", "F16", "Q8_0", "Q4_0", "Q4_1", "Q4_K", "Q5_K", "Q6_K")
)
_STEP_BYTES = np.array([stored.block_bytes(PANEL) // stored.block for stored in FORMATS.values()])
"""Bytes per input of a panel, by format."""


@intrinsic
def _number_at(context: Any, address: Any) -> Any:
    """Return the integer at an address."""

    def emit(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.load(builder.inttoptr(arguments[0], ir.IntType(64).as_pointer()))

    return types.intp(types.intp), emit


@njit
def _aligned(numbers: int) -> tuple[Floats, int]:
    """Return memory for this many numbers, and the address in it at which a cache line begins."""
    room = np.zeros(numbers + LINE // BYTES, np.float32)
    return room, (room.ctypes.data + LINE - 1) // LINE * LINE


@njit
def _widen(code: int, panel: int, first: int, count: int, to: int) -> None:
    """Write `count` inputs of a panel as float32, by the code of its format."""
    if code == 0:
        _f32(panel, first, count, to)
    elif code == 1:
        _bf16(panel, first, count, to)
    elif code == 2:
        _f16(panel, first, count, to)
    elif code == 3:
        _q8_0(panel, first, count, to)
    elif code == 4:
        _q4_0(panel, first, count, to)
    elif code == 5:
        _q4_1(panel, first, count, to)
    elif code == 6:
        _q4_k(panel, first, count, to)
    elif code == 7:
        _q5_k(panel, first, count, to)
    else:
        _q6_k(panel, first, count, to)


@njit
def _one_panel(
    rows: int, x: int, depth: int, code: int, panel: int, out: int, out_row: int, begins: int, pace: int
) -> None:
    """Multiply rows by one panel: at once if it is float32, else a chunk of its inputs after the other."""
    is_plain = code == FLOAT32
    room, buffer = _aligned(1 if is_plain else _CHUNK * PANEL)
    chunk = depth if is_plain else _CHUNK
    for first in range(0, depth, chunk):
        count = min(chunk, depth - first)
        weights = panel if is_plain else buffer
        if not is_plain:
            _widen(code, panel, first, count, buffer)
        ahead = panel + (first + count) * _STEP_BYTES[code]
        begin = begins if first == 0 else 0
        _product(rows, x + first * BYTES, depth, weights, PANEL, out, out_row, count, begin, ahead, pace)
    room[0] = 0  # keeps the memory until here


@njit(cache=True, parallel=True)
def multiply(x_TD: Floats, panels: int, out_TE: Floats, begins: int) -> None:
    """Compute out = x W^T for packed weights, or out += x W^T if not `begins`.

    `panels` is the address of a table with the address and the format of each panel; `out_TE` is as wide as all of
    them. `pace` spreads the prefetches for the next chunk over the tiles of this one.
    """
    rows, depth, out_row = x_TD.shape[0], x_TD.shape[1], out_TE.shape[1]
    x, out = x_TD.ctypes.data, out_TE.ctypes.data
    for n in prange(out_row // PANEL):
        w, code = _number_at(panels + 16 * n), _number_at(panels + 16 * n + 8)
        pace = 0 if rows <= _STREAMED else _STEP_BYTES[code] // (rows // 6 + 1) + 1
        _one_panel(rows, x, depth, code, w, out + n * PANEL * BYTES, out_row, begins, pace)


@njit
def _turned_panels(
    rows: int, g: int, outputs: int, panels: int, first: int, inputs: int, out: int, out_row: int
) -> None:
    """Multiply rows by `inputs` inputs of all panels, beginning with the input `first`: out = g W[:, inputs]."""
    square = PANEL * PANEL * BYTES
    room, buffer = _aligned(_CHUNK * PANEL + PANEL * PANEL)
    piece = buffer + _CHUNK * PANEL * BYTES
    for start in range(0, outputs, _CHUNK):
        count = min(_CHUNK, outputs - start)
        for part in range(-(-count // PANEL)):
            entry = panels + 16 * (start // PANEL + part)
            _widen(_number_at(entry + 8), _number_at(entry), first, inputs, piece)
            _turn(piece, buffer + part * square)
        begins = 1 if start == 0 else 0
        _product(rows, g + start * BYTES, outputs, buffer, PANEL, out, out_row, count, begins, buffer, 0)
    room[0] = 0  # keeps the memory until here


@njit(cache=True, parallel=True)
def multiply_back(g_TE: Floats, panels: int, depth: int, out_TD: Floats) -> None:
    """Compute out = g W for packed weights with `depth` inputs; `out_TD` is as wide as D in whole panels.

    The weights lie in the order of the other product, so each square of them is turned around in the first-level cache.
    Every result is one chain over the outputs, in order.
    """
    rows, outputs, out_row = g_TE.shape[0], g_TE.shape[1], out_TD.shape[1]
    g, out = g_TE.ctypes.data, out_TD.ctypes.data
    for m in prange(out_row // PANEL):
        first = m * PANEL
        _turned_panels(rows, g, outputs, panels, first, min(PANEL, depth - first), out + first * BYTES, out_row)


def _room(rows: int, row_bytes: int) -> torch.Tensor:
    """Return uninitialised bytes, in huge pages where the system has them: reading weights is a few percent faster."""
    size = rows * row_bytes
    if size < _PAGE or not hasattr(mmap, "MADV_HUGEPAGE"):
        return torch.empty(rows, row_bytes, dtype=torch.uint8)
    region = mmap.mmap(-1, size + _PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    room = torch.frombuffer(region, dtype=torch.uint8)
    start = -room.data_ptr() % _PAGE
    with contextlib.suppress(OSError):  # the system may not support it
        region.madvise(mmap.MADV_HUGEPAGE, start, size - size % _PAGE)
    return room[start : start + size].view(rows, row_bytes)


class _Segment(NamedTuple):
    """Panels in one format; X is the bytes of a panel."""

    format: Format
    room_NX: torch.Tensor


class PackedWeights:
    """Weights in panels: for each input, the numbers of P outputs side by side. Calling it computes x W^T + b.

    Weights keep the format of their file. Several matrices with the same inputs, in `parts`, are stacked; one that is
    followed by another format must fill whole panels, else all of them are widened.
    """

    def __init__(self, parts: Weights | Sequence[Weights], bias_E: torch.Tensor | None = None) -> None:
        stacked = joined([parts] if isinstance(parts, (torch.Tensor, Blocks)) else parts)
        if any(part.shape[0] % PANEL for part in stacked[:-1]):
            stacked = [torch.cat([widened(part).float() for part in stacked])]
        self.outputs, self.depth = sum(part.shape[0] for part in stacked), stacked[0].shape[1]
        self._segments = [_laid_out(part) for part in stacked]
        table = [
            (segment.room_NX.data_ptr() + n * segment.room_NX.shape[1], segment.format.code)
            for segment in self._segments
            for n in range(len(segment.room_NX))
        ]
        self._table_N2 = torch.tensor(table)
        self.address = self._table_N2.data_ptr()
        self.width = len(table) * PANEL
        """Outputs, rounded up to whole panels."""
        self.bias_E = bias_E

    @property
    def bytes_by_format(self) -> dict[str, int]:
        """Memory used by the panels of each format."""
        found: dict[str, int] = {}
        for segment in self._segments:
            found[segment.format.name] = found.get(segment.format.name, 0) + segment.room_NX.numel()
        return found

    @property
    def size_bytes(self) -> int:
        """Memory used by the panels and their table."""
        return sum(self.bytes_by_format.values()) + self._table_N2.nbytes

    @property
    def weight_ED(self) -> torch.Tensor:
        """A copy of the weights in float32."""
        rows = [read_panels(segment.format, segment.room_NX, PANEL) for segment in self._segments]
        return (rows[0] if len(rows) == 1 else torch.cat(rows))[: self.outputs]

    def rows(self, outputs_T: torch.Tensor) -> torch.Tensor:
        """Return weights_TD of some outputs in float32, for weights in one format."""
        (segment,) = self._segments
        return read_panels(segment.format, segment.room_NX, PANEL, outputs_T)

    def __call__(self, x_TD: torch.Tensor) -> torch.Tensor:
        """Return y_TE = x W^T + b."""
        if x_TD.shape[1] != self.depth:
            raise ValueError(f"x_TD has {x_TD.shape[1]} columns, the weights have {self.depth} inputs")
        use_threads(self.width * self.depth)
        out_TE = torch.empty(len(x_TD), self.width)
        multiply(x_TD.contiguous().numpy(), self.address, out_TE.numpy(), 1)
        out_TE = out_TE if self.width == self.outputs else out_TE[:, : self.outputs]
        return out_TE if self.bias_E is None else out_TE.add_(self.bias_E)

    def back(self, g_TE: torch.Tensor) -> torch.Tensor:
        """Return g W, the gradient of x for the gradient g of x W^T."""
        if g_TE.shape[1] != self.outputs:
            raise ValueError(f"g_TE has {g_TE.shape[1]} columns, the weights have {self.outputs} outputs")
        use_threads(self.width * self.depth)
        out_TD = torch.empty(len(g_TE), -(-self.depth // PANEL) * PANEL)
        multiply_back(g_TE.contiguous().numpy(), self.address, self.depth, out_TD.numpy())
        return out_TD if out_TD.shape[1] == self.depth else out_TD[:, : self.depth]


def _laid_out(weights: Weights) -> _Segment:
    stored = format_of(weights)
    outputs, depth = weights.shape
    room_NX = _room(-(-outputs // PANEL), panel_bytes(stored, depth, PANEL))
    write_panels(weights.detach() if isinstance(weights, torch.Tensor) else weights, room_NX, PANEL)
    return _Segment(stored, room_NX)

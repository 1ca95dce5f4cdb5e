"""Matrix products on a CPU in float32 over weights that were laid out for them: few rows or many, always the same sums.

Owns: the layout of the weights, and the product, compiled by numba at its first use and kept on disk. Its inner loop
is written in LLVM's vector instructions, because the sums must stay in registers; measured on two cores it is 1.2 times
as fast as oneDNN's product for 1 to 32 rows, and level for 256 (`bench/engine_products.py`).
Does not know: torch's autograd, models.

Every output is one chain of fused multiply-adds over the inputs in order, whatever the number of rows, columns or
threads: a row's result does not depend on the others.

Shapes: T rows, D inputs, E outputs, N panels of P outputs.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from llvmlite import binding, ir
from numba import njit, prange, types
from numba.core import cgutils
from numba.extending import intrinsic

from tinsmith.engine.cpu_kernels import use_threads

Floats = npt.NDArray[np.float32]


@functools.cache
def can_multiply() -> bool:
    """Whether this processor multiplies and adds in one instruction; without, the product would be slow."""
    found = binding.get_host_cpu_features()
    return bool(found.get("fma") or found.get("neon"))


LANES = 16 if binding.get_host_cpu_features().get("avx512f") else 8
"""Numbers of a vector register."""
_VECTORS = 2
PANEL = LANES * _VECTORS
_BYTES = 4


def _tile(rows: int) -> Callable[..., None]:
    """tile(x, x_row, w, out, out_row, depth): so many rows of x times one panel; addresses, and numbers per row."""

    @intrinsic
    def tile(context: Any, x: Any, x_row: Any, w: Any, out: Any, out_row: Any, depth: Any) -> Any:
        return types.void(*[types.intp] * 6), functools.partial(_emit_tile, rows)

    return tile  # type: ignore[no-any-return]


def _emit_tile(rows: int, context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
    """A loop over the depth: load a piece of the panel, multiply it by each row's number, add. Then store."""
    x, x_row, w, out, out_row, depth = arguments
    number, index = ir.FloatType(), ir.IntType(64)
    vector = ir.VectorType(number, LANES)
    name = f"llvm.fma.v{LANES}f32"
    fma = cgutils.get_or_insert_function(builder.module, ir.FunctionType(vector, [vector] * 3), name)

    def constant(value: int) -> Any:
        return ir.Constant(index, value)

    def at(base: Any, offset: Any, kind: Any) -> Any:
        return builder.inttoptr(builder.add(base, builder.mul(offset, constant(_BYTES))), kind.as_pointer())

    def everywhere(value: Any) -> Any:
        nothing = ir.Constant(vector, ir.Undefined)
        first = ir.Constant(ir.VectorType(ir.IntType(32), LANES), [0] * LANES)
        single = builder.insert_element(nothing, value, ir.Constant(ir.IntType(32), 0))
        return builder.shuffle_vector(single, nothing, first)

    row_bytes = builder.mul(x_row, constant(_BYTES))
    starts = [builder.add(x, builder.mul(row_bytes, constant(row))) for row in range(rows)]
    before, loop, end = builder.block, builder.append_basic_block("loop"), builder.append_basic_block("end")
    builder.branch(loop)
    builder.position_at_end(loop)
    step = builder.phi(index)
    step.add_incoming(constant(0), before)
    sums = [[builder.phi(vector) for _ in range(_VECTORS)] for _ in range(rows)]
    place = builder.mul(step, constant(PANEL))
    weights = [
        builder.load(at(w, builder.add(place, constant(v * LANES)), vector), align=LANES * _BYTES)
        for v in range(_VECTORS)
    ]
    added = []
    for row in range(rows):
        factor = everywhere(builder.load(at(starts[row], step, number), align=_BYTES))
        added.append([builder.call(fma, [factor, weights[v], sums[row][v]]) for v in range(_VECTORS)])
    following = builder.add(step, constant(1))
    step.add_incoming(following, loop)
    for row in range(rows):
        for v in range(_VECTORS):
            sums[row][v].add_incoming(ir.Constant(vector, [0.0] * LANES), before)
            sums[row][v].add_incoming(added[row][v], loop)
    builder.cbranch(builder.icmp_signed("<", following, depth), loop, end)
    builder.position_at_end(end)
    for row in range(rows):
        for v in range(_VECTORS):
            offset = builder.add(builder.mul(out_row, constant(row)), constant(v * LANES))
            builder.store(added[row][v], at(out, offset, vector), align=_BYTES)
    return context.get_dummy_value()


_tile1, _tile2, _tile3, _tile4, _tile6 = (_tile(rows) for rows in (1, 2, 3, 4, 6))


@njit(cache=True, parallel=True)
def _multiply(x_TD: Floats, packed_NDP: Floats, out_TE: Floats) -> None:
    """out = x W^T; its rows are as long as all panels together."""
    panels, depth, panel = packed_NDP.shape
    rows, x_row, out_row = x_TD.shape[0], x_TD.shape[1], out_TE.shape[1]
    x, w, out = x_TD.ctypes.data, packed_NDP.ctypes.data, out_TE.ctypes.data
    for n in prange(panels):
        piece, column, t = w + n * depth * panel * 4, out + n * panel * 4, 0
        while rows - t > 8 or rows - t == 6:
            _tile6(x + t * x_row * 4, x_row, piece, column + t * out_row * 4, out_row, depth)
            t += 6
        while rows - t >= 4:
            _tile4(x + t * x_row * 4, x_row, piece, column + t * out_row * 4, out_row, depth)
            t += 4
        if rows - t == 3:
            _tile3(x + t * x_row * 4, x_row, piece, column + t * out_row * 4, out_row, depth)
        elif rows - t == 2:
            _tile2(x + t * x_row * 4, x_row, piece, column + t * out_row * 4, out_row, depth)
        elif rows - t == 1:
            _tile1(x + t * x_row * 4, x_row, piece, column + t * out_row * 4, out_row, depth)


class PackedWeights:
    """Weights in panels: for each input the numbers of P outputs side by side."""

    def __init__(self, weight_ED: torch.Tensor) -> None:
        self.outputs, depth = weight_ED.shape
        panels = -(-self.outputs // PANEL)
        padded = torch.zeros(panels * PANEL, depth)
        padded[: self.outputs] = weight_ED.detach()
        self._packed_NDP: Floats = padded.view(panels, PANEL, depth).transpose(1, 2).contiguous().numpy()
        self._width = panels * PANEL

    def times(self, x_TD: torch.Tensor) -> torch.Tensor:
        """x W^T as y_TE."""
        use_threads(self._packed_NDP.size)
        out_TE = torch.empty(len(x_TD), self._width)
        _multiply(x_TD.contiguous().numpy(), self._packed_NDP, out_TE.numpy())
        return out_TE if self._width == self.outputs else out_TE[:, : self.outputs]

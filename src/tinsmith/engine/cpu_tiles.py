"""Tiles of a matrix product as vector instructions: some rows times one panel of columns, the sums in registers.

Owns: the instructions, for matrices whose rows and steps lie any distance apart, in float32.
Does not know: which matrices are multiplied, threads.

Every sum is one chain of fused multiply-adds over the depth in order.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from llvmlite import binding, ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

LANES = 16 if binding.get_host_cpu_features().get("avx512f") else 8
"""Numbers of a vector register."""
_VECTORS = 2
PANEL = LANES * _VECTORS
"""Columns of a tile."""
ROWS = 6
"""Rows of a tile: as many as leave registers for the panel."""
_BYTES = 4


def strided_tile(is_adding: bool) -> Callable[..., None]:
    """tile(x, x_row, x_step, w, w_step, out, out_row, depth): out = x w, or out += x w, for ROWS rows of x.

    `x`, `w` and `out` are addresses. A row or a step further is so many numbers further; those of a panel are adjacent.
    The depth is 1 at least.
    """

    @intrinsic
    def tile(
        context: Any, x: Any, x_row: Any, x_step: Any, w: Any, w_step: Any, out: Any, out_row: Any, depth: Any
    ) -> Any:
        return types.void(*[types.intp] * 8), functools.partial(_emit, is_adding)

    return tile  # type: ignore[no-any-return]


def _emit(is_adding: bool, context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
    """A loop over the depth: load a piece of the panel, multiply it by each row's number, add. Then store."""
    x, x_row, x_step, w, w_step, out, out_row, depth = arguments
    number, index = ir.FloatType(), ir.IntType(64)
    vector = ir.VectorType(number, LANES)
    fma = cgutils.get_or_insert_function(builder.module, ir.FunctionType(vector, [vector] * 3), f"llvm.fma.v{LANES}f32")
    zero = ir.Constant(vector, [0.0] * LANES)
    places = [(row, v) for row in range(ROWS) for v in range(_VECTORS)]

    def constant(value: int) -> Any:
        return ir.Constant(index, value)

    def address(base: Any, offset: Any) -> Any:
        return builder.add(base, builder.mul(offset, constant(_BYTES)))

    def at(base: Any, offset: Any, kind: Any) -> Any:
        return builder.inttoptr(address(base, offset), kind.as_pointer())

    def everywhere(value: Any) -> Any:
        nothing = ir.Constant(vector, ir.Undefined)
        first = ir.Constant(ir.VectorType(ir.IntType(32), LANES), [0] * LANES)
        single = builder.insert_element(nothing, value, ir.Constant(ir.IntType(32), 0))
        return builder.shuffle_vector(single, nothing, first)

    rows = [address(x, builder.mul(x_row, constant(row))) for row in range(ROWS)]
    outs = {
        (row, v): at(out, builder.add(builder.mul(out_row, constant(row)), constant(v * LANES)), vector)
        for row, v in places
    }
    start = {place: builder.load(outs[place], align=_BYTES) if is_adding else zero for place in places}
    before, loop, end = builder.block, builder.append_basic_block("loop"), builder.append_basic_block("end")
    builder.branch(loop)
    builder.position_at_end(loop)
    step = builder.phi(index)
    sums = {place: builder.phi(vector) for place in places}
    across, down = builder.mul(step, x_step), builder.mul(step, w_step)
    weights = [
        builder.load(at(w, builder.add(down, constant(v * LANES)), vector), align=_BYTES) for v in range(_VECTORS)
    ]
    factors = [everywhere(builder.load(at(row, across, number), align=_BYTES)) for row in rows]
    added = {(row, v): builder.call(fma, [factors[row], weights[v], sums[row, v]]) for row, v in places}
    following = builder.add(step, constant(1))
    step.add_incoming(constant(0), before)
    step.add_incoming(following, loop)
    for place in places:
        sums[place].add_incoming(start[place], before)
        sums[place].add_incoming(added[place], loop)
    builder.cbranch(builder.icmp_signed("<", following, depth), loop, end)
    builder.position_at_end(end)
    for place in places:
        builder.store(added[place], outs[place], align=_BYTES)
    return context.get_dummy_value()

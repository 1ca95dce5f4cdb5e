"""The inner loop of every matrix product on a CPU: a small tile of the output, whose sums stay in registers.

The trick. A processor can do about two vector multiply-adds per cycle, but memory delivers far fewer numbers than that
needs. So a tile of, say, 6 rows x 32 columns of the output is kept in vector registers while the loop walks along the
depth (the dimension that is summed over). Each step loads one piece of w (32 numbers) and one number of each row of x,
and does 6 x 32 multiply-adds with them: every loaded number is used many times, and no sum goes to memory before the
end. Six rows are the most for which the sums, the piece of w and a row's number fit into the registers.

A loop written for numba would not reliably keep the sums in registers, so the tile is emitted as LLVM instructions
(`_emit`). While it computes, it also prefetches memory that a later tile will read (`ahead`).

Exactness. Each sum is one chain of fused multiply-adds over the depth, in order, whatever the number of rows and
columns. So a row's result does not depend on the rows beside it: that is why a sample gives the same tokens in any
batch.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from llvmlite import ir
from numba import njit, types
from numba.core import cgutils
from numba.extending import intrinsic

BYTES = 4
"""Of a float32."""
LINE = 64
"""Bytes of a cache line, the unit in which memory is read."""


def make_product(lanes: int, vectors: int) -> Callable[..., None]:
    """Return product(rows, x, x_row, w, w_row, out, out_row, depth, begins, ahead, pace): `tile` for any number of
    rows.

    The rows are covered by tiles of 6 and 4 rows, and one of 3, 2 or 1 for the rest. Each tile continues prefetching
    where the one before it stopped.
    """
    tile1, tile2, tile3, tile4, tile6 = (_make_tile(rows, lanes, vectors) for rows in (1, 2, 3, 4, 6))

    @njit
    def product(
        rows: int,
        x: int,
        x_row: int,
        w: int,
        w_row: int,
        out: int,
        out_row: int,
        depth: int,
        begins: int,
        ahead: int,
        pace: int,
    ) -> None:
        while rows > 8 or rows == 6:
            tile6(x, x_row, w, w_row, out, out_row, depth, begins, ahead, pace)
            rows, x, out, ahead = rows - 6, x + 6 * x_row * BYTES, out + 6 * out_row * BYTES, ahead + depth * pace
        while rows >= 4:
            tile4(x, x_row, w, w_row, out, out_row, depth, begins, ahead, pace)
            rows, x, out, ahead = rows - 4, x + 4 * x_row * BYTES, out + 4 * out_row * BYTES, ahead + depth * pace
        if rows == 3:
            tile3(x, x_row, w, w_row, out, out_row, depth, begins, ahead, pace)
        elif rows == 2:
            tile2(x, x_row, w, w_row, out, out_row, depth, begins, ahead, pace)
        elif rows == 1:
            tile1(x, x_row, w, w_row, out, out_row, depth, begins, ahead, pace)

    return product  # type: ignore[no-any-return]


def _make_tile(rows: int, lanes: int, vectors: int) -> Callable[..., None]:
    """Return tile(x, x_row, w, w_row, out, out_row, depth, begins, ahead, pace): out = x w, or out += x w if not
    `begins`.

    x is rows x depth, w is depth x (lanes * vectors). x, w and out are addresses; x_row, w_row and out_row are the
    distances between two rows, in numbers. Each step of the depth prefetches one cache line: the first at address
    `ahead`, each further one `pace` bytes after the last.
    """

    @intrinsic
    def tile(
        context: Any,
        x: Any,
        x_row: Any,
        w: Any,
        w_row: Any,
        out: Any,
        out_row: Any,
        depth: Any,
        begins: Any,
        ahead: Any,
        pace: Any,
    ) -> Any:
        def emit(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            x, x_row, *others, ahead, pace = arguments
            operands = [x, x_row, ir.IntType(64)(1), *others]
            return _emit(context, builder, (rows, lanes, vectors), operands, (ahead, pace))

        return types.void(*[types.intp] * 10), emit

    return tile  # type: ignore[no-any-return]


def make_strided_tile(rows: int, lanes: int, vectors: int) -> Callable[..., None]:
    """Return tile(x, x_row, x_step, w, w_row, out, out_row, depth, begins): the same for an x that may be transposed.

    `x_step` is the distance between two steps of the depth, in numbers. Nothing is prefetched.
    """

    @intrinsic
    def tile(
        context: Any,
        x: Any,
        x_row: Any,
        x_step: Any,
        w: Any,
        w_row: Any,
        out: Any,
        out_row: Any,
        depth: Any,
        begins: Any,
    ) -> Any:
        def emit(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            return _emit(context, builder, (rows, lanes, vectors), arguments, None)

        return types.void(*[types.intp] * 9), emit

    return tile  # type: ignore[no-any-return]


def _emit(
    context: Any, builder: Any, size: tuple[int, int, int], operands: Sequence[Any], later: tuple[Any, Any] | None
) -> Any:
    """Emit the tile: a loop over the depth that loads a piece of w and adds its product with each row's number.

    `fresh` starts the sums at zero, `further` loads them from `out`; both enter `loop`, where phi nodes carry the sums
    from step to step in registers; `end` stores them.
    """
    x, x_row, x_step, w, w_row, out, out_row, depth, begins = operands
    rows, lanes, vectors = size
    number, index, flag = ir.FloatType(), ir.IntType(64), ir.IntType(32)
    vector, place = ir.VectorType(number, lanes), ir.IntType(8).as_pointer()
    every = [(row, part) for row in range(rows) for part in range(vectors)]

    def at(base: Any, offset: Any, kind: Any) -> Any:
        return builder.inttoptr(builder.add(base, builder.mul(offset, index(BYTES))), kind.as_pointer())

    def everywhere(value: Any) -> Any:
        nothing = ir.Constant(vector, ir.Undefined)
        single = builder.insert_element(nothing, value, flag(0))
        return builder.shuffle_vector(single, nothing, ir.Constant(ir.VectorType(flag, lanes), [0] * lanes))

    fma_kind = ir.FunctionType(vector, [vector] * 3)
    fma = cgutils.get_or_insert_function(builder.module, fma_kind, f"llvm.fma.v{lanes}f32")
    starts = [builder.add(x, builder.mul(x_row, index(row * BYTES))) for row in range(rows)]
    results = {
        (row, part): at(out, builder.add(builder.mul(out_row, index(row)), index(part * lanes)), vector)
        for row, part in every
    }
    fresh, further, loop, end = (builder.append_basic_block(name) for name in ("fresh", "further", "loop", "end"))
    builder.cbranch(builder.icmp_signed("!=", begins, index(0)), fresh, further)
    builder.position_at_end(fresh)
    builder.branch(loop)
    builder.position_at_end(further)
    found = {key: builder.load(results[key], align=BYTES) for key in every}
    builder.branch(loop)
    builder.position_at_end(loop)
    step = builder.phi(index)
    sums = {key: builder.phi(vector) for key in every}
    piece = builder.mul(step, w_row)
    weights = [
        builder.load(at(w, builder.add(piece, index(part * lanes)), vector), align=BYTES) for part in range(vectors)
    ]
    across = builder.mul(step, x_step)
    factors = [everywhere(builder.load(at(start, across, number), align=BYTES)) for start in starts]
    added = {(row, part): builder.call(fma, [factors[row], weights[part], sums[row, part]]) for row, part in every}
    if later is not None:
        ahead, pace = later
        prefetch_kind = ir.FunctionType(ir.VoidType(), [place, flag, flag, flag])
        prefetch = builder.module.declare_intrinsic("llvm.prefetch", [place], prefetch_kind)
        line = builder.inttoptr(builder.add(ahead, builder.mul(step, pace)), place)
        builder.call(prefetch, [line, flag(0), flag(2), flag(1)])  # for reading, into the second-level cache, data
    following = builder.add(step, index(1))
    for block, value in ((fresh, index(0)), (further, index(0)), (loop, following)):
        step.add_incoming(value, block)
    for key in every:
        for block, value in ((fresh, ir.Constant(vector, [0.0] * lanes)), (further, found[key]), (loop, added[key])):
            sums[key].add_incoming(value, block)
    builder.cbranch(builder.icmp_signed("<", following, depth), loop, end)
    builder.position_at_end(end)
    for key in every:
        builder.store(added[key], results[key], align=BYTES)
    return context.get_dummy_value()

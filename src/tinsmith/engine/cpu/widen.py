"""Widens a piece of a panel to float32, from the format in which its weights are kept.

The trick. A product reads weights from memory once, but its inner loop (`tile`) uses each of them for many rows. So a
piece of a panel that fits into the first-level cache is widened into a small buffer there, in vector registers, and all
rows are multiplied by the buffer. Memory delivers the few bytes of the stored format; the widening is paid once per
product, whatever the number of rows. For products with the transposed weights the buffer is also turned around.

Each format is a few LLVM instructions (`_emit_widened`), since numba knows neither 16-bit floats nor 4-bit integers. A
quantised number is multiplied by its scale and then added to its minimum, rounded after each: the bits are those of
`formats`.
"""

from __future__ import annotations

import platform
from collections.abc import Callable
from typing import Any

from llvmlite import binding, ir
from numba import njit, types
from numba.core import cgutils
from numba.extending import intrinsic

from tinsmith.engine.cpu.formats import Format
from tinsmith.engine.cpu.tile import BYTES

_IS_X86 = platform.machine().lower() in ("x86_64", "amd64", "i386", "i686")
_FEATURES = binding.get_host_cpu_features()
HAS_HALVES = not _IS_X86 or bool(_FEATURES.get("f16c") or _FEATURES.get("avx512f"))
"""Whether the processor converts float16; for others LLVM would call a function that may not exist."""

_INDEX, _FLAG, _BYTE, _FLOAT = ir.IntType(64), ir.IntType(32), ir.IntType(8), ir.FloatType()


def make_widening(stored: Format, lanes: int, vectors: int, has_halves: bool = HAS_HALVES) -> Callable[..., None]:
    """Return widen(panel, first, count, to): write `count` inputs of a panel at address `panel`, beginning with the
    input `first`, as float32 to address `to`.
    """
    width = lanes * vectors
    block, step, block_bytes = stored.block, stored.step_bytes(width), stored.block_bytes(width)
    scales = block * step
    minimums = scales + stored.scale_bytes(width)
    row = width * BYTES
    run = _make_run(stored, lanes, vectors, has_halves)

    @njit
    def widen(panel: int, first: int, count: int, to: int) -> None:
        end = first + count
        while first < end:
            inside = first % block
            start, steps = panel + first // block * block_bytes, min(block - inside, end - first)
            run(start + inside * step, start + scales, start + minimums, steps, to)
            first, to = first + steps, to + steps * row

    @njit
    def widen_plain(panel: int, first: int, count: int, to: int) -> None:
        run(panel + first * step, panel, panel, count, to)

    return widen_plain if stored.scale is None else widen  # type: ignore[no-any-return]


def _make_run(stored: Format, lanes: int, vectors: int, has_halves: bool) -> Callable[..., None]:
    """Return run(numbers, scales, minimums, count, to) for `count` inputs of one block; the others are addresses."""

    @intrinsic
    def run(context: Any, numbers: Any, scales: Any, minimums: Any, count: Any, to: Any) -> Any:
        def emit(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            numbers, scales, minimums, count, to = arguments
            shared = [_Shared(builder, stored, lanes, part, scales, minimums, has_halves) for part in range(vectors)]
            width = lanes * vectors
            with cgutils.for_range(builder, count) as loop:
                source = builder.add(numbers, builder.mul(loop.index, _INDEX(stored.step_bytes(width))))
                target = builder.add(to, builder.mul(loop.index, _INDEX(width * BYTES)))
                for part, value in enumerate(_numbers(builder, stored, lanes, vectors, source, has_halves)):
                    place = builder.add(target, _INDEX(part * lanes * BYTES))
                    builder.store(shared[part].applied(value), _pointer(builder, place, value.type), align=BYTES)
            return context.get_dummy_value()

        return types.void(*[types.intp] * 5), emit

    return run  # type: ignore[no-any-return]


class _Shared:
    """The scales and minimums of one vector of outputs, in registers."""

    def __init__(
        self,
        builder: Any,
        stored: Format,
        lanes: int,
        part: int,
        scales: Any,
        minimums: Any,
        has_halves: bool,
    ) -> None:
        self._builder = builder

        def load(address: Any) -> Any:
            assert stored.scale is not None
            size = stored.scale.itemsize
            kind = ir.VectorType(_FLOAT if size == BYTES else ir.IntType(16), lanes)
            place = builder.add(address, _INDEX(part * lanes * size))
            found = builder.load(_pointer(builder, place, kind), align=size)
            return found if size == BYTES else _from_half(builder, found, lanes, has_halves)

        self._scale = None if stored.scale is None else load(scales)
        self._minimum = load(minimums) if stored.has_minimum else None

    def applied(self, numbers: Any) -> Any:
        """Return numbers * scale + minimum, rounded after each operation."""
        if self._scale is None:
            return numbers
        products = self._builder.fmul(numbers, self._scale)
        return products if self._minimum is None else self._builder.fadd(products, self._minimum)


def _pointer(builder: Any, address: Any, kind: Any) -> Any:
    return builder.inttoptr(address, kind.as_pointer())


def _numbers(builder: Any, stored: Format, lanes: int, vectors: int, source: Any, has_halves: bool) -> list[Any]:
    """Return the numbers of one input in float32, one vector after the other."""
    words, wide = ir.VectorType(ir.IntType(stored.bits), lanes), ir.VectorType(_FLAG, lanes)
    floats = ir.VectorType(_FLOAT, lanes)
    if stored.bits == 4:
        assert vectors == 2, "the two numbers in a byte belong to two vectors"
        pairs = builder.zext(_loaded(builder, ir.VectorType(_BYTE, lanes), source), wide)
        four, low = ir.Constant(wide, [4] * lanes), ir.Constant(wide, [15] * lanes)
        zero = ir.Constant(wide, [stored.zero] * lanes)
        halves = builder.and_(pairs, low), builder.lshr(pairs, four)
        return [builder.sitofp(builder.sub(half, zero), floats) for half in halves]
    size = stored.bits // 8
    found = [_loaded(builder, words, builder.add(source, _INDEX(part * lanes * size)), size) for part in range(vectors)]
    if stored.name == "F32":
        return [builder.bitcast(word, floats) for word in found]
    if stored.name == "BF16":
        upper = ir.Constant(wide, [16] * lanes)
        return [builder.bitcast(builder.shl(builder.zext(word, wide), upper), floats) for word in found]
    if stored.name == "F16":
        return [_from_half(builder, word, lanes, has_halves) for word in found]
    return [builder.sitofp(builder.sext(word, wide), floats) for word in found]


def _loaded(builder: Any, kind: Any, address: Any, align: int = 1) -> Any:
    return builder.load(_pointer(builder, address, kind), align=align)


def _from_half(builder: Any, words: Any, lanes: int, has_halves: bool) -> Any:
    """Return float16 numbers, given as 16-bit integers, as float32."""
    floats, wide = ir.VectorType(_FLOAT, lanes), ir.VectorType(_FLAG, lanes)
    if has_halves:
        return builder.fpext(builder.bitcast(words, ir.VectorType(ir.HalfType(), lanes)), floats)

    def same(value: int) -> Any:
        return ir.Constant(wide, [value] * lanes)

    bits = builder.zext(words, wide)
    rest = builder.shl(builder.and_(bits, same(0x7FFF)), same(13))
    # In these places the exponent is too small by 112, which a multiplication corrects, also for subnormal numbers.
    finite = builder.bitcast(builder.fmul(builder.bitcast(rest, floats), ir.Constant(floats, [2.0**112] * lanes)), wide)
    is_special = builder.icmp_unsigned(">=", rest, same(0x7C00 << 13))
    value = builder.select(is_special, builder.or_(rest, same(0x7F800000)), finite)
    sign = builder.shl(builder.and_(bits, same(0x8000)), same(16))
    return builder.bitcast(builder.or_(value, sign), floats)


def make_turn(lanes: int, vectors: int) -> Callable[..., None]:
    """Return turn(source, target): transpose a square of lanes * vectors float32 from one address to another."""
    width = lanes * vectors

    @intrinsic
    def turn_part(context: Any, source: Any, target: Any) -> Any:
        def emit(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            _emit_turn(builder, lanes, width * BYTES, *arguments)
            return context.get_dummy_value()

        return types.void(types.intp, types.intp), emit

    @njit
    def turn(source: int, target: int) -> None:
        for row in range(vectors):
            for column in range(vectors):
                down, right = (row * width + column) * lanes * BYTES, (column * width + row) * lanes * BYTES
                turn_part(source + down, target + right)

    return turn  # type: ignore[no-any-return]


def _emit_turn(builder: Any, lanes: int, row_bytes: int, source: Any, target: Any) -> None:
    """Transpose lanes x lanes numbers in registers: exchange halves of pairs of rows, then quarters, and so on."""
    vector = ir.VectorType(_FLOAT, lanes)

    def at(base: Any, row: int) -> Any:
        return _pointer(builder, builder.add(base, _INDEX(row * row_bytes)), vector)

    rows = [builder.load(at(source, row), align=BYTES) for row in range(lanes)]
    distance = 1
    while distance < lanes:
        upper = [lane if not lane & distance else lanes + lane - distance for lane in range(lanes)]
        lower = [lane + distance if not lane & distance else lanes + lane for lane in range(lanes)]
        for row in range(lanes):
            if not row & distance:
                pair = rows[row], rows[row + distance]
                rows[row], rows[row + distance] = (
                    builder.shuffle_vector(*pair, ir.Constant(ir.VectorType(_FLAG, lanes), mask))
                    for mask in (upper, lower)
                )
        distance *= 2
    for row in range(lanes):
        builder.store(rows[row], at(target, row), align=BYTES)

"""Convert Python numbers to numpy arrays of int64 or float32, exactly or not at all.

Every error names the position of the wrong value; the caller passes the name of the field as `where`. Lists of
thousands of numbers are common, so most of this file checks them without a Python loop: a fast path converts the whole
list at once and returns None if anything is unusual, and a slow path then goes value by value to name the wrong one.
"""

from __future__ import annotations

import math
import struct
import sys
import warnings
from array import array as machine_array
from collections.abc import Mapping, Sequence, Set
from functools import lru_cache
from typing import Annotated, Any, NoReturn, TypeAlias

import msgspec
import numpy as np
import numpy.typing as npt

from tinsmith.errors import InvalidInputError, PrecisionWarning

Array: TypeAlias = npt.NDArray[Any]

MAX_TOKEN_ID = 2**31 - 1
"""Token ids travel as int32."""

TokenId: TypeAlias = Annotated[int, msgspec.Meta(ge=0, le=MAX_TOKEN_ID)]


class _TokenIds(msgspec.Struct, array_like=True):
    """A list of ids, wrapped: msgspec caches how to check a struct, but not how to check a bare `list[TokenId]`."""

    ids: list[TokenId]


_FLOAT32_MAX = float(np.finfo(np.float32).max)
_INT64: np.dtype[Any] = np.dtype("<i8")
_FLOAT32: np.dtype[Any] = np.dtype("<f4")
_ORDER = "@" if sys.byteorder == "little" else "<"
"""The prefix that makes `struct` write little-endian numbers; native order is faster where it is the same."""
_FEW = 64
"""Up to this many values are checked in a Python loop; more are left to msgspec."""
_SHORT = 256
"""Lists shorter than this are checked faster by msgspec than by packing them."""
_MARKED_FLOAT = np.dtype([("mark", "u1"), ("value", ">f8")])
_FLOAT_MARK = 0xCB
_NOT_NUMBERS = (msgspec.ValidationError, UnicodeEncodeError)
"""What msgspec raises for a list that holds something else; the second for half of a surrogate pair."""


def int_array(values: Any, where: str) -> Array:
    """Return a sequence of integers as an int64 array of the same shape; an array keeps a narrower integer dtype."""
    if isinstance(values, np.ndarray):
        return _checked_int_array(values, where)
    if isinstance(values, (list, tuple)) and values and isinstance(values[0], (list, tuple, np.ndarray)):
        return _stack(values, where, int_array)
    packed = _packed(values) if isinstance(values, (list, tuple)) else None
    return packed if packed is not None else _slow_int_array(values, where)


def float_array(values: Any, where: str) -> Array:
    """Return a sequence of numbers as a float32 array of the same shape."""
    if isinstance(values, np.ndarray):
        return _as_float32(values, where)
    if isinstance(values, (list, tuple)) and values and isinstance(values[0], (list, tuple, np.ndarray)):
        return _stack(values, where, float_array)
    packed = _packed_floats(values) if isinstance(values, (list, tuple)) and len(values) >= _SHORT else None
    if packed is not None:
        return packed
    try:
        checked = msgspec.convert(values, list[float]) if isinstance(values, (list, tuple)) else None
        if checked is not None:
            return _float32_of(checked, where)
    except _NOT_NUMBERS:
        pass
    return _slow_float_array(values, where)


def token_ids(values: Any, where: str) -> list[int] | Array:
    """Check token ids and return them: a list is copied, a numpy array is kept."""
    if isinstance(values, (list, tuple)):
        try:
            return msgspec.convert((values,), _TokenIds).ids
        except _NOT_NUMBERS:
            pass
    array = int_array(values, where)
    if array.ndim != 1:
        raise InvalidInputError(f"{where}: expected a flat sequence of token ids, got shape {array.shape}", field=where)
    check_ids(array, where)
    return array


def packed_ids(values: Any) -> Array | None:
    """Return a long list of token ids as int32, checked; None for anything else, which `token_ids` then handles."""
    if not isinstance(values, (list, tuple)) or len(values) < _SHORT:
        return None
    packed = _packed_unsigned(values)
    if packed is None or packed.max() > MAX_TOKEN_ID:
        return None
    return packed.view(np.int32) if _ORDER == "@" else packed.astype("<i4")


def int32_bytes(tokens: Sequence[int] | Array) -> bytes | memoryview:
    """Return checked token ids as little-endian int32."""
    if isinstance(tokens, np.ndarray):
        return np.ascontiguousarray(tokens, "<i4").data.cast("B") if tokens.size else b""
    return struct.pack(f"<{len(tokens)}i", *tokens)


def are_ids(array: Array) -> bool:
    """Whether all values are in the range of token ids."""
    if array.size == 0:
        return True
    # As an unsigned number a negative id is huge, so one maximum finds values that are too small or too large.
    unsigned = array.view(_unsigned(array.dtype)) if array.dtype.kind == "i" else array
    return bool(unsigned.max() <= MAX_TOKEN_ID and (array.dtype.itemsize >= 4 or array.min() >= 0))


def check_ids(array: Array, where: str) -> None:
    """Refuse values outside the range of token ids, naming the first one."""
    if not are_ids(array):
        index = np.argwhere((array < 0) | (array > MAX_TOKEN_ID))[0]
        value = array[tuple(index)]
        raise InvalidInputError(
            f"{where}{_index(index)}: {value} is not a token id (allowed: 0 to {MAX_TOKEN_ID})", field=where
        )


@lru_cache(maxsize=16)
def _unsigned(dtype: np.dtype[Any]) -> np.dtype[Any]:
    return np.dtype(dtype.str.replace("i", "u"))


def torch_to_numpy(tensor: Any, where: str) -> Array:
    """Return a torch tensor's values as numpy; bfloat16 and float16 become float32, which is exact."""
    tensor = tensor.detach().cpu()
    if tensor.is_sparse or str(tensor.layout) != "torch.strided":
        tensor = tensor.to_dense()
    if str(tensor.dtype) in ("torch.bfloat16", "torch.float16"):
        tensor = tensor.float()
    try:
        array: Array = tensor.contiguous().numpy()
    except TypeError:
        text = f"{where}: a tensor of dtype {tensor.dtype} cannot be sent; convert it to float32 or int64"
        raise InvalidInputError(text, field=where) from None
    return array


def is_torch_tensor(value: Any) -> bool:
    """Whether a value is a torch tensor, without importing torch."""
    return any(base.__module__ == "torch" and base.__name__ == "Tensor" for base in type(value).__mro__)


def _packed(values: Sequence[Any]) -> Array | None:
    """Return a flat list of integers as int64; None if it needs the slow path."""
    unsigned = _packed_unsigned(values)
    if unsigned is not None:
        return _read_only(unsigned.astype(_INT64))
    try:
        packed = np.frombuffer(struct.pack(f"{_ORDER}{len(values)}q", *values), _INT64)
        return packed if _are_ints(values, np.flatnonzero(packed.view("<u8") <= 1)) else None
    except struct.error:
        return None


def _packed_unsigned(values: Sequence[Any]) -> Array | None:
    """Return a flat list of integers from 0 to 2**32 - 1 in native byte order; None for anything else.

    Python's own `array` reads a list in place, which is faster than passing thousands of arguments to `struct`.
    """
    if type(values) is not list:
        return None
    numbers = machine_array("I")
    try:
        numbers.fromlist(values)
    except (TypeError, OverflowError):
        return None
    packed = np.frombuffer(numbers, np.uintc) if values else np.empty(0, np.uintc)
    return _read_only(packed) if _are_ints(values, np.flatnonzero(packed <= 1)) else None


def _are_ints(values: Sequence[Any], doubtful: Array) -> bool:
    """Whether the values that were read as 0 or 1 are integers; False and True pack to the same bytes."""
    if doubtful.size <= _FEW:
        return all(type(values[i]) is int for i in doubtful.tolist())
    try:
        msgspec.convert(values, list[int])
    except _NOT_NUMBERS:
        return False
    return True


def _read_only(array: Array) -> Array:
    array.flags.writeable = False
    return array


def _packed_floats(values: Sequence[Any]) -> Array | None:
    """Return a flat list of floats as float32; None if it holds anything else, or a number that is too large.

    The trick: msgpack writes each float as a marker byte and eight bytes of value. If the encoded list has exactly nine
    bytes per item, with the marker at every ninth byte, then every item is a float (by induction: the first ends where
    the second must begin), and numpy can read all the values in place.
    """
    count = len(values)
    try:
        encoded = _msgpack(values)
    except (TypeError, ValueError, OverflowError, RecursionError):
        return None
    start = 3 if count < 1 << 16 else 5
    if len(encoded) != start + count * _MARKED_FLOAT.itemsize:
        return None
    marked = np.frombuffer(encoded, _MARKED_FLOAT, count, start)
    if encoded[start :: _MARKED_FLOAT.itemsize].count(_FLOAT_MARK) != count:
        return None
    with np.errstate(over="ignore"):
        array = marked["value"].astype(_FLOAT32)
    return None if np.isinf(array).any() else array


_msgpack = msgspec.msgpack.Encoder().encode


def _checked_int_array(values: Array, where: str) -> Array:
    kind = values.dtype.kind
    if kind == "i":
        return values
    if kind == "u":
        if values.dtype.itemsize == 8 and values.size and values.max() > np.iinfo(np.int64).max:
            index = np.argwhere(values > np.iinfo(np.int64).max)[0]
            raise InvalidInputError(
                f"{where}{_index(index)}: {values[tuple(index)]} does not fit int64, the widest integer type",
                field=where,
            )
        return values.astype(np.int64)
    if kind == "O":
        return _slow_int_array(values.tolist(), where)
    if values.size == 0:
        return values.astype(np.int64)
    hint = "; convert it with .astype(int) if that is intended" if kind in "bf" else ""
    raise InvalidInputError(f"{where}: expected integers, got an array of {values.dtype}{hint}", field=where)


def _as_float32(values: Array, where: str) -> Array:
    kind = values.dtype.kind
    if kind == "f" and values.dtype.itemsize <= 4:
        return values.astype(np.float32, copy=False)
    if kind in "fiu":
        with np.errstate(over="ignore"):
            rounded = values.astype(np.float32)
        overflown = np.isfinite(values) & ~np.isfinite(rounded)
        if overflown.any():
            index = np.argwhere(overflown)[0]
            _too_large(values[tuple(index)], f"{where}{_index(index)}")
        lost = _differs(rounded, values)
        if lost.any():
            _warn_rounded(where, int(lost.sum()), values)
        return rounded
    if kind == "O":
        return _slow_float_array(values.tolist(), where)
    hint = "; convert it with .astype(np.float32) if that is intended" if kind == "b" else ""
    raise InvalidInputError(f"{where}: expected numbers, got an array of {values.dtype}{hint}", field=where)


def _differs(rounded: Array, values: Array) -> Array:
    """Return where rounding to float32 changed the value; NaN counts as unchanged."""
    if values.dtype.kind == "f":
        differs: Array = (rounded.astype(values.dtype) != values) & ~np.isnan(values)
        return differs
    # Integers at the end of their range round up to a float outside it, which cannot be converted back to compare.
    in_range = rounded < 2.0 ** (63 if values.dtype.kind == "i" else 64)
    back = np.where(in_range, rounded, 0).astype(values.dtype)
    differs = ~in_range | (back != values)
    return differs


def _warn_rounded(where: str, count: int, values: Array) -> None:
    warnings.warn(
        f"{where}: {count} of {values.size} {values.dtype} values were rounded to float32, the only float type of "
        "the protocol; convert them to float32 yourself to silence this warning",
        PrecisionWarning,
        stacklevel=_callers_level(),
    )


def _callers_level() -> int:
    """Return the stack level, for `warnings.warn`, of the first frame outside this package."""
    level, frame = 0, sys._getframe(1)
    while frame.f_back is not None and frame.f_globals.get("__name__", "").startswith("tinsmith."):
        level, frame = level + 1, frame.f_back
    return level + 1


def _stack(rows: Sequence[Any], where: str, convert: Any) -> Array:
    arrays = [convert(row, f"{where}[{i}]") for i, row in enumerate(rows)]
    for i, array in enumerate(arrays):
        if array.shape != arrays[0].shape:
            raise InvalidInputError(
                f"{where}: rows differ in shape: row 0 has {arrays[0].shape} and row {i} {array.shape}",
                field=where,
            )
    return np.stack(arrays)


def _slow_int_array(values: Any, where: str) -> Array:
    """Convert value by value: numpy integers are accepted, and an error names the first other value."""
    _check_sequence(values, "integers", where)
    integers = [_integer(value, f"{where}[{i}]") for i, value in enumerate(values)]
    return np.array(integers, np.int64)


def _check_sequence(values: Any, kind: str, where: str) -> None:
    if isinstance(values, (str, bytes, Mapping, Set)) or not hasattr(values, "__len__"):
        raise InvalidInputError(f"{where}: expected a sequence of {kind}, got {type(values).__name__}", field=where)


def _integer(value: Any, where: str) -> int:
    if isinstance(value, bool) or not isinstance(value, (int, np.integer)):
        raise InvalidInputError(f"{where}: expected an integer, got {_shown(value)}", field=where)
    number = int(value)
    if not -(2**63) <= number < 2**63:
        raise InvalidInputError(f"{where}: {_shown(number)} does not fit int64", field=where)
    return number


def _slow_float_array(values: Any, where: str) -> Array:
    _check_sequence(values, "numbers", where)
    numbers: list[float] = []
    for i, value in enumerate(values):
        if isinstance(value, (bool, np.bool_)) or not isinstance(value, (int, float, np.integer, np.floating)):
            raise InvalidInputError(f"{where}[{i}]: expected a number, got {_shown(value)}", field=where)
        if isinstance(value, int) and abs(value) > _FLOAT32_MAX:  # float() of it could overflow
            _too_large(value, f"{where}[{i}]")
        numbers.append(float(value))
    return _float32_of(numbers, where)


def _float32_of(numbers: list[float], where: str) -> Array:
    array = np.frombuffer(struct.pack(f"{_ORDER}{len(numbers)}f", *numbers), _FLOAT32)
    if np.isinf(array).any():  # in native order `struct` turns numbers that are too large into infinity
        try:
            struct.pack(f"<{len(numbers)}f", *numbers)
        except OverflowError:
            index = next(i for i, value in enumerate(numbers) if math.isfinite(value) and abs(value) > _FLOAT32_MAX)
            _too_large(numbers[index], f"{where}[{index}]")
    return array


def _too_large(value: float, where: str) -> NoReturn:
    shown = _shown(value) if isinstance(value, int) else f"{value:g}"
    raise InvalidInputError(f"{where}: {shown} does not fit float32 (largest: {_FLOAT32_MAX:.6g})", field=where)


def _shown(value: Any) -> str:
    text = repr(value)
    return f"{type(value).__name__} {text if len(text) <= 40 else text[:37] + '...'}"


def _index(index: Any) -> str:
    return "".join(f"[{int(i)}]" for i in index)

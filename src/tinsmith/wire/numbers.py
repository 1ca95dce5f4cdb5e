"""Python numbers to numpy, exactly or not at all.

Owns: the checks that turn user sequences into int64 and float32 arrays, each naming the offending position.
Does not know: which field the numbers belong to (the caller passes its name for the message).
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
    """A list of ids as the only field of a struct: msgspec remembers how to check that, and not a bare list."""

    ids: list[TokenId]


_FLOAT32_MAX = float(np.finfo(np.float32).max)
_INT64: np.dtype[Any] = np.dtype("<i8")
_FLOAT32: np.dtype[Any] = np.dtype("<f4")
_ORDER = "@" if sys.byteorder == "little" else "<"
"""How struct is told to write little-endian numbers; the machine's own order is the faster one."""
_FEW = 64
"""So many values are looked at one by one; more are left to msgspec."""
_SHORT = 256
"""Fewer numbers than this are checked faster by msgspec than by packing them."""
_MARKED_FLOAT = np.dtype([("mark", "u1"), ("value", ">f8")])
_FLOAT_MARK = 0xCB
_NOT_NUMBERS = (msgspec.ValidationError, UnicodeEncodeError)
"""What msgspec raises for a list that holds other things; the second for half of a surrogate pair."""


def int_array(values: Any, where: str) -> Array:
    """Any sequence of integers as a read-only int64 (or narrower, if it was an array) array of the same shape."""
    if isinstance(values, np.ndarray):
        return _checked_int_array(values, where)
    if isinstance(values, (list, tuple)) and values and isinstance(values[0], (list, tuple, np.ndarray)):
        return _stack(values, where, int_array)
    packed = _packed(values) if isinstance(values, (list, tuple)) else None
    return packed if packed is not None else _slow_int_array(values, where)


def float_array(values: Any, where: str) -> Array:
    """Any sequence of numbers as a float32 array of the same shape."""
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
    """Token ids, checked: a list is copied, a numpy array kept as it is."""
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
    """A long list of token ids as int32, checked; None for all else, which `token_ids` takes or refuses."""
    if not isinstance(values, (list, tuple)) or len(values) < _SHORT:
        return None
    packed = _packed_unsigned(values)
    if packed is None or packed.max() > MAX_TOKEN_ID:
        return None
    return packed.view(np.int32) if _ORDER == "@" else packed.astype("<i4")


def int32_bytes(tokens: Sequence[int] | Array) -> bytes | memoryview:
    """Checked token ids as little-endian int32."""
    if isinstance(tokens, np.ndarray):
        return np.ascontiguousarray(tokens, "<i4").data.cast("B") if tokens.size else b""
    return struct.pack(f"<{len(tokens)}i", *tokens)


def are_ids(array: Array) -> bool:
    """Whether all are ids that a vocabulary can have."""
    if array.size == 0:
        return True
    # Seen as unsigned, a negative id is a huge one: a single pass finds both kinds.
    unsigned = array.view(_unsigned(array.dtype)) if array.dtype.kind == "i" else array
    return bool(unsigned.max() <= MAX_TOKEN_ID and (array.dtype.itemsize >= 4 or array.min() >= 0))


def check_ids(array: Array, where: str) -> None:
    """Refuse ids that no vocabulary can have, naming the first one."""
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
    """A torch tensor's values as numpy; bfloat16 and half widen exactly to float32."""
    tensor = tensor.detach().cpu()
    if tensor.is_sparse or str(tensor.layout) != "torch.strided":
        tensor = tensor.to_dense()
    if str(tensor.dtype) in ("torch.bfloat16", "torch.float16"):
        tensor = tensor.float()
    try:
        array: Array = tensor.contiguous().numpy()
    except TypeError:
        text = f"{where}: a tensor of {tensor.dtype} cannot be sent; convert it to float32 first"
        raise InvalidInputError(text, field=where) from None
    return array


def is_torch_tensor(value: Any) -> bool:
    """Whether a value is a torch tensor, without importing torch."""
    return any(base.__module__ == "torch" and base.__name__ == "Tensor" for base in type(value).__mro__)


def _packed(values: Sequence[Any]) -> Array | None:
    """A flat list of integers as int64; None where it has to be looked at one by one."""
    unsigned = _packed_unsigned(values)
    if unsigned is not None:
        return _read_only(unsigned.astype(_INT64))
    try:
        packed = np.frombuffer(struct.pack(f"{_ORDER}{len(values)}q", *values), _INT64)
        return packed if _are_ints(values, np.flatnonzero(packed.view("<u8") <= 1)) else None
    except struct.error:
        return None


def _packed_unsigned(values: Sequence[Any]) -> Array | None:
    """A flat list of integers from 0 to 2**32 - 1, in the machine's order; None for any other.

    Python's own array reads a list in place, which is faster than handing thousands of arguments to struct.
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
    """Whether those that were read as 0 or 1 are no False or True."""
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
    """A flat list of floats as float32; None where anything else is in it, or a number too large.

    In msgpack each float is a mark and eight bytes. If there is such a mark where each of them should begin, then there
    are only floats: the first one ends where the second begins, and so on.
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
                f"{where}{_index(index)}: {values[tuple(index)]} does not fit int64, the widest the wire has",
                field=where,
            )
        return values.astype(np.int64)
    if kind == "O":
        return _slow_int_array(values.tolist(), where)
    if values.size == 0:
        return values.astype(np.int64)
    hint = "; pass .astype(int) if that is meant" if kind in "bf" else ""
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
    hint = "; pass .astype(np.float32) if that is meant" if kind == "b" else ""
    raise InvalidInputError(f"{where}: expected numbers, got an array of {values.dtype}{hint}", field=where)


def _differs(rounded: Array, values: Array) -> Array:
    """Where float32 does not hold the very number; NaN is NaN."""
    if values.dtype.kind == "f":
        differs: Array = (rounded.astype(values.dtype) != values) & ~np.isnan(values)
        return differs
    # Integers near the end of their range round up to a float beyond it, which has no integer to compare with.
    in_range = rounded < 2.0 ** (63 if values.dtype.kind == "i" else 64)
    back = np.where(in_range, rounded, 0).astype(values.dtype)
    differs = ~in_range | (back != values)
    return differs


def _warn_rounded(where: str, count: int, values: Array) -> None:
    warnings.warn(
        f"{where}: {count} of {values.size} {values.dtype} values were rounded to float32, the only float type on the "
        "wire; convert them yourself to silence this",
        PrecisionWarning,
        stacklevel=_callers_level(),
    )


def _callers_level() -> int:
    """The stack level, for `warnings.warn`, of the first frame outside this package."""
    level, frame = 0, sys._getframe(1)
    while frame.f_back is not None and frame.f_globals.get("__name__", "").startswith("tinsmith."):
        level, frame = level + 1, frame.f_back
    return level + 1


def _stack(rows: Sequence[Any], where: str, convert: Any) -> Array:
    arrays = [convert(row, f"{where}[{i}]") for i, row in enumerate(rows)]
    for i, array in enumerate(arrays):
        if array.shape != arrays[0].shape:
            raise InvalidInputError(
                f"{where}: rows must be equally long, but row 0 has shape {arrays[0].shape} and row {i} {array.shape}",
                field=where,
            )
    return np.stack(arrays)


def _slow_int_array(values: Any, where: str) -> Array:
    """One by one: numpy integers are welcome, everything else is named."""
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
    if np.isinf(array).any():  # the machine's own order rounds what is too large to infinity
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

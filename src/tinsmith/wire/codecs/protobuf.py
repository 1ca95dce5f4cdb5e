"""The protobuf wire format, and the Tensor message that requests and results share.

It is written by hand because the few messages that use it are mostly arrays: they go from numpy into the body with one
copy and come back as views of it (bench/wire.py compares it with the protobuf library). The contract tests check it
against the official descriptor. The other messages are in `proto_training`, `proto_outputs` and `proto_sampling`.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from functools import lru_cache
from typing import Any, Final, TypeAlias

import numpy as np

from tinsmith.errors import InvalidInputError, LimitExceededError, WireError
from tinsmith.wire.values.numbers import Array
from tinsmith.wire.values.tensors import MAX_DIMS, NUMPY_DTYPES, TensorData, TensorDtype

Part: TypeAlias = bytes | memoryview
Value: TypeAlias = int | memoryview
Field: TypeAlias = tuple[int, int, Value]

VARINT: Final = 0
FIXED64: Final = 1
BYTES: Final = 2
FIXED32: Final = 5

MAX_ITEMS = 1_000_000
"""The most entries of a repeated field: two bytes on the wire can create an object of hundreds of bytes."""

FLOAT32, INT64, INT32, BFLOAT16 = 1, 2, 3, 4
_DTYPES: dict[int, tuple[TensorDtype, np.dtype[Any]]] = {
    FLOAT32: ("float32", np.dtype("<f4")),
    INT64: ("int64", np.dtype("<i8")),
    INT32: ("int64", np.dtype("<i4")),
    BFLOAT16: ("float32", np.dtype("<u2")),
}
DTYPE_NUMBERS: dict[TensorDtype, int] = {"float32": FLOAT32, "int64": INT64}


class MessageWriter:
    """A message that is being written: its parts, which are joined once at the end, and their total size.

    The size is kept because protobuf writes the length of a nested message before the message. Field numbers must be
    below 16, so that a tag is one byte; all of the protocol's are.
    """

    __slots__ = ("parts", "size")

    def __init__(self) -> None:
        self.parts: list[Part] = []
        self.size = 0

    def add(self, part: Part) -> None:
        self.parts.append(part)
        self.size += len(part)

    def number(self, number: int, value: int) -> None:
        """Add a varint field."""
        self.add(_ONE_BYTE[number << 3 | VARINT] + varint(value))

    def double(self, number: int, value: float) -> None:
        self.add(_ONE_BYTE[number << 3 | FIXED64] + struct.pack("<d", value))

    def blob(self, number: int, value: Part) -> None:
        length = len(value)
        header = _ONE_BYTE[number << 3 | BYTES] + varint(length)
        self.parts += (header, value)
        self.size += len(header) + length

    def text(self, number: int, value: str) -> None:
        try:
            self.blob(number, value.encode())
        except UnicodeEncodeError:
            raise InvalidInputError(
                f"{value[:40]!r} cannot be sent: it holds half of a surrogate pair, which is not valid text"
            ) from None

    def message(self, number: int, value: MessageWriter) -> None:
        header = _ONE_BYTE[number << 3 | BYTES] + varint(value.size)
        self.parts.append(header)
        self.parts += value.parts
        self.size += len(header) + value.size

    def entry(self, number: int, key: str, value: MessageWriter) -> None:
        """Add a map entry whose value is a message."""
        entry = MessageWriter()
        entry.text(1, key)
        entry.message(2, value)
        self.message(number, entry)

    def packed(self, number: int, values: list[int]) -> None:
        """Add a repeated integer field."""
        if values:
            self.blob(number, b"".join(map(varint, values)))

    def encode(self) -> bytes:
        return b"".join(self.parts)


def varint(value: int) -> bytes:
    """Return a non-negative integer as a varint: seven bits per byte, the lowest first."""
    if value < 0x80:
        if value < 0:
            raise InvalidInputError(f"{value} is negative; the field must be 0 or more")
        return _ONE_BYTE[value]
    return _long_varint(value)


@lru_cache(maxsize=4096)
def _long_varint(value: int) -> bytes:
    """Return a longer varint; cached, because the lengths in a batch repeat."""
    encoded = bytearray()
    while value >= 0x80:
        encoded.append(value & 0x7F | 0x80)
        value >>= 7
    encoded.append(value)
    return bytes(encoded)


_ONE_BYTE = [bytes([value]) for value in range(0x80)]


def array_bytes(array: Array, dtype: np.dtype[Any]) -> Part:
    """Return the array's elements in little-endian order, without a copy if they are stored like that."""
    contiguous = np.ascontiguousarray(array, dtype)
    return contiguous.reshape(-1).data.cast("B") if contiguous.size else b""


def read_fields(data: memoryview, where: str) -> Iterator[Field]:
    """Yield the fields of a message in order: number, wire type, and an integer or the bytes."""
    position, end, left = 0, len(data), MAX_ITEMS
    while position < end:
        left -= 1
        if left < 0:
            raise LimitExceededError(f"{where}: has more than {MAX_ITEMS} fields", field=where)
        key = data[position]
        if key < 0x80:
            position += 1
        else:
            key, position = read_varint(data, position, where)
        number, kind = key >> 3, key & 7
        if number == 0 or number >= 1 << 29:
            raise WireError(f"{where}: field number {number} is not allowed", field=where)
        value: Value
        if kind == BYTES:
            if position < end and data[position] < 0x80:
                length = data[position]
                position += 1
            else:
                length, position = read_varint(data, position, where)
            if length > end - position:
                raise WireError(
                    f"{where}: a field claims {length} bytes, but only {end - position} are left", field=where
                )
            value = data[position : position + length]
            position += length
        elif kind == VARINT:
            value, position = read_varint(data, position, where)
        elif kind in (FIXED64, FIXED32):
            width = 8 if kind == FIXED64 else 4
            if width > end - position:
                raise WireError(f"{where}: ends inside a number", field=where)
            value = data[position : position + width]
            position += width
        else:
            raise WireError(f"{where}: wire type {kind} is not allowed", field=where)
        yield number, kind, value


def read_varint(data: memoryview, position: int, where: str) -> tuple[int, int]:
    """Return an unsigned integer of at most 64 bits, and the position after it."""
    value = shift = 0
    end = len(data)
    while position < end:
        byte = data[position]
        position += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            if value >= 1 << 64:
                raise WireError(f"{where}: a number has more than 64 bits", field=where)
            return value, position
        shift += 7
        if shift > 63:
            raise WireError(f"{where}: a number has more than 64 bits", field=where)
    raise WireError(f"{where}: ends inside a number", field=where)


def as_int(value: Value, kind: int, where: str, bits: int = 64) -> int:
    """Return a signed integer that fits into `bits`."""
    if kind != VARINT or not isinstance(value, int):
        raise WireError(f"{where}: expected an integer", field=where)
    signed = value - (1 << 64) if value >= 1 << 63 else value
    if not -(1 << bits - 1) <= signed < 1 << bits - 1:
        raise WireError(f"{where}: {signed} does not fit {bits} bits", field=where)
    return signed


def as_bytes(value: Value, kind: int, where: str) -> memoryview:
    if kind != BYTES or isinstance(value, int):
        raise WireError(f"{where}: expected bytes, a string or a message", field=where)
    return value


def as_text(value: Value, kind: int, where: str) -> str:
    try:
        return str(as_bytes(value, kind, where), "utf-8")
    except UnicodeDecodeError:
        raise WireError(f"{where}: not valid UTF-8", field=where) from None


def as_double(value: Value, kind: int, where: str) -> float:
    if kind != FIXED64 or isinstance(value, int):
        raise WireError(f"{where}: expected a double", field=where)
    number: float = struct.unpack("<d", value)[0]
    return number


def as_ints(value: Value, kind: int, where: str, limit: int = MAX_ITEMS) -> list[int]:
    """Return the integers of one occurrence of a repeated field, packed or single; at most `limit`."""
    if kind == VARINT:
        return [as_int(value, kind, where)]
    numbers: list[int] = []
    data, position = as_bytes(value, kind, where), 0
    while position < len(data):
        check_count(len(numbers) + 1, limit, where)
        number, position = read_varint(data, position, where)
        numbers.append(as_int(number, VARINT, where))
    return numbers


def as_array(value: Value, kind: int, where: str, dtype: np.dtype[Any]) -> Array:
    """Return a view of the elements in a bytes field."""
    data = as_bytes(value, kind, where)
    if len(data) % dtype.itemsize:
        raise WireError(f"{where}: {len(data)} bytes are not a whole number of {dtype.name} values", field=where)
    return np.frombuffer(data, dtype)


def read_entry(value: Value, kind: int, where: str) -> tuple[str, int | None, Value]:
    """Return a map entry: its key, and its value with wire type (None if absent, which means the default)."""
    key, found_kind, found = "", None, memoryview(b"")
    inner: Value = found
    for number, inner_kind, inner_value in read_fields(as_bytes(value, kind, where), where):
        if number == 1:
            key = as_text(inner_value, inner_kind, where)
        elif number == 2:
            found_kind, inner = inner_kind, inner_value
    return key, found_kind, inner


def check_count(count: int, limit: int, where: str) -> None:
    if count > limit:
        raise LimitExceededError(f"{where}: has more than {limit} entries", field=where)


def widen(data: memoryview, dtype_number: int, where: str) -> tuple[TensorDtype, Array]:
    """Return elements of one of the four encodings in one of the two public dtypes; a view if these are the same."""
    if dtype_number not in _DTYPES:
        raise WireError(f"{where}: dtype number {dtype_number} is unknown", field=where)
    dtype, stored = _DTYPES[dtype_number]
    array = as_array(data, BYTES, where, stored)
    if dtype_number == BFLOAT16:
        array = (array.astype("<u4") << 16).view("<f4")
    return dtype, array.astype(NUMPY_DTYPES[dtype], copy=False)


def tensor_message(tensor: TensorData) -> MessageWriter:
    """Return a tensor as a Tensor message."""
    message = MessageWriter()
    values = array_bytes(tensor.array, NUMPY_DTYPES[tensor.dtype])
    if tensor.is_sparse:
        csr = MessageWriter()
        csr.blob(1, values)
        csr.blob(2, array_bytes(np.array(tensor.sparse_crow_indices, np.int64), NUMPY_DTYPES["int64"]))
        csr.blob(3, array_bytes(np.array(tensor.sparse_col_indices, np.int64), NUMPY_DTYPES["int64"]))
        message.message(2, csr)
    else:
        message.blob(1, values)
    message.number(3, DTYPE_NUMBERS[tensor.dtype])
    message.packed(4, tensor.shape or [])
    return message


def first_blob(data: memoryview) -> tuple[int, int]:
    """Return where the bytes of field 1 start and end if a message starts with that field, else (0, 0)."""
    if len(data) < 2 or data[0] != 1 << 3 | BYTES:
        return 0, 0
    try:
        length, start = read_varint(data, 1, "")
    except WireError:
        return 0, 0
    return (start, start + length) if start + length <= len(data) else (0, 0)


def plain_tensor(data: memoryview) -> TensorData | None:
    """Read the common case fast: a dense one-dimensional tensor, encoded in the usual order of fields.

    The values come first, and what follows them depends only on dtype and length, so it is compared with bytes that are
    made once per length and cached, instead of being parsed. None means: read it field by field.
    """
    start, end = first_blob(data)
    tail = bytes(data[end : end + 16]) if start else b""
    if len(tail) < 2 or tail[1] not in (FLOAT32, INT64):
        return None
    dtype, stored = _DTYPES[tail[1]]
    count, rest = divmod(end - start, stored.itemsize)
    if rest or tail != _plain_tail(tail[1], count):
        return None
    return TensorData.of_array(np.frombuffer(data[start:end], stored), dtype, [count])


@lru_cache(maxsize=4096)
def _plain_tail(dtype_number: int, count: int) -> bytes:
    """Return the bytes after the values of such a tensor: its dtype and its shape."""
    message = MessageWriter()
    message.number(3, dtype_number)
    message.packed(4, [count])
    return message.encode()


def add_tensor(message: MessageWriter, number: int, key: str, tensor: TensorData) -> None:
    """Add a map entry whose value is a Tensor message."""
    if tensor.is_sparse:
        message.entry(number, key, tensor_message(tensor))
        return
    values = array_bytes(tensor.array, NUMPY_DTYPES[tensor.dtype])
    before, after = _around_values(number, key, tensor.dtype, tuple(tensor.shape or ()), len(values))
    message.parts += (before, values, after)
    message.size += len(before) + len(values) + len(after)


@lru_cache(maxsize=4096)
def _around_values(
    number: int, key: str, dtype: TensorDtype, shape: tuple[int, ...], size_bytes: int
) -> tuple[bytes, bytes]:
    """Return the bytes before and after the values of a tensor in a map; cached, because shapes repeat."""
    tensor, after, entry, message = MessageWriter(), MessageWriter(), MessageWriter(), MessageWriter()
    after.number(3, DTYPE_NUMBERS[dtype])
    after.packed(4, list(shape))
    tensor.add(_ONE_BYTE[1 << 3 | BYTES] + varint(size_bytes))
    tensor.size += size_bytes + after.size
    entry.text(1, key)
    entry.message(2, tensor)
    message.message(number, entry)
    return message.encode(), after.encode()


def read_tensor(data: memoryview, where: str) -> TensorData:
    """Read a tensor whose values are a view of `data`. Without a shape it has one dimension."""
    plain = plain_tensor(data)
    if plain is not None:
        return plain
    dense, csr, dtype_number, shape = memoryview(b""), None, 0, []
    for number, kind, value in read_fields(data, where):
        if number == 1:
            dense, csr = as_bytes(value, kind, where), None
        elif number == 2:
            csr = as_bytes(value, kind, where)
        elif number == 3:
            dtype_number = as_int(value, kind, f"{where}.dtype", 32)
        elif number == 4:
            shape += as_ints(value, kind, f"{where}.shape", MAX_DIMS)
            check_count(len(shape), MAX_DIMS, f"{where}.shape")
    try:
        if csr is not None:
            return _read_csr(csr, dtype_number, shape, where)
        dtype, array = widen(dense, dtype_number, where)
        if shape == [array.size]:
            return TensorData.of_array(array, dtype, shape)
        return TensorData(array, dtype, shape or None)
    except InvalidInputError as error:
        raise WireError(f"{where}: {error}", field=where) from None


def _read_csr(data: memoryview, dtype_number: int, shape: list[int], where: str) -> TensorData:
    values, crow, col = memoryview(b""), memoryview(b""), memoryview(b"")
    for number, kind, value in read_fields(data, where):
        if number == 1:
            values = as_bytes(value, kind, where)
        elif number == 2:
            crow = as_bytes(value, kind, where)
        elif number == 3:
            col = as_bytes(value, kind, where)
    dtype, array = widen(values, dtype_number, where)
    crow_indices = as_array(crow, BYTES, f"{where}.crow_indices", NUMPY_DTYPES["int64"]).tolist()
    col_indices = as_array(col, BYTES, f"{where}.col_indices", NUMPY_DTYPES["int64"]).tolist()
    return TensorData(array, dtype, shape, crow_indices, col_indices)

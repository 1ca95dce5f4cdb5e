"""Protobuf bodies by hand, right or wrong, independent of the code under test."""

from __future__ import annotations

import struct


def varint(value: int) -> bytes:
    """An integer as protobuf writes it; negative ones take ten bytes."""
    value %= 1 << 64
    encoded = bytearray()
    while value >= 0x80:
        encoded.append(value & 0x7F | 0x80)
        value >>= 7
    return bytes([*encoded, value])


def field(number: int, value: int | float | str | bytes) -> bytes:
    if isinstance(value, int):
        return varint(number << 3) + varint(value)
    if isinstance(value, float):
        return varint(number << 3 | 1) + struct.pack("<d", value)
    data = value.encode() if isinstance(value, str) else value
    return varint(number << 3 | 2) + varint(len(data)) + data


def int64s(*values: int) -> bytes:
    return struct.pack(f"<{len(values)}q", *values)


def int32s(*values: int) -> bytes:
    return struct.pack(f"<{len(values)}i", *values)


def float32s(*values: float) -> bytes:
    return struct.pack(f"<{len(values)}f", *values)


def entry(number: int, key: str, value: int | float | str | bytes) -> bytes:
    """One entry of a map."""
    return field(number, field(1, key) + field(2, value))


def packed(*values: int) -> bytes:
    return b"".join(map(varint, values))


FLOAT32, INT64, INT32, BFLOAT16 = 1, 2, 3, 4


def tensor(dense: bytes, dtype: int, *shape: int) -> bytes:
    return field(1, dense) + field(3, dtype) + field(4, packed(*shape))


def csr_tensor(values: bytes, crow: bytes, col: bytes, dtype: int, *shape: int) -> bytes:
    csr = field(1, values) + field(2, crow) + field(3, col)
    return field(2, csr) + field(3, dtype) + field(4, packed(*shape))


def request(*datums: bytes, rest: bytes = b"", loss_fn: str = "ppo") -> bytes:
    """A ForwardBackwardRequest of the given datums."""
    return field(1, "model") + b"".join(field(3, datum) for datum in datums) + field(4, loss_fn) + rest


def batched(data: bytes, offsets: bytes, dtype: int, *trailing: int) -> bytes:
    return field(1, data) + field(2, offsets) + field(3, dtype) + field(4, packed(*trailing))


def output(*columns: tuple[str, bytes], count: int | None = None) -> bytes:
    """A ForwardBackwardOutput of one record."""
    record = b"".join(entry(2, name, column) for name, column in columns)
    return field(1, "Kind") + field(2, record + (b"" if count is None else field(3, count)))

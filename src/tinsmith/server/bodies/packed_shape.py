"""The number of items in a MessagePack body, found by reading its headers only.

A decoder creates an object for each item before it can say that there are too many, and holds Python's lock meanwhile.
"""

from __future__ import annotations

from tinsmith.errors import InvalidInputError

_FIXED = {0xC0: 0, 0xC2: 0, 0xC3: 0, 0xCA: 4, 0xCB: 8, 0xCC: 1, 0xCD: 2, 0xCE: 4, 0xCF: 8}
_FIXED |= {0xD0: 1, 0xD1: 2, 0xD2: 4, 0xD3: 8}
"""Bytes after the first of nil, true, false and numbers."""
_SIZED = {0xC4: 1, 0xC5: 2, 0xC6: 4, 0xD9: 1, 0xDA: 2, 0xDB: 4}
"""How many bytes give the length of binary data or a string."""
_MAPS = {0xDE: 2, 0xDF: 4}
"""How many bytes give the number of pairs of a map."""


def check_shape(body: bytes, most: int) -> None:
    """Refuse a body that is not a map of at most `most` pairs; values are strings, bytes, numbers, or such maps one
    level down."""
    end = _pass_map(body, 0, most, depth=2)
    if end != len(body):
        raise _wrong(f"it has {len(body)} bytes, and its map ends at {end}")


def _pass_map(body: bytes, at: int, most: int, depth: int) -> int:
    first = _byte(body, at)
    at += 1
    if first & 0xF0 == 0x80:
        count = first & 0x0F
    elif first in _MAPS:
        count, at = _number(body, at, _MAPS[first])
    else:
        raise _wrong(f"expected a map, found the byte {first:#04x}")
    if count > most:
        raise _wrong(f"a map has {count} entries; at most {most} are allowed")
    for _ in range(count):
        at = _pass(body, at, most, 0)
        at = _pass(body, at, most, depth - 1)
    return at


def _pass(body: bytes, at: int, most: int, depth: int) -> int:
    """Return where the item that begins here ends."""
    first = _byte(body, at)
    if depth and (first & 0xF0 == 0x80 or first in _MAPS):
        return _pass_map(body, at, most, depth)
    if first < 0x80 or first >= 0xE0:
        return at + 1
    if first & 0xE0 == 0xA0:
        return at + 1 + (first & 0x1F)
    if first in _FIXED:
        return at + 1 + _FIXED[first]
    if first in _SIZED:
        size, at = _number(body, at + 1, _SIZED[first])
        return at + size
    raise _wrong(f"lists, extensions and deeper maps are not allowed (byte {first:#04x})")


def _number(body: bytes, at: int, size: int) -> tuple[int, int]:
    if at + size > len(body):
        raise _wrong("it is truncated")
    return int.from_bytes(body[at : at + size], "big"), at + size


def _byte(body: bytes, at: int) -> int:
    if at >= len(body):
        raise _wrong("it is truncated")
    return body[at]


def _wrong(reason: str) -> InvalidInputError:
    return InvalidInputError(f"body: not a valid MessagePack map: {reason}", field="body")

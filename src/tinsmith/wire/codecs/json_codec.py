"""JSON bodies: messages to bytes and back.

Decoding is tolerant (unknown fields are ignored) and its errors name the field. Depth and lengths are limited by the
types themselves (`wire/limits.py`); how large a body may be is for the caller to check.
"""

from __future__ import annotations

from collections.abc import Hashable
from functools import lru_cache
from typing import Any, TypeVar, cast, get_args

import msgspec

from tinsmith.errors import InvalidInputError, WireError
from tinsmith.wire.message import dec_hook, describe, enc_hook, field_of

T = TypeVar("T")

_encoder = msgspec.json.Encoder(enc_hook=enc_hook)


def encode(message: Any) -> bytes:
    """Return a message as JSON: fields that hold their default are written, fields that were not given are left out."""
    try:
        return _encoder.encode(message)
    except UnicodeEncodeError as error:
        text = f"{str(error.object)[:40]!r} cannot be sent: it holds half of a surrogate pair, which is not valid text"
        raise InvalidInputError(text) from None


def decode(body: bytes | bytearray | memoryview, type_: type[T]) -> T:
    """Read a message from JSON: unknown fields are ignored, absent ones take their default."""
    try:
        message: T = _decoder(cast(Hashable, type_)).decode(body)
        return message
    except msgspec.ValidationError as error:
        raise WireError(f"{_name(type_)}: {describe(error, type_)}", field=field_of(error)) from None
    except RecursionError:
        raise WireError(f"{_name(type_)}: the JSON is nested too deeply") from None
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise WireError(f"{_name(type_)}: not valid JSON: {error}") from None


@lru_cache(maxsize=512)
def _decoder(type_: Hashable) -> msgspec.json.Decoder[Any]:
    return msgspec.json.Decoder(cast(Any, type_), dec_hook=dec_hook)


def _name(type_: Any) -> str:
    return getattr(type_, "__name__", None) or " | ".join(_name(arg) for arg in get_args(type_))

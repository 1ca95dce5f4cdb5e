"""JSON bodies: our messages to bytes and back.

Owns: encoding for a given protocol version, tolerant decoding, and errors that name the field.
Does not know: HTTP. Limits on body size are the caller's; nesting and element checks are here.
"""

from __future__ import annotations

from collections.abc import Hashable
from functools import lru_cache
from typing import Any, TypeVar, cast, get_args

import msgspec

from tinsmith.errors import InvalidInputError, WireError
from tinsmith.wire.message import Message, dec_hook, describe, enc_hook, field_of, raw

T = TypeVar("T")

_encoder = msgspec.json.Encoder(enc_hook=enc_hook)


def encode(message: Any, version: str | None = None) -> bytes:
    """A message as JSON, all defaults written out, not-given fields left out.

    With `version` the body is what that release's protocol has: younger fields are left out while they hold their
    default, and refused by name when they do not.
    """
    if version is not None:
        message = _for_version(message, _parsed(version), version)
    try:
        return _encoder.encode(message)
    except UnicodeEncodeError as error:
        text = f"{str(error.object)[:40]!r} is not valid text: it holds half of a surrogate pair"
        raise InvalidInputError(text) from None


def decode(body: bytes | bytearray | memoryview, type_: type[T]) -> T:
    """A message from JSON: unknown fields are ignored, absent ones take their default."""
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


@lru_cache(maxsize=512)
def _field_versions(cls: type[Message]) -> dict[str, tuple[int, ...]]:
    """The release that brought each field, for the fields that say so."""
    versions = {}
    for info in msgspec.inspect.type_info(cls).fields:  # type: ignore[attr-defined]
        extra = getattr(info.type, "extra", None) or {}
        if "since" in extra:
            versions[info.name] = _parsed(extra["since"])
    return versions


def _for_version(value: Any, version: tuple[int, ...], shown: str) -> Any:
    if isinstance(value, list):
        return [_for_version(item, version, shown) for item in value]
    if not isinstance(value, Message):
        return value
    config = value.__struct_config__
    encoded: dict[str, Any] = {config.tag_field: config.tag} if config.tag_field is not None else {}
    versions = _field_versions(type(value))
    for spec in msgspec.structs.fields(type(value)):
        stored = raw(value, spec.name)
        if stored is msgspec.UNSET:
            continue
        if versions.get(spec.name, ()) > version:
            if stored is not None and stored != _default(spec):
                since = ".".join(map(str, versions[spec.name]))
                raise InvalidInputError(
                    f"{type(value).__name__}.{spec.name} needs protocol {since}; this server speaks {shown}",
                    field=spec.name,
                )
            continue
        encoded[spec.encode_name] = _for_version(stored, version, shown)
    return encoded


def _default(spec: msgspec.structs.FieldInfo) -> Any:
    return spec.default_factory() if spec.default_factory is not msgspec.NODEFAULT else spec.default


def _parsed(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in version.split(".")[:2])


def _name(type_: Any) -> str:
    return getattr(type_, "__name__", None) or " | ".join(_name(arg) for arg in get_args(type_))

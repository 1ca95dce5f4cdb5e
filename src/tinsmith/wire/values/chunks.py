"""The chunks of a model input: text, images, audio.

Each knows its length in tokens, an estimate of its bytes, and its JSON form, in which media are base64.
"""

from __future__ import annotations

import base64
import binascii
import copy
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import MISSING, asdict, dataclass, field, fields, replace
from typing import Any, ClassVar, Literal, Self, TypeAlias, get_args, get_type_hints

import numpy as np

from tinsmith.errors import InvalidInputError, UnknownFieldError
from tinsmith.wire.limits import MAX_LOCATION, check_size
from tinsmith.wire.model_methods import ModelField, ModelMethods, check_options
from tinsmith.wire.values.numbers import Array, int32_bytes, packed_ids, token_ids

ImageFormat: TypeAlias = Literal["png", "jpeg"]

_set = object.__setattr__

ONLY_IF_SET = frozenset({"override_dimensions", "height", "width", "tokens"})
"""Optional fields that `model_dump` omits while they are None, because only some releases have them."""


class _Chunk(ModelMethods):
    """The methods of pydantic models that programs call on chunks."""

    __slots__ = ()

    @classmethod
    def model_validate(cls, value: Any, **options: Any) -> Self:
        check_options("model_validate", options)
        if isinstance(value, cls):
            return value
        if not isinstance(value, Mapping):
            raise InvalidInputError(f"{cls.__name__}: expected an object, got {type(value).__name__}")
        chunk: Self = _built(cls, value)
        return chunk

    def model_copy(self, *, update: Mapping[str, Any] | None = None, deep: bool = False) -> Self:
        for name in update or ():
            if name not in self.model_fields:
                known = ", ".join(self.model_fields)
                raise UnknownFieldError(f"{type(self).__name__} has no field {name!r}; it has: {known}", field=name)
        copied: Self = replace(copy.deepcopy(self) if deep else self, **(update or {}))  # type: ignore[type-var]
        return copied

    @classmethod
    def _fields_of_model(cls) -> dict[str, ModelField]:
        hints = get_type_hints(cls)
        specs = [spec for spec in fields(cls) if spec.init]  # type: ignore[arg-type]
        return {spec.name: _model_field(hints[spec.name], spec.default) for spec in specs}

    def _values_of_model(self) -> Iterator[tuple[str, Any]]:
        for spec in fields(self):  # type: ignore[arg-type]
            value = getattr(self, spec.name)
            if spec.init and (value is not None or spec.name not in ONLY_IF_SET):
                yield spec.name, _plain(value)


def _model_field(annotation: Any, default: Any) -> ModelField:
    return ModelField(annotation) if default is MISSING else ModelField(annotation, default)


def _plain(value: Any) -> Any:
    """Return a field's value as JSON can hold it."""
    if isinstance(value, bytes):
        return base64.b64encode(value).decode()
    if isinstance(value, np.ndarray):
        return value.tolist()
    return asdict(value) if isinstance(value, ImageDimensions) else value


@dataclass(frozen=True, slots=True, kw_only=True, eq=False, repr=False)
class EncodedTextChunk(_Chunk):
    """Text as token ids. A list is copied; a numpy array is kept without a copy.

    The copy of a long list is an int32 array, which is what a request is encoded from; it turns into a list only when a
    program reads `tokens`.
    """

    tokens: Sequence[int] | Array
    type: Literal["encoded_text"] = "encoded_text"
    _packed: Array | None = field(default=None, init=False)

    def __post_init__(self) -> None:
        _check_type(self)
        packed = packed_ids(self.tokens)
        if packed is None:
            _set(self, "tokens", token_ids(self.tokens, "tokens"))
        else:
            _set(self, "_packed", packed)
            object.__delattr__(self, "tokens")

    def __getattr__(self, name: str) -> Any:
        """Called for `tokens` while they are packed: make the list and keep it instead of the array."""
        packed = self._packed if name == "tokens" else None
        if packed is None:
            return object.__getattribute__(self, name)
        tokens = packed.tolist()
        _set(self, "tokens", tokens)
        _set(self, "_packed", None)
        return tokens

    @property
    def _held(self) -> Sequence[int] | Array:
        packed = self._packed
        return self.tokens if packed is None else packed

    @property
    def length(self) -> int:
        return len(self._held)

    @property
    def estimated_bytes(self) -> int:
        return 4 * len(self._held)

    def __repr__(self) -> str:
        held = self._held
        shown = ", ".join(map(str, held[:8])) + (", ..." if len(held) > 8 else "")
        return f"EncodedTextChunk(tokens=[{shown}], length={len(held)})"

    def to_ints(self) -> list[int]:
        held = self._held
        ints: list[int] = held.tolist() if isinstance(held, np.ndarray) else list(held)
        return ints

    def to_builtins(self) -> dict[str, Any]:
        return {"tokens": self.to_ints(), "type": self.type}

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, EncodedTextChunk):
            return NotImplemented
        return self.to_ints() == other.to_ints()

    __hash__ = None  # type: ignore[assignment]


def text_of(tokens: Array) -> EncodedTextChunk:
    """Make a chunk from ids that are already checked (decoders)."""
    chunk = EncodedTextChunk.__new__(EncodedTextChunk)
    _set(chunk, "tokens", tokens)
    _set(chunk, "type", "encoded_text")
    _set(chunk, "_packed", None)
    return chunk


def largest_token(chunk: EncodedTextChunk) -> int:
    """Return the largest id of a chunk, -1 if it is empty. Ids are never negative, so comparing it checks them all."""
    held = chunk._held
    if not len(held):
        return -1
    return int(held.max()) if isinstance(held, np.ndarray) else max(held)


def token_bytes(chunk: EncodedTextChunk) -> bytes | memoryview:
    """Return the tokens of a chunk as little-endian int32, as they are sent."""
    return int32_bytes(chunk._held)


@dataclass(frozen=True, slots=True, kw_only=True)
class ImageDimensions:
    """The size to read an image at (protobuf only)."""

    width: int
    height: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ImageChunk(_Chunk):
    """An image; base64 in JSON. Releases before 0.6 sent height, width and tokens instead of expected_tokens."""

    data: bytes
    format: ImageFormat
    expected_tokens: int | None = None
    override_dimensions: ImageDimensions | None = None
    height: int | None = None
    width: int | None = None
    tokens: int | None = None
    type: Literal["image"] = "image"

    def __post_init__(self) -> None:
        _check_type(self)
        _check_format(self.format)
        _set(self, "data", _bytes_of(self.data, "data"))
        _set(self, "override_dimensions", _dimensions_of(self.override_dimensions))
        for name in ("expected_tokens", "height", "width", "tokens"):
            _check_count(name, getattr(self, name))

    @property
    def length(self) -> int:
        return _known_length(self.expected_tokens if self.expected_tokens is not None else self.tokens, "image")

    @property
    def estimated_bytes(self) -> int:
        return len(self.data)

    def to_builtins(self) -> dict[str, Any]:
        given = {name: getattr(self, name) for name in ("expected_tokens", "height", "width", "tokens")}
        encoded = {"data": base64.b64encode(self.data).decode(), "format": self.format, "type": self.type}
        return encoded | {name: value for name, value in given.items() if value is not None}


@dataclass(frozen=True, slots=True, kw_only=True)
class ImageAssetPointerChunk(_Chunk):
    """An image that the server fetches itself (JSON only)."""

    format: ImageFormat
    location: str
    expected_tokens: int | None = None
    height: int | None = None
    width: int | None = None
    tokens: int | None = None
    type: Literal["image_asset_pointer"] = "image_asset_pointer"

    def __post_init__(self) -> None:
        _check_type(self)
        _check_format(self.format)
        if not isinstance(self.location, str):
            raise InvalidInputError(
                f"location: expected a string, got {type(self.location).__name__}", field="location"
            )
        check_size(len(self.location), MAX_LOCATION, "location", "characters")
        for name in ("expected_tokens", "height", "width", "tokens"):
            _check_count(name, getattr(self, name))

    @property
    def length(self) -> int:
        return _known_length(self.expected_tokens if self.expected_tokens is not None else self.tokens, "image pointer")

    @property
    def estimated_bytes(self) -> int:
        return len(self.location)

    def to_builtins(self) -> dict[str, Any]:
        given = {name: getattr(self, name) for name in ("expected_tokens", "height", "width", "tokens")}
        encoded = {"format": self.format, "location": self.location, "type": self.type}
        return encoded | {name: value for name, value in given.items() if value is not None}


@dataclass(frozen=True, slots=True, kw_only=True)
class DmelChunk(_Chunk):
    """Audio tokens in a tensor container; base64 in JSON."""

    dmel: bytes
    type: Literal["dmel"] = "dmel"

    CONSTANT_MARKER: ClassVar[int] = 254
    MAX_DTYPE: ClassVar[int] = 7

    def __post_init__(self) -> None:
        _check_type(self)
        _set(self, "dmel", _bytes_of(self.dmel, "dmel"))

    @property
    def length(self) -> int:
        """The first dimension, read from the container's header."""
        position = 1 if self.dmel[:1] == bytes([self.CONSTANT_MARKER]) else 0
        if len(self.dmel) <= position or self.dmel[position] > self.MAX_DTYPE:
            raise InvalidInputError(
                "dmel: not a tensor container; it must start with a dtype byte of 0 to 7", field="dmel"
            )
        dimensions, position = _varint(self.dmel, position + 1)
        if dimensions == 0:
            raise InvalidInputError("dmel: the container holds a scalar, which has no length", field="dmel")
        return _varint(self.dmel, position)[0]

    @property
    def estimated_bytes(self) -> int:
        return len(self.dmel)

    def to_builtins(self) -> dict[str, Any]:
        return {"dmel": base64.b64encode(self.dmel).decode(), "type": self.type}


ModelInputChunk: TypeAlias = EncodedTextChunk | ImageAssetPointerChunk | ImageChunk | DmelChunk

_CHUNK_TYPES: Mapping[str, type[Any]] = {
    "encoded_text": EncodedTextChunk,
    "image": ImageChunk,
    "image_asset_pointer": ImageAssetPointerChunk,
    "dmel": DmelChunk,
}


def chunk_from_builtins(value: Any) -> ModelInputChunk:
    """Read a chunk from JSON. Releases before 0.18 leave out `type`; the keys then tell which one it is."""
    if type(value) is not dict and not isinstance(value, Mapping):
        raise InvalidInputError(f"expected a chunk object, got {type(value).__name__}")
    kind = value.get("type")
    if kind == "encoded_text" and value.get("tokens") is not None:  # the common case, without the lookups below
        return EncodedTextChunk(tokens=value["tokens"])
    if kind is None:
        kind = _inferred_type(value)
    if not isinstance(kind, str) or kind not in _CHUNK_TYPES:
        raise InvalidInputError(
            f"type: {kind!r} is not a chunk type (allowed: {', '.join(_CHUNK_TYPES)})", field="type"
        )
    wire_value = {name: item for name, item in value.items() if name != "override_dimensions"}
    chunk: ModelInputChunk = _built(_CHUNK_TYPES[kind], wire_value)
    return chunk


def _built(chunk_type: type[Any], value: Mapping[str, Any]) -> Any:
    names = [spec.name for spec in fields(chunk_type) if spec.init]
    known = {name: value[name] for name in names if value.get(name) is not None}
    try:
        return chunk_type(**known)
    except TypeError:
        needed = [spec.name for spec in fields(chunk_type) if spec.default is MISSING and spec.name not in known]
        kind = chunk_type.__dataclass_fields__["type"].default
        raise InvalidInputError(f"a chunk of type {kind} needs {' and '.join(needed)}", field=needed[0]) from None


def _inferred_type(value: Mapping[str, Any]) -> str:
    for key, kind in (
        ("dmel", "dmel"),
        ("location", "image_asset_pointer"),
        ("data", "image"),
        ("tokens", "encoded_text"),
    ):
        if key in value:
            return kind
    raise InvalidInputError(
        "type: is missing, and none of the keys tokens, data, location or dmel tells which chunk it is", field="type"
    )


def _check_type(chunk: Any) -> None:
    expected = type(chunk).__dataclass_fields__["type"].default
    if chunk.type != expected:
        raise InvalidInputError(
            f"type: {type(chunk).__name__} has the type {expected!r}, got {chunk.type!r}", field="type"
        )


def _check_format(value: Any) -> None:
    if value not in get_args(ImageFormat):
        raise InvalidInputError(f"format: {value!r} is not supported (allowed: png, jpeg)", field="format")


def _check_count(name: str, value: Any) -> None:
    if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < 0):
        raise InvalidInputError(f"{name}: must be an integer of 0 or more, got {value!r}", field=name)


def _dimensions_of(value: Any) -> ImageDimensions | None:
    if value is None or isinstance(value, ImageDimensions):
        return value
    if not isinstance(value, Mapping) or set(value) != {"width", "height"}:
        raise InvalidInputError(
            f"override_dimensions: expected width and height, got {value!r}", field="override_dimensions"
        )
    return ImageDimensions(**value)


def _bytes_of(value: Any, name: str) -> bytes:
    if isinstance(value, str):
        return _from_base64(value, name)
    if not isinstance(value, (bytes, bytearray, memoryview)):
        raise InvalidInputError(f"{name}: expected bytes, got {type(value).__name__}", field=name)
    return bytes(value)


def _from_base64(text: str, name: str) -> bytes:
    try:
        return base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError):
        raise InvalidInputError(f"{name}: not valid base64", field=name) from None


def _known_length(tokens: int | None, kind: str) -> int:
    if tokens is None:
        raise InvalidInputError(
            f"expected_tokens: is needed to know the length of an {kind} chunk", field="expected_tokens"
        )
    return tokens


def _varint(data: bytes, position: int) -> tuple[int, int]:
    value = shift = 0
    for byte in data[position : position + 10]:
        value |= (byte & 0x7F) << shift
        shift += 7
        position += 1
        if byte < 0x80:
            return value, position
    raise InvalidInputError("dmel: the header of the container is truncated or invalid", field="dmel")

"""The base classes of the wire messages: strict to build, tolerant to read.

- Building a message checks everything: an unknown field or a wrong type is an InvalidInputError that names it.
- Reading one (`wire/codecs/json_codec.py`) ignores unknown fields and fills in defaults.
- An optional field with the default NOT_GIVEN is left out of the JSON if it was not given, and written as `null` if it
  was given as None. The attribute reads None in both cases, which is what users' `is None` checks expect;
  `is_given(message, name)` tells them apart, and the two messages are not equal.
"""

from __future__ import annotations

import copy
import difflib
import functools
import math
import re
from collections.abc import Callable, Iterator, Mapping
from types import MemberDescriptorType
from typing import Annotated, Any, Self, TypeAlias, TypeVar, cast, get_type_hints

import msgspec

from tinsmith.errors import InvalidInputError, UnknownFieldError
from tinsmith.wire.losses import LOSSES, OFFERED
from tinsmith.wire.model_methods import ModelField, ModelMethods, check_options

NOT_GIVEN: Any = msgspec.UNSET
"""The default of an optional field that is not sent unless it is set. Typed Any so that it fits every annotation."""

T = TypeVar("T")
_PLACE = re.compile(r" - at (?:`key` in )?`\$([^`]*)`$")
"""Where a value is, at the end of the text of a validation error."""

SeqId: TypeAlias = Annotated[int, msgspec.Meta(ge=0, le=2**63 - 1)]
"""A sequence number: 64 bits, because cloned samplers count in blocks of 10**9."""
Count: TypeAlias = Annotated[int, msgspec.Meta(ge=0, le=2**63 - 1)]
PositiveInt: TypeAlias = Annotated[int, msgspec.Meta(ge=1, le=2**63 - 1)]


def since(version: str) -> msgspec.Meta:
    """Note which release of the official client first had a field; absent: 0.3 had it.

    This documents the protocol and changes nothing at run time. tests/contract/test_completeness.py compares every note
    with the official releases.
    """
    return msgspec.Meta(extra={"since": version})


EXTENSION = msgspec.Meta(extra={"extension": True})
"""Marks an optional field that only tinsmith has: neither a request nor a `model_dump` shows it unless it was given."""


def dec_hook(type_: type[T], value: Any) -> T:
    """Build one of the value types (`wire/values`) from decoded JSON."""
    from_builtins: Callable[[Any], T] | None = getattr(type_, "from_builtins", None)
    if from_builtins is None:
        raise NotImplementedError(f"{type_!r} is not a wire type")
    return value if isinstance(value, type_) else from_builtins(value)


def enc_hook(value: Any) -> Any:
    """Reduce one of the value types (`wire/values`) to what JSON can hold."""
    to_builtins = getattr(value, "to_builtins", None)
    if to_builtins is None:
        number = _plain_scalars(value)
        if number is not value:
            return number
        kind = type(value).__name__
        raise InvalidInputError(f"a value of type {kind} cannot be sent as JSON; use strings, numbers, lists and dicts")
    return to_builtins()


class MessageMeta(msgspec.StructMeta):
    """Makes construction strict, and lets fields that were not given read as None."""

    def __new__(mcls, name: str, bases: tuple[type, ...], namespace: dict[str, Any], **options: Any) -> MessageMeta:
        cls = super().__new__(mcls, name, bases, namespace, **options)
        for spec in msgspec.structs.fields(cast(Any, cls)):
            member = cls.__dict__.get(spec.name)
            if spec.default is msgspec.UNSET and isinstance(member, MemberDescriptorType):
                fallback = namespace.get(f"_read_{spec.name}")
                type.__setattr__(cls, spec.name, property(_none_if_not_given(member, fallback)))
        return cls

    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        struct = cast(Any, cls)
        values = _bind(struct, args, kwargs)
        try:
            return _checked(struct, values)
        except msgspec.ValidationError as error:
            raise InvalidInputError(f"{cls.__name__}: {describe(error, cls)}", field=field_of(error)) from None
        except RecursionError:
            raise InvalidInputError(f"{cls.__name__}: a value is nested too deeply") from None


class Message(ModelMethods, msgspec.Struct, frozen=True, kw_only=True, metaclass=MessageMeta):
    """A frozen wire message."""

    def model_copy(self, *, update: Mapping[str, Any] | None = None, deep: bool = False) -> Self:
        """Return a copy with some fields replaced; the new values are checked."""
        source = copy.deepcopy(self) if deep else self
        names = zip(self.__struct_encode_fields__, self.__struct_fields__, strict=True)
        values = {wire_name: raw(source, name) for wire_name, name in names}
        return type(self)(**(values | dict(update or {})))

    @classmethod
    def model_validate(cls, value: Any, **options: Any) -> Self:
        """Read plain values as a response is read: unknown fields are ignored."""
        check_options("model_validate", options)
        try:
            return msgspec.convert(value, cls, dec_hook=dec_hook, str_keys=True)
        except msgspec.ValidationError as error:
            raise InvalidInputError(f"{cls.__name__}: {describe(error, cls)}", field=field_of(error)) from None

    @classmethod
    def _fields_of_model(cls) -> dict[str, ModelField]:
        hints = get_type_hints(cls)
        fields = {}
        for spec in msgspec.structs.fields(cls):
            factory = None if spec.default_factory is msgspec.NODEFAULT else spec.default_factory
            default = None if spec.default is NOT_GIVEN or factory is not None else spec.default
            fields[spec.name] = ModelField(hints[spec.name], default, factory)
        config = cls.__struct_config__
        if config.tag_field is not None:
            fields[config.tag_field] = ModelField(str, config.tag)
        return fields

    def _values_of_model(self) -> Iterator[tuple[str, Any]]:
        hidden = {name for name in _extensions(type(self)) if not is_given(self, name)}
        yield from ((name, getattr(self, name)) for name in self.__struct_fields__ if name not in hidden)
        config = self.__struct_config__
        if config.tag_field is not None:
            yield config.tag_field, config.tag

    def _is_set(self, name: str, field: ModelField) -> bool:
        if name not in self.__struct_fields__:
            return False
        stored = raw(self, name)
        return stored is not NOT_GIVEN and (stored is None or not field.holds_default(stored))


class Tagged(Message, frozen=True, kw_only=True, tag_field="type"):
    """A member of a discriminated union; its `type` literal is always sent."""

    @property
    def type(self) -> str:
        return str(self.__struct_config__.tag)


def raw(message: msgspec.Struct, name: str) -> Any:
    """Return the stored value of a field, which may be NOT_GIVEN where the attribute reads None."""
    for cls in type(message).__mro__:
        descriptor = cls.__dict__.get(name)
        if isinstance(descriptor, property) and descriptor.fget is not None:
            return getattr(descriptor.fget, "stored", descriptor.fget)(message)
        if descriptor is not None:
            return descriptor.__get__(message)
    raise AttributeError(name)


def is_given(message: msgspec.Struct, name: str) -> bool:
    """Whether an optional field was given, even as None."""
    return raw(message, name) is not NOT_GIVEN


def store(message: msgspec.Struct, name: str, value: Any) -> None:
    """Set a field while a message is built (only in `__post_init__`; messages are frozen)."""
    for cls in type(message).__mro__:
        descriptor = cls.__dict__.get(name)
        if descriptor is not None:
            getattr(getattr(descriptor, "fget", None), "set_stored", descriptor.__set__)(message, value)
            return
    raise AttributeError(name)


@functools.cache
def _extensions(cls: type[msgspec.Struct]) -> tuple[str, ...]:
    """Return the fields of a message that are marked EXTENSION."""
    hints = get_type_hints(cls, include_extras=True)
    return tuple(name for name in cls.__struct_fields__ if EXTENSION in getattr(hints[name], "__metadata__", ()))


def describe(error: msgspec.ValidationError, type_: Any = None) -> str:
    """Return the text of a validation error: the field first and, for a wrong literal, the allowed ones."""
    found, where = _PLACE.search(str(error)), field_of(error)
    if found is None or where is None:
        return str(error)
    text = str(error)[: found.start()]
    literals = _literals_at(type_, where) if text.startswith("Invalid enum value") else ()
    allowed = OFFERED if set(literals) == set(LOSSES) else literals
    return f"{where}: {text}" + (f" (allowed: {', '.join(map(str, allowed))})" if allowed else "")


def field_of(error: msgspec.ValidationError) -> str | None:
    """Return the path of the field that a validation error is about."""
    found = _PLACE.search(str(error))
    return found[1].lstrip(".") or None if found else None


def _literals_at(type_: Any, path: str) -> tuple[Any, ...]:
    """Return the literals that a message type allows at a path such as `loss_fn` or `owner.type`."""
    info = msgspec.inspect.type_info(type_) if type_ is not None else None
    for name in re.findall(r"[^.\[\]]+", path):
        if isinstance(info, msgspec.inspect.StructType):
            info = next((field.type for field in info.fields if field.encode_name == name), None)
        while isinstance(info, msgspec.inspect.Metadata):
            info = info.type
        if isinstance(info, msgspec.inspect.UnionType):
            info = next((member for member in info.types if not isinstance(member, msgspec.inspect.NoneType)), None)
        if isinstance(info, msgspec.inspect.ListType):
            info = info.item_type
    return info.values if isinstance(info, msgspec.inspect.LiteralType) else ()


def _none_if_not_given(member: MemberDescriptorType, fallback: Callable[[Any], Any] | None) -> Callable[[Any], Any]:
    """Return a getter: None for a field that was not given, or what the class's `_read_<field>` returns."""
    stored = member.__get__

    def read(message: Any) -> Any:
        value = stored(message)
        if value is not msgspec.UNSET:
            return value
        return None if fallback is None else fallback(message)

    read.stored = stored  # type: ignore[attr-defined]
    read.set_stored = member.__set__  # type: ignore[attr-defined]
    return read


def _bind(cls: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """Return the arguments by field name, without those that are NOT_GIVEN."""
    names = cls.__struct_encode_fields__
    if len(args) > len(names):
        raise UnknownFieldError(f"{cls.__name__} has {len(names)} fields, got {len(args)} arguments")
    tag, tag_field = cls.__struct_config__.tag, cls.__struct_config__.tag_field
    positional = dict(zip(names, args, strict=False))
    for name in positional.keys() & kwargs.keys():
        raise UnknownFieldError(f"{cls.__name__}: {name} is given twice", field=name)
    values = {}
    for name, value in (positional | kwargs).items():
        if name == tag_field and tag is not None:
            if value != tag:
                raise InvalidInputError(f"{cls.__name__}: {name} must be {tag!r}, got {value!r}", field=name)
        elif name not in names:
            raise UnknownFieldError(f"{cls.__name__} has no field {name!r}{_suggest(name, cls)}", field=name)
        elif value is not msgspec.UNSET:
            values[name] = value
    return values


def _checked(cls: Any, values: dict[str, Any]) -> Any:
    for name, value in values.items():
        _check_finite(cls.__name__, name, value)
    try:
        return msgspec.convert(values, cls, dec_hook=dec_hook, str_keys=True)
    except msgspec.ValidationError:
        plain = {key: _plain_scalars(value) for key, value in values.items()}
        return msgspec.convert(plain, cls, dec_hook=dec_hook, str_keys=True)


def _check_finite(cls_name: str, where: str, value: Any) -> None:
    """Refuse NaN and infinity, which JSON cannot hold; msgspec would silently write null instead."""
    if isinstance(value, dict):
        for key, item in value.items():
            _check_finite(cls_name, f"{where}[{key!r}]", item)
    elif isinstance(value, (list, tuple)):
        for i, item in enumerate(value):
            _check_finite(cls_name, f"{where}[{i}]", item)
    else:
        number = _plain_scalars(value)
        if isinstance(number, float) and not math.isfinite(number):
            raise InvalidInputError(f"{cls_name}: {where}: must be finite, got {number}", field=where)


def _suggest(name: str, cls: Any) -> str:
    close = difflib.get_close_matches(name, cls.__struct_encode_fields__, n=1)
    known = ", ".join(cls.__struct_encode_fields__) or "none"
    return f"; did you mean {close[0]!r}? It has: {known}" if close else f"; it has: {known}"


def _plain_scalars(value: Any) -> Any:
    """Turn numpy scalars (anything with `item()`) into Python numbers, and tuples into lists."""
    if isinstance(value, (list, tuple)):
        return [_plain_scalars(item) for item in value]
    if isinstance(value, Mapping):
        return {key: _plain_scalars(item) for key, item in value.items()}
    item = getattr(value, "item", None)
    return item() if callable(item) and getattr(value, "ndim", None) == 0 else value

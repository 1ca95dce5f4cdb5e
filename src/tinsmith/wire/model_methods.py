"""The methods that programs written for pydantic models call: `model_dump` and its siblings, and `model_fields`.

The official types are pydantic models and ours are not; this mix-in gives them the same surface, which
tests/contract/test_surface_contract.py compares. Each type says what its fields are and how it is read and copied.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Self, TypeAlias

import msgspec

from tinsmith.errors import InvalidInputError, UnknownFieldError

Selection: TypeAlias = Mapping[Any, "Selection | None"]
"""Which keys or positions are selected; None as the value of a key selects all of it."""

EVERY = "__all__"
"""The key of a selection that means every position."""
WITHOUT_EFFECT = frozenset(
    {
        "by_alias",
        "by_name",
        "context",
        "ensure_ascii",
        "fallback",
        "from_attributes",
        "round_trip",
        "serialize_as_any",
        "strict",
        "warnings",
    }
)
"""Options of pydantic that are accepted and have no effect on these types."""


@dataclass(frozen=True, slots=True)
class ModelField:
    """A field of a type: its annotation and its default."""

    annotation: Any
    default: Any = msgspec.NODEFAULT
    default_factory: Callable[[], Any] | None = None

    def is_required(self) -> bool:
        return self.default is msgspec.NODEFAULT and self.default_factory is None

    def get_default(self, *, call_default_factory: bool = False) -> Any:
        """Return the default; call a factory only if `call_default_factory` is set, else return None."""
        if self.default_factory is None:
            return self.default
        return self.default_factory() if call_default_factory else None

    def holds_default(self, value: Any) -> bool:
        return not self.is_required() and bool(value == self.get_default(call_default_factory=True))


class _Fields:
    """The descriptor of `model_fields`, for a type and for its instances."""

    def __get__(self, value: Any, owner: type[ModelMethods]) -> dict[str, ModelField]:
        return owner._fields_of_model()


@dataclass(frozen=True, slots=True)
class _Left:
    """The options of a dump: what to leave out, and whether values must be JSON's."""

    as_json: bool
    unset: bool
    defaults: bool
    none: bool

    def leaves_out(self, model: ModelMethods, name: str, value: Any) -> bool:
        if self.none and value is None:
            return True
        if not (self.unset or self.defaults):
            return False
        field = model.model_fields[name]
        return (self.defaults and field.holds_default(value)) or (self.unset and not model._is_set(name, field))


class ModelMethods:
    """The methods of pydantic models that programs use. A type implements the four that raise here."""

    __slots__ = ()

    model_fields = _Fields()

    def model_dump(
        self,
        *,
        mode: str = "python",
        include: Any = None,
        exclude: Any = None,
        exclude_unset: bool = False,
        exclude_defaults: bool = False,
        exclude_none: bool = False,
        **options: Any,
    ) -> dict[str, Any]:
        """Return the fields as plain values; with `mode="json"` only values that JSON can hold.

        `include` and `exclude` name fields, or select inside them: `{"chunks": {0: {"tokens"}}}`. A field that holds
        its default counts as unset, except None that was given explicitly.
        """
        check_options("model_dump", options)
        if mode not in ("python", "json"):
            raise InvalidInputError(f"mode: must be 'python' or 'json', got {mode!r}", field="mode")
        left = _Left(mode == "json", exclude_unset, exclude_defaults, exclude_none)
        dumped: dict[str, Any] = _dump(self, left, _selection("include", include), _selection("exclude", exclude))
        return dumped

    def model_dump_json(self, *, indent: int | None = None, **options: Any) -> str:
        """Return the message as JSON, with null for None; takes the options of `model_dump`."""
        encoded = msgspec.json.encode(self.model_dump(mode="json", **options))
        return (encoded if indent is None else msgspec.json.format(encoded, indent=indent)).decode()

    @classmethod
    def model_validate_json(cls, text: str | bytes | bytearray, **options: Any) -> Self:
        """Read JSON as `model_validate` reads plain values."""
        try:
            value = msgspec.json.decode(text)
        except (msgspec.DecodeError, UnicodeError, RecursionError, TypeError) as error:
            raise InvalidInputError(f"{cls.__name__}: not valid JSON: {error}") from None
        return cls.model_validate(value, **options)

    @classmethod
    def model_validate(cls, value: Any, **options: Any) -> Self:
        """Read plain values as a response is read: unknown fields are ignored."""
        raise NotImplementedError

    def model_copy(self, *, update: Mapping[str, Any] | None = None, deep: bool = False) -> Self:
        """Return a copy with some fields replaced; the new values are checked."""
        raise NotImplementedError

    @classmethod
    def _fields_of_model(cls) -> dict[str, ModelField]:
        raise NotImplementedError

    def _values_of_model(self) -> Iterator[tuple[str, Any]]:
        """Yield the fields and their values, in the order of a dump."""
        raise NotImplementedError

    def _is_set(self, name: str, field: ModelField) -> bool:
        """Whether a field counts as given."""
        return not field.holds_default(dict(self._values_of_model())[name])


def check_options(method: str, options: Iterable[str]) -> None:
    """Refuse options that pydantic's method of this name does not have."""
    for name in options:
        if name not in WITHOUT_EFFECT:
            raise UnknownFieldError(f"{method} has no option {name!r}", field=name)


def _dump(value: Any, left: _Left, include: Selection | None, exclude: Selection | None) -> Any:
    if isinstance(value, ModelMethods):
        kept = [(name, item) for name, item in value._values_of_model() if not left.leaves_out(value, name, item)]
        return _dump_items(kept, left, include, exclude)
    if isinstance(value, Mapping):
        dumped = _dump_items(value.items(), left, include, exclude)
        return {str(key): item for key, item in dumped.items()} if left.as_json else dumped
    if isinstance(value, (list, tuple)):
        return list(_dump_items(enumerate(value), left, include, exclude, len(value)).values())
    if hasattr(value, "to_builtins"):
        return value.to_builtins()
    return msgspec.to_builtins(value) if left.as_json else value


def _dump_items(
    items: Iterable[tuple[Any, Any]],
    left: _Left,
    include: Selection | None,
    exclude: Selection | None,
    length: int | None = None,
) -> dict[Any, Any]:
    dumped = {}
    for key, item in items:
        is_included, included = (True, None) if include is None else _below(include, key, length)
        is_excluded, excluded = (False, None) if exclude is None else _below(exclude, key, length)
        if is_included and not (is_excluded and excluded is None):
            dumped[key] = _dump(item, left, included, excluded)
    return dumped


def _below(selection: Selection, key: Any, length: int | None) -> tuple[bool, Selection | None]:
    """Return whether a key (or a position, from either end) is selected, and the selection inside it."""
    names = [key] if length is None else [key, key - length, EVERY]
    found = [selection[name] for name in names if name in selection]
    merged: dict[Any, Selection | None] = {}
    for below in found:
        if below is None:
            return True, None
        merged.update(below)
    return bool(found), merged if found else None


def _selection(name: str, given: Any) -> Selection | None:
    """Read a selection as users write it: names, or names with True or another selection as the value."""
    if given is None:
        return None
    if isinstance(given, Mapping):
        return {key: None if below in (True, ...) else _selection(name, below) for key, below in given.items()}
    if isinstance(given, (set, frozenset, list, tuple)):
        return dict.fromkeys(given)
    raise InvalidInputError(f"{name}: expected field names, got {type(given).__name__}", field=name)

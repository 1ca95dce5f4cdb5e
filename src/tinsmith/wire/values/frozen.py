"""The base class of the value types that hold numpy arrays.

They are plain classes with slots, not dataclasses or msgspec structs: msgspec would encode those field by field, while
these must go through their own `to_builtins` and `from_builtins`, and must compare their arrays by content.
"""

from __future__ import annotations

from typing import Any, NoReturn, Self

import numpy as np


class Frozen:
    """An immutable value that can be compared and pickled; a subclass lists its fields in `__slots__`."""

    __slots__: tuple[str, ...] = ()

    def _init(self, **values: Any) -> None:
        """Set the fields, once, in the constructor."""
        for name, value in values.items():
            object.__setattr__(self, name, value)

    def replace(self, **changes: Any) -> Self:
        """Return a copy with some constructor arguments replaced."""
        return type(self)(**({name: getattr(self, name) for name in self.__slots__} | changes))

    def __setattr__(self, name: str, value: Any) -> NoReturn:
        raise AttributeError(f"{type(self).__name__} is immutable: cannot set {name!r}")

    def __delattr__(self, name: str) -> NoReturn:
        raise AttributeError(f"{type(self).__name__} is immutable: cannot delete {name!r}")

    def __eq__(self, other: object) -> bool:
        if type(other) is not type(self):
            return NotImplemented
        return all(_same(getattr(self, name), getattr(other, name)) for name in self.__slots__)

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        shown = ", ".join(f"{name}={getattr(self, name)!r}" for name in self.__slots__)
        return f"{type(self).__name__}({shown})"

    def __reduce__(self) -> tuple[Any, ...]:
        return _restore, (type(self), {name: getattr(self, name) for name in self.__slots__})


def _restore(cls: type[Frozen], values: dict[str, Any]) -> Frozen:
    value = cls.__new__(cls)
    value._init(**values)
    return value


def _same(a: Any, b: Any) -> bool:
    if isinstance(a, np.ndarray) or isinstance(b, np.ndarray):
        if a is None or b is None:
            return False
        a, b = np.asarray(a), np.asarray(b)
        return np.array_equal(a, b, equal_nan=a.dtype.kind == "f" and b.dtype.kind == "f")
    return bool(a == b)

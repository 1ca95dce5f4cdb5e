"""The statements of `queries.sql` by name, and parameters made fit for a database.

A statement begins behind a line `-- name: <name>`; comments above that line explain it. `:name` marks a parameter. Each
engine takes its parameters by position under its own mark, so a statement is turned into that form once.

Does not know: how statements are run.
"""

from __future__ import annotations

import functools
import importlib.resources
import math
import re
from collections.abc import Mapping
from types import MappingProxyType
from typing import TypeAlias

import msgspec

from tinsmith.errors import InvalidInputError, StoreError
from tinsmith.store.base import Value

_NAME = re.compile(r"^-- name: (\w+)\n", re.MULTILINE)
_COMMENT = re.compile(r"--[^\n]*")
_PARAMETER = re.compile(r"(?<!:):([a-z]\w*)")
_INT64 = 2**63

Bound: TypeAlias = tuple[Value, ...]


class Query(msgspec.Struct, frozen=True):
    """A statement with its parameters by position: `names[i]` goes to the i-th mark."""

    name: str
    sql: str
    names: tuple[str, ...]

    def bind(self, parameters: Mapping[str, Value]) -> Bound:
        """The values in order. Parameters that the statement does not have are left out: rows have more fields."""
        values: list[Value] = []
        try:
            for name in self.names:
                value = parameters[name]
                kind = type(value)
                if kind is str:
                    if not value.isascii() or "\0" in value:  # type: ignore[union-attr, operator]
                        _check_text(value, name)  # type: ignore[arg-type]
                elif kind is not bytes and value is not None:
                    value = _fit(value, name)
                values.append(value)
        except KeyError as error:
            needed = ", ".join(dict.fromkeys(self.names))
            raise StoreError(f"statement {self.name}: parameter {error} was not given; it needs {needed}") from None
        return tuple(values)


def parse(text: str) -> dict[str, str]:
    """From the text of a file to the statements in it, with `:name` parameters."""
    parts = _NAME.split(text)
    statements: dict[str, str] = {}
    for name, body in zip(parts[1::2], parts[2::2], strict=True):
        if name in statements:
            raise ValueError(f"queries.sql: the name {name} is given twice")
        statements[name] = " ".join(_COMMENT.sub("", body).split()).removesuffix(";")
    return statements


def positional(name: str, sql: str, mark: str) -> Query:
    """A statement with `mark` in the place of each parameter."""
    escaped = sql.replace("%", "%%") if mark.startswith("%") else sql
    return Query(name, _PARAMETER.sub(mark, escaped), tuple(_PARAMETER.findall(sql)))


@functools.cache
def load_queries(mark: str) -> Mapping[str, Query]:
    """All statements, for an engine whose parameters are marked so."""
    text = importlib.resources.files("tinsmith.store").joinpath("queries.sql").read_text(encoding="utf-8")
    return MappingProxyType({name: positional(name, sql, mark) for name, sql in parse(text).items()})


def find(queries: Mapping[str, Query], name: str) -> Query:
    try:
        return queries[name]
    except KeyError:
        raise StoreError(f"there is no statement {name!r} in queries.sql") from None


def _fit(value: Value, name: str) -> Value:
    """A value that both engines keep exactly as it is, or InvalidInputError."""
    if isinstance(value, str):
        _check_text(value, name)
    elif isinstance(value, bool):
        return int(value)
    elif isinstance(value, int):
        if not -_INT64 <= value < _INT64:
            raise InvalidInputError(f"{name}: {value} does not fit into 64 bits", field=name)
    elif isinstance(value, float) and math.isnan(value):
        raise InvalidInputError(f"{name}: NaN cannot be stored", field=name)
    return value


def _check_text(value: str, name: str) -> None:
    if "\0" in value:
        raise InvalidInputError(f"{name}: text with a NUL character (U+0000) cannot be stored", field=name)
    if not value.isascii():
        try:
            value.encode()
        except UnicodeEncodeError as error:
            raise InvalidInputError(
                f"{name}: character {error.start} is half of a surrogate pair and cannot be stored", field=name
            ) from None

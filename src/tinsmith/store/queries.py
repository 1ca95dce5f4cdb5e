"""The statements of `queries.sql` by name, and the conversion of their parameters.

A statement begins after a line `-- name: <name>`; comments above that line explain it. `:name` marks a parameter. Each
database takes parameters by position with its own placeholder, so a statement is converted to that form once.
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

from tinsmith.errors import InvalidInputError, UnstorableError
from tinsmith.store.base import Value

_NAME = re.compile(r"^-- name: (\w+)\n", re.MULTILINE)
_COMMENT = re.compile(r"--[^\n]*")
_PARAMETER = re.compile(r"(?<!:):([a-z]\w*)")
_INT64 = 2**63

URGENT = frozenset(
    {
        "delete_checkpoint",
        "delete_checkpoint_as_it_was",
        "close_model",
        "delete_model",
        "set_checkpoint_public",
        "set_checkpoint_expires_at",
        "set_session_status",
        "set_session_pruned",
        "delete_job",
        "delete_result",
        "delete_custom_loss",
        "delete_payload",
        "revoke_key",
        "delete_key",
    }
)
"""Statements that must work on a full disk, with all that is written with them: they free space, or revoke access."""

Bound: TypeAlias = tuple[Value, ...]


class Query(msgspec.Struct, frozen=True):
    """A statement with positional parameters: `names[i]` goes to the i-th placeholder."""

    name: str
    sql: str
    names: tuple[str, ...]

    def bind(self, parameters: Mapping[str, Value]) -> Bound:
        """Return the values in order. Extra parameters are ignored: rows have more fields."""
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
            raise UnstorableError(f"statement {self.name}: parameter {error} is missing; it needs {needed}") from None
        return tuple(values)


def parse(text: str) -> dict[str, str]:
    """Parse the statements of a file, with `:name` parameters."""
    parts = _NAME.split(text)
    statements: dict[str, str] = {}
    for name, body in zip(parts[1::2], parts[2::2], strict=True):
        if name in statements:
            raise ValueError(f"queries.sql: there are two statements named {name}")
        statements[name] = " ".join(_COMMENT.sub("", body).split()).removesuffix(";")
    return statements


def positional(name: str, sql: str, mark: str) -> Query:
    """Return a statement with `mark` in place of each parameter."""
    escaped = sql.replace("%", "%%") if mark.startswith("%") else sql
    return Query(name, _PARAMETER.sub(mark, escaped), tuple(_PARAMETER.findall(sql)))


@functools.cache
def load_queries(mark: str) -> Mapping[str, Query]:
    """Return all statements for a database with this placeholder."""
    text = importlib.resources.files("tinsmith.store").joinpath("queries.sql").read_text(encoding="utf-8")
    return MappingProxyType({name: positional(name, sql, mark) for name, sql in parse(text).items()})


def find(queries: Mapping[str, Query], name: str) -> Query:
    try:
        return queries[name]
    except KeyError:
        raise UnstorableError(f"queries.sql has no statement {name!r}") from None


def _fit(value: Value, name: str) -> Value:
    """Return a value that both databases store exactly, or raise InvalidInputError."""
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
        raise InvalidInputError(f"{name}: a string with a NUL character (U+0000) cannot be stored", field=name)
    if not value.isascii():
        try:
            value.encode()
        except UnicodeEncodeError as error:
            raise InvalidInputError(
                f"{name}: character {error.start} is a lone surrogate and cannot be stored", field=name
            ) from None

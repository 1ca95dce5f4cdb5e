"""The store: named statements against one database, durable when awaited.

Every statement has a name and stands in `queries.sql`; callers give the name and its parameters. `write` runs its
statements in one transaction and returns when they would survive a power cut; writes of several callers share a commit.
`read` sees everything whose `write` has returned. Values are None, bool (stored as integer), int, float, str and bytes.

Does not know: what the rows mean. Their types are in `rows`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol, TypeAlias, TypeVar

import msgspec

Value: TypeAlias = bool | int | float | str | bytes | None

RowT = TypeVar("RowT", bound="Row")


class Row(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """A row of a table; field names are column names. Parameters of a statement are the fields of a row.

    Rows hold plain values, so Python's collector of cycles need not look at them.
    """

    def parameters(self) -> dict[str, Value]:
        return msgspec.structs.asdict(self)


class Statement(msgspec.Struct, frozen=True, gc=False):
    """A named statement and its parameters."""

    name: str
    parameters: dict[str, Value]


def statement(name: str, row: Row | None = None, /, **parameters: Value) -> Statement:
    """A statement with the fields of a row, further parameters, or both."""
    if row is not None:
        parameters = {**row.parameters(), **parameters} if parameters else row.parameters()
    return Statement(name, parameters)


class Store(Protocol):
    """Where state is kept. Methods are called on one event loop and never block it."""

    async def open(self) -> None:
        """Connect and bring the schema up to date."""

    async def close(self) -> None:
        """Finish what was queued, then let go of the database."""

    async def write(self, *statements: Statement) -> int:
        """Run statements in one transaction; returns how many rows they touched. Durable on return.

        Writes run in the order in which they were begun. A write that fails leaves nothing behind and harms no other. A
        caller that is cancelled while it waits does not undo its write.
        """

    async def write_returning(self, row_type: type[RowT], name: str, /, **parameters: Value) -> list[RowT]:
        """Run one statement that ends with RETURNING, as `write` does; gives the rows that it touched."""

    async def read(self, row_type: type[RowT], name: str, /, **parameters: Value) -> list[RowT]:
        """The rows that a named query gives, as values of `row_type`."""

    async def size_bytes(self) -> int:
        """How much room the database takes."""


def make_row(row_type: type[RowT], columns: Sequence[str], values: Sequence[Any]) -> RowT:
    """A row from a database's answer; integers become booleans where the type says so."""
    return msgspec.convert(dict(zip(columns, values, strict=True)), row_type, strict=False)

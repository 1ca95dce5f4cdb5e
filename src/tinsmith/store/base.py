"""The store: named statements against one database, durable when awaited.

Every statement has a name and is in `queries.sql`; callers give the name and its parameters. `write` runs its
statements in one transaction and returns when they would survive a power cut; writes of several callers share a commit.
`read` sees everything whose `write` has returned. Values are None, bool (stored as integer), int, float, str and bytes.
`rows` has the types of the rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol, TypeAlias, TypeVar

import msgspec

from tinsmith.errors import StoreTakenError

Value: TypeAlias = bool | int | float | str | bytes | None

RowT = TypeVar("RowT", bound="Row")


class Row(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """A row of a table; field names are column names. Parameters of a statement are the fields of a row.

    Rows hold plain values, so they are excluded from garbage collection (`gc=False`).
    """

    def parameters(self) -> dict[str, Value]:
        return msgspec.structs.asdict(self)


class Statement(msgspec.Struct, frozen=True, gc=False):
    """A named statement and its parameters."""

    name: str
    parameters: dict[str, Value]


def statement(name: str, row: Row | None = None, /, **parameters: Value) -> Statement:
    """Return a statement with the fields of a row, further parameters, or both."""
    if row is not None:
        parameters = {**row.parameters(), **parameters} if parameters else row.parameters()
    return Statement(name, parameters)


class Identity(Row, frozen=True, kw_only=True):
    """The installation that a database or a directory belongs to, and its generation."""

    installation_id: str
    generation: int


class Found(msgspec.Struct, frozen=True, kw_only=True):
    """What a database holds, before it is opened."""

    is_new: bool
    """Whether it has no tables of ours."""
    identity: Identity | None = None


class FoundRuns(msgspec.Struct, frozen=True):
    """The runs that a database knows, and those that it expects to have files."""

    known: frozenset[str] = frozenset()
    with_files: frozenset[str] = frozenset()


LOOK_FOR_IDENTITY = "SELECT installation_id, generation FROM installation"
LOOK_FOR_KNOWN = "SELECT model_id FROM models"
LOOK_FOR_FILES = (
    "SELECT model_id FROM checkpoints UNION SELECT model_id FROM models WHERE snapshot_directory IS NOT NULL"
)
"""For databases of every release."""


class Store(Protocol):
    """A database. Methods are called on one event loop and never block it."""

    @property
    def where(self) -> str:
        """The database's address for messages, without its password."""

    @property
    def is_lasting(self) -> bool:
        """Whether it outlives its process."""

    async def look(self) -> Found:
        """Return what the database holds. For a store that is not open; changes nothing."""

    async def look_for_runs(self) -> FoundRuns:
        """Return the runs it knows. For a store that is not open and not new; changes nothing."""

    async def open(self, *, alone: bool = False) -> None:
        """Connect and migrate the schema. `alone`: raise StoreTakenError while another process has it open alone.

        SQLite relies on the lock of its data directory for that.
        """

    async def taken(self) -> StoreTakenError:
        """Return when another process has taken over a store that was opened alone; writes fail then."""

    async def close(self) -> None:
        """Finish what was queued, then disconnect."""

    async def write(self, *statements: Statement) -> int:
        """Run statements in one transaction and return how many rows they changed. Durable on return.

        Writes run in the order in which they were called. One that fails changes nothing and affects no other.
        Cancelling a caller that waits does not undo its write.
        """

    async def write_returning(self, row_type: type[RowT], name: str, /, **parameters: Value) -> list[RowT]:
        """Run one statement that ends with RETURNING, like `write`, and return its rows."""

    async def read(self, row_type: type[RowT], name: str, /, **parameters: Value) -> list[RowT]:
        """Return the rows of a named query as values of `row_type`."""

    async def size_bytes(self) -> int:
        """Return the size of the database."""


def make_row(row_type: type[RowT], columns: Sequence[str], values: Sequence[Any]) -> RowT:
    """Return a row from a database's answer; integers become booleans if the type says so."""
    return msgspec.convert(dict(zip(columns, values, strict=True)), row_type, strict=False)

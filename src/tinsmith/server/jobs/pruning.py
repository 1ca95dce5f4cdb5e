"""Deleting what one session or run has stored, however much it is, without holding up anybody's commits.

All tenants' writes share one connection to the database, and deleting a gigabyte of payloads takes ten seconds or more.
So rows are deleted a few megabytes at a time; other writes go in between.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from tinsmith.store.base import Row, Store, Value, statement

PIECE_BYTES = 4 * 1024 * 1024
"""What one write deletes at most, unless a single row is larger."""
PIECE_ROWS = 256


class DeletableRow(Row, frozen=True, kw_only=True):
    """The id of a row, and how many bytes it holds."""

    name: str
    size_bytes: int


async def delete_requests(store: Store, found_by: str, **which: Value) -> None:
    """Delete the requests that a query finds from the journal, with their results."""
    await delete_in_pieces(store, found_by, "delete_result", "delete_job", **which)


async def delete_in_pieces(store: Store, found_by: str, *deletes: str, **which: Value) -> None:
    """Run `deletes` for each row that the query `found_by` finds, until it finds no more."""
    while found := await store.read(DeletableRow, found_by, **which, limit=PIECE_ROWS):
        for names in pieces(found):
            await store.write(*(statement(delete, name=name) for delete in deletes for name in names))


def pieces(rows: Sequence[DeletableRow]) -> Iterator[list[str]]:
    """Divide rows into groups of up to `PIECE_BYTES`, in order; a larger row is a group of its own."""
    names: list[str] = []
    size_bytes = 0
    for row in rows:
        if names and size_bytes + row.size_bytes > PIECE_BYTES:
            yield names
            names, size_bytes = [], 0
        names.append(row.name)
        size_bytes += row.size_bytes
    if names:
        yield names

"""A store that is lost when it closes, for tests: SQLite in memory, with the same code.

One connection does everything, since no other could see its database; reads run between commits.
"""

from __future__ import annotations

from collections.abc import Sequence

from tinsmith.store.rows import SizeRow
from tinsmith.store.schema import Migration
from tinsmith.store.sqlite import MEMORY, SqliteStore
from tinsmith.store.threads import Task

_SIZE = "SELECT page_count * page_size AS size_bytes FROM pragma_page_count, pragma_page_size"


class MemoryStore(SqliteStore):
    """Rows in memory only."""

    def __init__(self, *, max_bytes: int | None = None, migrations: Sequence[Migration] | None = None) -> None:
        super().__init__(MEMORY, max_bytes=max_bytes, readers=0, migrations=migrations)

    async def size_bytes(self) -> int:
        rows: list[SizeRow] = await self._read(Task([(_SIZE, ())], SizeRow, self._future(), is_read=True))
        return rows[0].size_bytes

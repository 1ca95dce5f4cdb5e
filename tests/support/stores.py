"""Opening stores in tests: each kind in an empty place of its own."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any, TypeAlias, TypeVar

from tinsmith.store.memory import MemoryStore
from tinsmith.store.postgres import PostgresStore
from tinsmith.store.sqlite import SqliteStore

AnyStore: TypeAlias = SqliteStore | PostgresStore
MakeStore: TypeAlias = Callable[..., AnyStore]
"""Makes a store on the test's database; called again, it makes another on the same one (memory: on a new one)."""

ResultT = TypeVar("ResultT")


def memory_stores() -> MakeStore:
    return MemoryStore


def sqlite_stores(folder: Path) -> MakeStore:
    return lambda **options: SqliteStore(folder / "tinsmith.db", **options)


def postgres_stores(dsn: str) -> MakeStore:
    return lambda **options: PostgresStore(dsn, **options)


def run(make_store: MakeStore, scenario: Callable[[Any], Awaitable[ResultT]], **options: Any) -> ResultT:
    """Open a store, let the scenario use it, close it; 60 s are enough for any."""

    async def main() -> ResultT:
        store = make_store(**options)
        await store.open()
        try:
            return await scenario(store)
        finally:
            await store.close()

    async def bounded() -> ResultT:
        return await asyncio.wait_for(main(), 60)

    return asyncio.run(bounded())

"""From a URL or a path to a store.

| Given | Store |
| --- | --- |
| `memory:` | in memory, lost at exit |
| `postgresql://...` or `postgres://...` | PostgreSQL |
| `sqlite:///relative` or `sqlite:////absolute` | SQLite |
| anything without a scheme | SQLite at that path |
"""

from __future__ import annotations

import re
from pathlib import Path
from urllib.parse import unquote

from tinsmith.errors import InvalidInputError, StoreError
from tinsmith.store.base import Store

_SCHEME = re.compile(r"\A([A-Za-z][A-Za-z0-9+.-]+):")


def open_store(url_or_path: str | Path) -> Store:
    """Return the store that a URL or a path names; `await store.open()` connects it."""
    text = str(url_or_path)
    match = _SCHEME.match(text) if isinstance(url_or_path, str) else None
    scheme = match[1].lower() if match else None
    if scheme == "memory":
        from tinsmith.store.memory import MemoryStore

        return MemoryStore()
    if scheme in ("postgresql", "postgres"):
        return _postgres_store(text)
    if scheme in (None, "sqlite"):
        from tinsmith.store.sqlite import SqliteStore

        return SqliteStore(_path(text) if scheme else text)
    raise InvalidInputError(
        f"database: {scheme}: is not supported; use a path, sqlite:///path, postgresql://... or memory:",
        field="database",
    )


def _postgres_store(dsn: str) -> Store:
    try:
        from tinsmith.store.postgres import PostgresStore
    except ImportError as error:
        raise StoreError(f"a PostgreSQL database needs psycopg ({error}): pip install 'tinsmith[postgres]'") from error
    return PostgresStore(dsn)


def _path(url: str) -> str:
    path = url[len("sqlite:") :]
    if not path.startswith("///") or len(path) == 3:
        raise InvalidInputError(
            f"database: {url!r} does not name a file; use sqlite:///relative/path or sqlite:////absolute/path",
            field="database",
        )
    return unquote(path[3:])

"""`tinsmith key`: create, list and revoke API keys, directly in a server's database."""

from __future__ import annotations

import asyncio
import json
import os
import time
from collections.abc import Awaitable, Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, TypeVar

import click

from tinsmith.cli.output import echo, formatted, print_json, print_table, wants_json
from tinsmith.cli.server.serve import NEEDS_SERVER, warn_of_shown_secrets
from tinsmith.config import ServerConfig
from tinsmith.errors import TinkerError

T = TypeVar("T")

_DAY_S = 86_400


@click.group()
def key() -> None:
    """Create, list and revoke a server's API keys.

    Run these on the server's machine: they open its database, and the server need not be running.
    """


_data_dir = click.option(
    "--data-dir",
    type=click.Path(path_type=Path, file_okay=False),
    help="The server's data directory.  [default: ~/.local/share/tinsmith]",
)
_database = click.option("--database", metavar="URL", help="The server's database, if it is not in the data directory.")


@key.command()
@click.argument("name")
@click.option(
    "--org",
    default="local",
    show_default=True,
    help="Organisation of the key; organisations cannot see each other's data.",
)
@click.option("--user", default=None, help="User of the key.  [default: NAME; in the organisation local: local]")
@click.option("--email", help="Email address that `tinsmith auth whoami` shows.")
@click.option("--project", help="Restrict the key to this project.")
@click.option(
    "--scope",
    "scopes",
    multiple=True,
    help="What the key may do: all, train, sample, read, admin; repeatable.  [default: all]",
)
@click.option("--note", default="", help="Note to yourself.")
@click.option(
    "--expires-days",
    type=click.FloatRange(min=0, min_open=True),
    metavar="X",
    help="Days until the key expires.  [default: never]",
)
@click.option("--requests-per-minute", type=click.IntRange(min=1), metavar="N", help="Rate limit.  [default: none]")
@click.option("--tokens-per-day", type=click.IntRange(min=1), metavar="N", help="Token limit.  [default: none]")
@_data_dir
@_database
@formatted
def create(name: str, org: str, user: str | None, **options: Any) -> None:
    """Create a key. It is shown only once; the server stores a digest."""
    days = options.pop("expires_days")
    data_dir, database = options.pop("data_dir"), options.pop("database")
    now = time.time()

    async def make(store: Any) -> Any:
        from tinsmith.server.auth.keys import create_key

        return await create_key(
            store,
            name=name,
            now=now,
            org=org,
            user=user or ("local" if org == "local" else name),
            scopes=options.pop("scopes") or ("all",),
            expires_at=now + days * _DAY_S if days is not None else None,
            **options,
        )

    made = _with_store(data_dir, database, make)
    if wants_json():
        print_json({"key_id": made.row.key_id, "key": made.key, "name": name, "org": org})
        return
    echo(made.key)
    echo(f"created key {made.row.key_id} ({name}, organisation {org}); it is not shown again", err=True)


@key.command(name="list")
@_data_dir
@_database
@formatted
def list_keys(data_dir: Path | None, database: str | None) -> None:
    """List keys with their limits and what is left of these; only a hint of each key is shown.

    Tokens are counted per user, from midnight UTC, when requests finish.
    """

    async def read(store: Any) -> Any:
        from tinsmith.store.rows import KeyRow

        rows = await store.read(KeyRow, "keys")
        return [(row, await _tokens_left(store, row)) for row in rows]

    found = _with_store(data_dir, database, read)
    if wants_json():
        shown = [{**row.parameters(), "tokens_left_today": left} for row, left in found]
        print_json({"keys": [{name: value for name, value in row.items() if name != "digest"} for row in shown]})
        return
    columns = ("Key ID", "Name", "Hint", "Org", "User", "Scopes", "Created", "Expires", "State", "Per Minute")
    print_table((*columns, "Tokens Left Today"), [_cells(row, left) for row, left in found])


async def _tokens_left(store: Any, row: Any) -> int | None:
    """Return what is left of a key's daily tokens; None if it has no such limit."""
    from tinsmith.store.rows import CountRow

    if row.tokens_per_day is None:
        return None
    midnight = int(time.time() // _DAY_S) * _DAY_S // 3600
    used: list[CountRow] = await store.read(
        CountRow, "tokens_of_user", org_id=row.org_id, user_id=row.user_id, since_hour=midnight
    )
    return max(0, int(row.tokens_per_day) - used[0].count)


def _cells(row: Any, left: int | None) -> tuple[Any, ...]:
    state = "revoked" if row.revoked_at is not None else "expired" if _is_over(row.expires_at) else "active"
    scopes = ", ".join(json.loads(row.scopes))
    return (
        row.key_id, row.name, row.hint, row.org_id, row.user_id, scopes, _moment(row.created_at),
        _moment(row.expires_at), state, row.requests_per_minute,
        f"{left} of {row.tokens_per_day}" if left is not None else None,
    )  # fmt: skip


@key.command()
@click.argument("key_id", type=int)
@_data_dir
@_database
def revoke(key_id: int, data_dir: Path | None, database: str | None) -> None:
    """Revoke a key. A running server rejects it within two seconds."""

    async def end(store: Any) -> int:
        from tinsmith.store.base import statement

        touched: int = await store.write(statement("revoke_key", key_id=key_id, revoked_at=time.time()))
        return touched

    if not _with_store(data_dir, database, end):
        raise click.ClickException(f"no active key has the ID {key_id}; see: tinsmith key list")
    echo(f"revoked key {key_id}")


def _with_store(data_dir: Path | None, database: str | None, act: Callable[[Any], Awaitable[T]]) -> T:
    warn_of_shown_secrets(None, database)
    try:
        config = ServerConfig.from_env(os.environ, data_dir=data_dir, database=database)
        from tinsmith.store.open import open_store
    except ImportError as error:
        raise click.ClickException(f"{NEEDS_SERVER} ({error})") from None
    except TinkerError as error:
        raise click.ClickException(str(error)) from None

    async def run() -> T:
        store = open_store(config.database_url)
        await store.open()
        try:
            return await act(store)
        finally:
            await store.close()

    try:
        return asyncio.run(run())
    except TinkerError as error:
        raise click.ClickException(str(error)) from None


def _is_over(moment: float | None) -> bool:
    return moment is not None and moment <= time.time()


def _moment(seconds: float | None) -> datetime | None:
    return datetime.fromtimestamp(seconds, UTC) if seconds is not None else None

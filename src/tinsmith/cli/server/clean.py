"""`tinsmith clean`: show what is stored on this machine by kind, and delete it by choice.

Deleting locks the data directory as a server does, so nothing is deleted under a running engine.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click

from tinsmith.cli.connection import confirmed, reported
from tinsmith.cli.output import echo, formatted, plural, print_json, print_table, size, wants_json
from tinsmith.cli.server.serve import NEEDS_SERVER
from tinsmith.cli.server.storage import KINDS, data_dir_option, stored
from tinsmith.config import ServerConfig

DELETABLE = tuple(dict.fromkeys(choice for _, choice in KINDS.values() if choice is not None))


@dataclass(frozen=True, slots=True)
class Doomed:
    """What is to be deleted of one choice: the places, and what they hold."""

    choice: str
    places: tuple[Path, ...]
    size_bytes: int
    says: str
    kept: frozenset[str] = frozenset()
    """Sessions that are left alone."""


@click.command()
@click.argument("choices", nargs=-1, metavar="[KIND]...", type=click.Choice(DELETABLE))
@data_dir_option
@click.option("--database", metavar="URL", help="The server's database, if it is not in the data directory.")
@click.option("--dry-run", is_flag=True, help="Show what would be deleted, and delete nothing.")
@click.option("-y", "--yes", is_flag=True, help="Do not ask for confirmation.")
@formatted
@reported
def clean(choices: tuple[str, ...], data_dir: Path | None, database: str | None, dry_run: bool, yes: bool) -> None:
    """Show what is stored on this machine, or delete the given kinds of it.

    \b
    models       base models that were downloaded and converted
    caches       compiled kernels, adapters swapped to disk
    runs         snapshots, samplers and loaded weights of runs that are over
    checkpoints  all saved weights
    traces       exported traces of sessions
    uploads      parts of unfinished imports

    Models and caches are made again when they are needed. Runs that a program can still continue are kept. To delete
    single runs or checkpoints: tinsmith run delete, tinsmith checkpoint delete. Nothing is deleted while a server uses
    the data directory; to stop the local engine: tinsmith stop.
    """
    config = ServerConfig.from_env(os.environ, data_dir=data_dir, database=database)
    models_dir = config.models_dir or config.data_dir / "models"
    if not choices:
        _show(stored(config.data_dir, models_dir), config.data_dir, models_dir)
        return
    from tinsmith.client.connection.local_engine import check_platform

    check_platform()
    try:
        from tinsmith.server.process import sole_user
    except ImportError as error:
        raise click.ClickException(f"{NEEDS_SERVER} ({error})") from None

    if not config.data_dir.is_dir():
        raise click.ClickException(f"{config.data_dir} does not exist: nothing is stored there")
    with sole_user(config.data_dir):
        doomed = asyncio.run(_plan(config, models_dir, list(dict.fromkeys(choices))))
        _announce(doomed)
        if not dry_run and any(each.size_bytes for each in doomed):
            confirmed(f"Delete {size(sum(each.size_bytes for each in doomed))} permanently?", yes)
            asyncio.run(_delete(config, doomed))
    _report(doomed, dry_run)


def _show(sizes: dict[str, int], data_dir: Path, models_dir: Path) -> None:
    total = sum(sizes.values())
    if wants_json():
        print_json({"data_dir": data_dir, "models_dir": models_dir, "stored": sizes, "total_bytes": total})
        return
    elsewhere = "" if models_dir.is_relative_to(data_dir) else f" and {models_dir}"
    rows = [
        (kind, holds, size(sizes[kind]), f"tinsmith clean {choice}" if choice else "-")
        for kind, (holds, choice) in KINDS.items()
    ]
    print_table(("Kind", "Holds", "Size", "Delete With"), rows, title=f"{size(total)} in {data_dir}{elsewhere}")


async def _plan(config: ServerConfig, models_dir: Path, choices: list[str]) -> list[Doomed]:
    """Return what is to be deleted; changes nothing."""
    from tinsmith.engine.cpu.compile import NOTE, kernel_files

    found = []
    for choice in choices:
        if choice == "runs":
            found.append(await _ended_runs(config))
        elif choice == "models":
            found.append(_made_models(models_dir))
        elif choice == "caches":
            kernels = kernel_files()
            places = [*kernels, *(path for path in (models_dir / NOTE, config.data_dir / "spool") if path.exists())]
            found.append(_doomed(choice, places, plural(len(kernels), "compiled file")))
        else:
            places = sorted((config.data_dir / choice).glob("*"))
            found.append(_doomed(choice, places, "all of them" if places else "none"))
    return found


def _doomed(choice: str, places: list[Path], says: str, kept: frozenset[str] = frozenset()) -> Doomed:
    from tinsmith.server.data_dir import tree_bytes

    total = sum(tree_bytes(path) if path.is_dir() else path.stat().st_size for path in places)
    return Doomed(choice, tuple(places), total, says, kept)


def _made_models(models_dir: Path) -> Doomed:
    from tinsmith.engine.models.sources import made_in

    places = made_in(models_dir)
    own = [path.name for path in models_dir.glob("*") if path.is_dir() and path not in places]
    kept = f"; not made by tinsmith, so kept: {', '.join(own)}" if own else ""
    return _doomed("models", places, f"{', '.join(path.name for path in places) or 'none'}{kept}")


async def _ended_runs(config: ServerConfig) -> Doomed:
    from tinsmith.server.data_dir import run_places, session_of
    from tinsmith.server.ops.offline import places_of_ended, sessions_to_keep

    if not run_places(config.data_dir):
        return Doomed("runs", (), 0, "none")
    async with _opened(config) as (store, _):
        kept = await sessions_to_keep(store, time.time(), config.result_grace_s)
    places = places_of_ended(config.data_dir, kept)
    says = f"files of {plural(len({session_of(place) for place in places}), 'session')}"
    waiting = {session_of(place) for place in run_places(config.data_dir)} & kept
    if waiting:
        says += (
            f"; kept: those of {plural(len(waiting), 'session')} whose programs can still come back and continue "
            "(to end one: tinsmith session finish)"
        )
    return _doomed("runs", places, says, kept)


@asynccontextmanager
async def _opened(config: ServerConfig) -> AsyncIterator[tuple[Any, Any]]:
    """Open the database that belongs to the data directory; yields the `Store` and the `Files`."""
    from tinsmith.server.data_dir import Files
    from tinsmith.server.ops.installation import check_installation
    from tinsmith.store.open import open_store

    store = open_store(config.database_url)
    await check_installation(config.data_dir, store)
    await store.open(alone=True)
    try:
        yield store, Files(config.data_dir, config.min_free_bytes)
    finally:
        await store.close()


async def _delete(config: ServerConfig, doomed: list[Doomed]) -> None:
    from tinsmith.server.data_dir import remove_tree
    from tinsmith.server.ops.offline import delete_checkpoints, delete_ended

    for each in doomed:
        if not each.places:
            continue
        if each.choice in ("runs", "checkpoints"):
            async with _opened(config) as (store, files):
                if each.choice == "runs":
                    await delete_ended(store, files, each.kept, time.time())
                else:
                    await delete_checkpoints(store, files, time.time())
        for place in each.places:
            if place.is_dir():
                remove_tree(place)
            else:
                place.unlink(missing_ok=True)


def _announce(doomed: list[Doomed]) -> None:
    if not wants_json():
        for each in doomed:
            echo(f"{each.choice}: {size(each.size_bytes)} ({each.says})", err=True)


def _report(doomed: list[Doomed], dry_run: bool) -> None:
    sizes: dict[str, Any] = {each.choice: each.size_bytes for each in doomed}
    total = sum(sizes.values())
    if wants_json():
        print_json({"would_delete" if dry_run else "deleted": sizes, "total_bytes": total})
    elif not total:
        echo("nothing to delete")
    else:
        echo(f"{size(total)} would be deleted" if dry_run else f"deleted {size(total)}")

"""`tinsmith checkpoint delete`: by path, or by run and filters."""

from __future__ import annotations

from collections.abc import Iterable
from datetime import UTC, datetime
from typing import Any

import click

from tinsmith.cli.connection import checkpoint_path, confirmed, connected, rest_client
from tinsmith.cli.output import ago, console, echo, formatted, plural, print_json, size, wants_json

PARALLEL = 32
"""Deletions in flight at once."""
KINDS = ("weights", "sampler_weights", "external_weights")


def _moment(_context: click.Context, parameter: click.Parameter, value: str | None) -> datetime | None:
    if value is None:
        return None
    try:
        moment = datetime.fromisoformat(value)
    except ValueError:
        raise click.BadParameter(
            f"{value!r} is not an ISO 8601 date or time, such as 2027-01-31 or 2027-01-31T18:00:00Z"
        ) from None
    return moment.replace(tzinfo=UTC) if moment.tzinfo is None else moment


@click.command()
@click.argument("paths", nargs=-1, callback=checkpoint_path)
@click.option("--run-id", help="Delete the checkpoints of this training run that match the filters.")
@click.option("--type", "kind", type=click.Choice(KINDS), help="Filter: only this type.")
@click.option(
    "--before", callback=_moment, metavar="TIME", help="Filter: only those saved before this time (ISO 8601, UTC)."
)
@click.option("--after", callback=_moment, metavar="TIME", help="Filter: only those saved at or after this time.")
@click.option("--dry-run", is_flag=True, help="List what would be deleted, and delete nothing.")
@click.option("-y", "--yes", is_flag=True, help="Do not ask for confirmation.")
@formatted
@connected
def delete(
    paths: tuple[str, ...],
    run_id: str | None,
    kind: str | None,
    before: datetime | None,
    after: datetime | None,
    dry_run: bool,
    yes: bool,
) -> None:
    """Delete checkpoints permanently: those at PATHS, or those of a run.

    \b
    tinsmith checkpoint delete tinker://RUN/weights/NAME
    tinsmith checkpoint delete --run-id RUN --type weights --before 2027-01-31
    """
    if bool(paths) == bool(run_id):
        raise click.UsageError("pass either checkpoint paths or --run-id RUN")
    if (kind or before or after) and not run_id:
        raise click.UsageError("--type, --before and --after need --run-id")
    with rest_client() as rest:
        if run_id:
            found = [
                item
                for item in rest.list_checkpoints(run_id).result().checkpoints
                if _is_meant(item, kind, before, after)
            ]
            chosen = [item.tinker_path for item in found]
            _show(_described(found))
        else:
            chosen = list(dict.fromkeys(paths))
            _show(chosen)
        if dry_run:
            _report_trial(chosen)
            return
        if chosen:
            confirmed(f"Delete {plural(len(chosen), 'checkpoint')} permanently?", yes)
        failed = _delete(rest, chosen)
    _report(len(chosen) - len(failed), failed)


def _is_meant(item: Any, kind: str | None, before: datetime | None, after: datetime | None) -> bool:
    time = item.time if item.time.tzinfo is not None else item.time.replace(tzinfo=UTC)
    return (
        (kind is None or item.checkpoint_id.startswith(f"{kind}/") or f"/{kind}/" in item.tinker_path)
        and (before is None or time < before)
        and (after is None or time >= after)
    )


def _described(found: list[Any]) -> list[str]:
    lines = [f"{item.tinker_path} ({size(item.size_bytes)}, {ago(item.time)})" for item in found]
    total = sum(item.size_bytes or 0 for item in found)
    return [*lines, f"{len(found)} checkpoints, {size(total)} in total"] if len(found) > 1 else lines


def _show(lines: Iterable[str]) -> None:
    if not wants_json():
        for line in lines:
            echo(line, err=True)


def _delete(rest: Any, paths: list[str]) -> list[tuple[str, str]]:
    """Delete the checkpoints; return the paths that could not be deleted, with the reason."""
    from collections import deque

    from rich.progress import Progress

    from tinsmith.cli.connection import explained
    from tinsmith.errors import TinkerError

    failed: list[tuple[str, str]] = []
    waiting, under_way = deque(paths), deque[tuple[str, Any]]()
    terminal = console(stderr=True)
    with Progress(console=terminal, transient=True, disable=wants_json() or not terminal.is_terminal) as bar:
        task = bar.add_task("deleting", total=len(paths))
        while waiting or under_way:
            while waiting and len(under_way) < PARALLEL:
                path = waiting.popleft()
                under_way.append((path, rest.delete_checkpoint_from_tinker_path(path)))
            path, future = under_way.popleft()
            try:
                future.result()
            except TinkerError as error:
                failed.append((path, explained(error)))
            bar.advance(task)
    return failed


def _report_trial(paths: list[str]) -> None:
    if wants_json():
        print_json({"would_delete": paths})
    else:
        echo(f"{plural(len(paths), 'checkpoint')} would be deleted")


def _report(deleted: int, failed: list[tuple[str, str]]) -> None:
    if wants_json():
        print_json(
            {"deleted_count": deleted, "failed": [{"tinker_path": path, "error": error} for path, error in failed]}
        )
    else:
        echo(f"deleted {plural(deleted, 'checkpoint')}")
        for path, error in failed:
            echo(f"not deleted: {path}: {error}", err=True)
    if failed:
        click.get_current_context().exit(1)

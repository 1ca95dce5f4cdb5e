"""What commands print: a table for people or JSON for programs, chosen by `--format`.

`tinsmith --format json run list` and `tinsmith run list --format json` mean the same; the flag nearer to the command
wins.
Does not know: where the data comes from.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import UTC, datetime
from typing import Any, TypeVar

import click

F = TypeVar("F", bound=Callable[..., Any])

FORMATS = ("table", "json")
_KEY = "tinsmith.format"


def formatted(command: F) -> F:
    """Give a command `--format`; it is kept in the context, where `wants_json` finds it."""
    return click.option(
        "-f",
        "--format",
        type=click.Choice(FORMATS),
        expose_value=False,
        callback=_keep,
        help="A table for people or JSON for programs.  [default: table]",
    )(command)


def _keep(context: click.Context, _parameter: click.Parameter, value: str | None) -> None:
    if value is not None:
        context.meta[_KEY] = value


def wants_json() -> bool:
    """Was JSON asked for, here or before the command's name?"""
    return bool(click.get_current_context().meta.get(_KEY, "table") == "json")


def print_json(value: Any) -> None:
    """Plain values, indented by two; moments and paths as text."""
    click.echo(json.dumps(value, indent=2, default=str))


def print_table(columns: Sequence[str], rows: Iterable[Sequence[Any]], *, title: str | None = None) -> None:
    """A table as wide as its cells when piped, as wide as the terminal otherwise."""
    from rich.table import Table

    table = Table()
    for number, column in enumerate(columns):
        table.add_column(column, overflow="fold", no_wrap=number == 0)  # ids are to be copied: never cut
    for row in rows:
        table.add_row(*(cell(value) for value in row))
    _print(table, title)


def print_properties(values: Mapping[str, Any], *, title: str | None = None) -> None:
    """Names on the left, values on the right."""
    from rich.table import Table

    table = Table()
    table.add_column("Property", no_wrap=True)
    table.add_column("Value", overflow="fold")
    for name, value in values.items():
        table.add_row(name, cell(value))
    _print(table, title)


def _print(table: Any, title: str | None) -> None:
    """The title stands above the table, so that it is not broken to the table's width."""
    terminal = console()
    if title is not None:
        terminal.print(title)
    if table.row_count or title is None:
        terminal.print(table)


def console(*, stderr: bool = False) -> Any:
    """A terminal that neither colours numbers nor reads markup in data; piped, its lines are not broken."""
    import sys

    from rich.console import Console

    stream = sys.stderr if stderr else sys.stdout
    width = None if stream.isatty() else 200
    return Console(file=stream, highlight=False, markup=False, emoji=False, width=width, soft_wrap=False)


def cell(value: Any) -> str:
    """One value as people read it."""
    if value is None:
        return "-"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, datetime):
        return value.astimezone(UTC).strftime("%Y-%m-%d %H:%M")
    if isinstance(value, float):
        return f"{value:.4g}"
    return str(value)


def ago(moment: datetime | None, now: datetime | None = None) -> str:
    """How long something is past, or ahead."""
    if moment is None:
        return "-"
    seconds = ((now or datetime.now(UTC)) - moment.astimezone(UTC)).total_seconds()
    return f"{duration(seconds)} ago" if seconds >= 0 else f"in {duration(-seconds)}"


def duration(seconds: float) -> str:
    """A span in its largest whole unit."""
    for unit, length in (("day", 86_400), ("hour", 3600), ("minute", 60)):
        if seconds >= length:
            count = int(seconds // length)
            return f"{count} {unit}{'' if count == 1 else 's'}"
    return f"{seconds:.0f} s" if seconds >= 1 else f"{seconds * 1000:.0f} ms"


def size(count: int | None) -> str:
    """Bytes as people read them."""
    if count is None:
        return "-"
    amount = float(count)
    for unit in ("B", "kB", "MB", "GB"):
        if amount < 1000:
            return f"{amount:.0f} {unit}" if unit == "B" else f"{amount:.1f} {unit}"
        amount /= 1000
    return f"{amount:.1f} TB"

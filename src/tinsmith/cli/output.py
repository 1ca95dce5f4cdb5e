"""What commands print: tables, or JSON with `--format json`; and lists that a server returns page by page.

All text for people goes through this module, because much of it comes from others: names, notes, a server's errors.
Control characters, which a terminal would act on, are replaced (`printable.py`), and data is never read as markup.

`tinsmith --format json run list` and `tinsmith run list --format json` mean the same; if both are given, the option
nearer to the command wins.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import UTC, datetime
from typing import Any, TypeVar

import click

from tinsmith.text.printable import one_line, printable

F = TypeVar("F", bound=Callable[..., Any])

FORMATS = ("table", "json")
_KEY = "tinsmith.format"


def formatted(command: F) -> F:
    """Give a command `--format`, stored in the click context for `wants_json` to find."""
    return click.option(
        "-f",
        "--format",
        type=click.Choice(FORMATS),
        expose_value=False,
        callback=_keep,
        help="Output format.  [default: table]",
    )(command)


def _keep(context: click.Context, _parameter: click.Parameter, value: str | None) -> None:
    if value is not None:
        context.meta[_KEY] = value


def wants_json() -> bool:
    """Return whether `--format json` was given, before or after the command's name."""
    return bool(click.get_current_context().meta.get(_KEY, "table") == "json")


def echo(text: object = "", *, err: bool = False, nl: bool = True) -> None:
    """Print text with its control characters replaced."""
    click.echo(printable(str(text)), err=err, nl=nl)


def echo_exactly(text: str) -> None:
    """Print text unchanged to a file or pipe; on a terminal, control characters are replaced."""
    import sys

    click.echo(printable(text) if sys.stdout.isatty() else text)


def print_json(value: Any) -> None:
    """Print plain values as indented JSON; times and paths become strings."""
    click.echo(json.dumps(value, indent=2, default=str))


def print_table(columns: Sequence[str], rows: Iterable[Sequence[Any]], *, title: str | None = None) -> None:
    """Print a table: as wide as the terminal, or as wide as its cells in a pipe."""
    from rich.table import Table

    table = Table()
    for number, column in enumerate(columns):
        table.add_column(column, overflow="fold", no_wrap=number == 0)  # IDs get copied: never cut them
    for row in rows:
        table.add_row(*(cell(value) for value in row))
    _print(table, title)


def print_properties(values: Mapping[str, Any], *, title: str | None = None) -> None:
    """Print names on the left and values on the right."""
    from rich.table import Table

    table = Table()
    table.add_column("Property", no_wrap=True)
    table.add_column("Value", overflow="fold")
    for name, value in values.items():
        table.add_row(name, cell(value))
    _print(table, title)


def _print(table: Any, title: str | None) -> None:
    """Print the title as a line above the table, where rich does not wrap it to the table's width."""
    terminal = console()
    if title is not None:
        terminal.print(one_line(title))
    if table.row_count or title is None:
        terminal.print(table)


def console(*, stderr: bool = False, markup: bool = False) -> Any:
    """Return a rich console that neither highlights numbers nor reads markup in data, and does not wrap in a pipe.

    With `markup`, a command's own text may contain markup, and data inside it must go through `quoted`.
    """
    import sys

    from rich.console import Console
    from rich.segment import Segment

    class Terminal(Console):
        """A console that sends no control characters except those of the layout itself."""

        def render(self, renderable: Any, options: Any = None) -> Iterable[Segment]:
            for segment in super().render(renderable, options):
                yield segment if segment.control else Segment(printable(segment.text), segment.style)

    stream = sys.stderr if stderr else sys.stdout
    width = None if stream.isatty() else 200
    return Terminal(file=stream, highlight=False, markup=markup, emoji=False, width=width, soft_wrap=False)


def quoted(text: str) -> str:
    """Escape data for use inside text with markup."""
    from rich.markup import escape

    return escape(one_line(text))


def cell(value: Any) -> str:
    """Format one value for a table."""
    if value is None:
        return "-"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, datetime):
        return value.astimezone(UTC).strftime("%Y-%m-%d %H:%M")
    if isinstance(value, float):
        return f"{value:.4g}"
    return one_line(str(value))


def ago(moment: datetime | None, now: datetime | None = None) -> str:
    """Format a time relative to now: "3 hours ago", "in 2 days"."""
    if moment is None:
        return "-"
    seconds = ((now or datetime.now(UTC)) - moment.astimezone(UTC)).total_seconds()
    return f"{duration(seconds)} ago" if seconds >= 0 else f"in {duration(-seconds)}"


def plural(count: int, noun: str) -> str:
    """Format a count with its noun: "1 run", "2 runs"."""
    return f"{count} {noun}{'' if count == 1 else 's'}"


def duration(seconds: float) -> str:
    """Format a duration in its largest whole unit."""
    for unit, length in (("day", 86_400), ("hour", 3600), ("minute", 60)):
        if seconds >= length:
            count = int(seconds // length)
            return plural(count, unit)
    return f"{seconds:.0f} s" if seconds >= 1 else f"{seconds * 1000:.0f} ms"


def size(count: int | None) -> str:
    """Format a number of bytes."""
    if count is None:
        return "-"
    amount = float(count)
    for unit in ("B", "kB", "MB", "GB"):
        if amount < 1000:
            return f"{amount:.0f} {unit}" if unit == "B" else f"{amount:.1f} {unit}"
        amount /= 1000
    return f"{amount:.1f} TB"


def limited(what: str) -> Callable[[F], F]:
    """Give a command `--limit`."""
    return click.option(
        "--limit",
        type=click.IntRange(min=0),
        metavar="N",
        default=20,
        show_default=True,
        help=f"Number of {what} to show; 0 shows all.",
    )


def fetch(
    page: Callable[[int, int], Any], items_of: Callable[[Any], list[Any]], limit: int, size: int
) -> tuple[list[Any], int | None]:
    """Return the first `limit` items, and the total if the server reports it; `page` takes a limit and an offset.

    A server may return fewer items per page than requested, so only an empty page or the total ends the list.
    """
    found: list[Any] = []
    total: int | None = None
    while limit == 0 or len(found) < limit:
        answer = page(size if limit == 0 else min(size, limit - len(found)), len(found))
        items = items_of(answer)
        found += items
        cursor = getattr(answer, "cursor", None)
        total = cursor.total_count if cursor is not None else None
        if not items or (total is not None and len(found) >= total):
            break
    return (found[:limit] if limit else found), total


def title(count: int, total: int | None, what: str) -> str:
    """Return a heading with the number of items shown and the number left out."""
    shown = plural(count, what) if count else f"No {what}s"
    if total is not None and total > count:
        return f"{shown} ({total - count} more; use --limit)"
    return shown

"""Lists that a server gives page by page, up to a limit. Does not know: what is listed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import click

F = TypeVar("F", bound=Callable[..., Any])


def limited(what: str) -> Callable[[F], F]:
    """Give a command `--limit`."""
    return click.option(
        "--limit",
        type=click.IntRange(min=0),
        default=20,
        show_default=True,
        help=f"How many {what} to show; 0 shows all.",
    )


def fetch(
    page: Callable[[int, int], Any], items_of: Callable[[Any], list[Any]], limit: int, size: int
) -> tuple[list[Any], int | None]:
    """The first items, and how many there are in all if the server says; `page` takes a limit and an offset.

    A server may give fewer at a time than were asked for: only an empty page, or its count, ends the list.
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
    """How many are shown, and how many are not."""
    shown = f"{count} {what}{'' if count == 1 else 's'}" if count else f"No {what}s"
    if total is not None and total > count:
        return f"{shown} ({total - count} more, see --limit)"
    return shown

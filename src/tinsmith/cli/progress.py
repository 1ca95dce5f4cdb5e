"""Progress of a loop: a bar in a terminal, a line every few steps elsewhere."""

from __future__ import annotations

from typing import Any, Self

MOST_LINES = 20
"""Lines that a loop prints where there is no bar, besides the first and the last."""


class ProgressView:
    """A context manager that shows finished steps on a rich console."""

    def __init__(self, console: Any, total: int, first: int = 0) -> None:
        self._console = console
        self._total = total
        self._first = first
        self._every = line_every(total)
        self._bar: Any = None
        self._task: Any = None

    def __enter__(self) -> Self:
        if self._console.is_terminal:
            from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

            self._bar = Progress(
                TextColumn("{task.fields[what]}", markup=False),
                BarColumn(bar_width=None),
                MofNCompleteColumn(),
                TextColumn("{task.fields[rest]}", markup=False),
                console=self._console,
                expand=True,
            )
            self._task = self._bar.add_task("", total=self._total, completed=self._first, what="...", rest="")
            self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._bar is not None:
            self._bar.stop()

    def step(self, number: int, what: str, rest: str) -> None:
        """Show that a step is done, with `what` to the left of the bar and `rest` to its right."""
        if self._bar is not None:
            self._bar.update(self._task, completed=number, what=what, rest=rest)
            return
        if number in (self._first + 1, self._total) or number % self._every == 0:
            self.note(f"step {number}/{self._total}  {what}  {rest}")

    def note(self, text: str) -> None:
        """Print a line above the bar."""
        self._console.print(text, soft_wrap=True, markup=False)


def line_every(total: int) -> int:
    """Return how many steps lie between two lines: the least of 1, 2, 5, 10, 20, 50, ... that gives `MOST_LINES`."""
    scale = 1
    while True:
        for step in (scale, 2 * scale, 5 * scale):
            if total <= step * MOST_LINES:
                return step
        scale *= 10


def duration(seconds: float) -> str:
    """Format a duration in one or two units."""
    whole = round(seconds)
    if whole < 100:
        return f"{whole} s"
    minutes, rest = divmod(whole, 60)
    if minutes < 100:
        return f"{minutes} min {rest:02d} s"
    return f"{minutes // 60} h {minutes % 60:02d} min"

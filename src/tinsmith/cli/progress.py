"""Progress of a loop: a bar in a terminal, a line every few seconds elsewhere."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, Self

LINE_EVERY_S = 5.0


class ProgressView:
    """A context manager that shows finished steps on a rich console."""

    def __init__(self, console: Any, total: int, first: int = 0, clock: Callable[[], float] = time.monotonic) -> None:
        self._console = console
        self._total = total
        self._first = first
        self._clock = clock
        self._printed_at: float | None = None
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
        now = self._clock()
        if self._printed_at is None or number == self._total or now - self._printed_at >= LINE_EVERY_S:
            self._printed_at = now
            self.note(f"step {number}/{self._total}  {what}  {rest}")

    def note(self, text: str) -> None:
        """Print a line above the bar."""
        self._console.print(text, soft_wrap=True, markup=False)


def duration(seconds: float) -> str:
    """Format a duration in one or two units."""
    whole = round(seconds)
    if whole < 100:
        return f"{whole} s"
    minutes, rest = divmod(whole, 60)
    if minutes < 100:
        return f"{minutes} min {rest:02d} s"
    return f"{minutes // 60} h {minutes % 60:02d} min"

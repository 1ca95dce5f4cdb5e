"""Curves: as characters for a terminal, as SVG, as one HTML page, and as PNG where matplotlib is installed.

Does not know: where the numbers come from.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path

from tinsmith.errors import InvalidInputError, TinkerError

BARS = "▁▂▃▄▅▆▇█"
DOTS = ((0x01, 0x02, 0x04, 0x40), (0x08, 0x10, 0x20, 0x80))
"""The dots of a braille character: two columns of four, from the top."""
BRAILLE = 0x2800
FORMATS = (".svg", ".html", ".png")


def sparkline(values: Sequence[float], width: int = 40) -> str:
    """The latest values as bars in one line."""
    shown = [value for value in values if math.isfinite(value)][-width:]
    if not shown:
        return ""
    low, span = min(shown), (max(shown) - min(shown)) or 1.0
    return "".join(BARS[min(len(BARS) - 1, int((value - low) / span * len(BARS)))] for value in shown)


def terminal_curve(values: Sequence[float], width: int = 72, height: int = 12) -> str:
    """Values over their positions, drawn with dots; the highest and the lowest stand at the left."""
    points = [(index, value) for index, value in enumerate(values) if math.isfinite(value)]
    if not points:
        return "(no finite values)"
    low, high = min(value for _, value in points), max(value for _, value in points)
    columns, rows = 2 * width, 4 * height
    cells = [[0] * width for _ in range(height)]
    before: tuple[int, int] | None = None
    for index, value in points:
        x = round(index * (columns - 1) / max(1, len(values) - 1))
        y = round((high - value) * (rows - 1) / ((high - low) or 1.0))
        for dot_x, dot_y in _between(before or (x, y), (x, y)):
            cells[dot_y // 4][dot_x // 2] |= DOTS[dot_x % 2][dot_y % 4]
        before = (x, y)
    names = [f"{high:.4g}", *[""] * (height - 2), f"{low:.4g}"]
    margin = max(map(len, names))
    lines = [
        f"{name:>{margin}} ┤{''.join(chr(BRAILLE + dots) for dots in row)}"
        for name, row in zip(names, cells, strict=True)
    ]
    last = str(len(values))
    return "\n".join([*lines, f"{'':>{margin}}  1{last:>{width - 1}}"])


def _between(start: tuple[int, int], end: tuple[int, int]) -> list[tuple[int, int]]:
    """The dots of a straight line."""
    count = max(abs(end[0] - start[0]), abs(end[1] - start[1]), 1)
    return [
        (
            round(start[0] + (end[0] - start[0]) * step / count),
            round(start[1] + (end[1] - start[1]) * step / count),
        )
        for step in range(count + 1)
    ]


def write_curves(path: Path, title: str, curves: Mapping[str, Sequence[float]]) -> None:
    """Curves over steps into a file, as its ending says."""
    kind = path.suffix.lower()
    if kind not in FORMATS:
        raise InvalidInputError(f"{path}: the name must end in {', '.join(FORMATS)}", field="output")
    if kind == ".svg" and len(curves) != 1:
        raise InvalidInputError(
            f"{path}: an SVG holds one curve; choose one with --metric, or write .html", field="output"
        )
    if kind == ".png":
        _write_png(path, title, curves)
        return
    drawn = {name: _svg(name, values) for name, values in curves.items()}
    text = next(iter(drawn.values())) + "\n" if kind == ".svg" else _page(title, drawn)
    path.write_text(text, encoding="utf-8")


def _svg(name: str, values: Sequence[float]) -> str:
    """The report's curve as a picture that stands alone."""
    from tinsmith.cli.report import curve_svg

    points = [(step, value) for step, value in enumerate(values, 1) if math.isfinite(value)]
    alone = '<svg xmlns="http://www.w3.org/2000/svg" font-family="sans-serif" font-size="12" '
    return curve_svg(name, points).replace("<svg ", alone, 1)


def _page(title: str, drawn: Mapping[str, str]) -> str:
    parts = "".join(f"<h2>{escape(name)}</h2>\n{picture}\n" for name, picture in drawn.items())
    return f"""<!doctype html>
<html lang="en"><meta charset="utf-8"><meta name="viewport" content="width=device-width">
<title>{escape(title)}</title>
<style>
body {{ font: 16px/1.5 system-ui, sans-serif; max-width: 60rem; margin: 2rem auto; padding: 0 1rem; color: #222; }}
svg {{ width: 100%; fill: #555; }}
@media (prefers-color-scheme: dark) {{ body {{ background: #181818; color: #ddd; }} svg {{ fill: #aaa; }} }}
</style>
<h1>{escape(title)}</h1>
{parts}</html>
"""


def _write_png(path: Path, title: str, curves: Mapping[str, Sequence[float]]) -> None:
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError:
        raise TinkerError(
            f"{path}: a PNG needs matplotlib (pip install matplotlib); .svg and .html need nothing"
        ) from None
    figure = Figure(figsize=(9, 3 * len(curves)), layout="constrained")
    FigureCanvasAgg(figure)
    figure.suptitle(title)
    for number, (name, values) in enumerate(curves.items(), start=1):
        axes = figure.add_subplot(len(curves), 1, number)
        axes.plot(range(1, len(values) + 1), values)
        axes.set_xlabel("step")
        axes.set_ylabel(name)
    figure.savefig(path)

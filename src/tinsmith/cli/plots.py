"""Curves: as characters for a terminal, and as files: SVG, one HTML page, PNG.

Does not know: where the numbers come from.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path

from tinsmith.cli.report import Points, curve_svg
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


def terminal_curve(curve: Points, width: int = 72, height: int = 12) -> str:
    """Values over steps, drawn with dots; the highest and the lowest stand at the left, the steps below."""
    points = [(step, value) for step, value in curve if math.isfinite(value)]
    if not points:
        return "(no finite values)"
    first, last = curve[0][0], curve[-1][0]
    low, high = min(value for _, value in points), max(value for _, value in points)
    columns, rows = 2 * width, 4 * height
    cells = [[0] * width for _ in range(height)]
    before: tuple[int, int] | None = None
    for step, value in points:
        x = round((step - first) * (columns - 1) / ((last - first) or 1.0))
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
    begin = f"{first:g}"
    return "\n".join([*lines, f"{'':>{margin}}  {begin}{f'{last:g}':>{width - len(begin)}}"])


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


def write_curves(path: Path, title: str, curves: Mapping[str, Points]) -> None:
    """Curves over steps into a file, as its ending says."""
    kind = path.suffix.lower()
    if kind not in FORMATS:
        raise InvalidInputError(f"{path}: the name must end in {', '.join(FORMATS)}", field="output")
    if kind == ".svg" and len(curves) != 1:
        raise InvalidInputError(
            f"{path}: an SVG holds one curve; choose one with --metric, or write .html", field="output"
        )
    try:
        path.write_bytes(_encoded(kind, title, curves))
    except OSError as error:
        raise TinkerError(f"{path} cannot be written: {error.strerror}") from error


def _encoded(kind: str, title: str, curves: Mapping[str, Points]) -> bytes:
    if kind == ".png":
        from tinsmith.cli.png import curves_png

        return curves_png(title, curves)
    drawn = {name: _svg(name, points) for name, points in curves.items()}
    text = next(iter(drawn.values())) + "\n" if kind == ".svg" else _page(title, drawn)
    return text.encode()


def _svg(name: str, curve: Points) -> str:
    """The report's curve as a picture that stands alone."""
    points = [(step, value) for step, value in curve if math.isfinite(value)]
    alone = '<svg xmlns="http://www.w3.org/2000/svg" font-family="sans-serif" font-size="12" '
    drawn = (
        curve_svg(name, points)
        or f'<svg viewBox="0 0 300 40"><text x="8" y="24">{escape(name)}: no values</text></svg>'
    )
    return drawn.replace("<svg ", alone, 1)


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

"""Draw curves: as characters in a terminal, or into an SVG, HTML or PNG file.

SVG and HTML need nothing but this module. PNG is drawn by matplotlib, which the extra `tinsmith[plot]` installs.
"""

from __future__ import annotations

import io
import math
from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any

from tinsmith.cli.report import Points, curve_svg
from tinsmith.errors import InvalidInputError, TinkerError

BARS = "▁▂▃▄▅▆▇█"
DOTS = ((0x01, 0x02, 0x04, 0x40), (0x08, 0x10, 0x20, 0x80))
"""The bits of a braille character's dots: two columns of four, from the top."""
BRAILLE = 0x2800
"""The braille character without dots; adding the bits of `DOTS` sets them."""
FORMATS = (".svg", ".html", ".png")
COLOUR = "#b4541a"
"""The line of a curve, as in `report.curve_svg`."""


def sparkline(values: Sequence[float], width: int = 40) -> str:
    """Return the last `width` finite values as one line of bars."""
    shown = [value for value in values if math.isfinite(value)][-width:]
    if not shown:
        return ""
    low, span = min(shown), (max(shown) - min(shown)) or 1.0
    return "".join(BARS[min(len(BARS) - 1, int((value - low) / span * len(BARS)))] for value in shown)


def terminal_curve(curve: Points, width: int = 72, height: int = 12) -> str:
    """Draw values over steps with braille dots; the axes name the highest and lowest value, the first and last step.

    Each character cell holds two by four dots, so that the curve has eight times the resolution of the text.
    """
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
    """Return the dots of a straight line."""
    count = max(abs(end[0] - start[0]), abs(end[1] - start[1]), 1)
    return [
        (
            round(start[0] + (end[0] - start[0]) * step / count),
            round(start[1] + (end[1] - start[1]) * step / count),
        )
        for step in range(count + 1)
    ]


def check_output(path: Path) -> None:
    """Raise if a file's extension is none that can be drawn, or needs a package that is not installed."""
    kind = path.suffix.lower()
    if kind not in FORMATS:
        raise InvalidInputError(f"{path}: the file name must end in {', '.join(FORMATS)}", field="output")
    if kind == ".png":
        _figure_class()


def _figure_class() -> Any:
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise TinkerError(
            "a .png file needs matplotlib, which is not installed: pip install 'tinsmith[plot]' (.svg and .html need "
            "nothing)"
        ) from None
    return Figure


def write_curves(path: Path, title: str, curves: Mapping[str, Points]) -> None:
    """Write curves to a file, in the format that its extension names."""
    check_output(path)
    kind = path.suffix.lower()
    if kind == ".svg" and len(curves) != 1:
        raise InvalidInputError(
            f"{path}: an SVG file holds one curve, got {len(curves)}; choose one with --metric, or write .html",
            field="output",
        )
    try:
        path.write_bytes(_encoded(kind, title, curves))
    except OSError as error:
        raise TinkerError(f"cannot write {path}: {error.strerror}") from error


def _encoded(kind: str, title: str, curves: Mapping[str, Points]) -> bytes:
    if kind == ".png":
        return _png(title, curves)
    drawn = {name: _svg(name, points) for name, points in curves.items()}
    text = next(iter(drawn.values())) + "\n" if kind == ".svg" else _page(title, drawn)
    return text.encode()


def columns_of(curve: Points) -> tuple[list[float], list[float]]:
    """Return the steps and the values of a curve, without the values that are not finite."""
    points = [(step, value) for step, value in curve if math.isfinite(value)]
    return [step for step, _ in points], [value for _, value in points]


def _png(title: str, curves: Mapping[str, Points]) -> bytes:
    """Draw the curves one below the other."""
    # A Figure of its own needs no display, unlike matplotlib.pyplot. The size is in inches.
    figure = _figure_class()(figsize=(9, 0.6 + 3 * len(curves)), layout="constrained")
    figure.suptitle(title, parse_math=False)  # a "$" in a name is a "$", not a formula
    rows = figure.subplots(len(curves), squeeze=False)[:, 0]
    for axes, (name, curve) in zip(rows, curves.items(), strict=True):
        steps, values = columns_of(curve)
        axes.plot(steps, values, color=COLOUR, marker="o" if len(steps) == 1 else None)
        axes.set_title(name, loc="left", parse_math=False)
        axes.set_xlabel("step" if steps else "no finite values")
        axes.grid(alpha=0.3)
    picture = io.BytesIO()
    figure.savefig(picture, format="png", dpi=120)
    return picture.getvalue()


def _svg(name: str, curve: Points) -> str:
    """Return the report's curve as an SVG document of its own."""
    points = list(zip(*columns_of(curve), strict=True))
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

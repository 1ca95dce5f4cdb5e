"""The HTML report of a run: figures, curves as SVG, answers before and after. One file, without scripts."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from html import escape

WIDTH, HEIGHT = 720, 300
LEFT, RIGHT, TOP, BOTTOM = 64, 16, 34, 48
"""The margins of a curve, where its axes are labelled."""
COLOURS = ("#b4541a", "#2f7fc1")
MARKED = 60
"""Up to this many points, each one is marked and shows its value under the pointer."""

Points = Sequence[tuple[float, float]]
"""Step and value."""


def curve_svg(name: str, points: Points) -> str:
    """Draw values over steps as an SVG element."""
    return curves_svg(name, {name: points})


def curves_svg(name: str, series: Mapping[str, Points]) -> str:
    """Draw several series over the same steps and values; a legend names them if there are two or more.

    Values that are not finite are left out. Text and axes have the colour of the page around them.
    """
    drawn = {title: [point for point in points if math.isfinite(point[1])] for title, points in series.items()}
    drawn = {title: points for title, points in drawn.items() if points}
    if not drawn:
        return ""
    steps = ticks_of([step for points in drawn.values() for step, _ in points], 8, least=1.0)
    values = ticks_of([value for points in drawn.values() for _, value in points], 5)
    scale = _Scale(steps[0], steps[-1], values[0], values[-1])
    lines = "".join(
        _line(points, scale, colour, title if len(drawn) > 1 else name)
        for (title, points), colour in zip(drawn.items(), COLOURS, strict=False)
    )
    legend = _legend(list(drawn)) if len(drawn) > 1 else ""
    top = 0 if legend else TOP - 14  # half a line above the highest tick
    return (
        f'<svg viewBox="0 {top} {WIDTH} {HEIGHT - top}" role="img" aria-label="{escape(name)} over steps">'
        f"{_axes(name, steps, values, scale)}{lines}{legend}</svg>"
    )


def ticks_of(values: Sequence[float], count: int, *, least: float = 0.0) -> list[float]:
    """Return about `count` round numbers, evenly spaced, from below the lowest value to above the highest."""
    low, high = min(values), max(values)
    if low == high:  # one value: from 0 to it
        low, high = min(low, 0.0), max(high, 0.0) or float(low == 0)
    span = high - low
    if not 1e-300 < span < 1e300:  # numbers that no round ones lie between
        return [low, high]
    power = 10.0 ** math.floor(math.log10(span / count))
    spacing = max(least, next(power * step for step in (1, 2, 5, 10) if power * step * count >= span * 0.999))
    first, last = math.floor(low / spacing + 1e-9), math.ceil(high / spacing - 1e-9)
    return [number * spacing for number in range(first, max(last, first + 1) + 1)]


class _Scale:
    """Where steps and values lie in the picture."""

    def __init__(self, first: float, last: float, low: float, high: float) -> None:
        self._first, self._width = first, last - first
        self._low, self._height = low, high - low

    def x(self, step: float) -> float:
        return LEFT + (step - self._first) * (WIDTH - LEFT - RIGHT) / self._width

    def y(self, value: float) -> float:
        return HEIGHT - BOTTOM - (value - self._low) * (HEIGHT - TOP - BOTTOM) / self._height


def _axes(name: str, steps: Sequence[float], values: Sequence[float], scale: _Scale) -> str:
    bottom, right, middle = HEIGHT - BOTTOM, WIDTH - RIGHT, (TOP + HEIGHT - BOTTOM) / 2
    parts = []
    for value in values:
        y = scale.y(value)
        parts.append(f'<path d="M{LEFT},{y:.1f} H{right}" stroke="currentColor" stroke-opacity=".15"/>')
        parts.append(f'<text x="{LEFT - 8}" y="{y + 4:.1f}" text-anchor="end">{_number(value)}</text>')
    for step in steps:
        x = scale.x(step)
        parts.append(f'<path d="M{x:.1f},{bottom} v5" stroke="currentColor" stroke-opacity=".5"/>')
        parts.append(f'<text x="{x:.1f}" y="{bottom + 18}" text-anchor="middle">{_number(step)}</text>')
    parts.append(f'<path d="M{LEFT},{TOP} V{bottom} H{right}" fill="none" stroke="currentColor" stroke-opacity=".5"/>')
    parts.append(f'<text x="{(LEFT + right) / 2:.0f}" y="{HEIGHT - 8}" text-anchor="middle">step</text>')
    turned = f'transform="rotate(-90 14 {middle:.0f})"'
    parts.append(f'<text x="14" y="{middle:.0f}" text-anchor="middle" {turned}>{escape(name)}</text>')
    return "".join(parts)


def _line(points: Points, scale: _Scale, colour: str, title: str) -> str:
    places = [(scale.x(step), scale.y(value)) for step, value in points]
    line = " ".join(f"{x:.1f},{y:.1f}" for x, y in places)
    drawn = f'<polyline points="{line}" fill="none" stroke="{colour}" stroke-width="2" stroke-linejoin="round"/>'
    if len(points) > MARKED:
        return drawn
    return drawn + "".join(
        f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3" fill="{colour}"><title>{escape(title)}, step {step:g}: {value:.4g}'
        "</title></circle>"
        for (x, y), (step, value) in zip(places, points, strict=True)
    )


def _legend(titles: Sequence[str]) -> str:
    parts, x = [], LEFT
    for title, colour in zip(titles, COLOURS, strict=False):
        parts.append(f'<path d="M{x},16 h24" stroke="{colour}" stroke-width="3"/>')
        parts.append(f'<text x="{x + 30}" y="20">{escape(title)}</text>')
        x += 60 + 7 * len(title)
    return "".join(parts)


def _number(value: float) -> str:
    return f"{value:.6g}" if value else "0"


def numbered(values: Sequence[float]) -> Points:
    """Number values as steps 1, 2, ..."""
    return list(enumerate(values, start=1))


def report_html(
    title: str,
    figures: Mapping[str, str],
    curves: Mapping[str, Mapping[str, Points]],
    answers: Sequence[Sequence[str]] = (),
    asked: str = "",
) -> str:
    """Return the page.

    `answers` are prompts with the model's answer before and after training and, if known, the one that the data has;
    `asked` says where the prompts come from.
    """
    facts = "".join(f"<tr><th>{escape(name)}</th><td>{escape(value)}</td></tr>" for name, value in figures.items())
    plots = "\n".join(f"<h2>{escape(name)}</h2>\n{curves_svg(name, series)}" for name, series in curves.items())
    return f"""<!doctype html>
<html lang="en"><meta charset="utf-8"><meta name="viewport" content="width=device-width">
<title>{escape(title)}</title>
<style>
:root {{ color-scheme: light dark; }}
body {{ font: 16px/1.5 system-ui, sans-serif; max-width: 60rem; margin: 2rem auto; padding: 0 1rem; color: #222; }}
h1 {{ font-size: 1.6rem; overflow-wrap: anywhere; }}
h2 {{ font-size: 1.2rem; margin-top: 2rem; }}
table {{ border-collapse: collapse; width: 100%; margin: 1rem 0; }}
th, td {{ border: 1px solid #ddd; padding: .4rem .6rem; text-align: left; vertical-align: top; }}
td {{ overflow-wrap: anywhere; }}
.facts th {{ width: 1%; white-space: nowrap; }}
.answers {{ table-layout: fixed; }}
.answers td {{ white-space: pre-wrap; }}
svg {{ width: 100%; font-size: 12px; fill: currentColor; }}
i {{ opacity: .6; }}
@media (prefers-color-scheme: dark) {{ body {{ background: #181818; color: #ddd; }} th, td {{ border-color: #444; }} }}
</style>
<h1>{escape(title)}</h1>
<table class="facts">{facts}</table>
{_answers(answers, asked)}{plots}
</html>
"""


def _answers(answers: Sequence[Sequence[str]], asked: str) -> str:
    if not answers:
        return f"<p>{escape(asked)}</p>\n" if asked else ""
    names = ("Prompt", "Before", "After", "In the data")[: len(answers[0])]
    head = "".join(f"<th>{name}</th>" for name in names)
    rows = "".join(
        "<tr>" + "".join(f"<td>{escape(text) or '<i>(empty)</i>'}</td>" for text in row) + "</tr>" for row in answers
    )
    said = f"<p>{escape(asked)}</p>\n" if asked else ""
    return f'<h2>Before and after</h2>\n{said}<table class="answers"><tr>{head}</tr>{rows}</table>\n'

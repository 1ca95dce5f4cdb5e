"""The HTML report of a run: figures, curves as SVG, answers before and after. One file, without scripts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape

WIDTH, HEIGHT, MARGIN = 720, 260, 44

Points = Sequence[tuple[float, float]]
"""Step and value."""


def curve_svg(name: str, points: Points) -> str:
    """Draw values over steps as an SVG element."""
    if not points:
        return ""
    values = [value for _, value in points]
    first, last = points[0][0], points[-1][0]
    low, high = min(values), max(values)
    span, width = (high - low) or 1.0, (last - first) or 1.0

    def place(step: float, value: float) -> str:
        x = MARGIN + (step - first) * (WIDTH - 2 * MARGIN) / width
        y = HEIGHT - MARGIN - (value - low) * (HEIGHT - 2 * MARGIN) / span
        return f"{x:.1f},{y:.1f}"

    line = " ".join(place(step, value) for step, value in points)
    bottom, right = HEIGHT - MARGIN, WIDTH - MARGIN
    return (
        f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{escape(name)} over steps">'
        f'<path d="M{MARGIN},{MARGIN} V{bottom} H{right}" fill="none" stroke="#999"/>'
        f'<polyline points="{line}" fill="none" stroke="#b4541a" stroke-width="2"/>'
        f'<text x="{MARGIN - 6}" y="{MARGIN + 4}" text-anchor="end">{high:.2f}</text>'
        f'<text x="{MARGIN - 6}" y="{bottom + 4}" text-anchor="end">{low:.2f}</text>'
        f'<text x="{MARGIN}" y="{bottom + 18}">step {first:g}</text>'
        f'<text x="{right}" y="{bottom + 18}" text-anchor="end">step {last:g}</text></svg>'
    )


def numbered(values: Sequence[float]) -> Points:
    """Number values as steps 1, 2, ..."""
    return list(enumerate(values, start=1))


def report_html(
    title: str,
    figures: Mapping[str, str],
    curves: Mapping[str, Points],
    answers: Sequence[tuple[str, str, str]] = (),
) -> str:
    """Return the page; `answers` are prompts with the model's answer before and after training."""
    facts = "".join(f"<tr><th>{escape(name)}</th><td>{escape(value)}</td></tr>" for name, value in figures.items())
    plots = "\n".join(f"<h2>{escape(name)}</h2>\n{curve_svg(name, points)}" for name, points in curves.items())
    return f"""<!doctype html>
<html lang="en"><meta charset="utf-8"><meta name="viewport" content="width=device-width">
<title>{escape(title)}</title>
<style>
body {{ font: 16px/1.5 system-ui, sans-serif; max-width: 60rem; margin: 2rem auto; padding: 0 1rem; color: #222; }}
table {{ border-collapse: collapse; width: 100%; margin: 1rem 0; }}
th, td {{ border: 1px solid #ddd; padding: .4rem .6rem; text-align: left; vertical-align: top; }}
svg {{ width: 100%; font-size: 12px; fill: #555; }}
@media (prefers-color-scheme: dark) {{ body {{ background: #181818; color: #ddd; }} th, td {{ border-color: #444; }} }}
</style>
<h1>{escape(title)}</h1>
<table>{facts}</table>
{plots}
{_answers(answers)}</html>
"""


def _answers(answers: Sequence[tuple[str, str, str]]) -> str:
    if not answers:
        return ""
    rows = "".join(
        f"<tr><td>{escape(prompt)}</td><td>{escape(before)}</td><td>{escape(after)}</td></tr>"
        for prompt, before, after in answers
    )
    return f"<h2>Before and after</h2>\n<table><tr><th>Prompt</th><th>Before</th><th>After</th></tr>{rows}</table>\n"

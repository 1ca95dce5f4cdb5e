"""A run as one HTML file: figures, the loss curve as SVG, answers before and after. No scripts, nothing fetched."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape

WIDTH, HEIGHT, MARGIN = 720, 260, 44


def curve_svg(losses: Sequence[float]) -> str:
    """The loss over steps."""
    if not losses:
        return ""
    low, high = min(losses), max(losses)
    span = (high - low) or 1.0

    def point(index: int, loss: float) -> str:
        x = MARGIN + index * (WIDTH - 2 * MARGIN) / max(1, len(losses) - 1)
        y = HEIGHT - MARGIN - (loss - low) * (HEIGHT - 2 * MARGIN) / span
        return f"{x:.1f},{y:.1f}"

    points = " ".join(point(index, loss) for index, loss in enumerate(losses))
    bottom, right = HEIGHT - MARGIN, WIDTH - MARGIN
    return (
        f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="loss over steps">'
        f'<path d="M{MARGIN},{MARGIN} V{bottom} H{right}" fill="none" stroke="#999"/>'
        f'<polyline points="{points}" fill="none" stroke="#b4541a" stroke-width="2"/>'
        f'<text x="{MARGIN - 6}" y="{MARGIN + 4}" text-anchor="end">{high:.2f}</text>'
        f'<text x="{MARGIN - 6}" y="{bottom + 4}" text-anchor="end">{low:.2f}</text>'
        f'<text x="{MARGIN}" y="{bottom + 18}">step 1</text>'
        f'<text x="{right}" y="{bottom + 18}" text-anchor="end">step {len(losses)}</text></svg>'
    )


def report_html(
    title: str, figures: Mapping[str, str], losses: Sequence[float], answers: Sequence[tuple[str, str, str]]
) -> str:
    """The whole page; `answers` are prompts with what was said before and after."""
    facts = "".join(f"<tr><th>{escape(name)}</th><td>{escape(value)}</td></tr>" for name, value in figures.items())
    rows = "".join(
        f"<tr><td>{escape(prompt)}</td><td>{escape(before)}</td><td>{escape(after)}</td></tr>"
        for prompt, before, after in answers
    )
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
<h2>Loss</h2>
{curve_svg(losses)}
<h2>Before and after</h2>
<table><tr><th>Prompt</th><th>Before</th><th>After</th></tr>{rows}</table>
</html>
"""

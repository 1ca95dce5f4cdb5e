"""`tinsmith run plot` and `tinsmith run watch`: what a run measured, step by step.

Owns: from a server's points to steps (what one `optim_step` closes). A server tells of steps, or of requests, which are
joined here; a long curve is told with gaps.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from tinsmith.cli.connection import connected, operations
from tinsmith.cli.output import console, duration, formatted, print_json, wants_json

if TYPE_CHECKING:
    from tinsmith.cli.report import Points

LOSS = "loss"
"""Our own name of the loss per counted token, where the server counts them."""
SHOWN = 10
"""Steps that `watch` keeps in sight."""


@dataclass(frozen=True, slots=True)
class Step:
    """What the requests up to one `optim_step` measured, joined."""

    number: int
    seq: int
    finished_at: float
    seconds: float
    metrics: Mapping[str, float]


@dataclass(slots=True)
class Steps:
    """Joins points to steps as they come."""

    done: list[Step] = field(default_factory=list)
    _passes: list[dict[str, Any]] = field(default_factory=list)

    def add(self, points: Iterable[dict[str, Any]]) -> list[Step]:
        """Take in points in the order of their numbers; the steps that they complete."""
        known = len(self.done)
        for point in points:
            if point["kind"] == "forward_backward":
                self._passes.append(point)
            elif point["kind"] == "optim_step":
                self.done.append(self._closed(point))
                self._passes = []
        return self.done[known:]

    def _closed(self, point: dict[str, Any]) -> Step:
        metrics = _with_loss({**joined(self._passes), **point["metrics"]})
        seconds = sum(each["seconds"] for each in (*self._passes, point))
        number = point.get("step", self.done[-1].number + 1 if self.done else 1)
        return Step(number, point["seq"], point["finished_at"], seconds, metrics)


def joined(passes: list[dict[str, Any]]) -> dict[str, float]:
    """The metrics of a step's passes by the rules of the protocol."""
    from tinsmith.wire.combining import combine_metrics
    from tinsmith.wire.training import ForwardBackwardOutput

    if not passes:
        return {}
    return combine_metrics([ForwardBackwardOutput("", [{}] * point["datums"], point["metrics"]) for point in passes])


def _with_loss(metrics: dict[str, float]) -> dict[str, float]:
    """With the loss per token, where the server counts tokens."""
    tokens = metrics.get("tokens:sum")
    return {LOSS: metrics["loss:sum"] / tokens, **metrics} if tokens and "loss:sum" in metrics else metrics


def pages(extensions: Any, run_id: str, after: int = -1) -> Iterator[dict[str, Any]]:
    """The pages of a run's points from a number on; at least one."""
    while True:
        page = extensions.run_metrics(run_id, after)
        yield page
        if page["next_after"] is None:
            return
        after = page["next_after"]


def main_metric(steps: list[Step]) -> str | None:
    """What a user wants to see first."""
    names = [name for step in steps for name in step.metrics]
    return next((name for name in (LOSS, "loss:mean", "loss:sum") if name in names), names[0] if names else None)


def curve_of(steps: list[Step], name: str) -> list[tuple[float, float]]:
    """Steps and values."""
    return [(step.number, step.metrics[name]) for step in steps if name in step.metrics]


@click.command()
@click.argument("run_id")
@click.option("-m", "--metric", "metrics", multiple=True, metavar="NAME", help="May be repeated.  [default: the loss]")
@click.option("--all", "every", is_flag=True, help="Every metric there is.")
@click.option(
    "-o",
    "--output",
    type=click.Path(path_type=Path, dir_okay=False),
    help="A file that ends in .svg, .html or .png, instead of the terminal.",
)
@formatted
@connected
def plot(run_id: str, metrics: tuple[str, ...], every: bool, output: Path | None) -> None:
    """Draw what a run measured, step by step.

    A step is what one optim_step closes. The server keeps the curve as long as a checkpoint of the run, and at least
    for the time that its setting curve_grace_s says; of a run with more than 4096 steps it keeps every n-th.
    """
    from tinsmith.client.extensions import Extensions

    steps = Steps()
    with operations() as holder:
        for page in pages(Extensions(holder), run_id):
            steps.add(page["points"])
    curves = _chosen(steps.done, metrics, every, run_id)
    if output is not None:
        from tinsmith.cli.plots import write_curves

        write_curves(output, f"Training run {run_id}", curves)
    if wants_json():
        print_json({"training_run_id": run_id, "steps": [_plain(step) for step in steps.done]})
    elif output is not None:
        click.echo(str(output))
    else:
        _draw(curves)


def _chosen(steps: list[Step], metrics: tuple[str, ...], every: bool, run_id: str) -> dict[str, Points]:
    names = list(dict.fromkeys(name for step in steps for name in step.metrics))
    if not names:
        raise click.ClickException(
            f"{run_id} has no finished steps that the server knows; without a checkpoint they are kept for a time"
        )
    for name in metrics:
        if name not in names:
            raise click.BadParameter(f"{name!r} was not measured (there are: {', '.join(names)})")
    wanted = names if every else list(metrics) or [main_metric(steps) or names[0]]
    return {name: curve_of(steps, name) for name in wanted}


def _draw(curves: Mapping[str, Points]) -> None:
    import shutil

    from tinsmith.cli.plots import terminal_curve

    width = min(100, shutil.get_terminal_size((90, 24)).columns) - 14
    for name, points in curves.items():
        click.echo(f"{name}: {points[0][1]:.4g} to {points[-1][1]:.4g} in {points[-1][0]:g} steps")
        click.echo(terminal_curve(points, width=max(20, width)))


def _plain(step: Step) -> dict[str, Any]:
    return {"step": step.number, "seq": step.seq, "finished_at": step.finished_at, "metrics": dict(step.metrics)}


@click.command()
@click.argument("run_id")
@click.option("--every", type=click.FloatRange(min=0.1), default=2.0, show_default=True, metavar="SECONDS")
@formatted
@connected
def watch(run_id: str, every: float) -> None:
    """Follow a run until it ends, or Ctrl-C.

    On a terminal the view is kept up to date; piped, and with --format json, each step is one line.
    """
    import sys

    from tinsmith.client.extensions import Extensions

    with operations() as holder:
        extensions = Extensions(holder)
        is_live = sys.stdout.isatty() and not wants_json()
        (_follow_live if is_live else _follow_lines)(extensions, run_id, every)


def _news(extensions: Any, run_id: str, every: float) -> Iterator[tuple[Steps, list[Step], dict[str, Any]]]:
    """All steps so far, those that are new, and the state of the run; ends with the run."""
    steps, after = Steps(), -1
    while True:
        new: list[Step] = []
        page: dict[str, Any] = {}
        for page in pages(extensions, run_id, after):
            new += steps.add(page["points"])
            after = page["points"][-1]["seq"] if page["points"] else after
        yield steps, new, page
        if page["state"] != "live":
            return
        time.sleep(every)


def _follow_lines(extensions: Any, run_id: str, every: float) -> None:
    import json

    state = ""
    for _, new, page in _news(extensions, run_id, every):
        state = page["state"]
        for step in new:
            if wants_json():
                click.echo(json.dumps(_plain(step)))
            else:
                shown = "  ".join(f"{name} {value:.4g}" for name, value in step.metrics.items())
                click.echo(f"step {step.number}  {shown}")
    if not wants_json():
        click.echo(f"the run has ended ({state})")


def _follow_live(extensions: Any, run_id: str, every: float) -> None:
    from rich.live import Live

    terminal = console()
    with Live(console=terminal, auto_refresh=False) as live:
        for steps, _, page in _news(extensions, run_id, every):
            live.update(_view(run_id, steps.done, page), refresh=True)


def _view(run_id: str, steps: list[Step], page: dict[str, Any]) -> Any:
    from rich.console import Group
    from rich.table import Table
    from rich.text import Text

    from tinsmith.cli.plots import sparkline

    name = main_metric(steps)
    lines = [Text(f"{run_id}: {page['base_model']}, {page['state']}, {page['queued']} requests under way")]
    if name is None:
        return Group(*lines, Text("no finished step yet"))
    values = [value for _, value in curve_of(steps, name)]
    lines.append(Text(f"{name} {sparkline(values, 60)} {values[-1]:.4g}"))
    names = list(dict.fromkeys(key for step in steps[-SHOWN:] for key in step.metrics))[:6]
    table = Table("Step", "Took", *names)
    for step in steps[-SHOWN:]:
        cells = (f"{step.metrics[key]:.4g}" if key in step.metrics else "-" for key in names)
        table.add_row(str(step.number), duration(step.seconds), *cells)
    return Group(*lines, table)

"""`tinsmith run plot` and `tinsmith run watch`: a run's metrics, step by step.

A step is everything up to one `optim_step`. Servers report points per step or per request; `Steps` combines the points
of one step. Long curves come thinned out.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from tinsmith.cli.connection import connected, operations
from tinsmith.cli.output import console, duration, echo, formatted, print_json, wants_json

if TYPE_CHECKING:
    from tinsmith.cli.report import Points

LOSS = "loss"
"""Our name for the mean loss, where the server reports the weights or the number of the tokens."""
GRADIENT = "optim/grad_norm"
ELSEWHERE = (
    "This run's client computes the loss (DPO, forward_backward_custom), and the server gets only the gradient. The "
    "loss is in the results of the program that trains. The output directory of tinsmith train has it, too: tinsmith "
    "run plot DIRECTORY."
)
LOCAL = ("loss", "accuracy", "margin")
"""What is drawn of an output directory by default, as far as it is there."""
SHOWN = 10
"""Steps in the table of `watch`."""


@dataclass(frozen=True, slots=True)
class CurvePoint:
    """The combined metrics of one step."""

    number: int
    seq: int
    finished_at: float
    seconds: float
    metrics: Mapping[str, float]


@dataclass(slots=True)
class Steps:
    """Combines points into steps as they arrive."""

    done: list[CurvePoint] = field(default_factory=list)
    _passes: list[dict[str, Any]] = field(default_factory=list)

    def add(self, points: Iterable[dict[str, Any]]) -> list[CurvePoint]:
        """Add points in order of their sequence numbers; return the steps that they complete."""
        known = len(self.done)
        for point in points:
            if point["kind"] == "forward_backward":
                self._passes.append(point)
            elif point["kind"] == "optim_step":
                self.done.append(self._closed(point))
                self._passes = []
        return self.done[known:]

    def _closed(self, point: dict[str, Any]) -> CurvePoint:
        from tinsmith.wire.rules.optim_metrics import with_current_names

        metrics = _with_loss({**joined(self._passes), **with_current_names(point["metrics"])})
        seconds = sum(each["seconds"] for each in (*self._passes, point))
        number = point.get("step", self.done[-1].number + 1 if self.done else 1)
        return CurvePoint(number, point["seq"], point["finished_at"], seconds, metrics)


def joined(passes: list[dict[str, Any]]) -> dict[str, float]:
    """Combine the metrics of a step's passes by the rules of the protocol."""
    from tinsmith.wire.messages.training import ForwardBackwardOutput
    from tinsmith.wire.rules.split_join import combine_metrics

    if not passes:
        return {}
    return combine_metrics([ForwardBackwardOutput("", [{}] * point["datums"], point["metrics"]) for point in passes])


def _with_loss(metrics: dict[str, float]) -> dict[str, float]:
    """Add the mean loss, if the server reports what the sum goes over.

    A mean over weights does not depend on their scale; `tinsmith train` scales them so that they add up to 1.
    """
    count = metrics.get("weights:sum", metrics.get("tokens:sum", 0.0))
    if count <= 0 or "loss:sum" not in metrics or is_gradient(metrics):
        return metrics
    return {LOSS: metrics["loss:sum"] / count, **metrics}


def is_gradient(metrics: Mapping[str, float]) -> bool:
    """Whether the weights of a step are the gradient of a loss that the client computed, as in DPO.

    Then the server's `loss:sum` carries that gradient, and its value says nothing about the loss.
    """
    return metrics.get("weights:min", 0.0) < 0 or metrics.get("weights:sum", 1.0) <= 0


def pages(extensions: Any, run_id: str, after: int = -1) -> Iterator[dict[str, Any]]:
    """Yield the pages of a run's points after a sequence number; at least one page."""
    while True:
        page = extensions.run_metrics(run_id, after)
        yield page
        if page["next_after"] is None:
            return
        after = page["next_after"]


def main_metric(steps: list[CurvePoint]) -> str | None:
    """Return the metric to show by default: the loss, or the norm of the gradient where only the client knows it."""
    names = [name for step in steps for name in step.metrics]
    wanted = (GRADIENT,) if any(is_gradient(step.metrics) for step in steps) else (LOSS, "loss:mean", "loss:sum")
    return next((name for name in wanted if name in names), names[0] if names else None)


def curve_of(steps: list[CurvePoint], name: str) -> list[tuple[float, float]]:
    """Return a metric's values by step."""
    return [(step.number, step.metrics[name]) for step in steps if name in step.metrics]


@click.command()
@click.argument("run_id", metavar="RUN_ID_OR_DIRECTORY")
@click.option(
    "-m", "--metric", "metrics", multiple=True, metavar="NAME", help="Metric to draw; repeatable.  [default: the loss]"
)
@click.option("--all", "every", is_flag=True, help="Draw all metrics.")
@click.option(
    "-o",
    "--out",
    "--output",
    "output",
    type=click.Path(path_type=Path, dir_okay=False),
    help="Write a .svg, .html or .png file instead of drawing in the terminal. PNG needs the extra tinsmith[plot].",
)
@formatted
@connected
def plot(run_id: str, metrics: tuple[str, ...], every: bool, output: Path | None) -> None:
    """Draw a run's metrics, step by step.

    A step is everything up to one optim_step. The server keeps the curve as long as a checkpoint of the run exists, and
    at least as long as its setting curve_grace_s. Runs with more than 4096 steps are thinned out.

    If the client computes the loss (DPO, forward_backward_custom), the server knows only its gradient, whose norm is
    drawn. The output directory of `tinsmith train` has the loss, and for DPO the share of pairs right and the margin:
    give the directory instead of the run's id.
    """
    if output is not None:
        from tinsmith.cli.plots import check_output

        check_output(output)
    is_local = Path(run_id).is_dir()
    steps = _local_steps(Path(run_id)) if is_local else _server_steps(run_id)
    _show(run_id, steps, _chosen(steps, metrics, every, run_id, is_local), output)
    if not metrics and not every and any(is_gradient(step.metrics) for step in steps):
        echo(ELSEWHERE, err=True)


def _server_steps(run_id: str) -> list[CurvePoint]:
    from tinsmith.client.connection.own_endpoints import Extensions

    steps = Steps()
    with operations() as holder:
        for page in pages(Extensions(holder), run_id):
            steps.add(page["points"])
    return steps.done


def _local_steps(out: Path) -> list[CurvePoint]:
    """Read the steps that `tinsmith train` has written to its output directory."""
    from tinsmith.cli.train.state import METRICS, MetricsFile

    if not (out / METRICS).is_file():
        raise click.BadParameter(f"{out} has no {METRICS}: it is not an output directory of tinsmith train")
    rows = [row for row in MetricsFile(out).rows() if isinstance(row, dict) and isinstance(row.get("step"), int)]
    measured = [{name: value for name, value in row.items() if isinstance(value, float)} for row in rows]
    return [CurvePoint(row["step"], 0, 0.0, 0.0, found) for row, found in zip(rows, measured, strict=True)]


def _show(run_id: str, steps: list[CurvePoint], curves: dict[str, Points], output: Path | None) -> None:
    if output is not None:
        from tinsmith.cli.plots import write_curves

        write_curves(output, f"Training run {run_id}", curves)
    if wants_json():
        print_json({"training_run_id": run_id, "steps": [_plain(step) for step in steps]})
    elif output is not None:
        echo(str(output))
    else:
        _draw(curves)


def _chosen(
    steps: list[CurvePoint], metrics: tuple[str, ...], every: bool, run_id: str, is_local: bool
) -> dict[str, Points]:
    names = list(dict.fromkeys(name for step in steps for name in step.metrics))
    if not names:
        raise click.ClickException(
            f"no finished steps of {run_id} (without a checkpoint, the server keeps them for a limited time)"
        )
    for name in metrics:
        if name not in names:
            raise click.BadParameter(f"the run has no metric {name!r} (available: {', '.join(names)})")
    usual = [name for name in LOCAL if name in names] if is_local else [main_metric(steps) or names[0]]
    return {name: curve_of(steps, name) for name in (names if every else list(metrics) or usual)}


def _draw(curves: Mapping[str, Points]) -> None:
    import shutil

    from tinsmith.cli.plots import terminal_curve

    width = min(100, shutil.get_terminal_size((90, 24)).columns) - 14
    for name, points in curves.items():
        echo(f"{name}: {points[0][1]:.4g} to {points[-1][1]:.4g} in {points[-1][0]:g} steps")
        echo(terminal_curve(points, width=max(20, width)))


def _plain(step: CurvePoint) -> dict[str, Any]:
    return {"step": step.number, "seq": step.seq, "finished_at": step.finished_at, "metrics": dict(step.metrics)}


@click.command()
@click.argument("run_id")
@click.option(
    "--every",
    type=click.FloatRange(min=0.1),
    default=2.0,
    show_default=True,
    metavar="SECONDS",
    help="Time between updates.",
)
@formatted
@connected
def watch(run_id: str, every: float) -> None:
    """Follow a run until it ends; Ctrl-C stops watching.

    In a terminal the view updates in place. In a pipe, or with --format json, each step is one line.
    """
    import sys

    from tinsmith.client.connection.own_endpoints import Extensions

    with operations() as holder:
        extensions = Extensions(holder)
        is_live = sys.stdout.isatty() and not wants_json()
        (_follow_live if is_live else _follow_lines)(extensions, run_id, every)


def _news(extensions: Any, run_id: str, every: float) -> Iterator[tuple[Steps, list[CurvePoint], dict[str, Any]]]:
    """Yield all steps so far, the new ones, and the state of the run, until the run ends."""
    steps, after = Steps(), -1
    while True:
        new: list[CurvePoint] = []
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

    for _, new, _page in _news(extensions, run_id, every):
        for step in new:
            if wants_json():
                echo(json.dumps(_plain(step)))
            else:
                shown = "  ".join(f"{name} {value:.4g}" for name, value in step.metrics.items())
                echo(f"step {step.number}  {shown}")
    if not wants_json():
        echo("run ended")


def _follow_live(extensions: Any, run_id: str, every: float) -> None:
    from rich.live import Live

    terminal = console()
    with Live(console=terminal, auto_refresh=False) as live:
        for steps, _, page in _news(extensions, run_id, every):
            live.update(_view(run_id, steps.done, page), refresh=True)


def _view(run_id: str, steps: list[CurvePoint], page: dict[str, Any]) -> Any:
    from rich.console import Group
    from rich.table import Table
    from rich.text import Text

    from tinsmith.cli.plots import sparkline

    name = main_metric(steps)
    lines = [Text(f"{run_id}: {page['base_model']}, {page['state']}, {page['queued']} requests in progress")]
    if name is None:
        return Group(*lines, Text("no finished step yet"))
    values = [value for _, value in curve_of(steps, name)]
    lines.append(Text(f"{name} {sparkline(values, 60)} {values[-1]:.4g}"))
    names = list(dict.fromkeys(key for step in steps[-SHOWN:] for key in step.metrics))[:6]
    table = Table("Step", "Time", *names)
    for step in steps[-SHOWN:]:
        cells = (f"{step.metrics[key]:.4g}" if key in step.metrics else "-" for key in names)
        table.add_row(str(step.number), duration(step.seconds), *cells)
    return Group(*lines, table)

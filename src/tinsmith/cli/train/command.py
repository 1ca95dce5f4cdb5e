"""`tinsmith train`: its options, its output, and Ctrl-C."""

from __future__ import annotations

import contextlib
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click

from tinsmith.cli.connection import connected, service_client
from tinsmith.cli.main import INTERRUPTED
from tinsmith.cli.output import console, echo, formatted, plural, print_json, wants_json

DEFAULTS: dict[str, Any] = {"rank": 32, "eval_split": 0.0, "seed": 0, "beta": 0.1}
"""The rest depends on the size of the data: see `defaults`."""


@click.command()
@click.argument("data", type=click.Path(path_type=Path, dir_okay=False))
@click.option("--out", type=click.Path(path_type=Path, file_okay=False), help="Output directory.  [default: DATA-run]")
@click.option("--resume", is_flag=True, help="Fail unless --out contains a run to resume.")
@click.option("--dpo", is_flag=True, help="Train on preference pairs (DPO) instead of examples.")
@click.option("--model", metavar="NAME", help="Base model.  [default: the server's first]")
@click.option("--rank", type=click.IntRange(1, 512), metavar="N", help="Rank of the LoRA adapter.  [default: 32]")
@click.option(
    "--lr", "--learning-rate", "learning_rate", type=click.FloatRange(min=0, min_open=True), metavar="X",
    help="Initial learning rate; decays linearly to 0.  [default: by the size of the data]",
)  # fmt: skip
@click.option("--epochs", type=click.IntRange(min=1), metavar="N", help="Passes over the data.  [default: by its size]")
@click.option(
    "--batch-size",
    type=click.IntRange(min=1),
    metavar="N",
    help="Examples per step.  [default: by the size of the data]",
)
@click.option(
    "--eval-split", type=click.FloatRange(0, 1, max_open=True), metavar="X",
    help="Fraction of the data to hold out for evaluation.  [default: 0]",
)  # fmt: skip
@click.option(
    "--beta", type=click.FloatRange(min=0, min_open=True), metavar="X", help="Beta of the DPO loss.  [default: 0.1]"
)
@click.option(
    "--seed",
    type=click.IntRange(min=0),
    metavar="N",
    help="Seed of the adapter's initialization and the data order.  [default: 0]",
)
@click.option("--truncate", is_flag=True, help="Cut examples that exceed the model's context, instead of failing.")
@click.option(
    "--save-every", type=click.IntRange(min=1), default=25, show_default=True, metavar="STEPS",
    help="Steps between checkpoints.",
)  # fmt: skip
@formatted
@connected
def train(data: Path, out: Path | None, resume: bool, save_every: int, **given: Any) -> None:
    """Fine-tune a model on DATA, a JSONL file.

    \b
    Each line is one of:
      {"messages": [{"role": ..., "content": ...}, ...]}      a chat
      {"prompt": ..., "completion": ...}                      a text
      {"prompt": ..., "chosen": ..., "rejected": ...}         a pair, with --dpo

    Epochs, batch size and learning rate are chosen by the number of lines, and printed.

    Ctrl-C saves and stops. The same command resumes exactly where it stopped.
    """
    from tinsmith.cli.train.state import read_state

    out = out or Path(f"{data.stem}-run")
    state = read_state(out)
    if resume and state is None:
        raise click.ClickException(f"{out} contains no run to resume; omit --resume to start one")
    _train(console(stderr=wants_json()), data, out, save_every, _options(given, state, out), state)


def _train(screen: Any, path: Path, out: Path, save_every: int, options: dict[str, Any], state: Any) -> None:
    from tinsmith.cli.models import command_line
    from tinsmith.cli.train.run import read_data
    from tinsmith.cli.train.state import opened

    data = read_data(path, options["method"])
    if state is not None and state.data_sha256 != data.digest:
        raise click.ClickException(
            f"the run in {out} was started with different data ({state.data}), so {path} cannot resume it exactly; "
            "restore that file, or start a new run with another --out"
        )
    if state is not None and state.sampler is not None:
        screen.print(
            f"The run in {out} is finished ({state.total} steps). To start another, use another --out.", soft_wrap=True
        )
        _try_next(screen, path, state.plan, state.sampler)
        _print_state(state)
        return
    began = time.monotonic()
    if state is None:
        options = _completed(screen, options, len(data.rows))
    with opened(out), service_client(user_metadata={"purpose": "train"}) as service, _resumable(path, out):
        run, outcome = _run(screen, service, data, out, save_every, options, state)
    if outcome is None:
        screen.print(
            f"Stopped after step {run.state.step} of {run.total}; everything is saved. Resume with:\n"
            f"   {command_line('train', str(path), '--out', str(out))}",
            soft_wrap=True,
        )
        click.get_current_context().exit(INTERRUPTED)
    _print_outcome(screen, run, outcome, path, time.monotonic() - began)


def _options(given: dict[str, Any], state: Any, out: Path) -> dict[str, Any]:
    """Return the run's plan: the options given, else those the run was started with, else defaults.

    What depends on the size of the data is still missing from the plan of a new run.
    """
    chosen = {name: value for name, value in given.items() if value is not None and value is not False}
    if chosen.pop("dpo", False):
        chosen["method"] = "dpo"
    if state is None:
        method = chosen.setdefault("method", "sft")
        if "beta" in chosen and method != "dpo":
            raise click.UsageError("--beta needs --dpo")
        return {"model": None, "truncate": False, **DEFAULTS, **chosen}
    before = {name: getattr(state.plan, name) for name in state.plan.__struct_fields__}
    for name, value in chosen.items():
        if before[name] != value:
            flag = {"learning_rate": "--lr", "method": "--dpo"}.get(name, f"--{name.replace('_', '-')}")
            raise click.ClickException(
                f"the run in {out} was started with {name} {before[name]}, not {value}; "
                f"omit {flag} to resume it, or start a new run with another --out"
            )
    return before


def _completed(screen: Any, options: dict[str, Any], rows: int) -> dict[str, Any]:
    """Add what depends on the size of the data, and say what was chosen."""
    from tinsmith.cli.train.defaults import settings_for
    from tinsmith.cli.train.sft import held_count

    settings = settings_for(options["method"], rows - held_count(rows, options["eval_split"]), options)
    if settings.said:
        screen.print(settings.said, soft_wrap=True)
    chosen = ("epochs", "batch_size", "learning_rate")
    return {**options, **{name: getattr(settings, name) for name in chosen}}


def _run(
    screen: Any, service: Any, data: Any, out: Path, save_every: int, options: dict[str, Any], state: Any
) -> tuple[Any, Any]:
    """Train; return the run, and its results unless it was stopped."""
    from tinsmith.cli.models import chosen_model
    from tinsmith.cli.progress import ProgressView, duration
    from tinsmith.cli.train.run import TrainRun, described
    from tinsmith.cli.train.sft import Measured, Saved, TrainStep, Watcher
    from tinsmith.cli.train.state import RunPlan

    model = chosen_model(service, options["model"], use="trainable").model_name
    plan = RunPlan(**{**options, "model": model})
    with screen.status(f"loading {model}"):  # shown in terminals only
        run = TrainRun(service, plan, data, out, state, lambda text: screen.print(text, soft_wrap=True))
    held_out = f" ({len(run.held_out)} held out)" if run.held_out else ""
    screen.print(
        f"{plan.model}, LoRA rank {plan.rank}: {described(run.items, plan)}{held_out}, {run.tokens} tokens, "
        f"{plural(plan.epochs, 'epoch')}, {plural(run.total, 'step')}",
        soft_wrap=True,
    )
    if state is not None:
        screen.print(f"resuming after step {state.step} of {run.total}", soft_wrap=True)
    with ProgressView(screen, run.total, run.first) as view:

        def stepped(step: TrainStep) -> None:
            extra = f"  {step.metrics['accuracy']:.0%} right" if "accuracy" in step.metrics else ""
            rest = f"{step.tokens_per_s:.0f} tokens/s, {duration(step.left_s)} left"
            view.step(step.step, f"loss {step.loss:.4f}{extra}", rest)

        def scored(step: int, measured: Measured) -> None:
            view.note(f"epoch {step // run.steps_per_epoch} of {plan.epochs}: {_held_out(measured)}")

        def saved(point: Saved) -> None:
            held = f", {_held_out(point.held_out)}" if point.held_out is not None else ""
            view.note(f"step {point.step}: checkpoint saved{held}")

        with _interrupts(view.note) as asked:
            watcher = Watcher(step=stepped, scored=scored, saved=saved, is_stopping=lambda: bool(asked))
            is_done = run.train(watcher, save_every)
    return run, run.finish() if is_done else None


def _held_out(measured: Any) -> str:
    loss, metrics = measured
    right = f", {metrics['accuracy']:.0%} right, margin {metrics['margin']:.2f}" if "accuracy" in metrics else ""
    return f"held-out loss {loss:.4f}{right}"


@contextlib.contextmanager
def _interrupts(note: Any) -> Iterator[list[bool]]:
    """Handle Ctrl-C: the first one makes the returned list non-empty, the second one raises KeyboardInterrupt."""
    asked: list[bool] = []

    def interrupted(*_: object) -> None:
        if asked:
            raise KeyboardInterrupt
        asked.append(True)
        with contextlib.suppress(RuntimeError):  # the signal arrived in the middle of a print
            note("Stopping: finishing the steps in flight, then saving. Press Ctrl-C again to quit without saving.")

    before = signal.signal(signal.SIGINT, interrupted)
    try:
        yield asked
    finally:
        signal.signal(signal.SIGINT, before)


@contextlib.contextmanager
def _resumable(path: Path, out: Path) -> Iterator[None]:
    """If a run fails or is interrupted, say what was saved and how to resume."""
    from tinsmith.cli.models import command_line
    from tinsmith.cli.train.state import read_state
    from tinsmith.errors import RetryableException, TinkerError

    def hint() -> str:
        state = read_state(out)
        if state is None:
            return "No checkpoint was saved yet."
        again = command_line("train", str(path), "--out", str(out))
        return f"Saved up to step {state.step} of {state.total} ({state.checkpoint}). Resume with:\n   {again}"

    try:
        yield
    except KeyboardInterrupt:
        echo(hint(), err=True)
        raise
    except (TinkerError, RetryableException) as error:
        raise click.ClickException(f"{error}\n{hint()}") from error


def _print_outcome(screen: Any, run: Any, outcome: Any, path: Path, took_s: float) -> None:
    from tinsmith.cli.progress import duration
    from tinsmith.cli.train.run import ends

    adapter = outcome.adapter or f"not available from this server ({outcome.no_adapter})"
    rows = {
        "checkpoint": outcome.checkpoint,
        "sampler": outcome.sampler,
        "adapter": adapter,
        "report": outcome.report,
    }
    for name, value in rows.items():
        screen.print(f"{name:<12}{value}", soft_wrap=True)
    held = f", held-out loss {ends(outcome.held_out)}" if outcome.held_out else ""
    screen.print(f"Done in {duration(took_s)}: loss {ends(outcome.losses)}{held}. Try next:", soft_wrap=True)
    _try_next(screen, path, run.plan, outcome.sampler)
    loss, held_out = (points[-1][1] if points else None for points in (outcome.losses, outcome.held_out))
    _print_state(run.state, adapter=outcome.adapter, report=outcome.report, loss=loss, held_out_loss=held_out)


def _try_next(screen: Any, path: Path, plan: Any, sampler: str) -> None:
    from tinsmith.cli.models import command_line

    lines = {"chat with it": command_line("chat", "--checkpoint", sampler)}
    scored = ("--dpo",) if plan.method == "dpo" else ("--model", plan.model)
    lines["evaluate it"] = command_line("eval", str(path), "--checkpoint", sampler, *scored)
    for name, line in lines.items():
        screen.print(f"   {name + ':':<14}{line}", soft_wrap=True)


def _print_state(state: Any, **more: Any) -> None:
    if wants_json():
        import msgspec

        print_json({**msgspec.to_builtins(state), **more})

"""`tinsmith demo`: fine-tune a small model on this machine, from nothing to an adapter."""

from __future__ import annotations

import dataclasses
import time
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from tinsmith.cli.connection import connected, service_client
from tinsmith.cli.output import console as terminal
from tinsmith.cli.output import plural, quoted
from tinsmith.cli.train.comparison import greedy_answers, print_answers, print_comparison

if TYPE_CHECKING:
    from tinsmith.cli.train.sft import Plan

PROMPTS = ("What is the capital of Italy?", "How do I make good coffee?", "Why do stars shine?")
"""Questions that are not in the data."""
QUICK_CHATS = 8
"""Chats that `--quick` trains on: the first ones of the data."""
INCLUDED_DATA = resources.files("tinsmith.cli.train") / "data" / "workshop.jsonl"


@click.command()
@click.option(
    "--out",
    type=click.Path(path_type=Path, file_okay=False),
    default=Path("tinsmith-demo"),
    show_default=True,
    help="Output directory.",
)
@click.option("--model", metavar="NAME", help="Base model.  [default: the server's first]")
@click.option(
    "--data",
    type=click.Path(path_type=Path, dir_okay=False),
    help="JSONL file of chats to train on.  [default: an included one]",
)
@click.option(
    "--epochs", type=click.IntRange(min=1), metavar="N", help="Passes over the chats.  [default: 4; with --quick 3]"
)
@click.option(
    "--quick", is_flag=True, help=f"Train on {QUICK_CHATS} chats only, to check in a minute that everything works."
)
@click.option(
    "--rank", type=click.IntRange(1, 512), metavar="N", default=16, show_default=True, help="Rank of the LoRA adapter."
)
@click.option("--rl", is_flag=True, help="Train with rewards (reinforcement learning) instead of on chats.")
@click.option("--steps", type=click.IntRange(min=1), metavar="N", help="Training steps with --rl.  [default: 18]")
@connected
def demo(
    out: Path,
    model: str | None,
    data: Path | None,
    epochs: int | None,
    quick: bool,
    rank: int,
    rl: bool,
    steps: int | None,
) -> None:
    """Fine-tune a small model and compare its answers before and after.

    Runs on this machine unless a server is configured; no account and no GPU are needed. The first time, it downloads a
    model.
    """
    if rl and (data is not None or epochs is not None or quick):
        raise click.UsageError("--data, --epochs and --quick cannot be used with --rl")
    if steps is not None and not rl:
        raise click.UsageError("--steps needs --rl; without it, use --epochs")
    console = terminal(markup=True)
    console.print("[bold]1.[/] Starting")
    with service_client(user_metadata={"purpose": "demo"}) as service:
        if rl:
            from tinsmith.cli.train.demo_rl import run_demo_rl
            from tinsmith.cli.train.rl import RlPlan

            run_demo_rl(console, service, out, model, rank, RlPlan(steps=steps) if steps else RlPlan())
        else:
            from tinsmith.cli.train.sft import Plan

            # Fewer steps have to be larger ones.
            usual = Plan(epochs=3, batch_size=4, learning_rate=2e-3) if quick else Plan()
            plan = dataclasses.replace(usual, epochs=epochs or usual.epochs)
            _demo(console, service, out, model, data, QUICK_CHATS if quick else None, plan, rank)


def _demo(
    console: Any,
    service: Any,
    out: Path,
    model: str | None,
    data: Path | None,
    count: int | None,
    plan: Plan,
    rank: int,
) -> None:
    from tinsmith.cli.models import chosen_model, command_line
    from tinsmith.cli.progress import duration
    from tinsmith.cli.report import numbered, report_html

    began = time.monotonic()
    chosen = chosen_model(service, model, use="trainable")
    name = chosen.model_name
    training = service.create_lora_training_client(name, rank=rank, seed=0)
    tokenizer = training.get_tokenizer()
    examples = _examples(data, tokenizer, chosen.max_context_length)[:count]

    console.print(f"[bold]2.[/] Answers of {quoted(name)} before training")
    before = greedy_answers(service.create_sampling_client(base_model=name), tokenizer, PROMPTS)
    print_answers(console, PROMPTS, before)

    size = f"{plural(len(examples), 'chat')} ({sum(len(example.tokens) for example in examples)} tokens)"
    epochs = plural(plan.epochs, "epoch")
    console.print(f"[bold]3.[/] Training on {size}, {epochs}, LoRA rank {rank}")
    losses, speed = _train(console, training, examples, plan)

    console.print("[bold]4.[/] The same questions, before and after")
    saved = training.save_weights_for_sampler("demo").result()
    after = greedy_answers(training.create_sampling_client(saved.path), tokenizer, PROMPTS)
    answers = list(zip(PROMPTS, before, after, strict=True))
    print_comparison(console, answers)

    console.print("[bold]5.[/] Saving")
    state = training.save_state("demo").result()
    files = _export(service, training, out)
    took = time.monotonic() - began
    figures = {
        "Base model": name,
        "Adapter": f"LoRA, rank {rank}",
        "Data": f"{size}, {epochs}",
        "Steps": f"{plural(len(losses), 'step')} of {plural(min(plan.batch_size, len(examples)), 'chat')}",
        "Loss": f"{losses[0]:.2f} to {losses[-1]:.2f} per token",
        "Speed": f"{speed:.0f} tokens/s",
        "Time": duration(took),
        "Checkpoint": state.path,
    }
    page = out / "report.html"
    page.write_text(
        report_html("Fine-tuned model", figures, {"Loss per token": {"training": numbered(losses)}}, answers),
        encoding="utf-8",
    )
    for line in (f"checkpoint  {state.path}", f"adapter     {files}", f"report      {page}"):
        console.print(f"   {line}", soft_wrap=True, markup=False)
    console.print(f"Done in {duration(took)}. Try next:")
    lines = {
        "chat with it": command_line("chat", "--checkpoint", saved.path),
        "use your own data": command_line("train", "chats.jsonl"),
        "train by reward": command_line("demo", "--rl"),
        "run a server": "tinsmith serve",
    }
    for what, line in lines.items():
        console.print(f"   {what + ':':<20}{line}", soft_wrap=True, markup=False)


def _examples(data: Path | None, tokenizer: Any, max_length: int | None) -> list[Any]:
    from tinsmith.cli.dataset import read_examples

    if data is not None:
        return read_examples(data, tokenizer, max_length)
    with resources.as_file(INCLUDED_DATA) as included:
        return read_examples(included, tokenizer, max_length)


def _train(console: Any, training: Any, examples: list[Any], plan: Any) -> tuple[list[float], float]:
    """Train; return the losses of all steps, and tokens per second."""
    from tinsmith.cli.progress import ProgressView, duration
    from tinsmith.cli.train.objectives import Supervised
    from tinsmith.cli.train.sft import TrainStep, Watcher, fine_tune

    batches = plan.batches(examples)
    steps: list[TrainStep] = []
    with ProgressView(console, len(batches)) as view:

        def show(step: TrainStep) -> None:
            steps.append(step)
            rest = f"{step.tokens_per_s:.0f} tokens/s, {duration(step.left_s)} left"
            view.step(step.step, f"   loss {step.loss:.3f}", rest)

        fine_tune(training, Supervised(), batches, plan, Watcher(step=show))
    return [step.loss for step in steps], steps[-1].tokens_per_s


def _export(service: Any, training: Any, out: Path) -> Path:
    """Download the adapter in PEFT's format."""
    exported = training.save_weights_external("demo").result()
    directory = out / "adapter"
    directory.mkdir(parents=True, exist_ok=True)
    service.create_rest_client().download_external_weights(exported.path, directory).result()
    return directory

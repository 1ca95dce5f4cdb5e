"""`tinsmith demo`: the main job from nothing to a tuned model, on this machine."""

from __future__ import annotations

import time
from importlib import resources
from pathlib import Path
from typing import Any

import click

from tinsmith.cli.connection import connected, service_client

PROMPTS = ("What is the capital of Italy?", "How do I make good coffee?", "Why do stars shine?")
"""None of them is in the data."""
ANSWER_TOKENS = 48


@click.command()
@click.option(
    "--out", type=click.Path(path_type=Path, file_okay=False), default=Path("tinsmith-demo"), show_default=True
)
@click.option("--model", help="Base model.  [default: the first that the server offers]")
@click.option(
    "--data", type=click.Path(path_type=Path, dir_okay=False), help="Chats to learn.  [default: the shipped ones]"
)
@click.option("--epochs", type=click.IntRange(min=1), help="Times through the chats.  [default: 4]")
@click.option("--rank", type=click.IntRange(1, 512), default=16, show_default=True)
@click.option("--rl", is_flag=True, help="Learn by reward instead of from chats.")
@click.option("--steps", type=click.IntRange(min=1), help="Steps of --rl.  [default: 18]")
@connected
def demo(
    out: Path, model: str | None, data: Path | None, epochs: int | None, rank: int, rl: bool, steps: int | None
) -> None:
    """Fine-tune a small model on this machine and compare it with what it was."""
    from rich.console import Console

    if rl and (data is not None or epochs is not None):
        raise click.UsageError("--data and --epochs are not for --rl")
    if steps is not None and not rl:
        raise click.UsageError("--steps is for --rl; use --epochs")
    console = Console(highlight=False)
    console.print("[bold]1.[/] A local engine: no account, no GPU, no hub")
    with service_client(user_metadata={"purpose": "demo"}) as service:
        if rl:
            from tinsmith.cli.demo_rl import run_demo_rl
            from tinsmith.cli.reinforcement import RlPlan

            run_demo_rl(console, service, out, model, rank, RlPlan(steps=steps) if steps else RlPlan())
        else:
            _demo(console, service, out, model, data, epochs or 4, rank)


def _demo(console: Any, service: Any, out: Path, model: str | None, data: Path | None, epochs: int, rank: int) -> None:
    from tinsmith.cli.fine_tuning import Plan
    from tinsmith.cli.progress import duration
    from tinsmith.cli.report import numbered, report_html
    from tinsmith.cli.speakers import chosen_model, command_line

    began = time.monotonic()
    plan = Plan(epochs=epochs)
    chosen = chosen_model(service, model, use="trainable")
    name = chosen.model_name
    training = service.create_lora_training_client(name, rank=rank, seed=0)
    tokenizer = training.get_tokenizer()
    examples = _examples(data, tokenizer, chosen.max_context_length)

    console.print(f"[bold]2.[/] What {name} says now")
    before = greedy_answers(service.create_sampling_client(base_model=name), tokenizer, PROMPTS)
    print_answers(console, PROMPTS, before)

    count = sum(len(example.tokens) for example in examples)
    console.print(f"[bold]3.[/] Learning {len(examples)} chats ({count} tokens), {epochs} times, LoRA rank {rank}")
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
        "Data": f"{len(examples)} chats, {count} tokens, {epochs} epochs",
        "Loss": f"{losses[0]:.2f} to {losses[-1]:.2f} per token",
        "Speed": f"{speed:.0f} tokens/s",
        "Time": duration(took),
        "Checkpoint": state.path,
    }
    page = out / "report.html"
    page.write_text(report_html("A model, tuned", figures, {"Loss": numbered(losses)}, answers), encoding="utf-8")
    for line in (f"checkpoint  {state.path}", f"adapter     {files}", f"report      {page}"):
        console.print(f"   {line}", soft_wrap=True, markup=False)
    console.print(f"Done in {duration(took)}. Try next:")
    lines = {
        "talk to it": command_line("chat", "--checkpoint", saved.path),
        "your own chats": command_line("train", "chats.jsonl"),
        "learn by reward": command_line("demo", "--rl"),
        "a server for all": "tinsmith serve",
    }
    for what, line in lines.items():
        console.print(f"   {what + ':':<18}{line}", soft_wrap=True, markup=False)


def _examples(data: Path | None, tokenizer: Any, max_length: int | None) -> list[Any]:
    from tinsmith.cli.chat_data import read_examples

    if data is not None:
        return read_examples(data, tokenizer, max_length)
    with resources.as_file(resources.files("tinsmith.cli") / "data" / "workshop.jsonl") as shipped:
        return read_examples(shipped, tokenizer, max_length)


def greedy_answers(sampler: Any, tokenizer: Any, prompts: tuple[str, ...]) -> list[str]:
    """What a model says to each prompt."""
    from tinsmith.cli.chat_data import chat_prompt
    from tinsmith.types import ModelInput, SamplingParams

    params = SamplingParams(max_tokens=ANSWER_TOKENS, temperature=0.0)
    futures = [
        sampler.sample(ModelInput.from_ints(chat_prompt([{"role": "user", "content": prompt}], tokenizer)), 1, params)
        for prompt in prompts
    ]
    return [
        tokenizer.decode(future.result().sequences[0].tokens, skip_special_tokens=True).strip() for future in futures
    ]


def _train(console: Any, training: Any, examples: list[Any], plan: Any) -> tuple[list[float], float]:
    """The losses of all steps, and tokens per second."""
    from tinsmith.cli.fine_tuning import Progress, Watcher, fine_tune
    from tinsmith.cli.objectives import Supervised
    from tinsmith.cli.progress import ProgressView, duration

    batches = plan.batches(examples)
    steps: list[Progress] = []
    with ProgressView(console, len(batches)) as view:

        def show(step: Progress) -> None:
            steps.append(step)
            rest = f"{step.tokens_per_s:.0f} tokens/s, {duration(step.left_s)} left"
            view.step(step.step, f"   loss {step.loss:.3f}", rest)

        fine_tune(training, Supervised(), batches, plan, Watcher(step=show))
    return [step.loss for step in steps], steps[-1].tokens_per_s


def print_answers(console: Any, prompts: tuple[str, ...], answers: list[str]) -> None:
    for prompt, answer in zip(prompts, answers, strict=True):
        console.print(f"   {prompt}", style="dim", markup=False)
        console.print(f"   {answer}", markup=False)


def print_comparison(console: Any, answers: list[tuple[str, str, str]]) -> None:
    from rich.table import Table
    from rich.text import Text

    table = Table("Prompt", "Before", "After", show_lines=True)
    for row in answers:
        table.add_row(*map(Text, row))
    console.print(table)


def _export(service: Any, training: Any, out: Path) -> Path:
    """The adapter's files, as PEFT and vLLM load them."""
    exported = training.save_weights_external("demo").result()
    directory = out / "adapter"
    directory.mkdir(parents=True, exist_ok=True)
    service.create_rest_client().download_external_weights(exported.path, directory).result()
    return directory

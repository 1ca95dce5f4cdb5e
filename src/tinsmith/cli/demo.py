"""`tinsmith demo`: the main job from nothing to a tuned model, on this machine."""

from __future__ import annotations

import time
from importlib import resources
from pathlib import Path
from typing import Any

import click

from tinsmith.cli.chat_data import chat_prompt, read_examples
from tinsmith.cli.fine_tuning import Plan, Progress, fine_tune
from tinsmith.cli.report import report_html
from tinsmith.errors import TinkerError

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
@click.option("--epochs", type=click.IntRange(min=1), default=4, show_default=True)
@click.option("--rank", type=click.IntRange(1, 512), default=16, show_default=True)
def demo(out: Path, model: str | None, data: Path | None, epochs: int, rank: int) -> None:
    """Fine-tune a small model on this machine and compare it with what it was."""
    from rich.console import Console

    console = Console()
    try:
        _demo(console, out, model, data, Plan(epochs=epochs), rank)
    except TinkerError as error:
        raise click.ClickException(str(error)) from None


def _demo(console: Any, out: Path, model: str | None, data: Path | None, plan: Plan, rank: int) -> None:
    import tinsmith

    began = time.monotonic()
    console.print("[bold]1.[/] A local engine: no account, no GPU, no hub")
    with tinsmith.ServiceClient(user_metadata={"purpose": "demo"}) as service:
        offered = {str(item.model_name): item for item in service.get_server_capabilities().supported_models}
        name = model or next(iter(offered))
        if name not in offered:
            raise TinkerError(f"{name!r} is not offered (there are: {', '.join(offered)})")
        training = service.create_lora_training_client(name, rank=rank, seed=0)
        tokenizer = training.get_tokenizer()
        examples = _examples(data, tokenizer, offered[name].max_context_length or 2048)

        console.print(f"[bold]2.[/] What {name} says now")
        before = _answers(service.create_sampling_client(base_model=name), tokenizer)
        for prompt, answer in zip(PROMPTS, before, strict=True):
            console.print(f"   [dim]{prompt}[/]\n   {answer}", markup=True, highlight=False)

        count = sum(len(example.tokens) for example in examples)
        console.print(
            f"[bold]3.[/] Learning {len(examples)} chats ({count} tokens), {plan.epochs} times, LoRA rank {rank}"
        )
        curve = _train(console, training, examples, plan)

        console.print("[bold]4.[/] The same questions, before and after")
        saved = training.save_weights_for_sampler("demo").result()
        after = _answers(training.create_sampling_client(saved.path), tokenizer)
        _compare(console, before, after)

        console.print("[bold]5.[/] Saving")
        state = training.save_state("demo").result()
        files = _export(service, training, out)
        took = time.monotonic() - began
        figures = {
            "Base model": name,
            "Adapter": f"LoRA, rank {rank}",
            "Data": f"{len(examples)} chats, {count} tokens, {plan.epochs} epochs",
            "Loss": f"{curve.losses[0]:.2f} to {curve.losses[-1]:.2f} per token",
            "Speed": f"{curve.steps[-1].tokens_per_s:.0f} tokens/s",
            "Time": f"{took:.0f} s",
            "Checkpoint": state.path,
        }
        answers = list(zip(PROMPTS, before, after, strict=True))
        page = out / "report.html"
        page.write_text(report_html("A model, tuned", figures, curve.losses, answers), encoding="utf-8")
        for line in (f"checkpoint  {state.path}", f"adapter     {files}", f"report      {page}"):
            console.print(f"   {line}", highlight=False, soft_wrap=True)
    console.print(f"Done in {took:.0f} s. Try next:", highlight=False)
    console.print("   your own chats:    tinsmith demo --data chats.jsonl", highlight=False)
    console.print("   a server for all:  tinsmith serve", highlight=False)
    console.print("   your own loop:     the first block of README.md", highlight=False)


def _examples(data: Path | None, tokenizer: Any, max_length: int) -> list[Any]:
    if data is not None:
        return read_examples(data, tokenizer, max_length)
    with resources.as_file(resources.files("tinsmith.cli") / "data" / "workshop.jsonl") as shipped:
        return read_examples(shipped, tokenizer, max_length)


def _answers(sampler: Any, tokenizer: Any) -> list[str]:
    """Greedy answers to the prompts."""
    from tinsmith.types import ModelInput, SamplingParams

    params = SamplingParams(max_tokens=ANSWER_TOKENS, temperature=0.0, stop=[tokenizer.eos_token_id])
    futures = [
        sampler.sample(ModelInput.from_ints(chat_prompt([{"role": "user", "content": prompt}], tokenizer)), 1, params)
        for prompt in PROMPTS
    ]
    return [
        tokenizer.decode(future.result().sequences[0].tokens, skip_special_tokens=True).strip() for future in futures
    ]


def _train(console: Any, training: Any, examples: list[Any], plan: Plan) -> Any:
    from rich.progress import BarColumn, MofNCompleteColumn, TextColumn
    from rich.progress import Progress as Bar

    columns = (
        TextColumn("   loss {task.fields[loss]}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[rest]}"),
    )
    with Bar(*columns, console=console) as bar:
        task = bar.add_task("training", total=len(plan.batches(examples)), loss="-", rest="")

        def show(step: Progress) -> None:
            rest = f"{step.tokens_per_s:.0f} tokens/s, {step.left_s:.0f} s left"
            bar.update(task, completed=step.step, loss=f"{step.loss:.3f}", rest=rest)

        return fine_tune(training, examples, plan, show)


def _compare(console: Any, before: list[str], after: list[str]) -> None:
    from rich.table import Table

    table = Table("Prompt", "Before", "After", show_lines=True)
    for row in zip(PROMPTS, before, after, strict=True):
        table.add_row(*row)
    console.print(table)


def _export(service: Any, training: Any, out: Path) -> Path:
    """The adapter's files, as PEFT and vLLM load them."""
    from tinsmith.client.rest import RestClient

    exported = training.save_weights_external("demo").result()
    directory = out / "adapter"
    directory.mkdir(parents=True, exist_ok=True)
    connection = service.holder.connection.config
    rest = RestClient(base_url=connection.base_url, api_key=connection.api_key)
    rest.download_external_weights(exported.path, directory).result()
    return directory

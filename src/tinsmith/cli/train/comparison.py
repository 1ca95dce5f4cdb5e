"""A model's answers before and after training, side by side."""

from __future__ import annotations

from typing import Any

ANSWER_TOKENS = 48


def greedy_answers(sampler: Any, tokenizer: Any, prompts: tuple[str, ...]) -> list[str]:
    """Return a model's greedy answer to each prompt."""
    from tinsmith.cli.dataset import chat_prompt
    from tinsmith.types import ModelInput, SamplingParams

    params = SamplingParams(max_tokens=ANSWER_TOKENS, temperature=0.0)
    futures = [
        sampler.sample(ModelInput.from_ints(chat_prompt([{"role": "user", "content": prompt}], tokenizer)), 1, params)
        for prompt in prompts
    ]
    return [
        tokenizer.decode(future.result().sequences[0].tokens, skip_special_tokens=True).strip() for future in futures
    ]


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

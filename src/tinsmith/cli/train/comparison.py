"""A model's answers before and after training, side by side."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

ANSWER_TOKENS = 48
LONGEST_ANSWER = 256
"""The most tokens of an answer in a report, however long the one in the data is."""
LONGEST_PROMPT = 600
"""The most characters of a prompt in a report."""
IN_REPORT = 4
"""Prompts in a report."""


@dataclass(frozen=True, slots=True)
class Prompt:
    """A prompt from the data, as text and as tokens, its answer there, and the most tokens that a model may answer."""

    text: str
    tokens: tuple[int, ...]
    expected: str
    max_tokens: int


def prompts_of(items: Sequence[Any], rows: dict[int, Any], tokenizer: Any, context: int | None) -> list[Prompt]:
    """Return a few prompts, evenly spread over examples or pairs; `rows` are the lines of the file by number."""
    count = min(IN_REPORT, len(items))
    spread = [items[index * len(items) // count] for index in range(count)]
    found = [_prompt(getattr(item, "chosen", item), rows[item.line], tokenizer, context) for item in spread]
    return [prompt for prompt in found if prompt.max_tokens > 0]


def _prompt(example: Any, row: Any, tokenizer: Any, context: int | None) -> Prompt:
    start = example.last_answer
    tokens, answer = example.tokens[:start], example.tokens[start:]
    room = LONGEST_ANSWER if context is None else min(LONGEST_ANSWER, context - start)
    most = min(room, max(ANSWER_TOKENS, len(answer)))
    return Prompt(_question(row), tokens, _text(tokenizer, answer), most)


def _question(row: dict[str, Any]) -> str:
    """Return what was asked last in a line of the data."""
    asked: Any = next(row[key] for key in ("prompt", "messages", "chosen") if row.get(key) is not None)
    if not isinstance(asked, str):
        said = [message["content"] for message in asked if message["role"] != "assistant"]
        asked = said[-1] if said else ""
    return str(asked) if len(asked) <= LONGEST_PROMPT else f"... {asked[-LONGEST_PROMPT:]}"


def answers_to(sampler: Any, tokenizer: Any, prompts: Sequence[Prompt]) -> list[str]:
    """Return a model's greedy answer to each prompt; "..." ends one that was cut off."""
    from tinsmith.types import ModelInput, SamplingParams

    futures = [
        sampler.sample(
            ModelInput.from_ints(list(prompt.tokens)), 1, SamplingParams(max_tokens=prompt.max_tokens, temperature=0.0)
        )
        for prompt in prompts
    ]
    sequences = [future.result().sequences[0] for future in futures]
    return [_text(tokenizer, s.tokens) + (" ..." if s.stop_reason == "length" else "") for s in sequences]


def compared(
    service: Any, model: str, sampler: str, tokenizer: Any, prompts: Sequence[Prompt]
) -> list[tuple[str, ...]]:
    """Return each prompt with the base model's answer, that of a sampler checkpoint, and the one in the data."""
    clients = service.create_sampling_client(base_model=model), service.create_sampling_client(model_path=sampler)
    before, after = (answers_to(client, tokenizer, prompts) for client in clients)
    return [(prompt.text, *both, prompt.expected) for prompt, *both in zip(prompts, before, after, strict=True)]


def greedy_answers(sampler: Any, tokenizer: Any, prompts: tuple[str, ...]) -> list[str]:
    """Return a model's greedy answer to each question."""
    from tinsmith.cli.dataset import chat_prompt

    chats = [tuple(chat_prompt([{"role": "user", "content": prompt}], tokenizer)) for prompt in prompts]
    return answers_to(sampler, tokenizer, [Prompt("", tokens, "", ANSWER_TOKENS) for tokens in chats])


def _text(tokenizer: Any, tokens: Sequence[int]) -> str:
    return str(tokenizer.decode(list(tokens), skip_special_tokens=True)).strip()


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

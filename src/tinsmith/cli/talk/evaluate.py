"""`tinsmith eval`: loss, perplexity and exact matches of models on a file of examples."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import click

from tinsmith.cli.connection import checkpoint_path, connected, service_client
from tinsmith.cli.output import cell, console, formatted, print_json, wants_json

IN_FLIGHT = 32


@dataclass(frozen=True, slots=True)
class Score:
    """The result of one model on one file."""

    model: str
    examples: int
    tokens: int
    loss: float
    """Mean per token of the assistant's messages or the completions."""
    perplexity: float
    exact_match: float
    """Fraction of examples whose last answer a greedy sample reproduces exactly."""


@click.command(name="eval")
@click.argument("data", type=click.Path(path_type=Path, dir_okay=False))
@click.option(
    "--model", "models", multiple=True, metavar="NAME", help="Base model; repeatable.  [default: the server's first]"
)
@click.option(
    "--checkpoint",
    "checkpoints",
    multiple=True,
    metavar="tinker://...",
    callback=checkpoint_path,
    help="Checkpoint; repeatable.",
)
@click.option("--limit", type=click.IntRange(min=1), help="Use only the first N examples.", metavar="N")
@click.option("--truncate", is_flag=True, help="Cut examples that exceed the model's context, instead of failing.")
@formatted
@connected
def evaluate(
    data: Path, models: tuple[str, ...], checkpoints: tuple[str, ...], limit: int | None, truncate: bool
) -> None:
    """Evaluate models on DATA, a JSONL file as for `tinsmith train`.

    Loss and perplexity are computed over the assistant's messages (or the completion). An exact match is a greedy
    answer that equals the last answer of the example.
    """
    from tinsmith.cli.dataset import DataFile, check_examples
    from tinsmith.cli.models import open_speaker

    file = DataFile.read(data)
    check_examples(file)
    if limit is not None:
        file = DataFile(file.path, file.digest, file.rows[:limit])
    with service_client(user_metadata={"purpose": "eval"}) as service:
        speakers = [open_speaker(service, model=model) for model in models]
        speakers += [open_speaker(service, checkpoint=checkpoint) for checkpoint in checkpoints]
        speakers = speakers or [open_speaker(service)]
        scores = [_score(speaker, file, truncate) for speaker in speakers]
    if wants_json():
        print_json({"data": str(data), "scores": [asdict(score) for score in scores]})
        return
    _print_scores(scores)


def _print_scores(scores: list[Score]) -> None:
    """Print a table that wraps long names instead of cutting them: checkpoints of one run differ at the end."""
    from rich.table import Table

    table = Table()
    table.add_column("Model", overflow="fold")
    for name in ("Examples", "Tokens", "Loss", "Perplexity", "Exact"):
        table.add_column(name, justify="right", no_wrap=True)
    for s in scores:
        table.add_row(s.model, *map(cell, (s.examples, s.tokens, s.loss, s.perplexity, f"{s.exact_match:.0%}")))
    console().print(table)


def _score(speaker: Any, file: Any, truncate: bool) -> Score:
    from tinsmith.cli.dataset import examples_of
    from tinsmith.cli.progress import ProgressView

    examples = examples_of(file, speaker.tokenizer, speaker.context, truncate=truncate)
    screen = console(stderr=True)
    loss, count, exact = 0.0, 0.0, 0
    with ProgressView(screen, len(examples)) as view:
        for number, (example, logprobs, answer) in enumerate(_asked(speaker, examples), start=1):
            loss -= sum(w * p for w, p in zip(example.weights[1:], logprobs[1:], strict=True) if w)
            count += example.counted
            expected = speaker.text(example.tokens[example.last_answer :])
            exact += speaker.text(answer).strip() == expected.strip()
            if screen.is_terminal:
                view.step(number, speaker.name[-30:], "")
    mean = loss / max(1.0, count)
    perplexity = math.exp(min(mean, 700.0))
    return Score(speaker.name, len(examples), round(count), mean, perplexity, exact / len(examples))


def _asked(speaker: Any, examples: Sequence[Any]) -> Iterator[tuple[Any, list[Any], list[int]]]:
    """Yield each example with its logprobs and a greedy answer; up to `IN_FLIGHT` are requested at once."""
    from tinsmith.types import ModelInput, SamplingParams

    for start in range(0, len(examples), IN_FLIGHT):
        some = examples[start : start + IN_FLIGHT]
        asked = []
        for example in some:
            tokens = list(example.tokens)
            at = example.last_answer
            params = SamplingParams(max_tokens=len(tokens) - at, temperature=0.0)
            logprobs = speaker.sampler.compute_logprobs(ModelInput.from_ints(tokens))
            asked.append((logprobs, speaker.sample(tokens[:at], 1, params)))
        for example, (logprobs, answer) in zip(some, asked, strict=True):
            yield example, logprobs.result(), answer.result().sequences[0].tokens

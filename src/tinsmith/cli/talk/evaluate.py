"""`tinsmith eval`: loss, perplexity and exact matches of models on examples, or which answer of a pair they prefer
(`--dpo`)."""

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


@dataclass(frozen=True, slots=True)
class Preference:
    """The result of one checkpoint on a file of preference pairs."""

    model: str
    reference: str
    """The checkpoint's base model."""
    pairs: int
    right: float
    """Fraction of pairs whose chosen answer the checkpoint prefers more than the reference does."""
    margin: float
    """Mean of how much more, as a difference of logprobs."""


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
@click.option("--dpo", is_flag=True, help="DATA has preference pairs; compare checkpoints with their base model.")
@click.option("--limit", type=click.IntRange(min=1), help="Use only the first N examples.", metavar="N")
@click.option("--truncate", is_flag=True, help="Cut examples that exceed the model's context, instead of failing.")
@formatted
@connected
def evaluate(
    data: Path, models: tuple[str, ...], checkpoints: tuple[str, ...], dpo: bool, limit: int | None, truncate: bool
) -> None:
    """Evaluate models on DATA, a JSONL file as for `tinsmith train`.

    Loss and perplexity are computed over the assistant's messages (or the completion). An exact match is a greedy
    answer that equals the last answer of the example.

    With --dpo, the margin of a pair is how much more a checkpoint prefers the chosen answer to the rejected one than
    its base model does. A pair is right if its margin is positive.
    """
    from tinsmith.cli.dataset import DataFile, check_example
    from tinsmith.cli.dpo import check_pair

    if dpo and (models or not checkpoints):
        raise click.UsageError("--dpo compares checkpoints with their base models: pass --checkpoint, and no --model")
    file = DataFile.read(data, check_pair if dpo else check_example)
    if limit is not None:
        file = DataFile(file.path, file.digest, file.rows[:limit])
    with service_client(user_metadata={"purpose": "eval"}) as service:
        if dpo:
            scores: list[Any] = [_preference(service, checkpoint, file, truncate) for checkpoint in checkpoints]
        else:
            scores = _scores(service, models, checkpoints, file, truncate)
    if wants_json():
        print_json({"data": str(data), "scores": [asdict(score) for score in scores]})
        return
    (_print_preferences if dpo else _print_scores)(scores)


def _scores(service: Any, models: Sequence[str], checkpoints: Sequence[str], file: Any, truncate: bool) -> list[Score]:
    from tinsmith.cli.models import open_speaker

    speakers = [open_speaker(service, model=model) for model in models]
    speakers += [open_speaker(service, checkpoint=checkpoint) for checkpoint in checkpoints]
    speakers = speakers or [open_speaker(service)]
    return [_score(speaker, file, truncate) for speaker in speakers]


def _print_scores(scores: list[Score]) -> None:
    columns = ("Examples", "Tokens", "Loss", "Perplexity", "Exact")
    rows = [(s.model, s.examples, s.tokens, s.loss, s.perplexity, f"{s.exact_match:.0%}") for s in scores]
    _print_table(columns, rows)


def _print_preferences(found: list[Preference]) -> None:
    rows = [(p.model, p.pairs, f"{p.right:.0%}", p.margin) for p in found]
    _print_table(("Pairs", "Right", "Margin"), rows)


def _print_table(columns: Sequence[str], rows: Sequence[tuple[Any, ...]]) -> None:
    """Print a table that wraps long names instead of cutting them: checkpoints of one run differ at the end."""
    from rich.table import Table

    table = Table()
    table.add_column("Model", overflow="fold")
    for name in columns:
        table.add_column(name, justify="right", no_wrap=True)
    for model, *values in rows:
        table.add_row(model, *map(cell, values))
    console().print(table)


def _score(speaker: Any, file: Any, truncate: bool) -> Score:
    from tinsmith.cli.dataset import examples_of
    from tinsmith.cli.progress import ProgressView

    examples = examples_of(file, speaker.tokenizer, speaker.context, truncate=truncate)
    screen = console(stderr=True)
    loss, count, exact = 0.0, 0.0, 0
    with ProgressView(screen, len(examples)) as view:
        for number, (example, logprobs, answer) in enumerate(_asked(speaker, examples), start=1):
            loss -= _answer_logprob(example, logprobs)
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


def _preference(service: Any, checkpoint: str, file: Any, truncate: bool) -> Preference:
    from tinsmith.cli.dpo import margins_of, pairs_of, share_right
    from tinsmith.cli.models import open_speaker
    from tinsmith.cli.progress import ProgressView

    tuned = open_speaker(service, checkpoint=checkpoint)
    base = open_speaker(service, model=tuned.sampler.get_base_model())
    pairs = pairs_of(file, tuned.tokenizer, tuned.context, truncate=truncate)
    screen = console(stderr=True)
    margins: list[float] = []
    with ProgressView(screen, len(pairs)) as view:
        for start in range(0, len(pairs), IN_FLIGHT // 4):  # four requests for each pair
            margins += margins_of(*_preferred((tuned, base), pairs[start : start + IN_FLIGHT // 4]))
            if screen.is_terminal:
                view.step(len(margins), checkpoint[-30:], "")
    return Preference(checkpoint, base.name, len(pairs), share_right(margins), sum(margins) / len(margins))


def _preferred(speakers: Sequence[Any], pairs: Sequence[Any]) -> list[list[float]]:
    """Return the logprobs of both answers of every pair, by each speaker."""
    from tinsmith.cli.dpo import texts_of
    from tinsmith.types import ModelInput

    texts = texts_of(pairs)
    inputs = [ModelInput.from_ints(list(text.tokens)) for text in texts]
    asked = [[speaker.sampler.compute_logprobs(given) for given in inputs] for speaker in speakers]
    return [
        [_answer_logprob(text, future.result()) for text, future in zip(texts, futures, strict=True)]
        for futures in asked
    ]


def _answer_logprob(example: Any, logprobs: Sequence[Any]) -> float:
    """Return the logprob of an example's tokens that have a weight."""
    return sum(float(w * p) for w, p in zip(example.weights[1:], logprobs[1:], strict=True) if w)

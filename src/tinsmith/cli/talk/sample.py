"""`tinsmith sample`: samples for one prompt."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import click

from tinsmith.cli.connection import checkpoint_path, connected, service_client
from tinsmith.cli.output import echo, echo_exactly, formatted, print_json, wants_json

DEFAULT_TOKENS = 256


@click.command()
@click.argument("prompt", required=False)
@click.option(
    "--file", type=click.Path(path_type=Path, dir_okay=False, exists=True), help="Read the prompt from a file."
)
@click.option("--model", metavar="NAME", help="Base model.  [default: the server's first]")
@click.option(
    "--checkpoint",
    metavar="tinker://...",
    callback=checkpoint_path,
    help="Checkpoint to use instead of a base model.",
)
@click.option(
    "-n", "count", type=click.IntRange(min=1), metavar="N", default=1, show_default=True, help="Number of samples."
)
@click.option(
    "--max-tokens",
    type=click.IntRange(min=1),
    metavar="N",
    help="Longest sample, in tokens.  [default: 256, or what fits]",
)
@click.option(
    "--temperature",
    type=click.FloatRange(min=0),
    metavar="X",
    default=1.0,
    show_default=True,
    help="Sampling temperature; 0 is greedy.",
)
@click.option(
    "--top-p",
    type=click.FloatRange(0, 1, min_open=True),
    metavar="X",
    default=1.0,
    show_default=True,
    help="Sample from the most likely tokens that have this total probability.",
)
@click.option(
    "--top-k",
    type=click.IntRange(min=-1),
    metavar="N",
    default=-1,
    show_default=True,
    help="Sample from the K most likely tokens; -1: from all.",
)
@click.option(
    "--seed", type=click.IntRange(min=0), metavar="N", help="Random seed; the same seed gives the same samples."
)
@click.option("--stop", "stops", multiple=True, metavar="TEXT", help="End the sample at this string; repeatable.")
@click.option("--system", metavar="TEXT", help="System message before the prompt.")
@click.option("--raw", is_flag=True, help="Continue the prompt as plain text, without the chat template.")
@formatted
@connected
def sample(prompt: str | None, file: Path | None, **options: Any) -> None:
    """Sample from a model. The prompt is PROMPT, a file, or standard input.

    The prompt is sent as a user message in the model's chat template, unless --raw is given. --format json adds tokens,
    logprobs and stop reasons.
    """
    if options["model"] is not None and options["checkpoint"] is not None:
        raise click.UsageError("use either --model or --checkpoint, not both")
    if options["raw"] and options["system"] is not None:
        raise click.UsageError("--system cannot be used with --raw, which skips the chat template")
    text = _prompt(prompt, file)
    with service_client(user_metadata={"purpose": "sample"}) as service:
        _sample(service, text, options)


def _prompt(prompt: str | None, file: Path | None) -> str:
    if prompt is not None and file is not None:
        raise click.UsageError("use either PROMPT or --file, not both")
    if prompt is None and file is None and sys.stdin.isatty():
        raise click.UsageError("no prompt: pass it as an argument, with --file, or on standard input")
    try:
        if file is not None:
            text = file.read_text(encoding="utf-8")
        else:
            text = prompt if prompt is not None and prompt != "-" else sys.stdin.read()
    except UnicodeDecodeError as error:
        raise click.UsageError(f"the prompt is not UTF-8 ({error.reason})") from None
    if not text.strip():
        raise click.UsageError("the prompt is empty")
    return text if prompt is not None else text.removesuffix("\n")


def _sample(service: Any, text: str, options: dict[str, Any]) -> None:
    from tinsmith.cli.models import open_speaker
    from tinsmith.types import SamplingParams

    speaker = open_speaker(service, model=options["model"], checkpoint=options["checkpoint"])
    if options["raw"]:
        tokens = list(speaker.tokenizer.encode(text))
    else:
        system = [{"role": "system", "content": options["system"]}] if options["system"] is not None else []
        tokens = speaker.prompt([*system, {"role": "user", "content": text}])
    given: dict[str, Any] = {name: options[name] for name in ("temperature", "top_p", "top_k")}
    given["max_tokens"] = options["max_tokens"] or speaker.room(tokens, DEFAULT_TOKENS)
    if options["seed"] is not None:
        given["seed"] = options["seed"]
    if options["stops"]:
        given["stop"] = list(options["stops"])
    params = SamplingParams(**given)
    sequences = speaker.sample(tokens, options["count"], params).result().sequences
    if wants_json():
        samples = [
            {"text": speaker.text(s.tokens), "tokens": s.tokens, "logprobs": s.logprobs, "stop_reason": s.stop_reason}
            for s in sequences
        ]
        print_json({"model": speaker.name, "prompt_tokens": tokens, "samples": samples})
        return
    for number, sequence in enumerate(sequences, start=1):
        if len(sequences) > 1:
            echo(f"{'' if number == 1 else chr(10)}--- {number} of {len(sequences)} ---")
        echo_exactly(speaker.text(sequence.tokens))

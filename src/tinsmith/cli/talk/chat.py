"""`tinsmith chat`: a chat in the terminal."""

from __future__ import annotations

import contextlib
import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click

from tinsmith.cli.connection import checkpoint_path, connected, service_client
from tinsmith.cli.output import echo, plural

HELP = """\
/compare A B   send each message to two models (names or tinker:// paths); /compare alone stops
/model NAME    switch to another model or checkpoint
/system TEXT   set the system message; without TEXT, remove it
/reset         clear the conversation
/save FILE     append the conversation to a JSONL file that tinsmith train can read
/help          show this list
/quit          quit (also Ctrl-D); Ctrl-C stops an answer"""
HISTORY_LINES = 1000


@click.command()
@click.option("--model", metavar="NAME", help="Base model.  [default: the server's first]")
@click.option(
    "--checkpoint",
    metavar="tinker://...",
    callback=checkpoint_path,
    help="Checkpoint to use instead of a base model.",
)
@click.option(
    "--max-tokens",
    type=click.IntRange(min=1),
    metavar="N",
    default=512,
    show_default=True,
    help="Longest answer, in tokens.",
)
@click.option(
    "--temperature",
    type=click.FloatRange(min=0),
    metavar="X",
    default=0.7,
    show_default=True,
    help="Sampling temperature; 0 is greedy.",
)
@click.option(
    "--top-p",
    type=click.FloatRange(0, 1, min_open=True),
    metavar="X",
    default=0.95,
    show_default=True,
    help="Sample from the most likely tokens that have this total probability.",
)
@click.option("--seed", type=click.IntRange(min=0), metavar="N", help="Random seed, for repeatable answers.")
@click.option("--system", metavar="TEXT", help="System message.")
@connected
def chat(model: str | None, checkpoint: str | None, system: str | None, **options: Any) -> None:
    """Chat with a model. Type /help for the commands."""
    from tinsmith.cli.models import open_speaker
    from tinsmith.cli.talk.conversation import Conversation
    from tinsmith.types import SamplingParams

    if model is not None and checkpoint is not None:
        raise click.UsageError("use either --model or --checkpoint, not both")
    params = SamplingParams(**{name: value for name, value in options.items() if value is not None})
    with service_client(user_metadata={"purpose": "chat"}) as service:
        talk = Conversation(service, params, [open_speaker(service, model=model, checkpoint=checkpoint)])
        talk.system(system or "")
        echo(f"Chatting with {talk.title}. Type /help for commands, Ctrl-D to quit.", err=True)
        with _history():
            _converse(talk)


def _converse(talk: Any) -> None:
    is_shown = sys.stdin.isatty()
    while True:
        try:
            line = input("> " if is_shown else "").strip()
            if line in ("/quit", "/exit"):
                return
            if line:
                _handle(talk, line)
        except EOFError:
            if is_shown:
                echo()
            return
        except KeyboardInterrupt:
            echo("\n(Ctrl-D or /quit to quit)", err=True)


def _handle(talk: Any, line: str) -> None:
    """Handle one line of input; an error is printed and does not end the chat."""
    from tinsmith.errors import RetryableException, TinkerError

    try:
        if line.startswith("/"):
            _command(talk, *line[1:].partition(" ")[::2])
        else:
            talk.ask(line)
    except KeyboardInterrupt:
        echo(" [stopped]")
    except (TinkerError, RetryableException, OSError) as error:
        echo(f"Error: {error}", err=True)


def _command(talk: Any, name: str, rest: str) -> None:
    words = rest.split()
    if name == "help":
        echo(HELP)
    elif name == "reset":
        talk.reset()
        echo("conversation cleared", err=True)
    elif name == "system":
        talk.system(rest.strip())
        echo("system message set" if rest.strip() else "system message removed", err=True)
    elif name == "model" and len(words) == 1:
        talk.change(words)
        echo(talk.title, err=True)
    elif name == "compare" and len(words) in (0, 2):
        talk.change(words or [talk.names[0]])
        echo(talk.title, err=True)
    elif name == "save" and rest.strip():
        path = Path(rest.strip()).expanduser()
        count = _save(path, talk.chats())
        echo(f"{plural(count, 'chat')} saved to {path}" if count else "nothing to save yet", err=True)
    else:
        echo("unknown command or wrong arguments: " + f"/{name} {rest}".rstrip() + "\n" + HELP, err=True)


def _save(path: Path, chats: list[dict[str, Any]]) -> int:
    if chats:
        with path.open("a", encoding="utf-8") as file:
            file.writelines(json.dumps(chat, ensure_ascii=False) + "\n" for chat in chats)
    return len(chats)


@contextlib.contextmanager
def _history() -> Iterator[None]:
    """Keep the lines typed into a terminal across chats."""
    if not sys.stdin.isatty():
        yield
        return
    try:
        import readline
    except ImportError:  # not part of every Python build
        yield
        return
    from tinsmith.config import default_data_dir

    path = default_data_dir(os.environ) / "chat_history"
    with contextlib.suppress(OSError):
        readline.read_history_file(path)
    readline.set_history_length(HISTORY_LINES)
    try:
        yield
    finally:
        with contextlib.suppress(OSError):
            path.parent.mkdir(parents=True, exist_ok=True)
            readline.write_history_file(path)
            path.chmod(0o600)

"""`tinsmith chat`: a conversation in the terminal."""

from __future__ import annotations

import contextlib
import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click

from tinsmith.cli.connection import connected, service_client

HELP = """\
/compare A B   ask two models at once: base models or tinker:// paths; /compare alone ends it
/model NAME    talk to another model or checkpoint
/system TEXT   set the system message, or remove it
/reset         forget the conversation
/save FILE     add the conversation to a JSONL file, as tinsmith train reads it
/help          this list
/quit          end; so does Ctrl-D. Ctrl-C stops an answer."""
HISTORY_LINES = 1000


@click.command()
@click.option("--model", help="Base model.  [default: the server's first]")
@click.option("--checkpoint", metavar="tinker://...", help="Saved weights, instead of a base model.")
@click.option("--max-tokens", type=click.IntRange(min=1), default=512, show_default=True)
@click.option("--temperature", type=click.FloatRange(min=0), default=0.7, show_default=True, help="0 is greedy.")
@click.option("--top-p", type=click.FloatRange(0, 1, min_open=True), default=0.95, show_default=True)
@click.option("--seed", type=click.IntRange(min=0), help="Makes answers repeatable.")
@click.option("--system", help="A system message.")
@connected
def chat(model: str | None, checkpoint: str | None, system: str | None, **options: Any) -> None:
    """Talk to a model; /help lists what else can be said."""
    from tinsmith.cli.conversation import Conversation
    from tinsmith.cli.speakers import open_speaker
    from tinsmith.types import SamplingParams

    if model is not None and checkpoint is not None:
        raise click.UsageError("give --model or --checkpoint, not both")
    params = SamplingParams(**{name: value for name, value in options.items() if value is not None})
    with service_client(user_metadata={"purpose": "chat"}) as service:
        talk = Conversation(service, params, [open_speaker(service, model=model, checkpoint=checkpoint)])
        talk.system(system or "")
        click.echo(f"{talk.title}. /help lists commands; Ctrl-D ends.", err=True)
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
                _said(talk, line)
        except EOFError:
            if is_shown:
                click.echo()
            return
        except KeyboardInterrupt:
            click.echo("\n(Ctrl-D or /quit ends)", err=True)


def _said(talk: Any, line: str) -> None:
    """One line of the user; what goes wrong with it does not end the conversation."""
    from tinsmith.errors import RetryableException, TinkerError

    try:
        if line.startswith("/"):
            _command(talk, *line[1:].partition(" ")[::2])
        else:
            talk.ask(line)
    except KeyboardInterrupt:
        click.echo(" [stopped]")
    except (TinkerError, RetryableException, OSError) as error:
        click.echo(f"Error: {error}", err=True)


def _command(talk: Any, name: str, rest: str) -> None:
    words = rest.split()
    if name == "help":
        click.echo(HELP)
    elif name == "reset":
        talk.reset()
        click.echo("forgotten", err=True)
    elif name == "system":
        talk.system(rest.strip())
        click.echo("the system message is set" if rest.strip() else "there is no system message now", err=True)
    elif name == "model" and len(words) == 1:
        talk.change(words)
        click.echo(talk.title, err=True)
    elif name == "compare" and len(words) in (0, 2):
        talk.change(words or [talk.names[0]])
        click.echo(talk.title, err=True)
    elif name == "save" and rest.strip():
        path = Path(rest.strip()).expanduser()
        count = _save(path, talk.chats())
        click.echo(
            f"{count} chat{'' if count == 1 else 's'} added to {path}" if count else "nothing to save yet", err=True
        )
    else:
        click.echo(f"/{name} {rest}".rstrip() + " is not a command; there are:\n" + HELP, err=True)


def _save(path: Path, chats: list[dict[str, Any]]) -> int:
    if chats:
        with path.open("a", encoding="utf-8") as file:
            file.writelines(json.dumps(chat, ensure_ascii=False) + "\n" for chat in chats)
    return len(chats)


@contextlib.contextmanager
def _history() -> Iterator[None]:
    """Lines of earlier conversations, in a terminal."""
    if not sys.stdin.isatty():
        yield
        return
    try:
        import readline
    except ImportError:  # not built in everywhere
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

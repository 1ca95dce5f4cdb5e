"""`tinsmith chat`: a chat in the terminal."""

from __future__ import annotations

import json
import os
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

from tinsmith.cli.connection import checkpoint_path, connected, service_client
from tinsmith.cli.output import echo, plural

COMMANDS = {
    "compare": ("A B", "ask two models at once; without A B, return to the one before"),
    "model": ("NAME", "switch to another model, or to a checkpoint (tinker://...)"),
    "system": ("TEXT", "set the system message; without TEXT, remove it"),
    "reset": ("", "clear the conversation"),
    "save": ("FILE", "append the conversation to a JSONL file, as for tinsmith train"),
    "help": ("", "show this list"),
    "quit": ("", "quit (also Ctrl-D); Ctrl-C stops an answer"),
}
"""For each command: its arguments, and its line in /help."""
KEYS = """\
Enter sends the message. Alt-Enter, or Enter after a backslash, starts a new
line; pasted lines stay together. Tab completes a command, and the arrow keys
bring back earlier messages."""
_COMMAND = re.compile(r"/([A-Za-z]+)(?:\s+(.*))?", re.DOTALL)
"""A message such as "/usr/bin is a directory" or "// a comment" is none."""


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
    """Chat with a model. Type /help for the commands.

    Enter sends a message. Alt-Enter, or Enter after a backslash, starts a new line; pasted lines are one message. If
    stdin is not a terminal, each of its lines is a message.
    """
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
        _converse(talk, _reader())


def _reader() -> Callable[[], str]:
    """Return what reads the next message: a line editor in a terminal, else the lines of stdin."""
    if not sys.stdin.isatty():
        return input
    from prompt_toolkit.utils import is_dumb_terminal

    if is_dumb_terminal() or not (sys.stdout.isatty() or sys.stderr.isatty()):
        return lambda: input("> ")
    from tinsmith.cli.talk.line_editor import LineEditor
    from tinsmith.config import default_data_dir

    arguments = {name: arguments for name, (arguments, _) in COMMANDS.items()}
    return LineEditor(default_data_dir(os.environ) / "chat_history", arguments).read


def _converse(talk: Any, read: Callable[[], str]) -> None:
    while True:
        try:
            line = read().strip()
            if line in ("/quit", "/exit"):
                return
            if line:
                _handle(talk, line)
        except EOFError:
            return
        except KeyboardInterrupt:
            echo("(Ctrl-D or /quit to quit)", err=True)


def _handle(talk: Any, line: str) -> None:
    """Handle one message; an error is printed and does not end the chat."""
    from tinsmith.errors import RetryableException, TinkerError

    try:
        if command := _COMMAND.fullmatch(line):
            _command(talk, command[1], command[2] or "")
        else:
            talk.ask(line)
    except KeyboardInterrupt:
        echo(" [stopped]")
    except (TinkerError, RetryableException, OSError) as error:
        echo(f"Error: {error}", err=True)


def _command(talk: Any, name: str, rest: str) -> None:
    words = rest.split()
    if name == "help":
        echo(f"{_listed()}\n\n{KEYS}")
    elif name == "reset":
        talk.reset()
        echo("conversation cleared", err=True)
    elif name == "system":
        talk.system(rest.strip())
        echo("system message set" if rest.strip() else "system message removed", err=True)
    elif name == "model" and len(words) == 1:
        talk.change(words)
        echo(talk.title, err=True)
    elif name == "compare" and len(words) == 2:
        talk.compare(words)
        echo(talk.title, err=True)
    elif name == "compare" and not words:
        echo(f"back to {talk.title}" if talk.stop_comparing() else f"there is one model only: {talk.title}", err=True)
    elif name == "save" and rest.strip():
        path = Path(rest.strip()).expanduser()
        count = _save(path, talk.chats())
        echo(f"{plural(count, 'chat')} saved to {path}" if count else "nothing to save yet", err=True)
    else:
        echo("unknown command or wrong arguments: " + f"/{name} {rest}".rstrip() + "\n" + _listed(), err=True)


def _listed() -> str:
    """Return the commands, one per line."""
    return "\n".join(f"{f'/{name} {arguments}':<14} {text}" for name, (arguments, text) in COMMANDS.items())


def _save(path: Path, chats: list[dict[str, Any]]) -> int:
    if chats:
        with path.open("a", encoding="utf-8") as file:
            file.writelines(json.dumps(chat, ensure_ascii=False) + "\n" for chat in chats)
    return len(chats)

"""The command line: one file per command, loaded when it is called."""

from __future__ import annotations

import importlib
from typing import Any

import click

from tinsmith.cli.connection import connected
from tinsmith.cli.output import formatted
from tinsmith.version import PROTOCOL_VERSION, __version__

COMMANDS = {
    "serve": ("tinsmith.cli.serve", "serve", "Run a Tinker server for official and own clients."),
    "chat": ("tinsmith.cli.chat", "chat", "Talk to a model or a checkpoint, or to two at once."),
    "demo": ("tinsmith.cli.demo", "demo", "Fine-tune a small model here and compare it with what it was."),
    "eval": ("tinsmith.cli.evaluate", "evaluate", "Measure models on a file of examples."),
    "key": ("tinsmith.cli.key", "key", "Keys of a server: create, list, revoke."),
    "sample": ("tinsmith.cli.sample", "sample", "Ask a model or a checkpoint."),
    "train": ("tinsmith.cli.train", "train", "Fine-tune a model on a JSONL file, resumably."),
}
"""Name of a command, where it is, and what the overview says about it."""

INTERRUPTED = 130
"""Exit code after Ctrl-C: 128 + SIGINT."""


class LazyGroup(click.Group):
    """Commands of the table are imported when they are needed; the overview needs none of them."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return sorted([*COMMANDS, *super().list_commands(ctx)])

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in COMMANDS:
            return super().get_command(ctx, cmd_name)
        module, name, _ = COMMANDS[cmd_name]
        command: click.Command = getattr(importlib.import_module(module), name)
        return command

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except (KeyboardInterrupt, click.Abort):
            click.echo("interrupted", err=True)
            ctx.exit(INTERRUPTED)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        rows = [(name, text) for name, (_, _, text) in COMMANDS.items()]
        rows += [(name, command.get_short_help_str(80)) for name, command in self.commands.items()]
        with formatter.section("Commands"):
            formatter.write_dl(sorted(rows))


@click.group(cls=LazyGroup, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="tinsmith")
@formatted
@connected
def main() -> None:
    """Train and sample language models through the Tinker protocol."""


@main.command()
def version() -> None:
    """Print the version of tinsmith and of the protocol it speaks."""
    click.echo(f"tinsmith {__version__} (protocol {PROTOCOL_VERSION})")

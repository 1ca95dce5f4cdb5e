"""The command line: one file per command, loaded when it is called."""

from __future__ import annotations

import importlib
from typing import Any

import click

from tinsmith.cli.connection import server_option
from tinsmith.cli.output import formatted
from tinsmith.version import PROTOCOL_VERSION, __version__

COMMANDS = {
    "auth": ("tinsmith.cli.auth", "auth", "The key that this machine uses: log in, log out, check."),
    "billing": ("tinsmith.cli.billing", "billing", "Usage by the hour and storage, as a server counts them."),
    "chat": ("tinsmith.cli.chat", "chat", "Talk to a model or a checkpoint, or to two at once."),
    "checkpoint": ("tinsmith.cli.checkpoint", "checkpoint", "Checkpoints: list, download, export, delete and more."),
    "completion": ("tinsmith.cli.completion", "completion", "Print the script that completes commands in a shell."),
    "demo": ("tinsmith.cli.demo", "demo", "Fine-tune a small model here and compare it with what it was."),
    "doctor": ("tinsmith.cli.doctor", "doctor", "Check the installation, the data directory and the server."),
    "eval": ("tinsmith.cli.evaluate", "evaluate", "Measure models on a file of examples."),
    "key": ("tinsmith.cli.key", "key", "Keys of a server: create, list, revoke."),
    "model": ("tinsmith.cli.model", "model", "Base models of a server: list."),
    "run": ("tinsmith.cli.run", "run", "Training runs: list, show, plot, watch, end."),
    "sample": ("tinsmith.cli.sample", "sample", "Ask a model or a checkpoint."),
    "serve": ("tinsmith.cli.serve", "serve", "Run a Tinker server for official and own clients."),
    "session": ("tinsmith.cli.session", "session", "Sessions: list, show, finish, export a trace."),
    "status": ("tinsmith.cli.status", "status", "Is the server up, and what does it do?"),
    "train": ("tinsmith.cli.train", "train", "Fine-tune a model on a JSONL file, resumably."),
    "usage": ("tinsmith.cli.usage", "usage", "Tokens, seconds, storage and cost, summed up."),
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
@server_option
def main() -> None:
    """Train and sample language models through the Tinker protocol."""


@main.command()
def version() -> None:
    """Print the version of tinsmith and of the protocol it speaks."""
    click.echo(f"tinsmith {__version__} (protocol {PROTOCOL_VERSION})")

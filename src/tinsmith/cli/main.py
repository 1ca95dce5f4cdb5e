"""The `tinsmith` command: a table of commands, each imported when it is called."""

from __future__ import annotations

import importlib
import io
import logging
import sys
from typing import Any

import click

from tinsmith.cli.connection import server_option
from tinsmith.cli.output import echo, formatted
from tinsmith.text.printable import PrintableLines, printable
from tinsmith.version import PROTOCOL_VERSION, __version__

COMMANDS = {
    "auth": ("tinsmith.cli.manage.auth", "auth", "Log in to a server, log out, and check your key."),
    "billing": ("tinsmith.cli.manage.billing", "billing", "List usage per hour, and storage, row by row."),
    "chat": ("tinsmith.cli.talk.chat", "chat", "Chat with a model or a checkpoint, or compare two."),
    "checkpoint": (
        "tinsmith.cli.checkpoint.show",
        "checkpoint",
        "List, download, export, import and delete checkpoints.",
    ),
    "clean": ("tinsmith.cli.server.clean", "clean", "Show what is stored on this machine, or delete some of it."),
    "completion": (
        "tinsmith.cli.manage.completion",
        "completion",
        "Print a shell completion script.",
    ),
    "connect": (
        "tinsmith.cli.manage.connect",
        "connect",
        "Print how to use the server from OpenAI, Anthropic or Tinker clients.",
    ),
    "demo": ("tinsmith.cli.train.demo", "demo", "Fine-tune a small model and compare it before and after."),
    "doctor": ("tinsmith.cli.server.doctor", "doctor", "Check the installation, the data directory and the server."),
    "eval": ("tinsmith.cli.talk.evaluate", "evaluate", "Evaluate models on a file of examples."),
    "key": ("tinsmith.cli.server.key", "key", "Create, list and revoke a server's API keys."),
    "model": ("tinsmith.cli.manage.model", "model", "List a server's base models."),
    "run": ("tinsmith.cli.manage.run", "run", "List, inspect, plot, watch, end and delete training runs."),
    "sample": ("tinsmith.cli.talk.sample", "sample", "Sample from a model or a checkpoint."),
    "serve": ("tinsmith.cli.server.serve", "serve", "Run a Tinker server."),
    "session": ("tinsmith.cli.manage.session", "session", "List, inspect and end sessions; export traces."),
    "status": ("tinsmith.cli.manage.status", "status", "Show whether the server is up and what it is doing."),
    "stop": ("tinsmith.cli.server.stop", "stop", "End the local engine on this machine."),
    "train": ("tinsmith.cli.train.command", "train", "Fine-tune a model on a JSONL file; can be resumed."),
    "usage": ("tinsmith.cli.manage.usage", "usage", "Summarize tokens, compute time, storage and cost."),
}
"""For each command: its module, the name in it, and its line in `tinsmith --help`."""

INTERRUPTED = 130
"""Exit code after Ctrl-C: 128 + SIGINT."""


class LazyGroup(click.Group):
    """The commands of the table, imported when they are called; `--help` imports none of them."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return sorted([*COMMANDS, *super().list_commands(ctx)])

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in COMMANDS:
            return super().get_command(ctx, cmd_name)
        module, name, _ = COMMANDS[cmd_name]
        command: click.Command = getattr(importlib.import_module(module), name)
        return command

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        try:
            return super().resolve_command(ctx, args)
        except click.UsageError as error:
            import difflib

            close = difflib.get_close_matches(args[0], self.list_commands(ctx), n=1)
            if not close or "Did you mean" in error.message:
                raise
            raise click.UsageError(f"{error.message} Did you mean {close[0]!r}?", ctx) from None

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except click.ClickException as error:
            if type(error) is click.ClickException:  # subclasses quote only the user's own arguments and files
                raise click.ClickException(printable(error.message)) from None
            raise
        except (KeyboardInterrupt, click.Abort):
            echo("interrupted", err=True)
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
    if sys.platform == "win32":
        _print_all_characters()
    if logging.lastResort is not None:
        logging.lastResort.setFormatter(PrintableLines())  # warnings of the SDK may quote a server


def _print_all_characters() -> None:
    """Replace what a pipe's encoding lacks, which on Windows is often not UTF-8, instead of failing."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")


@main.command()
def version() -> None:
    """Print the versions of tinsmith and of the protocol."""
    echo(f"tinsmith {__version__} (protocol {PROTOCOL_VERSION})")

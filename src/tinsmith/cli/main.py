"""Entry point of the `tinsmith` command."""

from __future__ import annotations

import click

from tinsmith.version import PROTOCOL_VERSION, __version__


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="tinsmith")
def main() -> None:
    """Train and sample language models through the Tinker protocol."""


@main.command()
def version() -> None:
    """Print the version of tinsmith and of the protocol it speaks."""
    click.echo(f"tinsmith {__version__} (protocol {PROTOCOL_VERSION})")

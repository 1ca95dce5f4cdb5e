"""`tinsmith completion`: shell completion scripts."""

from __future__ import annotations

import click

from tinsmith.cli.output import echo

SHELLS = ("bash", "zsh", "fish")


@click.command()
@click.argument("shell", type=click.Choice(SHELLS))
def completion(shell: str) -> None:
    """Print a completion script for commands and options. To install it:

    \b
    bash  tinsmith completion bash >> ~/.bashrc
    zsh   tinsmith completion zsh >> ~/.zshrc
    fish  tinsmith completion fish > ~/.config/fish/completions/tinsmith.fish
    """
    from click.shell_completion import get_completion_class

    from tinsmith.cli.main import main

    kind = get_completion_class(shell)
    assert kind is not None
    echo(kind(main, {}, "tinsmith", "_TINSMITH_COMPLETE").source())

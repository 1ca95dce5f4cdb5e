"""`tinsmith completion`: what a shell needs to complete commands and options."""

from __future__ import annotations

import click

SHELLS = ("bash", "zsh", "fish")


@click.command()
@click.argument("shell", type=click.Choice(SHELLS))
def completion(shell: str) -> None:
    """Print the script that completes commands and options in SHELL.

    \b
    bash  tinsmith completion bash >> ~/.bashrc
    zsh   tinsmith completion zsh >> ~/.zshrc
    fish  tinsmith completion fish > ~/.config/fish/completions/tinsmith.fish
    """
    from click.shell_completion import get_completion_class

    from tinsmith.cli.main import main

    kind = get_completion_class(shell)
    assert kind is not None
    click.echo(kind(main, {}, "tinsmith", "_TINSMITH_COMPLETE").source())

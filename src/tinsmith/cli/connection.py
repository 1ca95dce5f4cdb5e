"""How commands reach a server: `--base-url`, else the environment, else the local engine; and what failures look like.

Does not know: what a command does with the client.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, TypeVar

import click

F = TypeVar("F", bound=Callable[..., Any])

_URL = "tinsmith.base_url"


def connected(command: F) -> F:
    """Give a command `--base-url` and turn errors of the SDK into one line with exit code 1."""

    @functools.wraps(command)
    def run(*args: Any, **kwargs: Any) -> Any:
        from tinsmith.errors import TinkerError

        try:
            return command(*args, **kwargs)
        except TinkerError as error:
            raise click.ClickException(str(error)) from None

    option = click.option(
        "--base-url",
        metavar="URL",
        expose_value=False,
        callback=_keep,
        help="The server; 'local' is the engine of this machine.  [default: TINKER_BASE_URL, else local]",
    )
    return option(run)  # type: ignore[return-value]


def _keep(context: click.Context, _parameter: click.Parameter, value: str | None) -> None:
    if value is not None:
        context.meta[_URL] = value


def service_client(**arguments: Any) -> Any:
    """A `ServiceClient` to the server that the command line names. Use it in a `with` block."""
    import tinsmith

    return tinsmith.ServiceClient(base_url=click.get_current_context().meta.get(_URL), **arguments)

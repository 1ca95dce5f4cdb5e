"""How commands reach a server: `--base-url`, else the environment, else the local engine; and what failures look like.

Does not know: what a command does with the client.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, TypeVar

import click

if TYPE_CHECKING:
    from tinsmith.client.operations import Operations
    from tinsmith.client.rest import RestClient
    from tinsmith.errors import TinkerError

F = TypeVar("F", bound=Callable[..., Any])

ONE_ATTEMPT_S = 0.01
"""Shorter than any pause between two attempts: whoever looks at a server wants to know at once that it is not there."""
RETRY_S = 30.0
NO_ROUTE = ("Not Found", "Method Not Allowed")
"""What common web frameworks say of a path that they do not serve; servers name what they miss themselves."""
_URL = "tinsmith.base_url"


def connected(command: F) -> F:
    """Give a command `--base-url`, and turn errors of the SDK into a few lines with exit code 1."""

    @functools.wraps(command)
    def run(*args: Any, **kwargs: Any) -> Any:
        from tinsmith.errors import TinkerError

        try:
            return command(*args, **kwargs)
        except TinkerError as error:
            raise click.ClickException(explained(error)) from None

    return server_option(run)  # type: ignore[return-value]


def server_option(command: F) -> F:
    """Give a command `--base-url`; it is kept in the context, where clients find it."""
    return click.option(
        "--base-url",
        metavar="URL",
        expose_value=False,
        callback=_keep,
        help="The server; 'local' is the engine here.  [default: TINKER_BASE_URL; without it and without a key, local]",
    )(command)


def _keep(context: click.Context, _parameter: click.Parameter, value: str | None) -> None:
    if value is not None:
        context.meta[_URL] = value


def explained(error: TinkerError) -> str:
    """What went wrong, and the next step where there is one."""
    from tinsmith.errors import APIConnectionError, APIStatusError, AuthenticationError

    text = str(error)
    if isinstance(error, APIStatusError):
        detail = error.body.get("detail") if isinstance(error.body, dict) else None
        if error.status_code in (404, 405) and detail in (None, *NO_ROUTE) and error.request is not None:
            text = f"{error.request.method} {error.request.url}: HTTP {error.status_code}\n" + (
                "This server does not have the call (older or smaller ones lack some), or does not know what was named."
            )
        elif isinstance(detail, str) and detail:
            text = f"{detail} (HTTP {error.status_code})"
        if isinstance(error, AuthenticationError):
            text += "\nSet TINKER_API_KEY to a key of this server, or run: tinsmith auth login"
    elif isinstance(error, APIConnectionError):
        text += "\nIs the server up, and is its address right (--base-url, TINKER_BASE_URL)? See: tinsmith status"
    return text


def base_url() -> str | None:
    """The server that the command line names, if it does."""
    url: str | None = click.get_current_context().meta.get(_URL)
    return url


def service_client(**arguments: Any) -> Any:
    """A `ServiceClient` to the server that the command line names. Use it in a `with` block."""
    import tinsmith

    return tinsmith.ServiceClient(base_url=base_url(), **arguments)


@contextlib.contextmanager
def operations(**settings: Any) -> Iterator[Operations]:
    """Calls without a session, for commands that look or manage: a server that is not there is given up at once."""
    from tinsmith.client.connection import Connection
    from tinsmith.client.embedded import client_config
    from tinsmith.client.operations import Operations
    from tinsmith.client.session import Session

    usual = {
        "base_url": base_url(),
        "telemetry": False,
        "first_contact_s": ONE_ATTEMPT_S,
        "retry_deadline_s": RETRY_S,
    }
    connection = Connection(client_config(**{**usual, **settings}))
    holder = Operations(connection, Session(connection))
    try:
        yield holder
    finally:
        holder.close()


@contextlib.contextmanager
def rest_client() -> Iterator[RestClient]:
    """A `RestClient` to the server that the command line names."""
    from tinsmith.client.rest import RestClient

    with operations() as holder:
        yield RestClient(holder)


def confirmed(question: str, is_sure: bool) -> None:
    """Ask before something that cannot be undone; no ends the command."""
    import sys

    if is_sure:
        return
    try:
        if click.confirm(question, err=True):
            return
    except click.Abort:
        if sys.stdin.isatty():
            raise
        raise click.ClickException("nobody is there to answer; give --yes to go on without being asked") from None
    click.echo("Nothing was changed.", err=True)
    click.get_current_context().exit(0)

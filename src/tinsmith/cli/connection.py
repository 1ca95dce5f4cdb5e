"""How commands connect to a server, what they check before, how they report errors, and how they ask for confirmation.

The server is `--base-url`, else what `ClientConfig` finds in the environment, else the local engine.
"""

from __future__ import annotations

import contextlib
import functools
import shlex
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, TypeVar

import click

from tinsmith.cli.output import echo
from tinsmith.text.printable import printable

if TYPE_CHECKING:
    from tinsmith.client.connection.operations import Operations
    from tinsmith.client.rest import RestClient
    from tinsmith.errors import TinkerError

F = TypeVar("F", bound=Callable[..., Any])

ONE_ATTEMPT_S = 0.01
"""Shorter than any pause between two attempts, so that commands that only look report a missing server at once."""
RETRY_S = 30.0
NO_ROUTE = ("Not Found", "Method Not Allowed")
"""What common web frameworks answer for a path that they do not serve; Tinker servers name the object instead."""
_URL = "tinsmith.base_url"


def connected(command: F) -> F:
    """Give a command `--base-url`, and report errors of the SDK in a few lines with exit code 1."""
    return server_option(reported(command))


def reported(command: F) -> F:
    """Report errors of the SDK in a few lines with exit code 1."""

    @functools.wraps(command)
    def run(*args: Any, **kwargs: Any) -> Any:
        from tinsmith.errors import TinkerError

        try:
            return command(*args, **kwargs)
        except TinkerError as error:
            raise click.ClickException(explained(error)) from None

    return run  # type: ignore[return-value]


def server_option(command: F) -> F:
    """Give a command `--base-url`, stored in the click context for `base_url` to find."""
    return click.option(
        "--base-url",
        metavar="URL",
        expose_value=False,
        callback=_keep,
        help="URL of the server; 'local' is the engine on this machine.  "
        "[default: TINKER_BASE_URL; local if neither that nor a key is set]",
    )(command)


def _keep(context: click.Context, _parameter: click.Parameter, value: str | None) -> None:
    if value is not None:
        context.meta[_URL] = value


def checkpoint_path(_context: click.Context, _parameter: click.Parameter, value: Any) -> Any:
    """Check the form of a checkpoint's path, or of several, before a server is asked or an engine started."""
    for path in (value,) if isinstance(value, str) else value or ():
        _check_path(path)
    return value


def _check_path(path: str) -> None:
    import os

    from tinsmith.errors import InvalidInputError
    from tinsmith.wire.messages.weights import ParsedCheckpointTinkerPath

    if os.path.isdir(path):
        command = shlex.join(["tinsmith", "checkpoint", "import", path])
        raise click.ClickException(
            f"{path} is a directory, not a checkpoint of the server; upload its adapter, and use the path that this "
            f"prints: {command}"
        )
    try:
        ParsedCheckpointTinkerPath.from_tinker_path(path)
    except InvalidInputError as error:
        raise click.ClickException(str(error)) from None


def explained(error: TinkerError) -> str:
    """Return what went wrong, followed by the next step if there is one."""
    from tinsmith.errors import APIConnectionError, APIStatusError, AuthenticationError
    from tinsmith.wire.rules.faults import long_wait

    text = str(error)
    if isinstance(error, APIStatusError):
        detail = error.body.get("detail") if isinstance(error.body, dict) else None
        if error.status_code in (404, 405) and detail in (None, *NO_ROUTE) and error.request is not None:
            text = f"{error.request.method} {error.request.url}: HTTP {error.status_code}\n" + (
                "The server does not support this call (other or older servers lack some), or the ID does not exist."
            )
        elif isinstance(detail, str) and detail:
            text = f"{detail} (HTTP {error.status_code}){long_wait(error.status_code, error.response.headers)}"
        if isinstance(error, AuthenticationError):
            text += "\nSet TINKER_API_KEY to a key of this server, or run: tinsmith auth login"
    elif isinstance(error, APIConnectionError) and error.is_not_started:
        text += "\nIf it is somewhere else, give its URL (--base-url, TINKER_BASE_URL). Check with: tinsmith status"
    elif isinstance(error, APIConnectionError):
        text += (
            "\nIs the server running, and is the URL correct (--base-url, TINKER_BASE_URL)? Check with: tinsmith status"
        )
    return text


def base_url() -> str | None:
    """Return the server given on the command line, if any."""
    url: str | None = click.get_current_context().meta.get(_URL)
    return url


def service_client(**arguments: Any) -> Any:
    """Return a `ServiceClient` for the command's server, to be used in a `with` block."""
    import tinsmith

    return tinsmith.ServiceClient(base_url=base_url(), **arguments)


@contextlib.contextmanager
def operations(**settings: Any) -> Iterator[Operations]:
    """Open a connection without a session, for commands that inspect or manage; a missing server fails at once."""
    from tinsmith.client.connection.connection import Connection
    from tinsmith.client.connection.local_engine import client_config
    from tinsmith.client.connection.operations import Operations
    from tinsmith.client.connection.session import Session

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
    """Open a `RestClient` for the command's server."""
    from tinsmith.client.rest import RestClient

    with operations() as holder:
        yield RestClient(holder)


def confirmed(question: str, is_sure: bool) -> None:
    """Ask before an action that cannot be undone, unless `is_sure`; exit if the answer is no."""
    import sys

    if is_sure:
        return
    try:
        if click.confirm(printable(question), err=True):
            return
    except click.Abort:
        if sys.stdin.isatty():
            raise
        raise click.ClickException(
            "cannot ask for confirmation: stdin is not a terminal; pass --yes to skip the question"
        ) from None
    echo("Nothing was changed.", err=True)
    click.get_current_context().exit(0)

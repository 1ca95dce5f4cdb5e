"""`tinsmith auth`: the key that clients on this machine use, official ones included. No command prints a key."""

from __future__ import annotations

import hashlib
import os
import sys
from typing import TYPE_CHECKING, Any

import click

from tinsmith.cli.connection import base_url, connected, explained, operations
from tinsmith.cli.output import echo, formatted, print_json, print_properties, wants_json

if TYPE_CHECKING:
    from tinsmith.client.connection.credentials import Credentials, StoredKey


@click.group()
def auth() -> None:
    """Log in to a server, log out, and check your key."""


def _credentials() -> Credentials:
    from tinsmith.client.connection.credentials import Credentials, credentials_path

    return Credentials(credentials_path(os.environ))


@auth.command()
@formatted
@connected
def login() -> None:
    """Store an API key, after the server has accepted it.

    Prompts for the key, or reads it from stdin if that is not a terminal. The key is stored in
    ~/.tinker/credentials.json, readable only by you, and used when TINKER_API_KEY is not set. It is sent to this server
    only, which becomes the default server when TINKER_BASE_URL is not set. Official clients ignore the stored URL: for
    your own server, set TINKER_BASE_URL for them.
    """
    from tinsmith.config import check_key

    credentials = _credentials()
    if credentials.default() is not None:
        raise click.ClickException("already logged in; to replace the stored key, first run: tinsmith auth logout")
    url = _server()
    if sys.stdin.isatty():
        key = click.prompt(f"API key for {url} (input is hidden)", hide_input=True, err=True)
    else:
        key = sys.stdin.readline()
    if not key.strip():
        raise click.ClickException("the key is empty")
    stored = _accepted(url, check_key(key))
    credentials.store_default(stored)
    if wants_json():
        print_json({"key_id": stored.key_id, "name": stored.name, "base_url": url, "email": stored.email})
        return
    whose = f" of {stored.email} ({stored.organization})" if stored.email else ""
    echo(f"Stored key {stored.name!r}{whose} for {url} in {credentials.path}")


def _server() -> str:
    """Return the server that the key is for; by default the hosted service, as for official clients."""
    from tinsmith.config import HOSTED_URL, LOCAL, ClientConfig

    url = ClientConfig.from_env(base_url=base_url(), api_key="tml-none").base_url
    if url == LOCAL:
        raise click.ClickException(
            f"the local engine needs no key; choose a server with --base-url or TINKER_BASE_URL (hosted: {HOSTED_URL})"
        )
    return url


def _accepted(url: str, key: str) -> StoredKey:
    """Return the server's details of a key; raise if it rejects the key."""
    from tinsmith.client.connection.credentials import StoredKey
    from tinsmith.errors import NotFoundError
    from tinsmith.transport.base import Purpose
    from tinsmith.wire.routes.table import GET_API_KEY, GET_SERVER_CAPABILITIES

    with operations(base_url=url, api_key=key) as holder:
        connection = holder.connection
        try:
            asked = connection.send(GET_API_KEY, None, purpose=Purpose.REST, credential=key)
            answer = holder.submit("get_api_key", asked).result()
        except NotFoundError:  # the server lacks this route; any other call shows whether it accepts the key
            holder.submit("get_server_capabilities", connection.call(GET_SERVER_CAPABILITIES)).result()
            key_id = f"manual-{hashlib.sha256(key.encode()).hexdigest()[:12]}"
            return StoredKey(key_id=key_id, key=key, name=url, base_url=url)
        from tinsmith.client.connection.connection import decode_answer

        found = decode_answer(GET_API_KEY, answer, GET_API_KEY.response)
    details = found.details.model_dump()
    return StoredKey(key_id=str(found.key_id), key=key, name=found.name, note=found.note, details=details, base_url=url)


@auth.command()
@formatted
@connected
def logout() -> None:
    """Delete the stored key from this machine. It stays valid until the server revokes it."""
    credentials = _credentials()
    stored = credentials.default()
    if stored is None:
        raise click.ClickException("no key is stored (logout does not change TINKER_API_KEY)")
    if stored.kind == "generated":
        _delete_on_server(stored)
    credentials.remove(stored.key_id)
    if wants_json():
        print_json({"key_id": stored.key_id, "name": stored.name})
        return
    still = (
        "" if stored.kind == "generated" else " It is still valid; revoke it on the server if you no longer need it."
    )
    echo(f"Removed key {stored.name!r}.{still}")


def _delete_on_server(stored: StoredKey) -> None:
    """Delete a key that was generated for this machine alone."""
    from tinsmith.errors import TinkerError
    from tinsmith.transport.base import Purpose
    from tinsmith.wire.routes.table import DELETE_API_KEY

    try:
        with operations(base_url=stored.base_url, api_key=stored.key) as holder:
            asked = holder.connection.send(DELETE_API_KEY, None, purpose=Purpose.REST, credential=stored.key)
            holder.submit("delete_api_key", asked).result()
    except TinkerError as error:
        echo(f"warning: cannot delete the key on the server: {error}", err=True)


@auth.command()
@formatted
@connected
def status() -> None:
    """Show which key is used and whether the server accepts it."""
    from tinsmith.config import LOCAL, ClientConfig, credential_source
    from tinsmith.errors import TinkerError
    from tinsmith.wire.routes.table import GET_SERVER_CAPABILITIES

    config = ClientConfig.from_env(base_url=base_url())
    answer: dict[str, Any] = {
        "base_url": config.base_url,
        "credentials": credential_source(os.environ, config.base_url),
        "accessible": None,
        "error": None,
    }
    if config.base_url != LOCAL and answer["credentials"] is not None:
        try:
            with operations() as holder:
                holder.submit("status", holder.connection.call(GET_SERVER_CAPABILITIES)).result()
            answer["accessible"] = True
        except TinkerError as error:
            answer |= {"accessible": False, "error": explained(error)}
    if wants_json():
        print_json(answer)
    else:
        found = answer["credentials"]
        echo(f"Server: {config.base_url}")
        echo(f"Credentials available: {f'yes ({found})' if found else 'no'}")
        if answer["accessible"] is not None:
            echo(f"Tinker accessible: {'yes' if answer['accessible'] else 'no'}")
    if config.base_url == LOCAL:
        echo("The local engine needs no key.", err=True)
    elif answer["credentials"] is None:
        raise click.ClickException("no key for this server\nRun: tinsmith auth login, or set TINKER_API_KEY")
    elif not answer["accessible"]:
        raise click.ClickException(answer["error"])


@auth.command()
@formatted
@connected
def whoami() -> None:
    """Show the user and organization of the key."""
    from tinsmith.client.rest import RestClient
    from tinsmith.errors import NotFoundError
    from tinsmith.wire.routes.table import GET_API_KEY

    with operations() as holder:
        try:
            found = RestClient(holder).whoami().result().model_dump()
        except RuntimeError:  # the server issues no tokens to read the identity from
            try:
                answer = holder.submit("get_api_key", holder.connection.call(GET_API_KEY)).result()
            except NotFoundError:
                raise click.ClickException("this server does not report whose key it is") from None
            found = {"user_urn": None, "org_urn": answer.details.org_details.name, "email": None}
            found["email"] = answer.details.user_details.email
    if wants_json():
        print_json(found)
    else:
        print_properties({"Email": found["email"], "User": found["user_urn"], "Organization": found["org_urn"]})

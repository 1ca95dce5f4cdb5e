"""`tinsmith auth`: the key that this machine's clients use, official ones included. No command prints a key."""

from __future__ import annotations

import hashlib
import os
import sys
from typing import TYPE_CHECKING, Any

import click

from tinsmith.cli.connection import base_url, connected, explained, operations
from tinsmith.cli.output import formatted, print_json, print_properties, wants_json

if TYPE_CHECKING:
    from tinsmith.client.credentials import Credentials, StoredKey


@click.group()
def auth() -> None:
    """The key that this machine uses: log in, log out, check."""


def _credentials() -> Credentials:
    from tinsmith.client.credentials import Credentials, credentials_path

    return Credentials(credentials_path(os.environ))


@auth.command()
@formatted
@connected
def login() -> None:
    """Store a key, after the server has accepted it.

    The key is asked for, or read from stdin where that is no terminal. It is kept in ~/.tinker/credentials.json, which
    only you can read, and used where TINKER_API_KEY is not set. The file knows no addresses: a server of your own also
    needs TINKER_BASE_URL.
    """
    from tinsmith.config import check_key

    credentials = _credentials()
    if credentials.default() is not None:
        raise click.ClickException("a key is stored already; run first: tinsmith auth logout")
    url = _server()
    if sys.stdin.isatty():
        key = click.prompt(f"Key for {url} (it is not shown)", hide_input=True, err=True)
    else:
        key = sys.stdin.readline()
    if not key.strip():
        raise click.ClickException("no key was given")
    stored = _accepted(url, check_key(key))
    credentials.store_default(stored)
    if wants_json():
        print_json({"key_id": stored.key_id, "name": stored.name, "base_url": url, "email": stored.email})
        return
    whose = f" of {stored.email} ({stored.organization})" if stored.email else ""
    click.echo(f"Stored key {stored.name!r}{whose} for {url} in {credentials.path}")


def _server() -> str:
    """Which server the key is for; without an address it is the hosted one, as for official clients."""
    from tinsmith.config import HOSTED_URL, LOCAL, ClientConfig

    url = ClientConfig.from_env(base_url=base_url(), api_key="tml-none").base_url
    if url == LOCAL:
        raise click.ClickException(
            f"the local engine needs no key; name a server with --base-url or TINKER_BASE_URL (hosted: {HOSTED_URL})"
        )
    return url


def _accepted(url: str, key: str) -> StoredKey:
    """What the server says of a key; raises if it does not take it."""
    from tinsmith.client.credentials import StoredKey
    from tinsmith.errors import NotFoundError
    from tinsmith.transport.base import Purpose
    from tinsmith.wire.routes import GET_API_KEY, GET_SERVER_CAPABILITIES

    with operations(base_url=url, api_key=key) as holder:
        connection = holder.connection
        try:
            asked = connection.send(GET_API_KEY, None, purpose=Purpose.REST, credential=key)
            answer = holder.submit("get_api_key", asked).result()
        except NotFoundError:  # a server without that route: any call shows whether it takes the key
            holder.submit("get_server_capabilities", connection.call(GET_SERVER_CAPABILITIES)).result()
            key_id = f"manual-{hashlib.sha256(key.encode()).hexdigest()[:12]}"
            return StoredKey(key_id=key_id, key=key, name=url)
        from tinsmith.client.connection import decode_answer

        found = decode_answer(GET_API_KEY, answer, GET_API_KEY.response)
    details = found.details.model_dump()
    return StoredKey(key_id=str(found.key_id), key=key, name=found.name, note=found.note, details=details)


@auth.command()
@formatted
@connected
def logout() -> None:
    """Forget the stored key. The key itself stays valid; its server can revoke it."""
    credentials = _credentials()
    stored = credentials.default()
    if stored is None:
        raise click.ClickException("no key is stored; TINKER_API_KEY, if set, is not touched")
    if stored.kind == "generated":
        _delete_on_server(stored.key)
    credentials.remove(stored.key_id)
    if wants_json():
        print_json({"key_id": stored.key_id, "name": stored.name})
        return
    still = "" if stored.kind == "generated" else " It is still valid: revoke it on its server if it is not needed."
    click.echo(f"Removed key {stored.name!r}.{still}")


def _delete_on_server(key: str) -> None:
    """A key that a program made for this machine alone goes with it."""
    from tinsmith.errors import TinkerError
    from tinsmith.transport.base import Purpose
    from tinsmith.wire.routes import DELETE_API_KEY

    try:
        with operations(base_url=_server(), api_key=key) as holder:
            asked = holder.connection.send(DELETE_API_KEY, None, purpose=Purpose.REST, credential=key)
            holder.submit("delete_api_key", asked).result()
    except TinkerError as error:
        click.echo(f"the key could not be deleted on the server: {error}", err=True)


@auth.command()
@formatted
@connected
def status() -> None:
    """Is there a key, and does the server take it?"""
    from tinsmith.config import LOCAL, ClientConfig, credential_source
    from tinsmith.errors import TinkerError
    from tinsmith.wire.routes import GET_SERVER_CAPABILITIES

    config = ClientConfig.from_env(base_url=base_url())
    answer: dict[str, Any] = {
        "base_url": config.base_url,
        "credentials": credential_source(os.environ),
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
        click.echo(f"Server: {config.base_url}")
        click.echo(f"Credentials available: {f'yes ({found})' if found else 'no'}")
        if answer["accessible"] is not None:
            click.echo(f"Tinker accessible: {'yes' if answer['accessible'] else 'no'}")
    if config.base_url == LOCAL:
        click.echo("The local engine needs no key.", err=True)
    elif answer["credentials"] is None:
        raise click.ClickException("no key is set for this server\nRun: tinsmith auth login, or set TINKER_API_KEY")
    elif not answer["accessible"]:
        raise click.ClickException(answer["error"])


@auth.command()
@formatted
@connected
def whoami() -> None:
    """Whose key is it?"""
    from tinsmith.client.rest import RestClient
    from tinsmith.errors import NotFoundError
    from tinsmith.wire.routes import GET_API_KEY

    with operations() as holder:
        try:
            found = RestClient(holder).whoami().result().model_dump()
        except RuntimeError:  # the server hands out no tokens, so it must be asked
            try:
                answer = holder.submit("get_api_key", holder.connection.call(GET_API_KEY)).result()
            except NotFoundError:
                raise click.ClickException("this server does not say whose key it is") from None
            found = {"user_urn": None, "org_urn": answer.details.org_details.name, "email": None}
            found["email"] = answer.details.user_details.email
    if wants_json():
        print_json(found)
    else:
        print_properties({"Email": found["email"], "User": found["user_urn"], "Organization": found["org_urn"]})

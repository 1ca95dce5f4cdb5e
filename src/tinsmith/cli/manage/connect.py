"""`tinsmith connect`: what programs written for OpenAI, Anthropic or Tinker need to know to use a server.

Prints lines for a shell, which can be evaluated: two variables for each kind of client, and an example as a comment.
The key is not among them, since terminals keep what they show; `--key` prints it alone.
"""

from __future__ import annotations

import json
import shlex
from dataclasses import dataclass
from typing import Any

import click

from tinsmith.cli.connection import base_url, connected, operations
from tinsmith.cli.output import echo, formatted, print_json, wants_json
from tinsmith.config import LOCAL, ClientConfig
from tinsmith.wire.routes.anthropic import ANTHROPIC_PREFIXES
from tinsmith.wire.routes.openai import PREFIXES
from tinsmith.wire.routes.table import GET_SERVER_CAPABILITIES


@dataclass(frozen=True, slots=True, kw_only=True)
class ClientKind:
    """A kind of client: the variables that it reads, and how it asks."""

    title: str
    url_variable: str
    key_variable: str
    path: str = ""
    """After the server's URL. The hosted service has the same."""
    example: str
    """The path of a call, after the URL of the variable."""
    header: str = "x-api-key: "
    """Before the key."""


KINDS = {
    "openai": ClientKind(
        title="OpenAI clients",
        url_variable="OPENAI_BASE_URL",
        key_variable="OPENAI_API_KEY",
        path=PREFIXES["hosted_openai"],
        example="/chat/completions",
        header="authorization: Bearer ",
    ),
    "anthropic": ClientKind(
        title="Anthropic clients",
        url_variable="ANTHROPIC_BASE_URL",
        key_variable="ANTHROPIC_API_KEY",
        path=ANTHROPIC_PREFIXES["hosted_anthropic"].removesuffix("/v1"),
        example="/v1/messages",
    ),
    "tinker": ClientKind(
        title="Tinker clients, tinsmith's own included",
        url_variable="TINKER_BASE_URL",
        key_variable="TINKER_API_KEY",
        example=GET_SERVER_CAPABILITIES.path,
    ),
}
"""By the name that the command takes."""
IDLE = "The local engine ends when nobody has used it for a while; tinsmith serve runs a server that stays."


@click.command()
@click.argument("kind", type=click.Choice(list(KINDS)), required=False)
@click.option("--key", "wants_key", is_flag=True, help="Print only the key.")
@formatted
@connected
def connect(kind: str | None, wants_key: bool) -> None:
    """Print how to use the server from OpenAI, Anthropic or Tinker clients.

    The lines set two variables for each kind of client, or for the one that is given, in a POSIX shell:

        eval "$(tinsmith connect openai)"
    """
    with operations() as holder:
        config = holder.connection.config
        model = _sampled_model(holder)
    if wants_key:
        echo(_key(config))
        return
    kinds = {name: found for name, found in KINDS.items() if kind in (None, name)}
    if wants_json():
        print_json({name: _described(found, config.base_url) for name, found in kinds.items()})
        return
    echo("\n\n".join(_lines(found, config.base_url, model) for found in kinds.values()))
    if ClientConfig.from_env(base_url=base_url()).base_url == LOCAL:
        echo(IDLE, err=True)


def _sampled_model(holder: Any) -> str | None:
    """Return a model for the examples. Asking also shows whether the server is there, and the key right."""
    answer = holder.submit("connect", holder.connection.call(GET_SERVER_CAPABILITIES)).result()
    return next((item.model_name for item in answer.supported_models if item.sampleable is not False), None)


def _key(config: ClientConfig) -> str:
    if config.api_key is None:
        raise click.ClickException(
            "there is no key that other programs could use: yours come from a command (TINKER_CREDENTIAL_CMD). "
            "Create one with: tinsmith key create"
        )
    return config.api_key


def _described(kind: ClientKind, url: str) -> dict[str, str]:
    return {"base_url": url + kind.path, "url_variable": kind.url_variable, "key_variable": kind.key_variable}


def _lines(kind: ClientKind, url: str, model: str | None) -> str:
    """Return lines for a shell. The key is first, since the URL of a Tinker client chooses the server that has it."""
    same_server = ["--base-url", url] if base_url() not in (None, LOCAL) else []
    key = shlex.join(["tinsmith", "connect", "--key", *same_server])
    call = f'# curl "${kind.url_variable}{kind.example}" -H "{kind.header}${kind.key_variable}"'
    if kind.path:
        body = {"model": model or "BASE", "max_tokens": 16, "messages": [{"role": "user", "content": "Hello"}]}
        call += f" -H content-type:application/json -d {shlex.quote(json.dumps(body))}"
    return "\n".join(
        [
            f"# {kind.title}",
            f'export {kind.key_variable}="$({key})"',
            f"export {kind.url_variable}={shlex.quote(url + kind.path)}",
            call,
        ]
    )

"""`tinsmith model`: the base models of a server."""

from __future__ import annotations

import click

from tinsmith.cli.connection import connected, operations
from tinsmith.cli.output import formatted, print_json, print_table, wants_json


@click.group()
def model() -> None:
    """List a server's base models."""


@model.command(name="list")
@click.argument("substring", required=False)
@formatted
@connected
def list_models(substring: str | None) -> None:
    """List the base models that can be trained or sampled.

    With SUBSTRING, only those whose name contains it, ignoring case.
    """
    from tinsmith.wire.routes.table import GET_SERVER_CAPABILITIES

    with operations() as holder:
        answer = holder.submit("list_models", holder.connection.call(GET_SERVER_CAPABILITIES)).result()
    found = answer.supported_models
    if substring is not None:
        found = [item for item in found if substring.lower() in (item.model_name or "").lower()]
        if not found:
            offered = ", ".join(str(item.model_name) for item in answer.supported_models) or "none"
            raise click.ClickException(f"no model name contains {substring!r}\nAvailable: {offered}")
    if wants_json():
        print_json({"models": [item.model_dump() for item in found]})
        return
    rows = [(item.model_name, item.max_context_length, item.trainable, item.sampleable) for item in found]
    print_table(("Model", "Max Context", "Trainable", "Sampleable"), rows)

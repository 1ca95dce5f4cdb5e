"""`tinsmith checkpoint import`: upload an adapter to a server.

A PEFT adapter is converted to a checkpoint in this process: this is one of the few commands that load engine modules
(docs/decisions/0018-engine-in-the-cli.md).
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import click

from tinsmith.cli.checkpoint.download import ADAPTER_CONFIG, MANIFEST, check_manifest
from tinsmith.cli.connection import connected, operations, service_client
from tinsmith.cli.output import echo, formatted, print_json, wants_json

FILES = ("adapter_model.safetensors", "adapter_config.json", "optimizer.safetensors", MANIFEST)
FACTS = ("rank", "alpha", "train_attn", "train_mlp", "train_unembed")


@click.command(name="import")
@click.argument("directory", type=click.Path(path_type=Path, file_okay=False, exists=True))
@click.option(
    "--model",
    metavar="NAME",
    help="Base model, by the server's name.  [default: the one that the adapter names, or the server's only one]",
)
@click.option("--name", default="imported", show_default=True, help="Name of the new checkpoint.")
@click.option(
    "--base",
    type=click.Path(path_type=Path, file_okay=False, exists=True),
    help="Directory of the base model; needed if the adapter covers only some modules.",
)
@formatted
@connected
def import_(directory: Path, model: str | None, name: str, base: Path | None) -> None:
    """Upload an adapter to a server, and load it there once to verify it.

    DIRECTORY contains a PEFT adapter (adapter_config.json and adapter_model.safetensors), or a checkpoint from
    "checkpoint download", including its optimizer state. Prints the new path, for create_training_client_from_state.
    The server's disk limits the size (settings disk_cap_bytes and min_free_bytes).
    """
    with tempfile.TemporaryDirectory() as scratch:
        folder = directory
        if not (directory / MANIFEST).exists():
            folder = Path(scratch) / "checkpoint"
            model, unsure = (model, "") if model is not None else _found_model(directory)
            _engine().as_checkpoint(directory, folder, model, base, unsure=unsure)
        elif model is not None or base is not None:
            raise click.UsageError(
                f"{directory} is a complete checkpoint, which names its base model; omit --model and --base"
            )
        check_manifest(folder)
        facts = {"name": name, **_facts(folder)}
        path = _uploaded(facts, {file: folder / file for file in FILES if (folder / file).exists()})
    if wants_json():
        print_json({"path": path, "base_model": facts["base_model"], "lora_rank": facts["rank"]})
    else:
        echo(path)


def _engine() -> Any:
    try:
        from tinsmith.engine.checkpoints import peft_import
    except ImportError as error:
        raise click.ClickException(f"import needs the engine: pip install 'tinsmith[server]' ({error})") from None
    return peft_import


def _found_model(directory: Path) -> tuple[str | None, str]:
    """Return the server's model that an adapter is for, or None and why it is not known."""
    from tinsmith.cli.models import offered_models

    with service_client() as service:
        offered = list(offered_models(service))
    named = _named_base(directory)
    found = matching_model(named, offered)
    if found is None:
        what = f"names the base model {named!r}, which the server does not have" if named else "names no base model"
        return None, f"{directory / ADAPTER_CONFIG} {what} (available: {', '.join(offered)})"
    if found != named:
        echo(f"base model: {found} (the adapter names {named or 'none'})", err=True)
    return found, ""


def _named_base(directory: Path) -> str:
    """Return the base model in an adapter's configuration; empty if there is none, which the engine reports."""
    try:
        named = json.loads((directory / ADAPTER_CONFIG).read_text(encoding="utf-8"))["base_model_name_or_path"]
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return ""
    return named if isinstance(named, str) else ""


def matching_model(named: str, offered: Sequence[str]) -> str | None:
    """Return the model that an adapter names: by the whole name, by the last part of it, or the only one there is.

    Other programs store a directory, or another owner's copy of a model; the server checks that the shapes fit.
    """
    alike = [name for name in offered if _last_part(name) == _last_part(named)]
    for found in ([name for name in offered if name == named], alike, offered):
        if len(found) == 1:
            return found[0]
    return None


def _last_part(name: str) -> str:
    return name.rstrip("/").rpartition("/")[2].lower()


def _facts(folder: Path) -> dict[str, Any]:
    """Read the adapter's properties from the manifest."""
    try:
        info = json.loads((folder / MANIFEST).read_bytes())["info"]
        return {name: info[name] for name in ("base_model", *FACTS)}
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise click.ClickException(f"{folder / MANIFEST} is not the manifest of a checkpoint: {error!r}") from None


def _uploaded(facts: dict[str, Any], files: dict[str, Path]) -> str:
    """Upload the files, load the checkpoint once, and return its path; a checkpoint that does not load is deleted."""
    from tinsmith.client.connection.own_endpoints import Extensions
    from tinsmith.client.rest import RestClient
    from tinsmith.errors import TinkerError

    with operations() as holder:
        path = Extensions(holder).import_weights(facts, files)
        has_optimizer = "optimizer.safetensors" in files
        try:
            with service_client(user_metadata={"created_by": "tinsmith checkpoint import"}) as service:
                if has_optimizer:
                    service.create_training_client_from_state_with_optimizer(path)
                else:
                    service.create_training_client_from_state(path)
        except TinkerError as error:
            RestClient(holder).delete_checkpoint_from_tinker_path(path).result()
            raise TinkerError(f"the server cannot load the checkpoint, so it was deleted again: {error}") from None
    return path

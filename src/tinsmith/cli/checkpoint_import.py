"""`tinsmith checkpoint import`: an adapter from this disk into a server.

Turning a PEFT adapter into a checkpoint is the engine's work: this is one of the three commands that load engine
modules (docs/decisions/0018-engine-in-the-cli.md).
"""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Any

import click

from tinsmith.cli.checkpoint_files import MANIFEST, check_manifest
from tinsmith.cli.connection import connected, operations, service_client
from tinsmith.cli.output import formatted, print_json, wants_json

FILES = ("adapter_model.safetensors", "adapter_config.json", "optimizer.safetensors", MANIFEST)
FACTS = ("rank", "alpha", "train_attn", "train_mlp", "train_unembed")


@click.command(name="import")
@click.argument("directory", type=click.Path(path_type=Path, file_okay=False, exists=True))
@click.option("--model", metavar="NAME", help="The server's name of the base model.  [default: the adapter's]")
@click.option("--name", default="imported", show_default=True, help="Name of the checkpoint.")
@click.option(
    "--base",
    type=click.Path(path_type=Path, file_okay=False, exists=True),
    help="The base model's directory, for adapters of only some modules.",
)
@formatted
@connected
def import_(directory: Path, model: str | None, name: str, base: Path | None) -> None:
    """Bring an adapter into a server, and load it there once to see that it fits.

    DIRECTORY is a PEFT adapter (adapter_config.json and adapter_model.safetensors), or what "checkpoint download"
    fetched, optimizer state included. Prints the path for create_training_client_from_state. It may be as large as the
    server has room for (its settings disk_cap_bytes and min_free_bytes).
    """
    with tempfile.TemporaryDirectory() as scratch:
        folder = directory
        if not (directory / MANIFEST).exists():
            folder = Path(scratch) / "checkpoint"
            _engine().as_checkpoint(directory, folder, model, base)
        elif model is not None or base is not None:
            raise click.UsageError(
                f"{directory} is a whole checkpoint: it names its model, and needs no --model or --base"
            )
        check_manifest(folder)
        facts = {"name": name, **_facts(folder)}
        path = _uploaded(facts, {file: folder / file for file in FILES if (folder / file).exists()})
    if wants_json():
        print_json({"path": path, "base_model": facts["base_model"], "lora_rank": facts["rank"]})
    else:
        click.echo(path)


def _engine() -> Any:
    try:
        from tinsmith.engine import adapter_import
    except ImportError as error:
        raise click.ClickException(f"import needs the engine: pip install 'tinsmith[server]' ({error})") from None
    return adapter_import


def _facts(folder: Path) -> dict[str, Any]:
    """What the manifest says of the adapter."""
    try:
        info = json.loads((folder / MANIFEST).read_text())["info"]
        return {name: info[name] for name in ("base_model", *FACTS)}
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise click.ClickException(f"{folder / MANIFEST} is not that of a checkpoint: {error!r}") from None


def _uploaded(facts: dict[str, Any], files: dict[str, Path]) -> str:
    """The path of the checkpoint, which a run has loaded; one that does not load is deleted again."""
    from tinsmith.client.extensions import Extensions
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
            raise TinkerError(f"the server cannot load it, and has deleted it again: {error}") from None
    return path

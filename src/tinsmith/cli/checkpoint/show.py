"""`tinsmith checkpoint`: the group, and the commands that list, inspect, publish and expire checkpoints."""

from __future__ import annotations

from typing import Any

import click

from tinsmith.cli.checkpoint.delete import delete
from tinsmith.cli.checkpoint.download import download, push_hf
from tinsmith.cli.checkpoint.export import export
from tinsmith.cli.checkpoint.import_ import import_
from tinsmith.cli.connection import checkpoint_path, connected, rest_client
from tinsmith.cli.output import (
    ago,
    fetch,
    formatted,
    limited,
    print_json,
    print_properties,
    print_table,
    size,
    title,
    wants_json,
)

PAGE = 1000
COLUMNS = ("Checkpoint ID", "Type", "Size", "Public", "Created", "Expires", "Path")


@click.group()
def checkpoint() -> None:
    """List, inspect, publish, expire, delete, download, export and import checkpoints."""


for _command in (delete, download, export, import_, push_hf):
    checkpoint.add_command(_command)


@checkpoint.command(name="list")
@click.option("--run-id", help="Only checkpoints of this training run.")
@limited("checkpoints")
@formatted
@connected
def list_checkpoints(run_id: str | None, limit: int) -> None:
    """List your checkpoints, or those of one run, newest first."""
    with rest_client() as rest:
        if run_id is not None:
            every = rest.list_checkpoints(run_id).result().checkpoints
            found, total = (every[:limit] if limit else every), len(every)
        else:
            found, count = fetch(
                lambda size, offset: rest.list_user_checkpoints(size, offset).result(),
                lambda page: page.checkpoints,
                limit,
                PAGE,
            )
            total = len(found) if count is None else count
    if wants_json():
        named = {"run_id": run_id} if run_id is not None else {}
        print_json({**named, "checkpoints": [item.model_dump() for item in found]})
        return
    print_table(COLUMNS, [_row(item) for item in found], title=title(len(found), total, "checkpoint"))


def _row(item: Any) -> tuple[Any, ...]:
    expires = ago(item.expires_at) if item.expires_at is not None else "never"
    return (
        item.checkpoint_id,
        item.checkpoint_type,
        size(item.size_bytes),
        item.public,
        ago(item.time),
        expires,
        item.tinker_path,
    )


@checkpoint.command()
@click.argument("path", callback=checkpoint_path)
@formatted
@connected
def info(path: str) -> None:
    """Show one checkpoint."""
    from tinsmith.errors import TinkerError
    from tinsmith.wire.messages.weights import ParsedCheckpointTinkerPath

    parsed = ParsedCheckpointTinkerPath.from_tinker_path(path)
    with rest_client() as rest:
        every = rest.list_checkpoints(parsed.training_run_id).result().checkpoints
        found = next((item for item in every if item.tinker_path == path), None)
        if found is None:
            there = ", ".join(item.checkpoint_id for item in every) or "none"
            raise TinkerError(f"{path} does not exist or has expired\nCheckpoints of this run: {there}")
        run = rest.get_training_run(parsed.training_run_id).result()
    if wants_json():
        print_json({**found.model_dump(), "is_lora": run.is_lora, "lora_rank": run.lora_rank})
        return
    values = {
        "Type": found.checkpoint_type,
        "Path": found.tinker_path,
        "Size": size(found.size_bytes),
        "Public": found.public,
        "Created": ago(found.time),
        "Expires": ago(found.expires_at) if found.expires_at is not None else "never",
        "Training Run": parsed.training_run_id,
        "Base Model": run.base_model,
        "LoRA": f"rank {run.lora_rank}" if run.lora_rank else run.is_lora,
        **{f"Metadata: {key}": value for key, value in (found.user_metadata or {}).items()},
    }
    print_properties(values, title=f"Checkpoint {found.checkpoint_id}")


@checkpoint.command()
@click.argument("path", callback=checkpoint_path)
@connected
def publish(path: str) -> None:
    """Let every user of the server load a checkpoint."""
    with rest_client() as rest:
        rest.publish_checkpoint_from_tinker_path(path).result()


@checkpoint.command()
@click.argument("path", callback=checkpoint_path)
@connected
def unpublish(path: str) -> None:
    """Make a published checkpoint private again."""
    with rest_client() as rest:
        rest.unpublish_checkpoint_from_tinker_path(path).result()


@checkpoint.command(name="set-ttl")
@click.argument("path", callback=checkpoint_path)
@click.option("--ttl", type=click.IntRange(min=1), metavar="SECONDS", help="Expire this many seconds from now.")
@click.option("--remove", is_flag=True, help="Never expire.")
@connected
def set_ttl(path: str, ttl: int | None, remove: bool) -> None:
    """Set when a checkpoint expires."""
    if (ttl is None) != remove:
        raise click.UsageError("use either --ttl SECONDS or --remove")
    with rest_client() as rest:
        rest.set_checkpoint_ttl_from_tinker_path(path, ttl).result()

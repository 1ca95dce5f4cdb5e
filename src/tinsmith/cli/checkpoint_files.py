"""`tinsmith checkpoint download` and `push-hf`: a checkpoint's files on this disk, and from there to the hub.

Owns: a download that is complete and checked before it takes its name; the temporary export that servers need which
hand out exports only.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from tinsmith.cli.connection import connected, operations, service_client
from tinsmith.cli.output import console, formatted, print_json, print_properties, size, wants_json

if TYPE_CHECKING:
    from tinsmith.client.operations import Operations
    from tinsmith.client.rest import RestClient

EXPORT_TTL_S = 3600
"""How long a temporary export lives, should this program die before it deletes it."""
MANIFEST = "manifest.json"
ADAPTER_CONFIG = "adapter_config.json"
ADAPTERS = ("adapter_model.safetensors", "adapter_model.bin")


@click.command()
@click.argument("path")
@click.option(
    "-o",
    "--output",
    type=click.Path(path_type=Path, file_okay=False),
    default=Path(),
    help="Directory to make the checkpoint's directory in.  [default: here]",
)
@click.option("--force", is_flag=True, help="Replace a directory that is there already.")
@formatted
@connected
def download(path: str, output: Path, force: bool) -> None:
    """Fetch a checkpoint's files into OUTPUT/RUN_KIND_NAME.

    A download that was cut off goes on where it was. The directory appears when all files are there and have the
    digests that the checkpoint's manifest names.
    """
    target = output / path.removeprefix("tinker://").replace("/", "_")
    if target.exists() and not force:
        raise click.ClickException(f"{target} exists already; use --force to replace it, or --output DIR")
    partial = target.with_name(f".{target.name}.partial")
    with operations() as holder:
        fetch_checkpoint(holder, path, partial)
    if target.exists():
        shutil.rmtree(target)
    partial.rename(target)
    total = sum(file.stat().st_size for file in target.rglob("*") if file.is_file())
    if wants_json():
        print_json({"checkpoint_path": path, "destination": str(target), "file_size_bytes": total})
        return
    print_properties({"Checkpoint": path, "Size": size(total), "Downloaded to": str(target)})


def fetch_checkpoint(holder: Operations, path: str, folder: Path) -> None:
    """Download all files of a checkpoint and check them; raises if anything is missing or wrong."""
    from tinsmith.client.rest import RestClient
    from tinsmith.errors import TinkerError
    from tinsmith.wire.weights import ParsedCheckpointTinkerPath

    parsed = ParsedCheckpointTinkerPath.from_tinker_path(path)
    rest = RestClient(holder)
    holder.submit("ready", holder.connection.ready()).result()
    if parsed.checkpoint_type == "external" or holder.connection.extensions:
        _fetch_files(rest, path, folder)
    elif parsed.checkpoint_type == "training":
        with _exported(rest, path) as export:
            _fetch_files(rest, export, folder)
    else:
        raise TinkerError(
            f"this server hands out training checkpoints and exports, not sampler checkpoints ({path}); "
            "save the state with save_state() and download that"
        )
    check_manifest(folder)


@contextlib.contextmanager
def _exported(rest: RestClient, path: str) -> Iterator[str]:
    """A training checkpoint as an export that lives as long as the block."""
    from tinsmith.errors import TinkerError

    click.echo(f"exporting {path} (this loads it into a new run on the server)", err=True)
    with service_client(user_metadata={"created_by": "tinsmith checkpoint download"}) as service:
        training = service.create_training_client_from_state(path)
        export = training.save_weights_external("download", ttl_seconds=EXPORT_TTL_S).result().path
        try:
            yield export
        finally:
            try:
                rest.delete_checkpoint_from_tinker_path(export).result()
            except TinkerError as error:
                click.echo(f"{export} was not deleted ({error}); it expires in an hour", err=True)


def _fetch_files(rest: RestClient, path: str, folder: Path) -> None:
    from tinsmith.errors import TinkerError

    with _progress() as show:
        files = rest.download_external_weights(path, folder, show).result()
    if not files:
        raise TinkerError(f"{path} has no files")


@contextlib.contextmanager
def _progress() -> Iterator[Callable[[Any], None] | None]:
    """Bars on a terminal, one for each file."""
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn

    terminal = console(stderr=True)
    if wants_json() or not terminal.is_terminal:
        yield None
        return
    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn())
    with Progress(*columns, console=terminal) as bars:
        tasks: dict[Path, Any] = {}

        def show(progress: Any) -> None:
            if progress.path not in tasks:
                tasks[progress.path] = bars.add_task(progress.path.name, total=progress.total)
            bars.update(tasks[progress.path], completed=progress.received, total=progress.total)

        yield show


def check_manifest(folder: Path) -> None:
    """Compare the files with the digests in the checkpoint's manifest; servers that give none are believed."""
    from tinsmith.errors import DamagedCheckpointError

    try:
        files = json.loads((folder / MANIFEST).read_text())["files"]
        expected = {name: kept["sha256"] if isinstance(kept, dict) else kept for name, kept in files.items()}
    except FileNotFoundError:
        return
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise DamagedCheckpointError(f"{folder / MANIFEST} cannot be read: {error}") from None
    for name, digest in expected.items():
        file = folder / name
        if not file.is_file():
            raise DamagedCheckpointError(f"{file} is missing; delete {folder} and download again")
        with file.open("rb") as opened:
            if hashlib.file_digest(opened, "sha256").hexdigest() != digest:
                raise DamagedCheckpointError(
                    f"{file} is not what the server wrote: its SHA-256 differs; delete {folder} and download again"
                )


@click.command(name="push-hf")
@click.argument("path")
@click.option("-r", "--repo", metavar="OWNER/NAME", help="Repository.  [default: named after model and run]")
@click.option("--public", is_flag=True, help="Make a new repository public.")
@click.option("--revision", help="Branch to push to.")
@click.option("--commit-message", metavar="TEXT")
@click.option("--create-pr", is_flag=True, help="Open a pull request instead of pushing.")
@click.option("--allow-pattern", "allow", multiple=True, metavar="GLOB", help="Only these files; may be repeated.")
@click.option("--ignore-pattern", "ignore", multiple=True, metavar="GLOB", help="Not these files; may be repeated.")
@click.option("--no-model-card", is_flag=True, help="Do not add a README.md.")
@formatted
@connected
def push_hf(path: str, repo: str | None, public: bool, no_model_card: bool, **options: Any) -> None:
    """Upload a checkpoint's adapter to the Hugging Face hub.

    Needs huggingface_hub and a token (hf auth login, or HF_TOKEN).
    """
    api = _hub()
    with tempfile.TemporaryDirectory() as scratch, operations() as holder:
        from tinsmith.client.rest import RestClient

        folder = Path(scratch) / "checkpoint"
        fetch_checkpoint(holder, path, folder)
        if not (folder / ADAPTER_CONFIG).exists() or not any((folder / name).exists() for name in ADAPTERS):
            raise click.ClickException(
                f"{path} holds no PEFT adapter ({ADAPTER_CONFIG} and {ADAPTERS[0]}); encrypted exports cannot be pushed"
            )
        base = RestClient(holder).get_weights_info_by_tinker_path(path).result().base_model
        name = repo or _repo_name(path, base)
        if not no_model_card and not (folder / "README.md").exists():
            (folder / "README.md").write_text(_model_card(path, base), encoding="utf-8")
        _upload(api, folder, name, public, options)
    if wants_json():
        print_json({"checkpoint_path": path, "repo_id": name, "revision": options["revision"], "public": public})
    else:
        click.echo(f"https://huggingface.co/{name}")


def _hub() -> Any:
    """The hub's API with a user who is logged in."""
    from tinsmith.errors import MissingPackageError

    try:
        from huggingface_hub import HfApi
    except ImportError:
        raise MissingPackageError("huggingface_hub", "push-hf") from None
    api = HfApi()
    try:
        api.whoami()
    except Exception as error:
        raise click.ClickException(
            f"the hub does not know you ({type(error).__name__}: {str(error).splitlines()[0]})\n"
            "Run: hf auth login (or set HF_TOKEN), and check the network"
        ) from None
    return api


def _upload(api: Any, folder: Path, repo: str, public: bool, options: dict[str, Any]) -> None:
    ignored = [*options["ignore"], "optimizer.safetensors", MANIFEST]
    try:
        api.create_repo(repo_id=repo, private=not public, exist_ok=True)
        api.upload_folder(
            folder_path=str(folder),
            repo_id=repo,
            revision=options["revision"],
            commit_message=options["commit_message"],
            create_pr=options["create_pr"],
            allow_patterns=list(options["allow"]) or None,
            ignore_patterns=list(options["ignore"]) if options["allow"] else ignored,
        )
    except Exception as error:
        raise click.ClickException(f"the hub did not take it: {type(error).__name__}: {error}") from None


def _repo_name(path: str, base_model: str) -> str:
    run = path.removeprefix("tinker://").partition("/")[0]
    text = f"tinker-{base_model.rpartition('/')[2]}-{run}"
    return "".join(letter if letter.isalnum() or letter in "-_." else "-" for letter in text).strip("-_.")[:96]


def _model_card(path: str, base_model: str) -> str:
    return f"""---
base_model: {base_model}
library_name: peft
tags:
- lora
- peft
- tinker
- base_model:adapter:{base_model}
---

# LoRA adapter of {base_model}

A PEFT adapter, trained through the Tinker protocol and saved as `{path}`.

```python
from peft import PeftModel
from transformers import AutoModelForCausalLM

base = AutoModelForCausalLM.from_pretrained("{base_model}")
model = PeftModel.from_pretrained(base, "this repository")
```
"""

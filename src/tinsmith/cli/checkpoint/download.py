"""`tinsmith checkpoint download` and `push-hf`: fetch a checkpoint's files, and upload them to the Hugging Face Hub.

Files are downloaded into a hidden directory, which gets its final name once everything is complete and its digests
match. The hosted service only serves exports: there, a training checkpoint is exported temporarily.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from tinsmith.cli.connection import checkpoint_path, connected, operations, service_client
from tinsmith.cli.output import console, echo, formatted, print_json, print_properties, size, wants_json

if TYPE_CHECKING:
    from tinsmith.client.connection.operations import Operations
    from tinsmith.client.rest import RestClient

EXPORT_TTL_S = 3600
"""Lifetime of a temporary export, in case this process dies before deleting it."""
MANIFEST = "manifest.json"
ADAPTER_CONFIG = "adapter_config.json"
ADAPTERS = ("adapter_model.safetensors", "adapter_model.bin")


@click.command()
@click.argument("path", callback=checkpoint_path)
@click.option(
    "-o",
    "--output",
    type=click.Path(path_type=Path, file_okay=False),
    default=Path(),
    help="Parent directory.  [default: the current directory]",
)
@click.option("--force", is_flag=True, help="Replace an existing directory.")
@formatted
@connected
def download(path: str, output: Path, force: bool) -> None:
    """Download a checkpoint's files into a new directory, named after its path.

    An interrupted download is resumed. The directory appears once all files are complete and match the digests in the
    checkpoint's manifest.
    """
    target = output / _folder_name(path)
    if target.exists() and not force:
        raise click.ClickException(f"{target} already exists; use --force to replace it, or another --output")
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


def _folder_name(path: str) -> str:
    """Return a checkpoint's path as the name of a directory; Windows allows no colons there."""
    name = path.removeprefix("tinker://").replace("/", "_")
    return name.replace(":", "_") if sys.platform == "win32" else name


def fetch_checkpoint(holder: Operations, path: str, folder: Path) -> None:
    """Download and verify all files of a checkpoint; raise if anything is missing or damaged."""
    from tinsmith.client.rest import RestClient
    from tinsmith.errors import TinkerError
    from tinsmith.wire.messages.weights import ParsedCheckpointTinkerPath

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
            f"this server does not offer sampler checkpoints for download ({path}); download a training checkpoint of "
            f"the run instead: tinsmith checkpoint list --run-id {parsed.training_run_id}"
        )
    check_manifest(folder)


@contextlib.contextmanager
def _exported(rest: RestClient, path: str) -> Iterator[str]:
    """Export a training checkpoint for the duration of the block."""
    from tinsmith.errors import TinkerError

    echo(f"exporting {path} (the server loads it into a new run)", err=True)
    with service_client(user_metadata={"created_by": "tinsmith checkpoint download"}) as service:
        training = service.create_training_client_from_state(path)
        export = training.save_weights_external("download", ttl_seconds=EXPORT_TTL_S).result().path
        try:
            yield export
        finally:
            try:
                rest.delete_checkpoint_from_tinker_path(export).result()
            except TinkerError as error:
                echo(f"warning: cannot delete the temporary export {export} ({error}); it expires in an hour", err=True)


def _fetch_files(rest: RestClient, path: str, folder: Path) -> None:
    from tinsmith.errors import TinkerError

    with _progress() as show:
        files = rest.download_external_weights(path, folder, show).result()
    if not files:
        raise TinkerError(f"{path} has no files")


@contextlib.contextmanager
def _progress() -> Iterator[Callable[[Any], None] | None]:
    """Show one progress bar per file, on a terminal."""
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn

    terminal = console(stderr=True)
    if wants_json() or not terminal.is_terminal:
        yield None
        return
    columns = (TextColumn("{task.description}", markup=False), BarColumn(), DownloadColumn(), TransferSpeedColumn())
    with Progress(*columns, console=terminal) as bars:
        tasks: dict[Path, Any] = {}

        def show(progress: Any) -> None:
            if progress.path not in tasks:
                tasks[progress.path] = bars.add_task(progress.path.name, total=progress.total)
            bars.update(tasks[progress.path], completed=progress.received, total=progress.total)

        yield show


def check_manifest(folder: Path) -> None:
    """Compare the files with the digests in the checkpoint's manifest; without a manifest there is nothing to check."""
    from tinsmith.errors import DamagedCheckpointError

    try:
        files = json.loads((folder / MANIFEST).read_bytes())["files"]
        expected = {name: kept["sha256"] if isinstance(kept, dict) else kept for name, kept in files.items()}
    except FileNotFoundError:
        return
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise DamagedCheckpointError(f"cannot read {folder / MANIFEST}: {error}") from None
    for name, digest in expected.items():
        file = folder / name
        if not file.is_file():
            raise DamagedCheckpointError(f"{file} is missing; delete {folder} and download again")
        with file.open("rb") as opened:
            if hashlib.file_digest(opened, "sha256").hexdigest() != digest:
                raise DamagedCheckpointError(
                    f"{file} is damaged: its SHA-256 is not the manifest's; delete {folder} and download again"
                )


@click.command(name="push-hf")
@click.argument("path", callback=checkpoint_path)
@click.option("-r", "--repo", metavar="OWNER/NAME", help="Repository.  [default: tinker-MODEL-RUN]")
@click.option("--public", is_flag=True, help="If the repository is new, make it public.")
@click.option("--revision", help="Branch to push to.")
@click.option("--commit-message", metavar="TEXT", help="Message of the commit.")
@click.option("--create-pr", is_flag=True, help="Open a pull request instead of pushing.")
@click.option("--allow-pattern", "allow", multiple=True, metavar="GLOB", help="Upload only these files; repeatable.")
@click.option("--ignore-pattern", "ignore", multiple=True, metavar="GLOB", help="Skip these files; repeatable.")
@click.option("--no-model-card", is_flag=True, help="Do not add a README.md.")
@formatted
@connected
def push_hf(path: str, repo: str | None, public: bool, no_model_card: bool, **options: Any) -> None:
    """Upload a checkpoint's adapter to the Hugging Face Hub.

    Needs the package huggingface_hub and a token (`hf auth login`, or HF_TOKEN).
    """
    api = _hub()
    with tempfile.TemporaryDirectory() as scratch, operations() as holder:
        from tinsmith.client.rest import RestClient

        folder = Path(scratch) / "checkpoint"
        fetch_checkpoint(holder, path, folder)
        if not (folder / ADAPTER_CONFIG).exists() or not any((folder / name).exists() for name in ADAPTERS):
            raise click.ClickException(
                f"{path} contains no PEFT adapter ({ADAPTER_CONFIG} and {ADAPTERS[0]}); encrypted exports cannot be "
                "pushed"
            )
        base = RestClient(holder).get_weights_info_by_tinker_path(path).result().base_model
        name = repo or _repo_name(path, base)
        if not no_model_card and not (folder / "README.md").exists():
            (folder / "README.md").write_text(_model_card(path, base), encoding="utf-8")
        _upload(api, folder, name, public, options)
    if wants_json():
        print_json({"checkpoint_path": path, "repo_id": name, "revision": options["revision"], "public": public})
    else:
        echo(f"https://huggingface.co/{name}")


def _hub() -> Any:
    """Return the Hub's API, with a logged-in user."""
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
            f"not logged in to the Hugging Face Hub ({type(error).__name__}: {str(error).splitlines()[0]})\n"
            "Run: hf auth login (or set HF_TOKEN), and check the network connection"
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
        raise click.ClickException(
            f"the upload to the Hugging Face Hub failed: {type(error).__name__}: {error}"
        ) from None


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

# LoRA adapter for {base_model}

A PEFT adapter, trained through the Tinker protocol and saved as `{path}`.

```python
from peft import PeftModel
from transformers import AutoModelForCausalLM

base = AutoModelForCausalLM.from_pretrained("{base_model}")
model = PeftModel.from_pretrained(base, "this repository")
```
"""

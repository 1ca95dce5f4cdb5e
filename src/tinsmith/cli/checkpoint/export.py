"""`tinsmith checkpoint export`: convert a checkpoint for PEFT, transformers or llama.cpp.

Merging runs in this process: this is one of the few commands that load engine modules
(docs/decisions/0018-engine-in-the-cli.md).
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import click

from tinsmith.cli.checkpoint.download import fetch_checkpoint
from tinsmith.cli.connection import checkpoint_path, connected, operations
from tinsmith.cli.output import formatted, print_json, print_properties, size, wants_json

FORMATS = ("peft", "merged", "gguf")


@click.command()
@click.argument("path", callback=checkpoint_path)
@click.option(
    "--to", "form", type=click.Choice(FORMATS), default="peft", show_default=True, help="Format of the result."
)
@click.option(
    "-o", "--out", type=click.Path(path_type=Path), required=True, help="Directory to create; for gguf, the file."
)
@click.option("--base", metavar="SOURCE", help="Base model: a directory, GGUF file or Hub ID.  [default: by name]")
@click.option(
    "--dtype", type=click.Choice(("f32", "f16")), default="f16", show_default=True, help="Number format of a GGUF."
)
@click.option("--force", is_flag=True, help="Replace existing files.")
@formatted
@connected
def export(path: str, form: str, out: Path, base: str | None, dtype: str, force: bool) -> None:
    """Convert a checkpoint for other programs, and verify the result.

    \b
    peft    the adapter, for PEFT and vLLM
    merged  the base model with the adapter merged into it, for transformers
    gguf    the merged model in one file, for llama.cpp

    The result is read back and compared: its tensors, and the logits of the merged model with those of the base model
    and adapter. Needs the engine: pip install 'tinsmith[server]'.
    """
    if out.exists() and not force:
        raise click.ClickException(f"{out} already exists; use --force to replace it, or another --out")
    exporting = _engine()
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch) / "checkpoint"
        with operations() as holder:
            fetch_checkpoint(holder, path, folder)
        if form == "peft":
            figures = exporting.export_peft(folder, out, overwrite=force)
        else:
            source = exporting.base_directory(base, folder, _models_dir(), Path(scratch) / "base")
            if form == "merged":
                figures = exporting.export_merged(folder, source, out, overwrite=force)
            else:
                figures = exporting.export_gguf(folder, source, out, Path(scratch) / "merged", dtype, overwrite=force)
    _report(path, form, out, figures)


def _engine() -> Any:
    try:
        from tinsmith.engine.checkpoints import export
    except ImportError as error:
        raise click.ClickException(f"export needs the engine: pip install 'tinsmith[server]' ({error})") from None
    return export


def _models_dir() -> Path:
    import os

    from tinsmith.config import EmbeddedConfig

    return EmbeddedConfig.from_env(os.environ).models_dir


def _report(path: str, form: str, out: Path, figures: dict[str, Any]) -> None:
    files = [out] if out.is_file() else [file for file in out.rglob("*") if file.is_file()]
    total = sum(file.stat().st_size for file in files)
    if wants_json():
        print_json({"checkpoint_path": path, "format": form, "destination": str(out), "size_bytes": total, **figures})
        return
    shown = {name.replace("_", " ").capitalize(): value for name, value in figures.items()}
    print_properties({"Checkpoint": path, "Format": form, "Written to": str(out), "Size": size(total), **shown})

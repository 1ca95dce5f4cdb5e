"""What tinsmith stores on this machine, by kind, with sizes: the data directory, the models, the compiled kernels."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

import click

from tinsmith.cli.output import size

F = TypeVar("F", bound=Callable[..., Any])

KINDS: Mapping[str, tuple[str, str | None]] = {
    "models": ("base models, downloaded and converted; made again when needed", "models"),
    "caches": ("compiled kernels, adapters swapped to disk; made again when needed", "caches"),
    "checkpoints": ("saved weights", "checkpoints"),
    "snapshots": ("states from which runs are restored after a crash", "runs"),
    "samplers": ("temporary weights to sample from", "runs"),
    "loads": ("weights that runs have loaded", "runs"),
    "traces": ("exported traces of sessions", "traces"),
    "uploads": ("parts of unfinished imports", "uploads"),
    "database": ("runs, journals, results, curves, usage, keys", None),
    "other": ("logs, secrets", None),
}
"""For each kind: what it holds, and the name by which `tinsmith clean` deletes it."""


def data_dir_option(command: F) -> F:
    """Give a command `--data-dir`: the data directory of the local engine, or of a server on this machine."""
    return click.option(
        "--data-dir",
        type=click.Path(path_type=Path, file_okay=False),
        help="The data directory.  [default: TINSMITH_DATA_DIR, or ~/.local/share/tinsmith]",
    )(command)


def stored(data_dir: Path, models_dir: Path) -> dict[str, int]:
    """Return how many bytes each kind takes; nothing is loaded that needs the engine."""
    from tinsmith.engine.cpu.compile import kernel_files
    from tinsmith.server.data_dir import DIRECTORIES, tree_bytes

    sizes = dict.fromkeys(KINDS, 0)
    sizes["models"] = tree_bytes(models_dir)
    sizes["caches"] = tree_bytes(data_dir / "spool") + sum(path.stat().st_size for path in kernel_files())
    for place in data_dir.glob("*") if data_dir.is_dir() else ():
        if place in (models_dir, data_dir / "spool"):
            continue
        kind = place.name if place.name in DIRECTORIES else "database" if "sqlite" in place.name else "other"
        sizes[kind] += tree_bytes(place) if place.is_dir() else place.lstat().st_size
    return sizes


def described(sizes: Mapping[str, int]) -> str:
    """Return the sum and the kinds that take space, the largest first, in one line."""
    parts = sorted(((amount, kind) for kind, amount in sizes.items() if amount), reverse=True)
    return f"{size(sum(sizes.values()))} ({', '.join(f'{kind} {size(amount)}' for amount, kind in parts) or 'nothing'})"

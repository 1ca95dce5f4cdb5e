"""Compiles this machine's kernels once, in separate processes; every engine then reads them from numba's disk cache.

An engine must not use code that it has compiled itself: freshly compiled code and the cached version of it can differ
in the last bit, and an engine that restarts must compute exactly what it computed before.
"""

from __future__ import annotations

import hashlib
import logging
import os
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

from tinsmith.config import numba_cache_dir
from tinsmith.engine.machine import processor

logger = logging.getLogger(__name__)

SOURCES = (
    "cached_attention.py",
    "draw.py",
    "elementwise.py",
    "formats.py",
    "layers.py",
    "packed_attention.py",
    "product.py",
    "tile.py",
    "widen.py",
)
"""Files with kernels."""
NOTE = "kernels.txt"
"""A file in the cache directory with the machines and versions that kernels were compiled for."""
PROGRAM = "tinsmith.engine.worker.use_kernels"
SHARES = ("sampling", "training")
"""Two halves of the kernels, compiled by two processes in parallel, since compiling uses one core."""


def kernel_files() -> list[Path]:
    """Return the files of compiled kernels in numba's cache: beside their source, or in another directory."""
    here = Path(__file__).resolve().parent
    name = f"{here.name}_{hashlib.sha1(str(here).encode(), usedforsecurity=False).hexdigest()}"  # as numba names it
    elsewhere, is_only = numba_cache_dir(os.environ)
    places = [elsewhere / name, *([] if is_only else [here / "__pycache__"])]
    return [path for place in places for path in place.glob("*.nb[ic]")]


def compile_kernels(cache_dir: Path) -> None:
    """Compile all kernels for sampling and training, unless they were compiled on this machine before."""
    note = cache_dir / NOTE
    sources = [Path(__file__).with_name(name).stat().st_mtime_ns for name in SOURCES]
    wanted = f"{processor()}; numba {version('numba')}; {sources}"
    if note.exists() and wanted in note.read_text().splitlines() and kernel_files():
        return
    logger.info("compiling kernels for this processor (only done once)", extra={"event": "compiling"})
    processes = [
        subprocess.Popen([sys.executable, "-m", PROGRAM, share], stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL)
        for share in SHARES
    ]
    codes = [process.wait() for process in processes]
    if any(codes):
        logger.warning("compiling kernels ahead of time failed; the first requests will have to wait for them")
        return
    cache_dir.mkdir(parents=True, exist_ok=True)
    with note.open("a") as lines:
        lines.write(f"{wanted}\n")

"""Which number format a machine's processor computes fastest and rightly.

Processors announce instructions that their virtual machine does not let them run, and the first use kills the process.
So a process of its own (`dtype_trial`) tries each format, forward and backward, compares with float64 and takes the
time; what it did not print, it did not survive. The answer is kept, since trying takes seconds.

Does not import torch.
"""

from __future__ import annotations

import os
import platform
import subprocess
import sys
from collections.abc import Callable, Mapping
from importlib.metadata import version
from pathlib import Path
from typing import TypeAlias

import msgspec

FORMATS = ("float32", "bfloat16")
TOLERANCE: Mapping[str, float] = {"float32": 1e-4, "bfloat16": 3e-2}
"""Largest error that is right, relative to the largest value."""
CAREFUL: Mapping[str, str] = {"ONEDNN_MAX_CPU_ISA": "AVX512_CORE_BF16"}
"""Keeps oneDNN from the matrix instructions (AMX), the ones that are announced and do not run."""
TIMEOUT_S = 120.0


class Trial(msgspec.Struct, frozen=True):
    """What one format did."""

    format: str
    seconds: float
    error: float

    @property
    def is_right(self) -> bool:
        return self.error <= TOLERANCE[self.format]


class Choice(msgspec.Struct, frozen=True):
    """The format to compute in, the environment that it needs, and what led to it."""

    dtype: str
    environment: dict[str, str]
    reason: str


class _Kept(msgspec.Struct, frozen=True):
    machine: str
    choice: Choice


Run: TypeAlias = Callable[[Mapping[str, str]], list[Trial]]
"""Tries all formats in this environment; gives those that were survived."""


def choose(cache_dir: Path) -> Choice:
    """The choice for this machine, from `cache_dir` if it was made there before."""
    path = cache_dir / "dtype.json"
    machine = f"{processor()}; {cores()} cores; torch {version('torch')}"
    kept = _read(path)
    if kept is not None and kept.machine == machine:
        return kept.choice
    choice = decide(run_trial)
    _keep(path, _Kept(machine, choice))
    return choice


def decide(run: Run) -> Choice:
    """The fastest format that is right. A trial that ends early is made again with care; in doubt float32."""
    environment: Mapping[str, str] = {}
    trials = run(environment)
    if len(trials) < len(FORMATS):
        environment = CAREFUL
        trials = run(environment)
    told = ", ".join(f"{t.format} {t.seconds * 1000:.1f} ms (error {t.error:.0e})" for t in trials) or "none survived"
    best = min((trial for trial in trials if trial.is_right), key=lambda trial: trial.seconds, default=None)
    if best is None:
        return Choice("float32", {}, f"nothing was found right ({told})")
    return Choice(best.format, dict(environment) if best.format != "float32" else {}, told)


def cores() -> int:
    """The cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def run_trial(environment: Mapping[str, str]) -> list[Trial]:
    command = [sys.executable, "-m", "tinsmith.engine.dtype_trial"]
    try:
        done = subprocess.run(
            command, env={**os.environ, **environment}, capture_output=True, timeout=TIMEOUT_S, check=False
        )
        printed = done.stdout
    except subprocess.TimeoutExpired as expired:
        printed = expired.stdout or b""
    return [msgspec.json.decode(line, type=Trial) for line in printed.splitlines()]


def _read(path: Path) -> _Kept | None:
    try:
        return msgspec.json.decode(path.read_bytes(), type=_Kept)
    except (OSError, msgspec.MsgspecError):
        return None


def _keep(path: Path, kept: _Kept) -> None:
    """Whole or not at all: what a crash cut off would be decided again, by a clock, and might come out otherwise."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f".{path.name}.{os.getpid()}")
    partial.write_bytes(msgspec.json.encode(kept))
    os.replace(partial, path)


def processor() -> str:
    """What the machine's processor calls itself."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        return next(line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor() or platform.machine()

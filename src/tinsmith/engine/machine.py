"""What this machine can compute, and its fingerprint: everything besides the request that the bits of a result depend
on.

bfloat16 has to be tried out. Processors announce instructions that their virtual machine does not let them run, and the
first use kills the process. So a separate process (`worker/dtype_trial`) runs each format forward and backward,
compares the results with float64 and prints the outcome; a format that it did not print, it did not survive. The
outcome is cached, because the trial takes seconds. The default on a CPU is float32 all the same: only with float32 do
trainer and sampler agree to 1e-4, and do samples not depend on what runs beside them.

The trial runs before torch is loaded, so this module does not import torch at the top.
"""

from __future__ import annotations

import os
import platform
import subprocess
import sys
from collections.abc import Callable, Mapping
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias

import msgspec

from tinsmith.config import instruction_limit

if TYPE_CHECKING:
    import torch

FORMATS = ("float32", "bfloat16")
TOLERANCE: Mapping[str, float] = {"float32": 1e-4, "bfloat16": 3e-2}
"""Largest acceptable error, relative to the largest value."""
CAREFUL: Mapping[str, str] = {"ONEDNN_MAX_CPU_ISA": "AVX512_CORE_BF16"}
"""Keeps oneDNN from using the matrix instructions (AMX), which some machines announce but cannot run."""
TIMEOUT_S = 120.0


class FormatTrial(msgspec.Struct, frozen=True):
    """The outcome of one format's trial."""

    format: str
    seconds: float
    error: float

    @property
    def is_right(self) -> bool:
        return self.error <= TOLERANCE[self.format]


class Choice(msgspec.Struct, frozen=True):
    """The environment variables with which bfloat16 works (None: it does not), and the measurements behind that."""

    environment: dict[str, str] | None
    reason: str


class _Kept(msgspec.Struct, frozen=True):
    machine: str
    choice: Choice


Run: TypeAlias = Callable[[Mapping[str, str]], list[FormatTrial]]
"""Tries all formats in this environment; returns the trials that the process survived."""


def choose(cache_dir: Path) -> Choice:
    """Return how bfloat16 works on this machine, from the file in `cache_dir` or by a trial."""
    path = cache_dir / "bfloat16.json"
    machine = f"{processor()}; {cores()} cores; torch {version('torch')}"
    kept = _read(path)
    if kept is not None and kept.machine == machine:
        return kept.choice
    choice = decide(run_trial)
    _keep(path, _Kept(machine, choice))
    return choice


def decide(run: Run) -> Choice:
    """Try bfloat16 with the environment as it is, then without the risky instructions."""
    summary = "none survived"
    for environment in ({}, CAREFUL):
        trials = run(environment)
        summary = ", ".join(f"{t.format} {t.seconds * 1000:.1f} ms (error {t.error:.0e})" for t in trials) or summary
        if any(trial.format == "bfloat16" and trial.is_right for trial in trials):
            return Choice(dict(environment), summary)
    return Choice(None, summary)


def cores() -> int:
    """Return the number of cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def run_trial(environment: Mapping[str, str]) -> list[FormatTrial]:
    command = [sys.executable, "-m", "tinsmith.engine.worker.dtype_trial"]
    try:
        done = subprocess.run(
            command, env={**os.environ, **environment}, capture_output=True, timeout=TIMEOUT_S, check=False
        )
        printed = done.stdout
    except subprocess.TimeoutExpired as expired:
        printed = expired.stdout or b""
    return [msgspec.json.decode(line, type=FormatTrial) for line in printed.splitlines()]


def _read(path: Path) -> _Kept | None:
    try:
        return msgspec.json.decode(path.read_bytes(), type=_Kept)
    except (OSError, msgspec.MsgspecError):
        return None


def _keep(path: Path, kept: _Kept) -> None:
    """Write the file atomically. A truncated one would lead to a new trial, which may come out differently."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f".{path.name}.{os.getpid()}")
    partial.write_bytes(msgspec.json.encode(kept))
    os.replace(partial, path)


def processor() -> str:
    """Return the processor's model name."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        return next(line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor() or platform.machine()


def fingerprint(
    device: torch.device, dtype: str, micro_batch_tokens: int, source: Path, products: str
) -> dict[str, str]:
    """Return the fingerprint of an engine in this process; call it after the number of threads is set.

    `source` is where the base model was read from, `products` the kind of matrix product in use.
    """
    import torch

    found = {
        "device": device.type,
        "cpu": processor(),
        "isa": " ".join([torch.backends.cpu.get_cpu_capability(), instruction_limit(os.environ)]).strip(),
        "threads": str(torch.get_num_threads()),
        "torch": str(torch.__version__),
        "dtype": dtype,
        "products": products,
        "micro_batch_tokens": str(micro_batch_tokens),
        "base_bytes": str(_size_bytes(source)),
    }
    if device.type == "cuda":
        found["gpu"] = torch.cuda.get_device_name(device)
    return found


def _size_bytes(source: Path) -> int:
    """Return the size of the weights, to notice a replaced base model; 0 if the source is not a path."""
    if source.is_file():
        return source.stat().st_size
    return sum(path.stat().st_size for path in source.glob("*.safetensors")) if source.is_dir() else 0

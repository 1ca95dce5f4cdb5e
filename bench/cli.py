"""CPU time of `--help` and `version`, compared with the official command line.

    .venv/bin/python bench/cli.py [ROUNDS]

Each run is a process of its own, `python -m` with that command line's interpreter. The figures are medians of the
child's user and system time.
"""

from __future__ import annotations

import os
import platform
import resource
import statistics
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
RELEASE = "0.36.0"
WARMUP = 2


def cpu_s(command: list[str], python_path: Path) -> float:
    """Run a command and return its CPU time."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    environ = {**os.environ, "PYTHONPATH": str(python_path)}
    subprocess.run(command, env=environ, check=True, stdout=subprocess.DEVNULL)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return (after.ru_utime - before.ru_utime) + (after.ru_stime - before.ru_stime)


def main() -> None:
    rounds = int(sys.argv[1]) if len(sys.argv) > 1 else 15
    ours = [sys.executable, "-m", "tinsmith"]
    theirs = [str(ROOT / ".official" / "venv" / "bin" / "python"), "-m", "tinker.cli"]
    print(f"{platform.machine()}, {os.cpu_count()} cores, Python {platform.python_version()}, {rounds} rounds")
    for arguments in (["--help"], ["version"]):
        took: dict[str, list[float]] = {"tinsmith": [], f"tinker {RELEASE}": []}
        for number in range(WARMUP + rounds):  # alternating, so that a busy machine slows both
            pair = (
                cpu_s([*ours, *arguments], ROOT / "src"),
                cpu_s([*theirs, *arguments], ROOT / ".official" / RELEASE),
            )
            if number >= WARMUP:
                for name, seconds in zip(took, pair, strict=True):
                    took[name].append(seconds)
        mine, official = (statistics.median(values) for values in took.values())
        shown = ", ".join(f"{name} {statistics.median(values) * 1000:.0f} ms" for name, values in took.items())
        print(f"{' '.join(arguments)}: {shown}; ratio 1/{official / mine:.1f}")


if __name__ == "__main__":
    main()

"""Install the built wheel where there is nothing else, and use it: `make wheel-test` (a few minutes, needs an index).

The environment and its data directory are outside the clone, so neither a file that the wheel forgot nor a package that
only developers have can help. The default model is downloaded as on a user's first day. `WHEEL=FILE` tries that file.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tarfile
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
DEMO = ("demo", "--quick")
"""The shortest demo."""
MADE = ("report.html", "adapter/adapter_model.safetensors", "adapter/adapter_config.json")
"""What it leaves in its output directory."""


@dataclass(frozen=True, slots=True)
class Built:
    """The files of a release."""

    wheel: Path
    sdist: Path


def build(source: Path, target: Path, variables: Mapping[str, str] | None = None) -> Built:
    """Build a source tree with the backend that pyproject.toml names, in this environment, with further variables."""
    command = [sys.executable, "-m", "hatchling", "build", "--directory", str(target)]
    env = {**os.environ, **(variables or {})}
    subprocess.run(command, cwd=source, env=env, check=True, capture_output=True, text=True)
    (wheel,), (sdist,) = target.glob("*.whl"), target.glob("*.tar.gz")
    return Built(wheel, sdist)


def unpack_sdist(sdist: Path, target: Path) -> Path:
    with tarfile.open(sdist) as opened:
        opened.extractall(target, filter="data")
    (source,) = target.glob("tinsmith-*")
    return source


def outside_environment(place: Path) -> dict[str, str]:
    """The environment of a user who has no clone and no server; pip's own settings stay."""
    ours = ("TINSMITH_", "TINKER_", "PYTHON", "VIRTUAL_ENV")
    kept = {name: value for name, value in os.environ.items() if not name.startswith(ours)}
    return {**kept, "TINSMITH_DATA_DIR": str(place / "data"), "TINSMITH_KEEP": "1"}


def install(wheel: Path, place: Path, env: dict[str, str]) -> Path:
    """Make an environment with the wheel's [server]; return its `bin`."""
    _run([sys.executable, "-m", "venv", str(place / "venv")], place, env)
    pip = [str(place / "venv" / "bin" / "pip"), "install", "--quiet", "--disable-pip-version-check"]
    constraints = ["--constraint", str(ROOT / "constraints.txt")]
    _run([*pip, *constraints, "torch"], place, env)  # first, as in tools/setup
    _run([*pip, *constraints, f"tinsmith[server] @ {wheel.as_uri()}"], place, env)
    return place / "venv" / "bin"


def try_it(wheel: Path, place: Path) -> None:
    """Install, run the demo, and look at what it made."""
    env = outside_environment(place)
    tinsmith = install(wheel, place, env) / "tinsmith"
    _run([str(tinsmith), "version"], place, env)
    _run([str(tinsmith), *DEMO, "--out", "made"], place, env)
    missing = [name for name in MADE if not (place / "made" / name).is_file()]
    if missing:
        raise SystemExit(f"wheel-test: the demo did not write {', '.join(missing)}")


def _run(command: Sequence[str], place: Path, env: dict[str, str]) -> None:
    began = time.monotonic()
    print(f"wheel-test: {' '.join(command)}", flush=True)
    done = subprocess.run(command, cwd=place, env=env, check=False)
    if done.returncode:
        raise SystemExit(f"wheel-test: exit code {done.returncode}: {' '.join(command)}")
    print(f"wheel-test: {time.monotonic() - began:.0f} s", flush=True)


def main() -> None:
    with tempfile.TemporaryDirectory(prefix="tinsmith-wheel-") as scratch:
        place = Path(scratch)
        try_it(Path(sys.argv[1]).resolve() if sys.argv[1:] else build(ROOT, place / "dist").wheel, place)
    print("wheel-test: the wheel works where there is nothing else")


if __name__ == "__main__":
    main()

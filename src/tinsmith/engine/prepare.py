"""Bring a base model to this machine and say what it is: run as a process, so that the server needs no torch.

    python -m tinsmith.engine.prepare SOURCE CACHE_DIR

prints one line of JSON, `Prepared` or `{"error": ...}`. An empty SOURCE is the default model.
"""

from __future__ import annotations

import sys
from pathlib import Path

import msgspec

from tinsmith.errors import TinkerError


class Prepared(msgspec.Struct, frozen=True, kw_only=True):
    """Where a model lies, and what requests for it are judged by."""

    source: str
    vocab_size: int
    max_context_length: int
    arch: str
    tokenizer_directory: str


def prepare(source: str, cache_dir: Path) -> Prepared:
    """Fetch and convert what is needed; everything is cached."""
    from tinsmith.engine.models import hub
    from tinsmith.engine.models.default import default_model
    from tinsmith.engine.models.gguf_file import GgufFile
    from tinsmith.engine.models.load import gguf_tokenizer
    from tinsmith.engine.models.safetensors_dir import read_config

    path = default_model(cache_dir) if not source else Path(source)
    if path.is_file() and path.suffix == ".gguf":
        file = GgufFile(path)
        config, tokenizer = file.config, gguf_tokenizer(file, cache_dir)
    else:
        path = path if path.is_dir() else hub.fetch(source)
        config, tokenizer = read_config(path), path
    return Prepared(
        source=str(path.absolute()),
        vocab_size=config.vocab_size,
        max_context_length=config.max_context_length,
        arch=config.architecture,
        tokenizer_directory=str(tokenizer.absolute()),
    )


def main() -> None:
    source, cache_dir = sys.argv[1:]
    try:
        answer = msgspec.json.encode(prepare(source, Path(cache_dir)))
    except TinkerError as error:
        answer = msgspec.json.encode({"error": str(error)})
    sys.stdout.buffer.write(answer + b"\n")


if __name__ == "__main__":
    main()

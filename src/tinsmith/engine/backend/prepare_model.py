"""Downloads and converts a base model and describes it. Runs as a process, so that the server does not load torch.

    python -m tinsmith.engine.backend.prepare_model SOURCE CACHE_DIR

prints one line of JSON, `PreparedModel` or `{"error": ...}`. An empty SOURCE is the default model.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from tinsmith.errors import TinkerError

if TYPE_CHECKING:
    from tinsmith.engine.general.architecture import GeneralConfig
    from tinsmith.engine.models.config import ModelConfig


class PreparedModel(msgspec.Struct, frozen=True, kw_only=True):
    """Where a model is, and what the server needs to know to validate requests for it."""

    source: str
    vocab_size: int
    max_context_length: int
    arch: str
    tokenizer_directory: str


def prepare(source: str, cache_dir: Path) -> PreparedModel:
    """Download and convert what is needed; everything is cached."""
    from tinsmith.engine.general.architecture import general_config, parameter_count
    from tinsmith.engine.models import sources
    from tinsmith.engine.models.gguf_read import GgufFile
    from tinsmith.engine.models.hf_directory import SafetensorsDirectory
    from tinsmith.engine.models.load import gguf_tokenizer
    from tinsmith.engine.models.sources import default_model

    config: ModelConfig | GeneralConfig
    path = default_model(cache_dir) if not source else Path(source)
    if path.is_file() and path.suffix == ".gguf":
        file = GgufFile(path)
        config, tokenizer = file.config, gguf_tokenizer(file, cache_dir)
    else:
        path = path if path.is_dir() else sources.fetch(source)
        general, tokenizer = general_config(path), path
        config = SafetensorsDirectory(path).config if general is None else general
        if general is not None:
            parameter_count(path)  # reads the headers of all files
    if not (tokenizer / "tokenizer.json").exists():
        raise TinkerError(f"{tokenizer} has no tokenizer.json; save the model's tokenizer there")
    return PreparedModel(
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
    except OSError as error:
        reason = f"{error.filename or cache_dir}: {error.strerror or error}; check the space and the permissions there"
        answer = msgspec.json.encode({"error": reason})
    sys.stdout.buffer.write(answer + b"\n")


if __name__ == "__main__":
    main()

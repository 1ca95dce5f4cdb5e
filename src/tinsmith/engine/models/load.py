"""Loads a model from a directory, a GGUF file or a hub id, as a decoder with its tokenizer.

A model that does not fit into memory is rejected before it is read.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import torch

from tinsmith.engine.cpu.formats import Format, Weights, packed_bytes
from tinsmith.engine.cpu.linear import can_pack, panel_width, product_kind
from tinsmith.engine.models import sources
from tinsmith.engine.models.bpe_tokenizer import write_tokenizer
from tinsmith.engine.models.config import ModelConfig
from tinsmith.engine.models.decoder import Decoder, build_decoder, weight_shapes
from tinsmith.engine.models.gguf_read import GgufFile
from tinsmith.engine.models.gguf_to_hf import original_of
from tinsmith.engine.models.hf_directory import SafetensorsDirectory
from tinsmith.errors import InvalidInputError, TinkerError

CONTAINER_LIMITS = (Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory/memory.limit_in_bytes"))
"""Where Linux reports a container's memory limit (cgroups v2 and v1)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadedModel:
    """A loaded model."""

    source: str
    config: ModelConfig
    decoder: Decoder
    tokenizer_dir: Path
    """Contains tokenizer.json and tokenizer_config.json."""
    chat_template: str | None
    memory_bytes: int
    """What `memory_needed` said of its file."""


def load_model(
    source: str | Path,
    device: torch.device | str = "cpu",
    dtype: torch.dtype = torch.float32,
    *,
    cache_dir: Path,
) -> LoadedModel:
    """Load a model from a Hugging Face directory, a `.gguf` file or a hub id.

    The tokenizer of a GGUF file is written to `cache_dir`. Raise if the model is larger than the free memory.
    """
    path, device = Path(source), torch.device(device)
    files: GgufFile | SafetensorsDirectory
    weights: GgufFile | SafetensorsDirectory
    if path.is_file() and path.suffix == ".gguf":
        files = weights = GgufFile(path)
    else:
        tokenizer_dir = path if path.is_dir() else sources.fetch(str(source))
        original = original_of(tokenizer_dir)
        files = SafetensorsDirectory(tokenizer_dir)
        weights = files if original is None else GgufFile(original)
    needed = memory_needed(weights, device, dtype)
    _check_fits(files.config, needed, device, dtype)
    if isinstance(files, GgufFile):
        tokenizer_dir = gguf_tokenizer(files, cache_dir)
    return LoadedModel(
        source=str(source),
        config=files.config,
        decoder=build_decoder(files.config, weights.read_stored, device, dtype),
        tokenizer_dir=tokenizer_dir,
        chat_template=read_chat_template(tokenizer_dir),
        memory_bytes=needed,
    )


def read_chat_template(directory: Path) -> str | None:
    """Return the chat template of a tokenizer: from its own file, or from tokenizer_config.json."""
    own = directory / "chat_template.jinja"
    if own.exists():
        return own.read_text(encoding="utf-8")
    config = directory / "tokenizer_config.json"
    if not config.exists():
        return None
    template = json.loads(config.read_text(encoding="utf-8")).get("chat_template")
    if isinstance(template, list):  # several, by name
        template = {entry["name"]: entry["template"] for entry in template}.get("default")
    return template if isinstance(template, str) else None


class WeightFile(Protocol):
    """A file or directory with the weights of a model."""

    @property
    def config(self) -> ModelConfig: ...

    def read_stored(self, name: str) -> Weights:
        """Return a weight by its Hugging Face name in the format of the file."""
        ...

    def format_of(self, name: str) -> Format:
        """Return the format in which a weight can be kept."""
        ...


def memory_needed(weights: WeightFile, device: torch.device, dtype: torch.dtype) -> int:
    """Return the bytes of the weights, laid out for products, and of the largest matrix while it is converted."""
    shapes = weight_shapes(weights.config)
    largest = 4 * max(math.prod(shape) for shape in shapes.values())
    if product_kind(device, dtype) != "compiled":
        copies = 2 if can_pack(device, dtype) else 1
        return copies * weights.config.parameter_count() * dtype.itemsize + largest
    panel, total = panel_width(device, dtype), largest
    for name, shape in shapes.items():
        is_matrix = len(shape) == 2
        total += packed_bytes(weights.format_of(name), (shape[0], shape[1]), panel) if is_matrix else 4 * shape[0]
    return total


def built_in_bytes(device: torch.device | str = "cpu") -> int | None:
    """Return the memory of the machine, of the container, or of a CUDA device; None if unknown."""
    if torch.device(device).type == "cuda":
        return int(torch.cuda.mem_get_info(device)[1])
    try:
        machine = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, ValueError, OSError):
        return None
    return min(machine, *(_limit(path) or machine for path in CONTAINER_LIMITS))


def _limit(path: Path) -> int | None:
    try:
        return int(path.read_text())
    except (OSError, ValueError):  # the file does not exist, or says `max`
        return None


def available_bytes(device: torch.device | str) -> int | None:
    """Return the free memory of the device; None if unknown."""
    if torch.device(device).type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    try:
        for line in Path("/proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    except OSError:
        pass
    return built_in_bytes()


def _check_fits(config: ModelConfig, needed: int, device: torch.device, dtype: torch.dtype) -> None:
    check_free(config.parameter_count(), needed, device, dtype)


def check_free(parameters: int, needed: int, device: torch.device | str, dtype: torch.dtype) -> None:
    """Raise if a model of so many weights needs more memory than is free."""
    available = available_bytes(device)
    if available is not None and needed > available:
        raise TinkerError(
            f"the model needs {needed / 1e9:.1f} GB in {str(dtype).removeprefix('torch.')} "
            f"({parameters:,} weights), but only {available / 1e9:.1f} GB are free; "
            "choose a smaller model or dtype, or free memory"
        )


def gguf_tokenizer(file: GgufFile, cache_dir: Path) -> Path:
    """Write the tokenizer of a GGUF file, once, to a directory that is named after its contents; return it."""
    tokenizer = file.tokenizer()
    if len(tokenizer.tokens) > file.config.vocab_size:
        raise InvalidInputError(
            f"{file.path}: the tokenizer has {len(tokenizer.tokens)} tokens, but the model has {file.config.vocab_size}"
        )
    digest = hashlib.sha256(repr(tokenizer).encode()).hexdigest()[:16]
    directory = cache_dir / f"{sources.TOKENIZER}{digest}"
    if not (directory / "tokenizer_config.json").exists():
        write_tokenizer(tokenizer, directory)
    return directory

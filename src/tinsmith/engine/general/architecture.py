"""Which models run through transformers, and what must be known of them before they are loaded.

Our own decoder goes first. What it does not compute is described by transformers' configuration classes, or refused
with the reason. Code from a model's repository is never run.
"""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open

from tinsmith.engine.models.families import ARCHITECTURES, config_from_hf, token_ids
from tinsmith.engine.models.hf_directory import read_values
from tinsmith.errors import InvalidInputError

OTHER_SETTINGS = frozenset({"head_dim", "hidden_act", "layer_types", "partial_rotary_factor", "rope_parameters"})
"""Settings of a known architecture that our decoder may refuse although transformers computes them."""
CONTEXT_NAMES = ("max_position_embeddings", "n_positions", "max_seq_len", "seq_length", "context_length", "n_ctx")
"""What configurations call the longest sequence."""
UNLIMITED_CONTEXT = 8192
"""Tokens in a sequence of a model that names no limit, such as a state-space model."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GeneralConfig:
    """What a server must know of a model that runs through transformers."""

    architecture: str
    vocab_size: int
    max_context_length: int
    eos_token_ids: tuple[int, ...]
    values: Any
    """transformers' own configuration."""


def transformers_version() -> str | None:
    """Return the version of the installed transformers; None if there is none."""
    try:
        return version("transformers")
    except PackageNotFoundError:
        return None


def use_no_hub_code() -> None:
    """Keep transformers from downloading kernels; to be called before it is imported."""
    os.environ["USE_HUB_KERNELS"] = "NO"


def general_config(directory: Path) -> GeneralConfig | None:
    """Return the description of a model that runs through transformers; None if our own decoder computes it.

    Raise InvalidInputError if neither does.
    """
    values = read_values(directory)
    reason = _why_not_ours(values)
    if reason is None:
        return None
    where = directory / "config.json"
    if values.get("quantization_config") is not None:
        raise InvalidInputError(
            f"{where}: quantization_config: quantised safetensors are not supported; use the original weights",
            field="quantization_config",
        )
    if transformers_version() is None:
        raise InvalidInputError(
            f"{where}: {reason}. Other causal language models run through transformers, which is not installed: "
            "pip install 'tinsmith[transformers]'",
            field="architectures",
        )
    return _described(directory, values, reason)


def parameter_count(directory: Path) -> int:
    """Return the number of weights in a directory's safetensors files, from their headers."""
    files = sorted(directory.glob("*.safetensors"))
    if not files:
        raise InvalidInputError(f"{directory} contains no safetensors files; other formats are not supported")
    count = 0
    for path in files:
        try:
            with safe_open(path, framework="pt") as opened:
                count += sum(math.prod(opened.get_slice(name).get_shape()) for name in opened.keys())  # noqa: SIM118
        except (OSError, SafetensorError) as error:
            raise InvalidInputError(f"{path} cannot be read ({error}); download the file again") from error
    return count


def _why_not_ours(values: Mapping[str, Any]) -> str | None:
    try:
        config_from_hf(values)
    except InvalidInputError as error:
        names = values.get("architectures") or [""]
        return str(error) if names[0] not in ARCHITECTURES or error.field in OTHER_SETTINGS else None
    return None


def _described(directory: Path, values: Mapping[str, Any], reason: str) -> GeneralConfig:
    use_no_hub_code()
    from transformers import AutoConfig
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    architecture = str((values.get("architectures") or ["(none named)"])[0])
    where = f"{directory / 'config.json'}: architecture {architecture}"
    try:
        config = AutoConfig.from_pretrained(directory, local_files_only=True, trust_remote_code=False)
    except Exception as error:  # transformers does not document all that it raises
        own_code = "; the code in the model's repository is never run" if values.get("auto_map") else ""
        raise InvalidInputError(
            f"{directory / 'config.json'}: {reason}, and transformers {transformers_version()} does not know it"
            f"{own_code}: {_first_line(error)}",
            field="architectures",
        ) from error
    if getattr(config, "is_encoder_decoder", False):
        raise InvalidInputError(
            f"{where} is an encoder-decoder model; only decoders can be trained and sampled here", field="architectures"
        )
    if MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.get(config.model_type) != architecture:
        raise InvalidInputError(
            f"{where} has no causal language-model head that transformers {transformers_version()} loads; {reason}",
            field="architectures",
        )
    return GeneralConfig(
        architecture=architecture,
        vocab_size=config.get_text_config().vocab_size,
        max_context_length=_context_length(config.get_text_config()),
        eos_token_ids=token_ids(values.get("eos_token_id", config.eos_token_id)),
        values=config,
    )


def _context_length(config: Any) -> int:
    found = (getattr(config, name, None) for name in CONTEXT_NAMES)
    lengths = [length for length in found if isinstance(length, int) and not isinstance(length, bool) and length > 0]
    return lengths[0] if lengths else UNLIMITED_CONTEXT


def _first_line(error: Exception) -> str:
    return next(iter(str(error).strip().splitlines()), type(error).__name__)[:300]

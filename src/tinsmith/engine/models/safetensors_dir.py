"""Weights in a Hugging Face directory: `config.json` and safetensors, in one file or several.

Owns: reading and writing such directories. Does not know: tokenizers, GGUF, the hub.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from tinsmith.engine.models.config import ModelConfig, config_from_hf
from tinsmith.engine.models.decoder import weight_shapes
from tinsmith.errors import InvalidInputError

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"


class SafetensorsDirectory:
    """Config and weights of one directory; tensors are read when asked for."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.config = read_config(directory)
        self._file_of = self._locate()
        self._check()

    def read(self, name: str) -> torch.Tensor:
        """A weight by its Hugging Face name, in memory of its own: a view would keep the whole file mapped."""
        path = self.directory / self._file_of[name]
        try:
            with safe_open(path, framework="pt") as opened:
                tensor: torch.Tensor = opened.get_tensor(name).clone()
        except (OSError, SafetensorError) as error:
            raise InvalidInputError(f"{path}: {name} cannot be read ({error}); download the file again") from error
        return tensor

    def _locate(self) -> dict[str, str]:
        """Which file holds which weight."""
        index = self.directory / INDEX
        if index.exists():
            mapping: dict[str, str] = json.loads(index.read_text())["weight_map"]
            missing = sorted({file for file in mapping.values() if not (self.directory / file).exists()})
            if missing:
                raise InvalidInputError(f"{self.directory}: {INDEX} names {missing[0]}, which is not there")
            return mapping
        if not (self.directory / SINGLE).exists():
            raise InvalidInputError(f"{self.directory} holds neither {SINGLE} nor {INDEX}; other formats are not read")
        with safe_open(self.directory / SINGLE, framework="pt") as opened:
            return dict.fromkeys(opened.keys(), SINGLE)

    def _check(self) -> None:
        """Every weight there with its shape, and none that would be ignored."""
        expected = weight_shapes(self.config)
        missing = sorted(set(expected) - set(self._file_of))
        if missing:
            raise InvalidInputError(f"{self.directory}: weight {missing[0]} is missing ({len(missing)} in all)")
        surplus = sorted(name for name in set(self._file_of) - set(expected) if not _is_derived(name))
        if surplus:
            raise InvalidInputError(
                f"{self.directory}: weight {surplus[0]} has no place in {self.config.architecture} "
                f"as config.json describes it ({len(surplus)} in all)"
            )
        for file in sorted(set(self._file_of.values())):
            with safe_open(self.directory / file, framework="pt") as opened:
                for name in expected:
                    if self._file_of[name] != file:
                        continue
                    shape = tuple(opened.get_slice(name).get_shape())
                    if shape != expected[name]:
                        raise InvalidInputError(
                            f"{self.directory}: {name} has shape {list(shape)}, config.json asks for "
                            f"{list(expected[name])}"
                        )


def _is_derived(name: str) -> bool:
    """Buffers of old exports, and the copy that tied embeddings make."""
    return name.endswith("rotary_emb.inv_freq") or name == "lm_head.weight"


def read_config(directory: Path) -> ModelConfig:
    """The ModelConfig of a directory; end-of-text ids of generation_config.json are added to those of config.json."""
    path = directory / "config.json"
    values = _json(path)
    generation = directory / "generation_config.json"
    if generation.exists():
        more = _json(generation).get("eos_token_id")
        if more is not None:
            given = values.get("eos_token_id")
            values["eos_token_id"] = _merged(given, more)
    try:
        return config_from_hf(values)
    except InvalidInputError as error:
        raise InvalidInputError(f"{path}: {error}", field=error.field) from None


def _merged(first: Any, second: Any) -> list[int]:
    lists = [value if isinstance(value, list) else [value] for value in (first, second) if value is not None]
    return list(dict.fromkeys(token for tokens in lists for token in tokens))


def _json(path: Path) -> dict[str, Any]:
    try:
        values = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise InvalidInputError(f"{path} cannot be read: {error}") from error
    if not isinstance(values, dict):
        raise InvalidInputError(f"{path} does not hold an object")
    return values

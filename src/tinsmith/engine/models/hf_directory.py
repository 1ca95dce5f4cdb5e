"""Reads the configuration and weights of a Hugging Face directory: `config.json` and one or more safetensors files."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from tinsmith.engine.cpu.formats import FORMATS, PLAIN, Format
from tinsmith.engine.models.config import ModelConfig
from tinsmith.engine.models.decoder import weight_shapes
from tinsmith.engine.models.families import config_from_hf
from tinsmith.errors import InvalidInputError

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"


class SafetensorsDirectory:
    """The configuration and weights of one directory; tensors are read on demand."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.config = read_config(directory)
        self._file_of = self._locate()
        self._check()

    def read(self, name: str) -> torch.Tensor:
        """Return a copy of a weight, by its Hugging Face name; a view would keep the whole file mapped."""
        with _opened(self.directory / self._file_of[name]) as opened:
            tensor: torch.Tensor = opened.get_tensor(name).clone()
        return tensor

    def read_stored(self, name: str) -> torch.Tensor:
        """Return a weight in the format of the file, which `read` does not change."""
        return self.read(name)

    def format_of(self, name: str) -> Format:
        """Return the format in which a weight can be kept: the file's, or float32."""
        with _opened(self.directory / self._file_of[name]) as opened:
            return FORMATS.get(opened.get_slice(name).get_dtype(), PLAIN)

    def _locate(self) -> dict[str, str]:
        """Return the file that contains each weight."""
        index = self.directory / INDEX
        if index.exists():
            mapping: dict[str, str] = json.loads(index.read_text())["weight_map"]
            missing = sorted({file for file in mapping.values() if not (self.directory / file).exists()})
            if missing:
                raise InvalidInputError(f"{self.directory}: {INDEX} names {missing[0]}, which does not exist")
            return mapping
        if not (self.directory / SINGLE).exists():
            raise InvalidInputError(
                f"{self.directory} contains neither {SINGLE} nor {INDEX}; other formats are not supported"
            )
        with _opened(self.directory / SINGLE) as opened:
            return dict.fromkeys(opened.keys(), SINGLE)

    def _check(self) -> None:
        """Raise unless every weight is there with its shape, and no other."""
        expected = weight_shapes(self.config)
        missing = sorted(set(expected) - set(self._file_of))
        if missing:
            raise InvalidInputError(f"{self.directory}: weight {missing[0]} is missing ({len(missing)} missing in all)")
        surplus = sorted(name for name in set(self._file_of) - set(expected) if not _is_derived(name))
        if surplus:
            raise InvalidInputError(
                f"{self.directory}: weight {surplus[0]} is not part of {self.config.architecture} "
                f"as config.json describes it ({len(surplus)} such weights in all)"
            )
        for file in sorted(set(self._file_of.values())):
            with _opened(self.directory / file) as opened:
                for name in expected:
                    if self._file_of[name] != file:
                        continue
                    shape = tuple(opened.get_slice(name).get_shape())
                    if shape != expected[name]:
                        raise InvalidInputError(
                            f"{self.directory}: {name} has shape {list(shape)}, but config.json requires "
                            f"{list(expected[name])}"
                        )


@contextmanager
def _opened(path: Path) -> Iterator[Any]:
    """Open a safetensors file; errors name it."""
    try:
        with safe_open(path, framework="pt") as opened:
            yield opened
    except (OSError, SafetensorError) as error:
        raise InvalidInputError(f"{path} cannot be read ({error}); download the file again") from error


def _is_derived(name: str) -> bool:
    """Return whether a name is a buffer of old exports, or the copy of tied embeddings; both can be ignored."""
    return name.endswith("rotary_emb.inv_freq") or name == "lm_head.weight"


def read_config(directory: Path) -> ModelConfig:
    """Return the ModelConfig of a directory."""
    values = read_values(directory)
    try:
        return config_from_hf(values)
    except InvalidInputError as error:
        raise InvalidInputError(f"{directory / 'config.json'}: {error}", field=error.field) from None


def read_values(directory: Path) -> dict[str, Any]:
    """Return config.json, with the end-of-text ids of generation_config.json added."""
    values = _json(directory / "config.json")
    generation = directory / "generation_config.json"
    if generation.exists():
        more = _json(generation).get("eos_token_id")
        if more is not None:
            given = values.get("eos_token_id")
            values["eos_token_id"] = _merged(given, more)
    return values


def _merged(first: Any, second: Any) -> list[int]:
    lists = [value if isinstance(value, list) else [value] for value in (first, second) if value is not None]
    return list(dict.fromkeys(token for tokens in lists for token in tokens))


def _json(path: Path) -> dict[str, Any]:
    try:
        values = json.loads(path.read_text())
    except FileNotFoundError as error:
        raise InvalidInputError(
            f"{path.parent} has no {path.name}: it is not a model in Hugging Face's layout"
        ) from error
    except (OSError, ValueError) as error:
        raise InvalidInputError(f"{path} cannot be read: {error}") from error
    if not isinstance(values, dict):
        raise InvalidInputError(f"{path} does not contain a JSON object")
    return values

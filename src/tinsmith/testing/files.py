"""Checkpoints of the test arithmetic: real files, complete or absent.

A directory appears by a rename. Nothing is synced: files survive a killed process, but not a power failure.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import uuid
from pathlib import Path

import msgspec
import numpy as np
import safetensors.numpy

from tinsmith.engine.protocol import LoraSpec, SavedFiles
from tinsmith.errors import InvalidInputError
from tinsmith.testing.arithmetic import FEATURES, ArithmeticAdapter
from tinsmith.wire.values.numbers import Array

WEIGHTS, OPTIMIZER, CONFIG, MANIFEST = (
    "adapter_model.safetensors",
    "optimizer.safetensors",
    "adapter_config.json",
    "manifest.json",
)
_A, _B = "base_model.model.arithmetic.lora_A.weight", "base_model.model.arithmetic.lora_B.weight"


class ArithmeticManifest(msgspec.Struct, frozen=True, kw_only=True):
    """The description of a checkpoint, and the SHA-256 of its other files."""

    base_model: str
    lora: LoraSpec
    files: dict[str, str]
    format: str = "tinsmith-arithmetic-1"


def write(directory: Path, adapter: ArithmeticAdapter, *, optimizer: bool) -> SavedFiles:
    """Save an adapter; `directory` must not exist."""
    if directory.exists():
        raise InvalidInputError(f"{directory} already exists; checkpoints are never overwritten", field="directory")
    contents = _contents(adapter, optimizer=optimizer)
    temporary = directory.with_name(f".{directory.name}.{uuid.uuid4().hex}")
    temporary.mkdir(parents=True)
    try:
        for name, data in contents.items():
            (temporary / name).write_bytes(data)
        os.rename(temporary, directory)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise
    digest = hashlib.sha256(contents[MANIFEST]).hexdigest()
    return SavedFiles(size_bytes=sum(map(len, contents.values())), digest=digest)


def _contents(adapter: ArithmeticAdapter, *, optimizer: bool) -> dict[str, bytes]:
    config = {
        "base_model_name_or_path": adapter.base_model,
        "lora_alpha": adapter.lora.alpha,
        "peft_type": "LORA",
        "r": adapter.lora.rank,
        "target_modules": ["arithmetic"],
    }
    weights = {_A: adapter.parameters[:FEATURES], _B: adapter.parameters[FEATURES:]}
    contents = {CONFIG: msgspec.json.encode(config), WEIGHTS: safetensors.numpy.save(weights)}
    if optimizer:
        state = {
            "first_moments": adapter.first_moments,
            "second_moments": adapter.second_moments,
            "step": np.array([adapter.step], np.int64),
        }
        contents[OPTIMIZER] = safetensors.numpy.save(state)
    digests = {name: hashlib.sha256(data).hexdigest() for name, data in contents.items()}
    contents[MANIFEST] = msgspec.json.encode(
        ArithmeticManifest(base_model=adapter.base_model, lora=adapter.lora, files=digests)
    )
    return contents


def read_manifest(directory: Path) -> ArithmeticManifest:
    try:
        return msgspec.json.decode((directory / MANIFEST).read_bytes(), type=ArithmeticManifest)
    except OSError as error:
        raise InvalidInputError(f"{directory} is not a checkpoint: {error.strerror}", field="directory") from None
    except msgspec.DecodeError as error:
        raise InvalidInputError(f"{directory / MANIFEST} is damaged: {error}", field="directory") from None


def read_parameters(directory: Path, manifest: ArithmeticManifest) -> Array:
    tensors = safetensors.numpy.load(_verified(directory, WEIGHTS, manifest))
    return np.concatenate([tensors[_A], tensors[_B]])


def read_optimizer(directory: Path, manifest: ArithmeticManifest) -> tuple[Array, Array, int]:
    """Return first and second moments, and the number of steps."""
    if OPTIMIZER not in manifest.files:
        raise InvalidInputError(
            f"{directory} was saved without optimizer state; load it with optimizer=False", field="optimizer"
        )
    tensors = safetensors.numpy.load(_verified(directory, OPTIMIZER, manifest))
    return tensors["first_moments"], tensors["second_moments"], int(tensors["step"][0])


def _verified(directory: Path, name: str, manifest: ArithmeticManifest) -> bytes:
    path = directory / name
    try:
        data = path.read_bytes()
    except OSError as error:
        raise InvalidInputError(f"{path}: {error.strerror}", field="directory") from None
    if hashlib.sha256(data).hexdigest() != manifest.files.get(name):
        raise InvalidInputError(f"{path} is damaged: its SHA-256 differs from the one in {MANIFEST}", field="directory")
    return data

"""Checkpoints: a directory with the adapter as PEFT has it, the optimizer's state if asked for, and a manifest.

    adapter_model.safetensors   A and B of each module, float32, under PEFT's names
    adapter_config.json         what PEFT needs to load them
    optimizer.safetensors       moments and step count, only in checkpoints to train on from
    manifest.json               what this is, and length and SHA-256 of each file

Owns: the layout, writing it whole or not at all, and refusing files that are not what was written.
Does not know: models, adapters' arithmetic, or where checkpoints are kept and under which names.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import msgspec
import safetensors.torch
import torch
from safetensors import SafetensorError
from torch import Tensor

from tinsmith.engine.files import DISK, Disk, whole_directory
from tinsmith.errors import DamagedCheckpointError, InvalidInputError, TinkerError

FORMAT = 1
ADAPTER = "adapter_model.safetensors"
ADAPTER_CONFIG = "adapter_config.json"
OPTIMIZER = "optimizer.safetensors"
MANIFEST = "manifest.json"
PREFIX = "base_model.model."
"""What PEFT puts before a module's name."""


class CheckpointInfo(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What the weights of a checkpoint are, beside their numbers."""

    base_model: str
    rank: int
    alpha: float
    seed: int | None = None
    train_attn: bool = True
    train_mlp: bool = True
    train_unembed: bool = True
    optimizer: str = "adamw"

    @property
    def scale(self) -> float:
        """The factor of B A."""
        return self.alpha / self.rank


class FileRecord(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    bytes: int
    sha256: str


class Manifest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`digest` is that of everything else in it."""

    format: int
    info: CheckpointInfo
    files: dict[str, FileRecord]
    digest: str = ""

    @property
    def has_optimizer(self) -> bool:
        return OPTIMIZER in self.files

    @property
    def size_bytes(self) -> int:
        return sum(record.bytes for record in self.files.values())

    def own_digest(self) -> str:
        return hashlib.sha256(msgspec.json.encode(msgspec.structs.replace(self, digest=""), order="sorted")).hexdigest()


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A checkpoint as it was read; `optimizer` is None if there is none or it was not asked for."""

    info: CheckpointInfo
    weights: dict[str, Tensor]
    optimizer: dict[str, Tensor] | None


def write_checkpoint(
    directory: Path,
    info: CheckpointInfo,
    weights: Mapping[str, Tensor],
    optimizer: Mapping[str, Tensor] | None = None,
    *,
    overwrite: bool = False,
    disk: Disk = DISK,
) -> Manifest:
    """Write a checkpoint that is on the disk when this returns; if it raises, `directory` is as it was before."""
    contents = {
        ADAPTER: _tensor_bytes(weights),
        ADAPTER_CONFIG: _json_bytes(peft_config(info, weights)),
    }
    if optimizer is not None:
        contents[OPTIMIZER] = _tensor_bytes(optimizer)
    records = {name: FileRecord(len(data), hashlib.sha256(data).hexdigest()) for name, data in contents.items()}
    manifest = Manifest(format=FORMAT, info=info, files=records)
    manifest = msgspec.structs.replace(manifest, digest=manifest.own_digest())
    contents[MANIFEST] = _json_bytes(msgspec.to_builtins(manifest))
    try:
        with whole_directory(directory, overwrite=overwrite, disk=disk) as partial:
            for name, data in contents.items():
                disk.write_file(partial / name, data)
    except FileExistsError as error:
        text = f"a checkpoint {directory.name!r} exists already; choose another name or overwrite it"
        raise InvalidInputError(text, field="path") from error
    except OSError as error:
        raise TinkerError(f"checkpoint {directory.name!r} was not saved, and nothing is left of it: {error}") from error
    return manifest


def read_manifest(directory: Path) -> Manifest:
    """What a checkpoint is, without reading its tensors."""
    data = _read(directory, MANIFEST)
    try:
        if json.loads(data).get("format") != FORMAT:
            _damaged(directory, MANIFEST, f"has another format than {FORMAT}, the one that this release reads")
        manifest = msgspec.json.decode(data, type=Manifest)
    except (msgspec.MsgspecError, ValueError, AttributeError) as error:
        _damaged(directory, MANIFEST, f"cannot be read: {error}")
    if manifest.digest != manifest.own_digest():
        _damaged(directory, MANIFEST, "is not what was written: its digest differs")
    return manifest


def read_checkpoint(directory: Path, *, with_optimizer: bool, device: torch.device | str = "cpu") -> Checkpoint:
    """Read a checkpoint, each file compared with its digest; the tensors are copies of their own."""
    manifest = read_manifest(directory)
    if with_optimizer and not manifest.has_optimizer:
        raise InvalidInputError(
            f"checkpoint {directory.name!r} was saved for sampling and has no optimizer state; load its weights only"
        )
    verified_bytes(directory, ADAPTER_CONFIG, manifest)
    weights = _read_tensors(directory, ADAPTER, manifest, device)
    optimizer = _read_tensors(directory, OPTIMIZER, manifest, device) if with_optimizer else None
    return Checkpoint(manifest.info, weights, optimizer)


def verify_checkpoint(directory: Path) -> Manifest:
    """Compare every file with its digest; raises DamagedCheckpointError, which names the file."""
    manifest = read_manifest(directory)
    for name in manifest.files:
        verified_bytes(directory, name, manifest)
    return manifest


def verified_bytes(directory: Path, name: str, manifest: Manifest) -> bytes:
    """A file's contents, which are what was written."""
    record = manifest.files.get(name)
    if record is None:
        _damaged(directory, MANIFEST, f"does not list {name}")
    data = _read(directory, name)
    if len(data) != record.bytes:
        _damaged(directory, name, f"has {len(data)} bytes, {record.bytes} were written")
    if hashlib.sha256(data).hexdigest() != record.sha256:
        _damaged(directory, name, "is not what was written: its SHA-256 differs")
    return data


def peft_config(info: CheckpointInfo, weights: Mapping[str, Tensor]) -> dict[str, Any]:
    """adapter_config.json: what PEFT needs, and nothing that depends on its version."""
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": info.base_model,
        "r": info.rank,
        "lora_alpha": info.alpha,
        "lora_dropout": 0.0,
        "target_modules": sorted({name.rpartition(".")[2] for name in adapted_modules(weights)}),
        "bias": "none",
        "fan_in_fan_out": False,
        "inference_mode": True,
        "init_lora_weights": True,
        "use_rslora": False,
        "use_dora": False,
    }


def adapted_modules(weights: Mapping[str, Tensor]) -> dict[str, tuple[Tensor, Tensor]]:
    """A and B of each module, by the name that the module has in the base model."""
    modules = {}
    for name, a_RD in weights.items():
        if name.endswith(".lora_A.weight") and name.startswith(PREFIX):
            b_ER = weights.get(name.replace(".lora_A.", ".lora_B."))
            if b_ER is None:
                raise InvalidInputError(f"adapter weights: {name} has no lora_B beside it")
            modules[name.removeprefix(PREFIX).removesuffix(".lora_A.weight")] = (a_RD, b_ER)
    if 2 * len(modules) != len(weights):
        known = {f"{PREFIX}{module}.lora_{side}.weight" for module in modules for side in "AB"}
        raise InvalidInputError(f"adapter weights: {sorted(set(weights) - known)[0]!r} is no name that PEFT would use")
    return modules


def _tensor_bytes(tensors: Mapping[str, Tensor]) -> bytes:
    own = {name: tensor.detach().to("cpu").contiguous() for name, tensor in tensors.items()}
    data: bytes = safetensors.torch.save(own, metadata={"format": "pt"})
    return data


def _read_tensors(directory: Path, name: str, manifest: Manifest, device: torch.device | str) -> dict[str, Tensor]:
    try:
        tensors: dict[str, Tensor] = safetensors.torch.load(verified_bytes(directory, name, manifest))
    except SafetensorError as error:
        _damaged(directory, name, f"holds no tensors: {error}")
    return {key: tensor.to(device, copy=True) for key, tensor in tensors.items()}


def _read(directory: Path, name: str) -> bytes:
    try:
        return (directory / name).read_bytes()
    except FileNotFoundError:
        _damaged(directory, name, "is missing")
    except OSError as error:
        _damaged(directory, name, f"cannot be read: {error.strerror}")


def _json_bytes(value: Any) -> bytes:
    return (json.dumps(value, indent=2, sort_keys=True) + "\n").encode()


def _damaged(directory: Path, name: str, reason: str) -> NoReturn:
    raise DamagedCheckpointError(f"checkpoint {directory.name!r}: {name} {reason}; use another checkpoint")

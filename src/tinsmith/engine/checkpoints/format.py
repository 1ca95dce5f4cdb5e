"""The format of checkpoints: a directory with the adapter in PEFT's layout, perhaps optimizer state, and a manifest.

    adapter_model.safetensors   A and B of each module, float32, under PEFT's names
    adapter_config.json         what PEFT needs to load them
    optimizer.safetensors       moments and step count, only in checkpoints to resume training from
    manifest.json               description, and length and SHA-256 of each file

A checkpoint is written complete or not at all, and files that differ from what was written are rejected. A checkpoint
may also come from a stranger: correct digests say nothing about its contents, so these are validated before they are
used.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, NoReturn

import msgspec
import safetensors.torch
import torch
from torch import Tensor

from tinsmith.engine.checkpoints.durable_files import DISK, DurableDisk, whole_directory
from tinsmith.engine.lora import PEFT_PREFIX, is_finite
from tinsmith.errors import DamagedCheckpointError, InvalidInputError, TinkerError

FORMAT = 1
ADAPTER = "adapter_model.safetensors"
ADAPTER_CONFIG = "adapter_config.json"
OPTIMIZER = "optimizer.safetensors"
MANIFEST = "manifest.json"
FILES = frozenset({ADAPTER, ADAPTER_CONFIG, OPTIMIZER})
"""Files that a manifest may list."""
MAX_MANIFEST_BYTES = 64 * 1024
MAX_ALPHA = 1e9
MAX_REASON = 500
MAX_NAME = 200
"""Characters of a name that an error message shows."""
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
"""Allowed formats of weights: they are converted to float32, which can represent all of their numbers."""

_USUAL_PATH = re.compile(r"model\.layers\.\d+\.(self_attn|mlp)\.\w+|lm_head")


class CheckpointInfo(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The description of a checkpoint's weights."""

    base_model: Annotated[str, msgspec.Meta(max_length=1024)]
    rank: Annotated[int, msgspec.Meta(ge=1, le=2**20)]
    alpha: Annotated[float, msgspec.Meta(ge=-MAX_ALPHA, le=MAX_ALPHA)]
    seed: Annotated[int, msgspec.Meta(ge=-(2**63), le=2**63 - 1)] | None = None
    train_attn: bool = True
    train_mlp: bool = True
    train_unembed: bool = True
    optimizer: str = "adamw"

    @property
    def scale(self) -> float:
        """The factor of B A in the adapter's output."""
        return self.alpha / self.rank


class ManifestEntry(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    bytes: int
    sha256: str


class Manifest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The contents of manifest.json. `digest` covers everything else in it."""

    format: int
    info: CheckpointInfo
    files: dict[str, ManifestEntry]
    digest: str = ""

    @property
    def has_optimizer(self) -> bool:
        return OPTIMIZER in self.files

    @property
    def size_bytes(self) -> int:
        return sum(record.bytes for record in self.files.values())

    def own_digest(self) -> str:
        return hashlib.sha256(msgspec.json.encode(msgspec.structs.replace(self, digest=""), order="sorted")).hexdigest()


class _AnyManifest(msgspec.Struct):
    """The fields that manifests of all formats have."""

    format: int = 0


@dataclass(frozen=True, slots=True)
class LoadedCheckpoint:
    """A checkpoint in memory; `optimizer` is None if there is none or it was not requested."""

    info: CheckpointInfo
    weights: dict[str, Tensor]
    optimizer: dict[str, Tensor] | None


def write_checkpoint(
    directory: Path,
    info: CheckpointInfo,
    weights: Mapping[str, Tensor],
    optimizer: Mapping[str, Tensor] | None = None,
    *,
    disk: DurableDisk = DISK,
) -> Manifest:
    """Write a checkpoint, which is on the disk when this returns; if it raises, `directory` is unchanged."""
    contents = {
        ADAPTER: _tensor_bytes(weights),
        ADAPTER_CONFIG: _json_bytes(peft_config(info, weights)),
    }
    if optimizer is not None:
        contents[OPTIMIZER] = _tensor_bytes(optimizer)
    records = {name: ManifestEntry(len(data), hashlib.sha256(data).hexdigest()) for name, data in contents.items()}
    manifest = Manifest(format=FORMAT, info=info, files=records)
    manifest = msgspec.structs.replace(manifest, digest=manifest.own_digest())
    contents[MANIFEST] = _json_bytes(msgspec.to_builtins(manifest))
    try:
        with whole_directory(directory, disk=disk) as partial:
            for name, data in contents.items():
                disk.write_file(partial / name, data)
    except FileExistsError as error:
        text = f"a checkpoint {directory.name!r} already exists; choose another name"
        raise InvalidInputError(text, field="path") from error
    except OSError as error:
        raise TinkerError(
            f"checkpoint {directory.name!r} was not saved, and no files were left behind: {error}"
        ) from error
    return manifest


def read_manifest(directory: Path) -> Manifest:
    """Read a checkpoint's manifest, without its tensors."""
    data = _read(directory, MANIFEST, MAX_MANIFEST_BYTES)
    try:
        if msgspec.json.decode(data, type=_AnyManifest).format != FORMAT:
            _damaged(directory, MANIFEST, f"has a format other than {FORMAT}, the only one that this release reads")
        manifest = msgspec.json.decode(data, type=Manifest)
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        _damaged(directory, MANIFEST, f"cannot be read: {error}")
    strange = sorted(manifest.files.keys() - FILES)
    if strange:
        _damaged(directory, MANIFEST, f"lists {strange[0]!r}, which is not a file of a checkpoint")
    if manifest.digest != manifest.own_digest():
        _damaged(directory, MANIFEST, "was changed after it was written: its digest differs")
    return manifest


def read_checkpoint(directory: Path, *, with_optimizer: bool) -> LoadedCheckpoint:
    """Read a checkpoint and compare each file with its digest."""
    manifest = read_manifest(directory)
    if with_optimizer and not manifest.has_optimizer:
        raise InvalidInputError(
            f"checkpoint {directory.name!r} was saved for sampling and has no optimizer state; load only its weights"
        )
    verified_bytes(directory, ADAPTER_CONFIG, manifest)
    weights = _read_tensors(directory, ADAPTER, manifest)
    optimizer = _read_tensors(directory, OPTIMIZER, manifest) if with_optimizer else None
    return LoadedCheckpoint(manifest.info, weights, optimizer)


def verified_bytes(directory: Path, name: str, manifest: Manifest) -> bytes:
    """Return a file's contents, after comparing them with the manifest."""
    record = manifest.files.get(name)
    if record is None:
        _damaged(directory, MANIFEST, f"does not list {name}")
    data = _read(directory, name)
    if len(data) != record.bytes:
        _damaged(directory, name, f"has {len(data)} bytes, but {record.bytes} were written")
    if hashlib.sha256(data).hexdigest() != record.sha256:
        _damaged(directory, name, "was changed after it was written: its SHA-256 differs")
    return data


def peft_config(info: CheckpointInfo, weights: Mapping[str, Tensor]) -> dict[str, Any]:
    """Return adapter_config.json: what PEFT needs, and nothing that depends on its version."""
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": info.base_model,
        "r": info.rank,
        "lora_alpha": info.alpha,
        "lora_dropout": 0.0,
        "target_modules": _target_modules(adapted_modules(weights)),
        "bias": "none",
        "fan_in_fan_out": False,
        "inference_mode": True,
        "init_lora_weights": True,
        "use_rslora": False,
        "use_dora": False,
    }


def _target_modules(modules: Iterable[str]) -> list[str]:
    """Return the names by which PEFT finds the modules: the last part of their paths, or the whole path in models where
    that part may name other modules, too (GPT-2 has a `c_proj` in attention and MLP).
    """
    paths = sorted(modules)
    is_usual = all(_USUAL_PATH.fullmatch(path) for path in paths)
    return sorted({path.rpartition(".")[2] for path in paths}) if is_usual else paths


def adapted_modules(weights: Mapping[str, Tensor]) -> dict[str, tuple[Tensor, Tensor]]:
    """Return A and B of each module, by the module's name in the base model."""
    modules = {}
    for name, a_RD in weights.items():
        if name.endswith(".lora_A.weight") and name.startswith(PEFT_PREFIX):
            b_ER = weights.get(name.replace(".lora_A.", ".lora_B."))
            if b_ER is None:
                raise InvalidInputError(f"adapter weights: {name} has no matching lora_B")
            modules[name.removeprefix(PEFT_PREFIX).removesuffix(".lora_A.weight")] = (a_RD, b_ER)
    if 2 * len(modules) != len(weights):
        known = {f"{PEFT_PREFIX}{module}.lora_{side}.weight" for module in modules for side in "AB"}
        raise InvalidInputError(
            f"adapter weights: {sorted(set(weights) - known)[0][:MAX_NAME]!r} is not a name that PEFT uses"
        )
    return modules


def _tensor_bytes(tensors: Mapping[str, Tensor]) -> bytes:
    own = {name: tensor.detach().to("cpu").contiguous() for name, tensor in tensors.items()}
    data: bytes = safetensors.torch.save(own, metadata={"format": "pt"})
    return data


def _read_tensors(directory: Path, name: str, manifest: Manifest) -> dict[str, Tensor]:
    data = verified_bytes(directory, name, manifest)
    try:
        tensors: dict[str, Tensor] = safetensors.torch.load(data)
    except Exception as error:  # the library does not document all that it raises
        reason = f"cannot be read as safetensors: {type(error).__name__}: {error}"
        raise InvalidInputError(f"checkpoint {directory.name!r}: {name} {reason}"[:MAX_REASON]) from error
    _check_numbers(directory, name, tensors)
    return {key: tensor.clone() for key, tensor in tensors.items()}


def _check_numbers(directory: Path, name: str, tensors: Mapping[str, Tensor]) -> None:
    """Reject tensors that cannot be weights: formats that PEFT does not use, and numbers that are not finite."""
    for key, tensor in tensors.items():
        found = None
        if tensor.dtype not in DTYPES and not (name == OPTIMIZER and tensor.dtype == torch.int64):
            found = f"{tensor.dtype}, which is not a format of weights"
        elif tensor.is_floating_point() and not is_finite(tensor):
            found = "not finite"
        if found is not None:
            where = f"checkpoint {directory.name!r}: {name}"
            raise InvalidInputError(f"{where}: {key[:MAX_NAME]!r} is {found}; use another checkpoint")


def _read(directory: Path, name: str, most: int | None = None) -> bytes:
    """Return a file's bytes; raise if there are more than `most`."""
    try:
        if most is not None and (size := (directory / name).stat().st_size) > most:
            _damaged(directory, name, f"has {size} bytes; at most {most} are allowed")
        return (directory / name).read_bytes()
    except FileNotFoundError:
        _damaged(directory, name, "is missing")
    except OSError as error:
        _damaged(directory, name, f"cannot be read: {error.strerror}")


def _json_bytes(value: Any) -> bytes:
    return (json.dumps(value, indent=2, sort_keys=True) + "\n").encode()


def _damaged(directory: Path, name: str, reason: str) -> NoReturn:
    raise DamagedCheckpointError(f"checkpoint {directory.name!r}: {name} {reason}; use another checkpoint")

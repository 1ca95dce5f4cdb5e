"""PEFT adapters of other programs as checkpoints of ours: names, shapes and scale as the engine has them.

Owns: which adapters can be taken over, and what is said of the others.
Does not know: where the checkpoint goes.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from safetensors import SafetensorError

from tinsmith.engine.checkpoints import ADAPTER, ADAPTER_CONFIG, CheckpointInfo, adapted_modules, write_checkpoint
from tinsmith.engine.lora import ATTENTION, GROUPS, LM_HEAD, MLP, LoraAdapter
from tinsmith.engine.models.safetensors_dir import read_config
from tinsmith.errors import InvalidInputError

REFUSED: Mapping[str, tuple[Any, ...]] = {
    "use_dora": (False, None),
    "fan_in_fan_out": (False, None),
    "modules_to_save": (None, []),
    "rank_pattern": (None, {}),
    "alpha_pattern": (None, {}),
    "lora_bias": (False, None),
    "bias": ("none", None),
}
"""Settings of PEFT that change what an adapter does, and the values with which they do not."""
_ATTENTION = frozenset(module for group in ATTENTION for module in GROUPS[group])
_MLP = frozenset(module for group in MLP for module in GROUPS[group])


def as_checkpoint(adapter: Path, out: Path, base_model: str | None = None, base: Path | None = None) -> CheckpointInfo:
    """Write a PEFT directory as a checkpoint.

    `base_model` is the server's name for the model; None takes the adapter's. An adapter of only some modules of the
    attention or the MLP needs `base`, the model's directory: the rest is added as a new adapter begins, without effect.
    """
    config = _read_config(adapter)
    weights = _read_weights(adapter)
    modules = {name.rpartition(".")[2] for name in adapted_modules(weights)}
    unknown = sorted(modules - _ATTENTION - _MLP - {LM_HEAD})
    if unknown:
        raise InvalidInputError(f"{adapter}: the adapter changes {unknown[0]}, which the engine does not adapt")
    name = base_model or config.get("base_model_name_or_path")
    if not isinstance(name, str) or not name:
        raise InvalidInputError(f"{adapter / ADAPTER_CONFIG} names no base model; say which with --model")
    rank = config["r"]
    info = CheckpointInfo(
        base_model=name,
        rank=rank,
        alpha=_alpha(config),
        train_attn=bool(modules & _ATTENTION),
        train_mlp=bool(modules & _MLP),
        train_unembed=LM_HEAD in modules,
    )
    whole = (_ATTENTION if info.train_attn else frozenset()) | (_MLP if info.train_mlp else frozenset())
    missing = sorted(whole - modules)
    if base is not None:
        weights = _completed(weights, info, base)
    elif missing:
        raise InvalidInputError(
            f"{adapter}: the adapter changes {', '.join(sorted(modules))}, and the engine adapts attention and MLP as "
            f"wholes; name the model's directory with --base, so that {', '.join(missing)} can be added without effect"
        )
    write_checkpoint(out, info, weights)
    return info


def _read_config(adapter: Path) -> dict[str, Any]:
    try:
        config = json.loads((adapter / ADAPTER_CONFIG).read_text(encoding="utf-8"))
        if config["peft_type"] != "LORA":
            raise InvalidInputError(f"{adapter}: peft_type is {config['peft_type']!r}; only LORA can be imported")
        rank = config["r"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        if isinstance(error, InvalidInputError):
            raise
        raise InvalidInputError(f"{adapter / ADAPTER_CONFIG} cannot be read: {error!r}") from None
    if not isinstance(rank, int) or isinstance(rank, bool) or rank < 1:
        raise InvalidInputError(f"{adapter / ADAPTER_CONFIG}: r is {rank!r}, not a rank")
    for name, harmless in REFUSED.items():
        if config.get(name) not in harmless:
            raise InvalidInputError(f"{adapter / ADAPTER_CONFIG}: {name}={config[name]!r} cannot be imported")
    return dict(config)


def _alpha(config: Mapping[str, Any]) -> float:
    """Alpha as the engine means it: the scale is alpha / rank."""
    alpha = float(config.get("lora_alpha", 8))
    return alpha * math.sqrt(config["r"]) if config.get("use_rslora") else alpha


def _read_weights(adapter: Path) -> dict[str, torch.Tensor]:
    path = adapter / ADAPTER
    if not path.exists():
        raise InvalidInputError(f"{adapter} has no {ADAPTER}; other formats (.bin) are not read")
    try:
        found = safetensors.torch.load_file(path)
    except (OSError, SafetensorError) as error:
        raise InvalidInputError(f"{path} cannot be read: {error}") from None
    for name, tensor in found.items():
        if not tensor.is_floating_point() or not bool(torch.isfinite(tensor).all()):
            raise InvalidInputError(f"{path}: {name} is not made of finite numbers")
    return {name: tensor.to(torch.float32) for name, tensor in found.items()}


def _completed(weights: Mapping[str, torch.Tensor], info: CheckpointInfo, base: Path) -> dict[str, torch.Tensor]:
    """All modules that the engine adapts together; those that were not there do nothing until they are trained."""
    fresh = LoraAdapter(
        read_config(base), info.rank, 0, info.train_attn, info.train_mlp, info.train_unembed, info.alpha
    )
    values = {**fresh.parameters(), **weights}
    fresh.load(values)  # names and shapes
    return {name: tensor.clone() for name, tensor in fresh.parameters().items()}

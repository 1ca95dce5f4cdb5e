"""Converts PEFT adapters of other programs to checkpoints: names, shapes and scale as the engine needs them."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import safetensors.torch
import torch

from tinsmith.engine.checkpoints.format import (
    ADAPTER,
    ADAPTER_CONFIG,
    MAX_ALPHA,
    CheckpointInfo,
    adapted_modules,
    write_checkpoint,
)
from tinsmith.engine.lora import ATTENTION, MAX_RANK, MLP, LoraAdapter, is_finite
from tinsmith.engine.models.config import FUSED_GROUPS, GROUPS, LM_HEAD
from tinsmith.engine.models.hf_directory import read_config
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
"""PEFT settings that change what an adapter computes, with the values at which they do not."""
_ATTENTION, _MLP = (
    tuple(frozenset(module for group in part for module in groups[group]) for groups in (GROUPS, FUSED_GROUPS))
    for part in (ATTENTION, MLP)
)
"""The modules of each part of a layer: those of most models, and those of models with fused linears."""
_FUSED_ONLY = frozenset(module for group in GROUPS for module in set(FUSED_GROUPS[group]) - set(GROUPS[group]))


def as_checkpoint(
    adapter: Path, out: Path, base_model: str | None = None, base: Path | None = None, *, unsure: str = ""
) -> CheckpointInfo:
    """Write a PEFT directory as a checkpoint.

    `base_model` is the server's name for the model; None: the name in the adapter's configuration, unless `unsure` says
    why that is not one. An adapter for only some modules of the attention or the MLP needs `base`, the model's
    directory: the other modules are added in the state of a new adapter, which has no effect.
    """
    config = _read_config(adapter)
    weights = _read_weights(adapter)
    modules = {name.rpartition(".")[2] for name in adapted_modules(weights)}
    unknown = sorted(modules.difference(*_ATTENTION, *_MLP, (LM_HEAD,)))
    if unknown:
        raise InvalidInputError(f"{adapter}: the adapter changes {unknown[0]}, which the engine cannot adapt")
    name = base_model or config.get("base_model_name_or_path")
    if not isinstance(name, str) or not name:
        unsure = unsure or f"{adapter / ADAPTER_CONFIG} does not name a base model"
    info = CheckpointInfo(
        base_model=str(name),
        rank=config["r"],
        alpha=_alpha(config),
        train_attn=any(modules & part for part in _ATTENTION),
        train_mlp=any(modules & part for part in _MLP),
        train_unembed=LM_HEAD in modules,
    )
    is_fused = bool(modules & _FUSED_ONLY)
    trained = [part[is_fused] for part, trains in ((_ATTENTION, info.train_attn), (_MLP, info.train_mlp)) if trains]
    missing = sorted(frozenset().union(*trained) - modules) if base is None else []
    wanted = [f"{unsure}; name it with --model"] if unsure and base_model is None else []
    if missing:
        wanted.append(
            f"{adapter}: the adapter changes only {', '.join(sorted(modules))}, but the engine adapts attention and "
            f"MLP as a whole; give the model's directory with --base, so that {', '.join(missing)} can be added "
            "without effect"
        )
    if wanted:
        raise InvalidInputError("\n".join(wanted))
    if base is not None:
        weights = _completed(weights, info, base)
    write_checkpoint(out, info, weights)
    return info


def _read_config(adapter: Path) -> dict[str, Any]:
    if not (adapter / ADAPTER_CONFIG).exists():
        raise InvalidInputError(f"{adapter} has no {ADAPTER_CONFIG}: it is not the directory of a PEFT adapter")
    try:
        config = json.loads((adapter / ADAPTER_CONFIG).read_text(encoding="utf-8"))
        if config["peft_type"] != "LORA":
            raise InvalidInputError(f"{adapter}: peft_type is {config['peft_type']!r}; only LORA can be imported")
        rank = config["r"]
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        if isinstance(error, InvalidInputError):
            raise
        raise InvalidInputError(f"{adapter / ADAPTER_CONFIG} cannot be read: {error!r}") from None
    if not isinstance(rank, int) or isinstance(rank, bool) or not 1 <= rank <= MAX_RANK:
        raise InvalidInputError(f"{adapter / ADAPTER_CONFIG}: r must be 1 to {MAX_RANK}, got {repr(rank)[:40]}")
    for name, harmless in REFUSED.items():
        if config.get(name) not in harmless:
            raise InvalidInputError(f"{adapter / ADAPTER_CONFIG}: {name}={config[name]!r} cannot be imported")
    return dict(config)


def _alpha(config: Mapping[str, Any]) -> float:
    """Return alpha as the engine defines it: the scale is alpha / rank."""
    try:
        alpha = float(config.get("lora_alpha", 8))
    except (TypeError, ValueError, OverflowError):
        alpha = math.nan
    if not abs(alpha) <= MAX_ALPHA:
        raise InvalidInputError(f"lora_alpha: {str(config['lora_alpha'])[:40]!r} is not a number up to {MAX_ALPHA:g}")
    return alpha * math.sqrt(config["r"]) if config.get("use_rslora") else alpha


def _read_weights(adapter: Path) -> dict[str, torch.Tensor]:
    path = adapter / ADAPTER
    if not path.exists():
        raise InvalidInputError(f"{adapter} has no {ADAPTER}; other formats (.bin) are not supported")
    try:
        found = safetensors.torch.load_file(path)
    except Exception as error:  # the library does not document all that it raises
        raise InvalidInputError(f"{path} cannot be read: {error}") from None
    for name, tensor in found.items():
        if not tensor.is_floating_point() or not is_finite(tensor):
            raise InvalidInputError(f"{path}: {name} has numbers that are not finite")
    return {name: tensor.to(torch.float32) for name, tensor in found.items()}


def _completed(weights: Mapping[str, torch.Tensor], info: CheckpointInfo, base: Path) -> dict[str, torch.Tensor]:
    """Return weights for all modules that the engine adapts; the added ones have no effect until they are trained."""
    fresh = LoraAdapter(
        read_config(base), info.rank, 0, info.train_attn, info.train_mlp, info.train_unembed, info.alpha
    )
    values = {**fresh.parameters(), **weights}
    fresh.load(values)  # also checks names and shapes
    return {name: tensor.clone() for name, tensor in fresh.parameters().items()}

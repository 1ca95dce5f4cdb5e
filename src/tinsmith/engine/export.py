"""Merged export: the base model with an adapter added to its weights, as a directory that Hugging Face loaders read.

A tied model whose unembedding was trained has no merged form that is still tied: the adapter changes only what is read
out. Such a model is untied: `lm_head.weight` is written beside the embeddings, which stay as they were, and its
configuration says so.
Does not know: where base weights come from (they are an iterator of names and tensors), or quantised bases.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from safetensors import safe_open
from torch import Tensor

from tinsmith.engine.checkpoints import adapted_modules
from tinsmith.engine.files import DISK, Disk, whole_directory
from tinsmith.errors import InvalidInputError, TinkerError

EMBEDDINGS = "model.embed_tokens.weight"
UNEMBEDDING = "lm_head.weight"
SHARD_BYTES = 2**30
"""A shard is in memory twice while it is written."""


def directory_tensors(directory: Path) -> Iterator[tuple[str, Tensor]]:
    """The weights of a Hugging Face directory, one at a time."""
    paths = sorted(directory.glob("*.safetensors"))
    if not paths:
        raise InvalidInputError(f"{directory} has no *.safetensors files to merge into")
    for path in paths:
        with safe_open(path, framework="pt") as file:
            for name in file.keys():  # noqa: SIM118 - not a mapping
                yield name, file.get_tensor(name)


def merge_into(
    directory: Path,
    *,
    base: Iterable[tuple[str, Tensor]],
    config: Mapping[str, Any],
    weights: Mapping[str, Tensor],
    scale: float,
    is_tied: bool,
    copied: Iterable[Path] = (),
    shard_bytes: int = SHARD_BYTES,
    overwrite: bool = False,
    disk: Disk = DISK,
) -> None:
    """Write `base` with the adapter in it, in the base's dtypes; whole or not at all.

    `config` is the base's config.json; `copied` are files to take along, such as the tokenizer's. Sums are made in
    float32 and rounded once, so with a bfloat16 base small changes can be lost.
    """
    modules = adapted_modules(weights)
    unties = is_tied and "lm_head" in modules
    merged = _merged(base, modules, scale, is_tied)
    try:
        with whole_directory(directory, overwrite=overwrite, disk=disk) as partial:
            _write_shards(partial, merged, shard_bytes, disk)
            settings = dict(config) | {"tie_word_embeddings": is_tied and not unties}
            disk.write_file(partial / "config.json", (json.dumps(settings, indent=2) + "\n").encode())
            for path in copied:
                disk.write_file(partial / path.name, path.read_bytes())
    except OSError as error:
        raise TinkerError(f"export {directory.name!r} was not written, and nothing is left of it: {error}") from error


def _merged(
    base: Iterable[tuple[str, Tensor]], modules: Mapping[str, tuple[Tensor, Tensor]], scale: float, is_tied: bool
) -> Iterator[tuple[str, Tensor]]:
    waiting = dict(modules)
    for name, weight in base:
        if is_tied and name == UNEMBEDDING:
            continue  # a second copy of the embeddings
        module = name.removesuffix(".weight")
        yield name, _added(name, weight, waiting.pop(module), scale) if module in waiting else weight
        if is_tied and name == EMBEDDINGS and "lm_head" in waiting:
            yield UNEMBEDDING, _added(UNEMBEDDING, weight, waiting.pop("lm_head"), scale)
    if waiting:
        raise InvalidInputError(f"the adapter has {sorted(waiting)[0]}, which the base model has no weight for")


def _added(name: str, weight_ED: Tensor, factors: tuple[Tensor, Tensor], scale: float) -> Tensor:
    a_RD, b_ER = (factor.detach().to("cpu", torch.float32) for factor in factors)
    if (b_ER.shape[0], a_RD.shape[1]) != tuple(weight_ED.shape):
        shape = [b_ER.shape[0], a_RD.shape[1]]
        raise InvalidInputError(f"{name}: the adapter is for a weight of shape {shape}, not {list(weight_ED.shape)}")
    return (weight_ED.to(torch.float32) + scale * (b_ER @ a_RD)).to(weight_ED.dtype)


def _write_shards(partial: Path, tensors: Iterable[tuple[str, Tensor]], shard_bytes: int, disk: Disk) -> None:
    """One file if all fits; else shards with an index, which learn their final names when their number is known."""
    shards: list[list[str]] = []
    total = 0
    for shard in _shards(tensors, shard_bytes):
        data = safetensors.torch.save({name: t.contiguous() for name, t in shard.items()}, metadata={"format": "pt"})
        disk.write_file(partial / f"shard-{len(shards)}", data)
        shards.append(list(shard))
        total += sum(tensor.nbytes for tensor in shard.values())
    names = [f"model-{i + 1:05}-of-{len(shards):05}.safetensors" for i in range(len(shards))]
    names = names if len(shards) > 1 else ["model.safetensors"]
    for i, name in enumerate(names):
        disk.rename(partial / f"shard-{i}", partial / name)
    if len(shards) > 1:
        where = {name: names[i] for i, shard in enumerate(shards) for name in shard}
        index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(where.items()))}
        disk.write_file(partial / "model.safetensors.index.json", (json.dumps(index, indent=2) + "\n").encode())


def _shards(tensors: Iterable[tuple[str, Tensor]], shard_bytes: int) -> Iterator[dict[str, Tensor]]:
    shard: dict[str, Tensor] = {}
    size = 0
    for name, tensor in tensors:
        if shard and size + tensor.nbytes > shard_bytes:
            yield shard
            shard, size = {}, 0
        shard[name] = tensor
        size += tensor.nbytes
    yield shard

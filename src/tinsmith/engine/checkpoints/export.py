"""Exports a checkpoint for other programs: as a PEFT adapter, as a merged Hugging Face directory, or as a GGUF file.

Every export is read back and compared with its source before it is kept. Merging adds the adapter to the base weights.
A model with tied embeddings whose unembedding was trained has no merged form that is still tied, because the adapter
changes the output side only. Such a model is untied: `lm_head.weight` is written in addition to the unchanged
embeddings, and the configuration says so. Quantised bases are not supported. GGUF is written by `models/gguf_write`.
"""

from __future__ import annotations

import json
import shutil
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from safetensors import safe_open
from torch import Tensor

from tinsmith.engine.checkpoints.durable_files import DISK, DurableDisk, whole_directory
from tinsmith.engine.checkpoints.format import ADAPTER, ADAPTER_CONFIG, CheckpointInfo, adapted_modules, read_checkpoint
from tinsmith.engine.lora import LoraAdapter
from tinsmith.engine.models import sources
from tinsmith.engine.models.attention import PackedAttention
from tinsmith.engine.models.decoder import Decoder
from tinsmith.engine.models.families import ARCHITECTURES
from tinsmith.engine.models.gguf_to_hf import convert_gguf
from tinsmith.engine.models.gguf_write import check_gguf, write_gguf
from tinsmith.engine.models.load import load_model
from tinsmith.engine.models.sources import NAME as DEFAULT_NAME
from tinsmith.engine.models.sources import default_model
from tinsmith.errors import InvalidInputError, TinkerError

EMBEDDINGS = "model.embed_tokens.weight"
UNEMBEDDING = "lm_head.weight"
SHARD_BYTES = 2**30
"""Size of a shard, which is in memory twice while it is written."""


def directory_tensors(directory: Path) -> Iterator[tuple[str, Tensor]]:
    """Yield the weights of a Hugging Face directory, one at a time."""
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
    disk: DurableDisk = DISK,
) -> None:
    """Write `base` merged with the adapter, in the base's dtypes; complete or not at all.

    `config` is the base's config.json; `copied` are files to copy, such as the tokenizer's. Sums are computed in
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
        raise TinkerError(
            f"export {directory.name!r} was not written, and no files were left behind: {error}"
        ) from error


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
        raise InvalidInputError(f"the adapter has {sorted(waiting)[0]}, but the base model has no such weight")


def _added(name: str, weight_ED: Tensor, factors: tuple[Tensor, Tensor], scale: float) -> Tensor:
    a_RD, b_ER = (factor.detach().to("cpu", torch.float32) for factor in factors)
    if (b_ER.shape[0], a_RD.shape[1]) != tuple(weight_ED.shape):
        shape = [b_ER.shape[0], a_RD.shape[1]]
        raise InvalidInputError(
            f"{name}: the adapter fits a weight of shape {shape}, but the base has {list(weight_ED.shape)}"
        )
    return (weight_ED.to(torch.float32) + scale * (b_ER @ a_RD)).to(weight_ED.dtype)


def _write_shards(partial: Path, tensors: Iterable[tuple[str, Tensor]], shard_bytes: int, disk: DurableDisk) -> None:
    """Write one file if everything fits, else shards with an index. Shards are renamed once their number is known."""
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


TRIAL_TOKENS = 24
MAX_DIFFERENCE = 2e-3
"""Largest difference of logits in float32: merged weights are rounded once more than base and adapter apart."""
COPIED = ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "chat_template.jinja",
          "generation_config.json")  # fmt: skip


def export_peft(checkpoint: Path, out: Path, *, overwrite: bool = False) -> dict[str, Any]:
    """Export the adapter's two files in PEFT's format."""
    written = read_checkpoint(checkpoint, with_optimizer=False)
    with whole_directory(out, overwrite=overwrite) as partial:
        for name in (ADAPTER, ADAPTER_CONFIG):
            DISK.write_file(partial / name, (checkpoint / name).read_bytes())
    again = safetensors.torch.load_file(out / ADAPTER)
    _check(set(again) == set(written.weights), f"{out / ADAPTER} does not contain the adapter's tensors")
    for name, tensor in written.weights.items():
        _check(torch.equal(again[name], tensor), f"{out / ADAPTER}: {name} differs from the checkpoint's")
    return {"tensors_compared": len(again), "rank": written.info.rank, "base_model": written.info.base_model}


def base_directory(source: str | None, checkpoint: Path, models_dir: Path, scratch: Path) -> Path:
    """Return the base model as a Hugging Face directory: the given source, or what the checkpoint was trained on."""
    name = source or read_checkpoint(checkpoint, with_optimizer=False).info.base_model
    path = Path(name)
    if path.is_file() and path.suffix == ".gguf":
        convert_gguf(path, scratch)
        return scratch
    if path.is_dir():
        return path
    if name == DEFAULT_NAME:
        return default_model(models_dir)
    try:
        return sources.fetch(name)
    except TinkerError as error:
        raise TinkerError(f"merging needs the base model: {error}; you can also give it with --base") from error


def export_merged(checkpoint: Path, base: Path, out: Path, *, overwrite: bool = False) -> dict[str, Any]:
    """Export base and adapter as one directory; its logits must equal those of the two apart."""
    saved = read_checkpoint(checkpoint, with_optimizer=False)
    config = json.loads((base / "config.json").read_text(encoding="utf-8"))
    _check_mergeable(config)
    with tempfile.TemporaryDirectory() as cache:
        loaded = load_model(base, cache_dir=Path(cache))
        adapter = _adapter(loaded.decoder, saved.info, saved.weights)
        expected = _logits(loaded.decoder, adapter)
        changed = float((expected - _logits(loaded.decoder, None)).abs().max())
        is_tied = loaded.config.tie_embeddings
        del loaded
        merge_into(
            out,
            base=directory_tensors(base),
            config=config,
            weights=saved.weights,
            scale=saved.info.scale,
            is_tied=is_tied,
            copied=[base / name for name in COPIED if (base / name).exists()],
            overwrite=overwrite,
        )
        found = _logits(load_model(out, cache_dir=Path(cache)).decoder, None)
    difference = float((found - expected).abs().max())
    if not difference <= MAX_DIFFERENCE * max(1.0, float(expected.abs().max())):
        shutil.rmtree(out)
        raise TinkerError(
            f"the merged model's logits differ by {difference:.2g} from those of base and adapter, so it was removed. "
            "A base in bfloat16 is too coarse to merge into: give a float32 copy with --base"
        )
    return {"max_logit_difference": difference, "max_change_by_adapter": changed, "base_model": saved.info.base_model}


def _check_mergeable(config: Mapping[str, Any]) -> None:
    names = config.get("architectures") or ["(none named)"]
    if names[0] not in ARCHITECTURES:
        raise InvalidInputError(
            f"architecture {names[0]} cannot be merged or written as GGUF here (supported: "
            f"{', '.join(sorted(ARCHITECTURES))}); export the adapter for PEFT, which can merge it",
            field="architectures",
        )


def export_gguf(
    checkpoint: Path, base: Path, out: Path, scratch: Path, dtype: str, *, overwrite: bool = False
) -> dict[str, Any]:
    """Export the merged model as one GGUF file; each tensor is read back and compared."""
    figures = export_merged(checkpoint, base, scratch)
    if out.exists() and not overwrite:
        raise InvalidInputError(f"{out} already exists", field="out")
    partial = out.with_name(f".{out.name}.partial")
    try:
        write_gguf(scratch, partial, dtype)
        largest = check_gguf(scratch, partial, dtype)
        partial.replace(out)
    finally:
        partial.unlink(missing_ok=True)
    return {**figures, "max_weight_difference": largest}


def _adapter(decoder: Decoder, info: CheckpointInfo, weights: dict[str, torch.Tensor]) -> LoraAdapter:
    adapter = LoraAdapter(
        decoder.config,
        info.rank,
        0,
        info.train_attn,
        info.train_mlp,
        info.train_unembed,
        info.alpha,
    )
    adapter.load(weights)
    return adapter


def _logits(decoder: Decoder, adapter: LoraAdapter | None) -> torch.Tensor:
    """Return a model's logits for some tokens spread over its vocabulary."""
    vocabulary = decoder.config.vocab_size
    count = min(TRIAL_TOKENS, decoder.config.max_context_length)
    tokens_T = torch.arange(count) * max(1, vocabulary // (count + 1)) % vocabulary
    attention = PackedAttention(decoder.config, [count])
    with torch.no_grad():
        hidden_TD = decoder.hidden(tokens_T, attention.positions(decoder.device), attention, adapter)
        return decoder.unembed(hidden_TD, adapter)


def _check(is_so: bool, otherwise: str) -> None:
    if not is_so:
        raise TinkerError(otherwise)

"""A downloaded checkpoint in the formats of other programs, each read again and compared before it is handed out.

Owns: which comparison each format must pass. Merging is in `export`, GGUF in `models/gguf_writer`.
Does not know: where checkpoints come from.
"""

from __future__ import annotations

import json
import shutil
import tempfile
from pathlib import Path
from typing import Any

import safetensors.torch
import torch

from tinsmith.engine.checkpoints import ADAPTER, ADAPTER_CONFIG, CheckpointInfo, read_checkpoint
from tinsmith.engine.export import directory_tensors, merge_into
from tinsmith.engine.files import DISK, whole_directory
from tinsmith.engine.lora import LoraAdapter
from tinsmith.engine.models import hub
from tinsmith.engine.models.attention import PackedAttention
from tinsmith.engine.models.convert import convert_gguf
from tinsmith.engine.models.decoder import Decoder
from tinsmith.engine.models.default import NAME as DEFAULT_NAME
from tinsmith.engine.models.default import default_model
from tinsmith.engine.models.gguf_writer import check_gguf, write_gguf
from tinsmith.engine.models.load import load_model
from tinsmith.errors import InvalidInputError, TinkerError

TRIAL_TOKENS = 24
MAX_DIFFERENCE = 2e-3
"""Of logits in float32: merged weights are rounded once more than base and adapter apart."""
COPIED = ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "chat_template.jinja",
          "generation_config.json")  # fmt: skip


def export_peft(checkpoint: Path, out: Path, *, overwrite: bool = False) -> dict[str, Any]:
    """The adapter's two files."""
    written = read_checkpoint(checkpoint, with_optimizer=False)
    with whole_directory(out, overwrite=overwrite) as partial:
        for name in (ADAPTER, ADAPTER_CONFIG):
            DISK.write_file(partial / name, (checkpoint / name).read_bytes())
    again = safetensors.torch.load_file(out / ADAPTER)
    _check(set(again) == set(written.weights), f"{out / ADAPTER} does not hold the adapter's tensors")
    for name, tensor in written.weights.items():
        _check(torch.equal(again[name], tensor), f"{out / ADAPTER}: {name} differs from the checkpoint's")
    return {"tensors_compared": len(again), "rank": written.info.rank, "base_model": written.info.base_model}


def base_directory(source: str | None, checkpoint: Path, models_dir: Path, scratch: Path) -> Path:
    """The base model as a Hugging Face directory: what is named, else what the checkpoint was trained on."""
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
        return hub.fetch(name)
    except TinkerError as error:
        raise TinkerError(f"the base model is needed to merge: {error}; or name it with --base") from error


def export_merged(checkpoint: Path, base: Path, out: Path, *, overwrite: bool = False) -> dict[str, Any]:
    """Base and adapter in one directory; its logits must be those of the two apart."""
    saved = read_checkpoint(checkpoint, with_optimizer=False)
    config = json.loads((base / "config.json").read_text(encoding="utf-8"))
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
            f"the merged model's logits differ by {difference:.2g} from those of base and adapter; nothing is left of "
            "it. A base in bfloat16 is too coarse to merge into: use a float32 copy with --base"
        )
    return {"max_logit_difference": difference, "max_change_by_adapter": changed, "base_model": saved.info.base_model}


def export_gguf(
    checkpoint: Path, base: Path, out: Path, scratch: Path, dtype: str, *, overwrite: bool = False
) -> dict[str, Any]:
    """The merged model as one GGUF file; each tensor is read again and compared."""
    figures = export_merged(checkpoint, base, scratch)
    if out.exists() and not overwrite:
        raise InvalidInputError(f"{out} exists already", field="out")
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
    """What a model says to some tokens spread over its vocabulary."""
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

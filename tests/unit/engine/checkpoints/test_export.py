"""Exports for other programs: what is written is what was saved, and damage is noticed before an export is kept."""

from __future__ import annotations

import json
import warnings
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from support.general_models import adapter_of, load_general, make_general

from tinsmith.engine.checkpoints import export
from tinsmith.engine.checkpoints.export import base_directory, export_gguf, export_merged, export_peft
from tinsmith.engine.checkpoints.format import CheckpointInfo, read_checkpoint, write_checkpoint
from tinsmith.engine.checkpoints.peft_import import as_checkpoint
from tinsmith.engine.lora import LoraAdapter
from tinsmith.engine.models import gguf_write
from tinsmith.engine.models.gguf_read import GgufFile
from tinsmith.engine.models.hf_directory import read_config
from tinsmith.engine.models.load import load_model
from tinsmith.engine.models.tiny import FAMILIES, make_tiny
from tinsmith.errors import InvalidInputError, TinkerError

RANK = 4
WITH_GGUF = ("llama", "smollm", "qwen2", "qwen3", "mistral")


def trained(base: Path, directory: Path, *, size: float = 0.05, **trains: bool) -> Path:
    """A checkpoint of an adapter that changes something."""
    info = CheckpointInfo(base_model="tiny", rank=RANK, alpha=32.0, **trains)
    adapter = LoraAdapter(read_config(base), RANK, seed=3, **trains)
    generator = torch.Generator().manual_seed(5)
    for parameter in adapter.parameters().values():
        parameter.copy_(size * torch.randn(parameter.shape, generator=generator))
    write_checkpoint(directory, info, adapter.parameters())
    return directory


@pytest.fixture(params=FAMILIES)
def base(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    return make_tiny(tmp_path / "base", request.param, seed=2)


def logits_of_transformers(directory: Path, adapter: Path | None = None) -> torch.Tensor:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        import peft
        import transformers

        model = transformers.AutoModelForCausalLM.from_pretrained(
            directory, dtype=torch.float32, attn_implementation="eager"
        )
        if adapter is not None:
            model = peft.PeftModel.from_pretrained(model, adapter)
        count = export.TRIAL_TOKENS
        vocabulary = model.config.vocab_size
        tokens = torch.arange(count) * max(1, vocabulary // (count + 1)) % vocabulary
        with torch.no_grad():
            logits: torch.Tensor = model(tokens[None]).logits[0]
    return logits


def test_the_merged_model_is_base_and_adapter(base: Path, tmp_path: Path) -> None:
    figures = export_merged(trained(base, tmp_path / "saved"), base, tmp_path / "merged")
    assert figures["max_logit_difference"] < 1e-4
    assert figures["max_change_by_adapter"] > 0.1
    ours = export._logits(load_model(tmp_path / "merged", cache_dir=tmp_path).decoder, None)
    assert torch.allclose(logits_of_transformers(tmp_path / "merged"), ours, atol=1e-4)
    assert (tmp_path / "merged" / "tokenizer.json").read_bytes() == (base / "tokenizer.json").read_bytes()


def test_peft_loads_the_adapter_and_computes_the_same(base: Path, tmp_path: Path) -> None:
    saved = trained(base, tmp_path / "saved")
    export_peft(saved, tmp_path / "peft")
    read = read_checkpoint(saved, with_optimizer=False)
    decoder = load_model(base, cache_dir=tmp_path).decoder
    ours = export._logits(decoder, export._adapter(decoder, read.info, read.weights))
    theirs = logits_of_transformers(base, tmp_path / "peft")
    assert torch.allclose(theirs, ours, atol=1e-4)
    assert not torch.allclose(logits_of_transformers(base), ours, atol=0.05)


def test_an_adapter_that_peft_saved_is_imported_and_exported_as_it_was(base: Path, tmp_path: Path) -> None:
    saved = trained(base, tmp_path / "saved")
    export_peft(saved, tmp_path / "peft")
    as_checkpoint(tmp_path / "peft", tmp_path / "again")
    weights = [read_checkpoint(path, with_optimizer=False).weights for path in (saved, tmp_path / "again")]
    assert all(torch.equal(weights[0][name], weights[1][name]) for name in weights[0] | weights[1])


@pytest.mark.parametrize("family", sorted(set(FAMILIES) - set(WITH_GGUF)))
def test_families_without_gguf_are_refused_by_name(family: str, tmp_path: Path) -> None:
    base = make_tiny(tmp_path / "base", family, seed=2)
    name = read_config(base).architecture
    with pytest.raises(InvalidInputError, match=f"{name} cannot be written as GGUF"):
        export_gguf(trained(base, tmp_path / "saved"), base, tmp_path / "x.gguf", tmp_path / "merged", "f32")
    assert not (tmp_path / "x.gguf").exists()


@pytest.mark.parametrize("family", WITH_GGUF)
def test_the_gguf_file_is_the_merged_model(family: str, tmp_path: Path) -> None:
    base = make_tiny(tmp_path / "base", family, seed=2)
    saved = trained(base, tmp_path / "saved")
    figures = export_gguf(saved, base, tmp_path / "model.gguf", tmp_path / "merged", "f32")
    assert figures["max_weight_difference"] == 0
    merged = load_model(tmp_path / "merged", cache_dir=tmp_path)
    written = load_model(tmp_path / "model.gguf", cache_dir=tmp_path)
    assert torch.equal(export._logits(merged.decoder, None), export._logits(written.decoder, None))
    assert written.chat_template == merged.chat_template
    again = json.loads((written.tokenizer_dir / "tokenizer.json").read_text())
    before = json.loads((base / "tokenizer.json").read_text())
    for part in ("model", "pre_tokenizer", "added_tokens"):
        assert again[part] == before[part]


def test_half_precision_rounds_matrices_only(tmp_path: Path) -> None:
    base = make_tiny(tmp_path / "base", seed=2)
    saved = trained(base, tmp_path / "saved")
    figures = export_gguf(saved, base, tmp_path / "model.gguf", tmp_path / "merged", "f16")
    assert 0 < figures["max_weight_difference"] < 1e-2
    kinds = {tensor.name: tensor.tensor_type.name for tensor in GgufFile(tmp_path / "model.gguf")._tensors.values()}
    assert kinds["blk.0.attn_q.weight"] == "F16"
    assert kinds["blk.0.attn_norm.weight"] == "F32"


@pytest.mark.parametrize("trains", ["train_attn", "train_mlp", "train_unembed"])
def test_partial_adapters_are_exported(tmp_path: Path, trains: str) -> None:
    base = make_tiny(tmp_path / "base", "smollm", seed=2)
    switches = {name: name == trains for name in ("train_attn", "train_mlp", "train_unembed")}
    saved = trained(base, tmp_path / "saved", **switches)
    assert export_peft(saved, tmp_path / "peft")["rank"] == RANK
    figures = export_gguf(saved, base, tmp_path / "model.gguf", tmp_path / "merged", "f32")
    assert figures["max_logit_difference"] < 1e-4
    assert figures["max_change_by_adapter"] > 0


def test_peft_gets_two_files_and_nothing_else(tmp_path: Path) -> None:
    saved = trained(make_tiny(tmp_path / "base"), tmp_path / "saved")
    export_peft(saved, tmp_path / "peft")
    assert sorted(path.name for path in (tmp_path / "peft").iterdir()) == [
        "adapter_config.json",
        "adapter_model.safetensors",
    ]
    assert (tmp_path / "peft" / "adapter_model.safetensors").read_bytes() == (
        saved / "adapter_model.safetensors"
    ).read_bytes()


def test_a_merge_that_went_wrong_is_not_handed_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    base = make_tiny(tmp_path / "base")
    merge_into = export.merge_into

    def wrong(*arguments: Any, scale: float, **rest: Any) -> None:
        merge_into(*arguments, scale=1.5 * scale, **rest)

    monkeypatch.setattr(export, "merge_into", wrong)
    with pytest.raises(TinkerError, match="the merged model's logits differ by"):
        export_merged(trained(base, tmp_path / "saved"), base, tmp_path / "merged")
    assert not (tmp_path / "merged").exists()


def test_a_gguf_file_that_reads_back_otherwise_is_not_handed_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    base = make_tiny(tmp_path / "base")
    monkeypatch.setattr(gguf_write, "_pair_order", lambda tensor, heads: tensor)
    with pytest.raises(TinkerError, match=r"blk\.0\.attn_q\.weight differs from its source after it was written"):
        export_gguf(trained(base, tmp_path / "saved"), base, tmp_path / "model.gguf", tmp_path / "merged", "f32")
    assert [path.name for path in tmp_path.iterdir() if "gguf" in path.name] == []


def test_an_adapter_of_another_model_is_refused(tmp_path: Path) -> None:
    other = make_tiny(tmp_path / "other", hidden_size=16, head_dim=4)
    base = make_tiny(tmp_path / "base")
    with pytest.raises(InvalidInputError, match="has shape"):
        export_merged(trained(other, tmp_path / "saved"), base, tmp_path / "merged")


def test_what_gguf_cannot_hold_is_refused_by_name(tmp_path: Path) -> None:
    sliding = make_tiny(tmp_path / "sliding", "mistral", sliding_window=5)
    with pytest.raises(InvalidInputError, match="MistralForCausalLM cannot be written as GGUF"):
        gguf_write.write_gguf(sliding, tmp_path / "x.gguf", "f32")
    strange = make_tiny(tmp_path / "strange")
    described = json.loads((strange / "tokenizer.json").read_text())
    described["pre_tokenizer"] = {"type": "Whitespace"}
    (strange / "tokenizer.json").write_text(json.dumps(described))
    with pytest.raises(InvalidInputError, match="splits text in a way that is not supported"):
        gguf_write.write_gguf(strange, tmp_path / "x.gguf", "f32")


def test_the_base_is_what_is_named_or_what_the_checkpoint_names(tmp_path: Path) -> None:
    base = make_tiny(tmp_path / "base", "llama", seed=2)
    saved = trained(base, tmp_path / "saved")
    assert base_directory(str(base), saved, tmp_path, tmp_path / "scratch") == base
    gguf_write.write_gguf(base, tmp_path / "base.gguf", "f32")
    converted = base_directory(str(tmp_path / "base.gguf"), saved, tmp_path, tmp_path / "scratch")
    name = "model.layers.0.self_attn.q_proj.weight"
    read = [safetensors.torch.load_file(place / "model.safetensors")[name] for place in (base, converted)]
    assert torch.equal(*read)
    with pytest.raises(TinkerError, match="merging needs the base model: 'tiny' is neither"):
        base_directory(None, saved, tmp_path, tmp_path / "scratch")


def test_a_model_that_runs_through_transformers_is_exported_for_peft_only(tmp_path: Path) -> None:
    base = make_general(tmp_path / "base", "gpt2")
    adapter = adapter_of(load_general(base), rank=RANK)
    info = CheckpointInfo(base_model="tiny", rank=RANK, alpha=32.0)
    write_checkpoint(tmp_path / "checkpoint", info, adapter.parameters())
    assert export_peft(tmp_path / "checkpoint", tmp_path / "peft")["tensors_compared"] == len(adapter.parameters())
    config = json.loads((tmp_path / "peft" / "adapter_config.json").read_text())
    assert "transformer.h.0.attn.c_proj" in config["target_modules"]  # `c_proj` alone would also name the MLP's
    with pytest.raises(InvalidInputError, match="architecture GPT2LMHeadModel cannot be merged or written as GGUF"):
        export_merged(tmp_path / "checkpoint", base, tmp_path / "merged")
    with pytest.raises(InvalidInputError, match="architecture GPT2LMHeadModel cannot be merged or written as GGUF"):
        export_gguf(tmp_path / "checkpoint", base, tmp_path / "out.gguf", tmp_path / "scratch", "f32")
    assert not (tmp_path / "merged").exists()
    assert not (tmp_path / "out.gguf").exists()

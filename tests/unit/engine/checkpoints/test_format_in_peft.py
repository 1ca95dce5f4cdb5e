"""Other programs read our files: PEFT the adapter, transformers the merged model, with the same logits."""

from __future__ import annotations

import json
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from support.failing_disk import FailingDisk
from torch import Tensor
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from tinsmith.engine.checkpoints.export import directory_tensors, merge_into
from tinsmith.engine.checkpoints.format import CheckpointInfo, write_checkpoint
from tinsmith.errors import InvalidInputError, TinkerError

LAYERS, RANK = 2, 4
ATTENTION = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj")
MLP = ("mlp.gate_proj", "mlp.up_proj", "mlp.down_proj")
INFO = CheckpointInfo(base_model="tiny", rank=RANK, alpha=32.0)
TOKENS = torch.tensor([[1, 5, 9, 2, 40, 63, 0, 7]])


@pytest.fixture(params=[False, True], ids=["untied", "tied"])
def base(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=64,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=LAYERS,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=32,
        tie_word_embeddings=request.param,
    )
    LlamaForCausalLM(config).save_pretrained(tmp_path / "base")
    (tmp_path / "base" / "tokenizer.json").write_text("{}")
    return tmp_path / "base"


def modules_of(which: str) -> list[str]:
    kinds = {"attn": ATTENTION, "mlp": MLP, "both": ATTENTION + MLP, "all": ATTENTION + MLP, "lm_head": ()}[which]
    names = [f"model.layers.{layer}.{kind}" for layer in range(LAYERS) for kind in kinds]
    return names + (["lm_head"] if which in ("all", "lm_head") else [])


def adapter(model: Any, which: str) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(1)
    weights = {}
    for name in modules_of(which):
        rows, columns = model.get_submodule(name).weight.shape
        weights[f"base_model.model.{name}.lora_A.weight"] = torch.randn(RANK, columns, generator=generator) * 0.1
        weights[f"base_model.model.{name}.lora_B.weight"] = torch.randn(rows, RANK, generator=generator) * 0.1
    return weights


def plain_logits(base: Path, weights: dict[str, Tensor]) -> Tensor:
    """The adapter as hooks on the base model: y + scale B (A x). The embeddings are not touched."""
    model = AutoModelForCausalLM.from_pretrained(base)
    for name, a_RD in weights.items():
        if "lora_A" in name:
            b_ER = weights[name.replace("lora_A", "lora_B")]
            module = model.get_submodule(name.removeprefix("base_model.model.").removesuffix(".lora_A.weight"))

            def hook(_: Any, inputs: Any, y: Tensor, a_RD: Tensor = a_RD, b_ER: Tensor = b_ER) -> Tensor:
                return y + INFO.scale * (inputs[0] @ a_RD.T @ b_ER.T)

            module.register_forward_hook(hook)
    with torch.no_grad():
        logits: Tensor = model(TOKENS).logits
    return logits


@pytest.mark.parametrize("which", ["attn", "mlp", "both", "all", "lm_head"])
def test_peft_loads_the_adapter(base: Path, tmp_path: Path, which: str) -> None:
    from peft import PeftModel

    model = AutoModelForCausalLM.from_pretrained(base)
    weights = adapter(model, which)
    with torch.no_grad():
        plain = model(TOKENS).logits
    write_checkpoint(tmp_path / "c", INFO, weights)
    with warnings.catch_warnings():  # PEFT warns that merging there unties; engine/checkpoints/export.py does that
        warnings.filterwarnings("ignore", message=".*tie_word_embeddings.*")
        loaded = PeftModel.from_pretrained(model, tmp_path / "c")
    with torch.no_grad():
        logits = loaded(TOKENS).logits
    expected = plain_logits(base, weights)
    torch.testing.assert_close(logits, expected, rtol=1e-4, atol=1e-5)
    assert not torch.allclose(logits, plain, atol=1e-2)
    saved = {name for name in loaded.state_dict() if "lora_" in name}
    assert saved == {name.replace(".weight", ".default.weight") for name in weights}


@pytest.mark.parametrize("which", ["attn", "mlp", "both", "all", "lm_head"])
@pytest.mark.parametrize("shard_bytes", [2**30, 2000], ids=["one-file", "shards"])
def test_the_merged_model_has_the_same_logits(base: Path, tmp_path: Path, which: str, shard_bytes: int) -> None:
    model = AutoModelForCausalLM.from_pretrained(base)
    weights = adapter(model, which)
    config = json.loads((base / "config.json").read_text())
    is_tied = config["tie_word_embeddings"]
    merge_into(
        tmp_path / "merged",
        base=directory_tensors(base),
        config=config,
        weights=weights,
        scale=INFO.scale,
        is_tied=is_tied,
        copied=[base / "tokenizer.json"],
        shard_bytes=shard_bytes,
    )
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "merged")
    with torch.no_grad():
        logits = merged(TOKENS).logits
    torch.testing.assert_close(logits, plain_logits(base, weights), rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(merged.model.embed_tokens.weight, model.model.embed_tokens.weight, rtol=0, atol=0)
    trains_unembedding = which in ("all", "lm_head")
    assert merged.config.tie_word_embeddings == (is_tied and not trains_unembedding)
    assert (tmp_path / "merged" / "tokenizer.json").read_text() == "{}"
    files = sorted(path.name for path in (tmp_path / "merged").glob("*.safetensors"))
    assert (len(files) > 1) == (shard_bytes == 2000)
    assert (tmp_path / "merged" / "model.safetensors.index.json").exists() == (len(files) > 1)


def test_merging_keeps_the_dtype_of_the_base(base: Path, tmp_path: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.bfloat16)
    model.save_pretrained(tmp_path / "half")
    weights = adapter(model, "attn")
    merge_into(
        tmp_path / "merged",
        base=directory_tensors(tmp_path / "half"),
        config=json.loads((tmp_path / "half" / "config.json").read_text()),
        weights=weights,
        scale=INFO.scale,
        is_tied=model.config.tie_word_embeddings,
    )
    name = "model.layers.0.self_attn.q_proj"
    a_RD, b_ER = (weights[f"base_model.model.{name}.lora_{side}.weight"] for side in "AB")
    expected = (model.get_submodule(name).weight.float() + INFO.scale * b_ER @ a_RD).to(torch.bfloat16)
    assert torch.equal(dict(directory_tensors(tmp_path / "merged"))[f"{name}.weight"], expected)


def test_what_does_not_fit_together_is_refused_and_nothing_is_left(base: Path, tmp_path: Path) -> None:
    weights = adapter(AutoModelForCausalLM.from_pretrained(base), "attn")
    unknown = {name.replace("layers.1", "layers.9"): value for name, value in weights.items()}
    misshaped = {name: (value[:, :-1] if "lora_A" in name else value) for name, value in weights.items()}
    for bad, text in ((unknown, "but the base model has no such weight"), (misshaped, "the adapter fits a weight")):
        with pytest.raises(InvalidInputError, match=text):
            _merge(base, tmp_path, bad)
    with pytest.raises(InvalidInputError, match=r"no \*\.safetensors files"):
        dict(directory_tensors(tmp_path))
    counting = FailingDisk()
    _merge(base, tmp_path, weights, counting)
    (tmp_path / "merged").rename(tmp_path / "done")
    for step in range(len(counting.steps)):
        with pytest.raises(TinkerError, match="was not written, and no files were left behind"):
            _merge(base, tmp_path, weights, FailingDisk(step))
        assert sorted(path.name for path in tmp_path.iterdir()) == ["base", "done"]


def _merge(base: Path, parent: Path, weights: dict[str, Tensor], disk: FailingDisk | None = None) -> None:
    config = json.loads((base / "config.json").read_text())
    merge_into(
        parent / "merged",
        base=directory_tensors(base),
        config=config,
        weights=weights,
        scale=INFO.scale,
        is_tied=config["tie_word_embeddings"],
        disk=disk or FailingDisk(),
    )

"""PEFT adapters become checkpoints with the same effect; what cannot be imported is refused by name."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from support.checkpoint_files import verify_checkpoint

from tinsmith.engine.checkpoints.format import read_checkpoint
from tinsmith.engine.checkpoints.peft_import import as_checkpoint
from tinsmith.engine.models.tiny import make_tiny
from tinsmith.errors import InvalidInputError

CONFIG = {"peft_type": "LORA", "r": 4, "lora_alpha": 16, "base_model_name_or_path": "tiny", "bias": "none"}
ALL = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj")
MLP = ("mlp.gate_proj", "mlp.up_proj", "mlp.down_proj")


@pytest.fixture
def base(tmp_path: Path) -> Path:
    return make_tiny(tmp_path / "base", seed=2)


def peft(base: Path, folder: Path, modules: tuple[str, ...] = ALL + MLP, dtype: Any = None, **config: Any) -> Path:
    """A PEFT adapter of these modules in all layers."""
    shapes = {name: tensor.shape for name, tensor in load_file(base / "model.safetensors").items()}
    generator = torch.Generator().manual_seed(1)
    weights = {}
    for name in [
        f"model.layers.{layer}.{module}" for layer in range(2) for module in modules if module != "lm_head"
    ] + (["lm_head"] if "lm_head" in modules else []):
        rows, columns = shapes[f"{name}.weight"]
        for side, shape in (("A", (4, columns)), ("B", (rows, 4))):
            tensor = torch.randn(shape, generator=generator)
            weights[f"base_model.model.{name}.lora_{side}.weight"] = tensor.to(dtype or torch.float32)
    folder.mkdir()
    save_file(weights, folder / "adapter_model.safetensors")
    (folder / "adapter_config.json").write_text(json.dumps({**CONFIG, **config}))
    return folder


@pytest.mark.parametrize(
    ("modules", "trains"),
    [
        (ALL, (True, False, False)),
        (MLP, (False, True, False)),
        (("lm_head",), (False, False, True)),
        ((*ALL, *MLP, "lm_head"), (True, True, True)),
    ],
)
def test_whole_adapters_are_taken_over_bit_for_bit(
    base: Path, tmp_path: Path, modules: tuple[str, ...], trains: tuple[bool, bool, bool]
) -> None:
    source = peft(base, tmp_path / "peft", modules)
    info = as_checkpoint(source, tmp_path / "out")
    verify_checkpoint(tmp_path / "out")
    found = read_checkpoint(tmp_path / "out", with_optimizer=False)
    assert found.info == info
    assert (info.base_model, info.rank, info.scale) == ("tiny", 4, 4.0)
    assert (info.train_attn, info.train_mlp, info.train_unembed) == trains
    expected = load_file(source / "adapter_model.safetensors")
    assert set(found.weights) == set(expected)
    assert all(torch.equal(found.weights[name], tensor) for name, tensor in expected.items())


def test_half_precision_is_widened_and_the_model_renamed(base: Path, tmp_path: Path) -> None:
    source = peft(base, tmp_path / "peft", ALL, dtype=torch.bfloat16)
    assert as_checkpoint(source, tmp_path / "out", "other/name").base_model == "other/name"
    weights = read_checkpoint(tmp_path / "out", with_optimizer=False).weights
    assert {tensor.dtype for tensor in weights.values()} == {torch.float32}


def test_the_scale_of_rslora_is_kept(base: Path, tmp_path: Path) -> None:
    source = peft(base, tmp_path / "peft", ALL, use_rslora=True)
    assert as_checkpoint(source, tmp_path / "out").scale == pytest.approx(16 / math.sqrt(4))


def test_some_modules_are_completed_without_effect(base: Path, tmp_path: Path) -> None:
    source = peft(base, tmp_path / "peft", ("self_attn.q_proj", "self_attn.v_proj"))
    with pytest.raises(InvalidInputError, match="--base, so that k_proj, o_proj can be added without effect"):
        as_checkpoint(source, tmp_path / "out")
    info = as_checkpoint(source, tmp_path / "out", base=base)
    assert (info.train_attn, info.train_mlp) == (True, False)
    weights = read_checkpoint(tmp_path / "out", with_optimizer=False).weights
    given = load_file(source / "adapter_model.safetensors")
    for name, tensor in weights.items():
        if name in given:
            assert torch.equal(tensor, given[name])
        elif "lora_B" in name:
            assert not tensor.any()
        else:
            assert tensor.any(), "it can be trained"
    other = make_tiny(tmp_path / "other", hidden_size=16, head_dim=4)
    with pytest.raises(InvalidInputError, match="has shape"):
        as_checkpoint(source, tmp_path / "again", base=other)


def test_fused_modules_belong_to_the_attention_and_the_mlp(tmp_path: Path) -> None:
    base = make_tiny(tmp_path / "base", "phi3", seed=2)
    fused = ("self_attn.qkv_proj", "self_attn.o_proj", "mlp.gate_up_proj", "mlp.down_proj")
    info = as_checkpoint(peft(base, tmp_path / "peft", fused), tmp_path / "out")
    assert (info.train_attn, info.train_mlp, info.train_unembed) == (True, True, False)
    some = peft(base, tmp_path / "some", ("self_attn.qkv_proj",))
    with pytest.raises(InvalidInputError, match="--base, so that o_proj can be added without effect"):
        as_checkpoint(some, tmp_path / "none")
    assert as_checkpoint(some, tmp_path / "completed", base=base).train_attn
    other = peft(make_tiny(tmp_path / "llama", num_key_value_heads=4), tmp_path / "other", ALL)
    with pytest.raises(InvalidInputError, match=r"k_proj\.lora_A\.weight is not a weight of this adapter"):
        as_checkpoint(other, tmp_path / "none", base=base)


def test_all_that_is_missing_is_told_at_once(base: Path, tmp_path: Path) -> None:
    source = peft(base, tmp_path / "peft", ("self_attn.q_proj",), base_model_name_or_path=None)
    with pytest.raises(InvalidInputError) as caught:
        as_checkpoint(source, tmp_path / "out")
    first, second = str(caught.value).splitlines()
    assert first.endswith("adapter_config.json does not name a base model; name it with --model")
    assert "give the model's directory with --base" in second
    source = peft(base, tmp_path / "other", ("self_attn.q_proj",))
    with pytest.raises(InvalidInputError) as caught:
        as_checkpoint(source, tmp_path / "out", unsure="the server does not have it")
    assert [line.partition(" --")[2][:5] for line in str(caught.value).splitlines()] == ["model", "base,"]
    assert as_checkpoint(source, tmp_path / "out", "tiny", base, unsure="").base_model == "tiny"


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"peft_type": "IA3"}, "peft_type is 'IA3'; only LORA can be imported"),
        ({"r": 0}, "r must be 1 to 512, got 0"),
        ({"r": "many"}, "r must be 1 to 512, got 'many'"),
        ({"use_dora": True}, "use_dora=True cannot be imported"),
        ({"bias": "all"}, "bias='all' cannot be imported"),
        ({"modules_to_save": ["lm_head"]}, "modules_to_save=.* cannot be imported"),
        ({"rank_pattern": {"q_proj": 2}}, "rank_pattern=.* cannot be imported"),
        ({"base_model_name_or_path": None}, "does not name a base model; name it with --model"),
    ],
)
def test_what_peft_can_and_the_engine_cannot_is_refused(
    base: Path, tmp_path: Path, change: dict[str, Any], says: str
) -> None:
    with pytest.raises(InvalidInputError, match=says):
        as_checkpoint(peft(base, tmp_path / "peft", ALL, **change), tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_damaged_adapters_are_refused(base: Path, tmp_path: Path) -> None:
    source = peft(base, tmp_path / "peft", ALL)
    weights = load_file(source / "adapter_model.safetensors")
    name = next(iter(weights))
    cases: list[tuple[str, Any]] = [
        ("has numbers that are not finite", lambda: save({**weights, name: weights[name] * math.nan})),
        ("is not a name that PEFT uses", lambda: save({**weights, "x": weights[name].clone()})),
        ("cannot be read", lambda: (source / "adapter_model.safetensors").write_bytes(b"xx")),
        ("other formats", lambda: (source / "adapter_model.safetensors").unlink()),
        ("cannot be read", lambda: (source / "adapter_config.json").write_text("[]")),
        ("has no adapter_config.json: it is not", lambda: (source / "adapter_config.json").unlink()),
    ]

    def save(tensors: dict[str, torch.Tensor]) -> None:
        save_file(tensors, source / "adapter_model.safetensors")

    for says, damage in cases:
        damage()
        with pytest.raises(InvalidInputError, match=says):
            as_checkpoint(source, tmp_path / "out")

"""Adapters: names, initial values, switches, copies, and what they add to a linear."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from support.model_reference import randomized

from tinsmith.engine.lora import LoraAdapter
from tinsmith.engine.models.config import FUSED_GROUPS, GROUPS
from tinsmith.engine.models.tiny import FAMILIES
from tinsmith.errors import InvalidInputError

PREFIX = "base_model.model.model.layers"


def test_names_and_shapes_are_pefts(tiny: Callable[..., Any]) -> None:
    config = tiny().decoder.config
    shapes = {name: tuple(value.shape) for name, value in LoraAdapter(config, 3, seed=0).parameters().items()}
    assert shapes[f"{PREFIX}.0.self_attn.q_proj.lora_A.weight"] == (3, 32)
    assert shapes[f"{PREFIX}.0.self_attn.k_proj.lora_B.weight"] == (16, 3)
    assert shapes[f"{PREFIX}.1.mlp.down_proj.lora_A.weight"] == (3, 64)
    assert shapes["base_model.model.lm_head.lora_B.weight"] == (264, 3)
    assert len(shapes) == 2 * (2 * 7 + 1)


@pytest.mark.parametrize("family", FAMILIES)
def test_peft_makes_the_same_parameters(family: str, tiny: Callable[..., Any]) -> None:
    import warnings

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        import peft
        import transformers

        made = tiny(family)
        base = transformers.AutoModelForCausalLM.from_pretrained(made.directory, dtype=torch.float32)
        groups = (FUSED_GROUPS if family == "phi3" else GROUPS).values()
        modules = [*(module for group in groups for module in group), "lm_head"]
        model = peft.get_peft_model(base, peft.LoraConfig(r=3, target_modules=modules))
        theirs = peft.get_peft_model_state_dict(model, save_embedding_layers=False)
    ours = LoraAdapter(made.decoder.config, 3, seed=0).parameters()
    assert {name: value.shape for name, value in theirs.items()} == {name: value.shape for name, value in ours.items()}


def test_a_is_seeded_and_bounded_and_b_is_zero(tiny: Callable[..., Any]) -> None:
    config = tiny().decoder.config
    first, again, other = (LoraAdapter(config, 4, seed=seed).parameters() for seed in (7, 7, 8))
    for name, value in first.items():
        assert value.dtype == torch.float32
        assert torch.equal(value, again[name])
        if "lora_B" in name:
            assert not value.any()
        else:
            assert not torch.equal(value, other[name])
            bound = value.shape[1] ** -0.5
            assert 0.8 * bound < value.abs().max() <= bound


def test_the_seed_does_not_touch_the_global_generator(tiny: Callable[..., Any]) -> None:
    before = torch.random.get_rng_state()
    LoraAdapter(tiny().decoder.config, 4, seed=7)
    assert torch.equal(before, torch.random.get_rng_state())


@pytest.mark.parametrize(
    ("switches", "modules"),
    [
        ((True, False, False), {"q_proj", "k_proj", "v_proj", "o_proj"}),
        ((False, True, False), {"gate_proj", "up_proj", "down_proj"}),
        ((False, False, True), {"lm_head"}),
    ],
)
def test_switches(switches: tuple[bool, bool, bool], modules: set[str], tiny: Callable[..., Any]) -> None:
    adapter = LoraAdapter(tiny().decoder.config, 2, 0, *switches)
    assert {name.split(".")[-3] for name in adapter.parameters()} == modules


@pytest.mark.parametrize("rank", [0, 513, True, 2.0])
def test_bad_ranks_are_refused(rank: Any, tiny: Callable[..., Any]) -> None:
    with pytest.raises(InvalidInputError, match="rank: must be 1 to 512"):
        LoraAdapter(tiny().decoder.config, rank, 0)


def test_nothing_to_train_is_refused(tiny: Callable[..., Any]) -> None:
    with pytest.raises(InvalidInputError, match="all off"):
        LoraAdapter(tiny().decoder.config, 2, 0, False, False, False)


@pytest.mark.parametrize("with_grad", [False, True])
def test_apply_adds_the_scaled_product(with_grad: bool, tiny: Callable[..., Any]) -> None:
    adapter = randomized(LoraAdapter(tiny().decoder.config, 4, 0, train_mlp=False))
    parameters = adapter.parameters()
    down, up = (parameters[f"{PREFIX}.1.self_attn.v_proj.lora_{side}.weight"] for side in "AB")
    x, y = torch.randn(5, 32), torch.randn(5, 16, requires_grad=with_grad)
    wanted = y.detach() + 32.0 / 4 * x @ down.T @ up.T
    found = adapter.apply(1, "v_proj", x, y)
    torch.testing.assert_close(found.detach(), wanted, atol=1e-5, rtol=1e-5)
    assert found.requires_grad == with_grad
    untouched = torch.randn(5, 64)
    assert adapter.apply(1, "up_proj", x, untouched) is untouched


def test_gradients_of_requests_are_added_up_until_they_are_forgotten(tiny: Callable[..., Any]) -> None:
    adapter = LoraAdapter(tiny().decoder.config, 2, seed=0)
    for value in (1.0, 2.0):
        grads = adapter.empty_gradients()
        for group in grads.values():
            for tensor in (group.A_GRD, *group.Bs_ER):
                tensor.fill_(value)
        adapter.accumulate(grads)
    assert {float(value) for grad in adapter.gradients().values() for value in grad.unique()} == {3.0}
    adapter.zero_gradients()
    assert all(not grad.any() for grad in adapter.gradients().values())


def test_load_sets_everything_or_nothing(tiny: Callable[..., Any]) -> None:
    config = tiny().decoder.config
    source, target = randomized(LoraAdapter(config, 2, seed=1)), LoraAdapter(config, 2, seed=2)
    values = {name: value.clone() for name, value in source.parameters().items()}
    name = f"{PREFIX}.1.mlp.up_proj.lora_B.weight"
    before = {key: value.clone() for key, value in target.parameters().items()}
    with pytest.raises(InvalidInputError, match=r"up_proj.lora_B.weight has shape \[64, 3\], expected \[64, 2\]"):
        target.load(values | {name: torch.zeros(64, 3)})
    with pytest.raises(InvalidInputError, match=r"up_proj.lora_B.weight is missing"):
        target.load({key: value for key, value in values.items() if key != name})
    with pytest.raises(InvalidInputError, match="extra is not a weight of this adapter"):
        target.load(values | {"extra": torch.zeros(1)})
    assert all(torch.equal(value, before[key]) for key, value in target.parameters().items())
    target.load(values)
    assert all(torch.equal(value, values[key]) for key, value in target.parameters().items())
    x = torch.randn(3, 32)
    y = torch.zeros(3, 64)
    assert torch.equal(target.apply(1, "up_proj", x, y.clone()), source.apply(1, "up_proj", x, y.clone()))

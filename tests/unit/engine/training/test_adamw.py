"""AdamW against torch's own, to the last bit, and what it refuses."""

from __future__ import annotations

import math
from collections.abc import Mapping

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from tinsmith.engine.training.adamw import AdamW, global_norm
from tinsmith.errors import InvalidInputError, NonFiniteError
from tinsmith.wire.messages.training import AdamParams, DimuonParams, OptimStepRequest
from tinsmith.wire.rules.adam_rules import adam_params

SHAPES = {"a": (4, 7), "b": (3, 4), "c": (33, 5)}


def tensors(seed: int, scale: float = 1.0) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {name: torch.randn(shape, generator=generator) * scale for name, shape in SHAPES.items()}


def copies(values: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name: value.clone() for name, value in values.items()}


def equal(a: Mapping[str, Tensor], b: Mapping[str, Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


@settings(max_examples=25, deadline=None)
@given(
    seed=st.integers(0, 1000),
    rate=st.sampled_from([0.0, 1e-5, 1e-3, 0.5]),
    beta1=st.sampled_from([0.0, 0.9, 0.99]),
    beta2=st.sampled_from([0.0, 0.95, 0.999]),
    eps=st.sampled_from([1e-12, 1e-8, 1e-3]),
    decay=st.sampled_from([0.0, 0.1]),
    scale=st.sampled_from([1e-12, 1e-3, 1.0, 1e6]),
)
def test_same_bits_as_torch(
    seed: int, rate: float, beta1: float, beta2: float, eps: float, decay: float, scale: float
) -> None:
    params = tensors(seed)
    theirs = [value.clone().requires_grad_() for value in params.values()]
    torch_optimizer = torch.optim.AdamW(
        theirs, lr=rate, betas=(beta1, beta2), eps=eps, weight_decay=decay, foreach=False
    )
    ours = AdamW(params)
    given_settings = AdamParams(learning_rate=rate, beta1=beta1, beta2=beta2, eps=eps, weight_decay=decay)
    for step in range(5):
        grads = tensors(seed + step + 1, scale)
        for param, grad in zip(theirs, grads.values(), strict=True):
            param.grad = grad.clone()
        torch_optimizer.step()
        ours.step(params, grads, given_settings)
    for mine, param in zip(params.values(), theirs, strict=True):
        assert torch.equal(mine, param.detach())


@pytest.mark.parametrize("limit", [0.5, 1e9, 0.0])
def test_clipping_is_by_the_norm_of_everything(limit: float) -> None:
    params, grads = tensors(0), tensors(1)
    norm = math.sqrt(sum(float(grad.double().square().sum()) for grad in grads.values()))
    expected = copies(params)
    factor = min(1.0, limit / norm) if limit > 0 else 1.0
    AdamW(expected).step(expected, {name: grad * factor for name, grad in grads.items()}, AdamParams(eps=0.1))
    kept = copies(grads)
    metrics = AdamW(params).step(params, grads, AdamParams(eps=0.1, grad_clip_norm=limit))
    assert metrics["optim/grad_norm"] == pytest.approx(norm, rel=1e-12)
    assert all(torch.allclose(params[name], expected[name], rtol=1e-6, atol=1e-9) for name in params)
    assert equal(grads, kept)


def test_clipping_divides_by_the_norm_itself() -> None:
    """Not by a little more, as some do to be safe from 0: gradients as small as that would be made far smaller."""
    params, grads = {"a": torch.zeros(2)}, {"a": torch.tensor([3e-7, 4e-7])}
    optimizer = AdamW(params)
    metrics = optimizer.step(params, grads, AdamParams(beta1=0.0, grad_clip_norm=2.5e-7))
    assert metrics["optim/grad_norm"] == pytest.approx(5e-7, rel=1e-6)
    assert torch.allclose(optimizer.state()["m.a"], torch.tensor([1.5e-7, 2e-7]), rtol=1e-6, atol=0.0)


def test_metrics_tell_what_was_done() -> None:
    params, grads = tensors(0), tensors(1)
    before, optimizer = copies(params), AdamW(params)
    metrics = optimizer.step(params, grads, AdamParams(learning_rate=0.01))
    change = {name: params[name] - before[name] for name in params}
    assert metrics == {
        "optim/grad_norm": global_norm(grads),
        "optim/update_norm": pytest.approx(global_norm(change)),
        "optim/learning_rate": 0.01,
        "optim/step": 1.0,
    }
    assert optimizer.step(params, grads, AdamParams())["optim/step"] == 2.0


def test_a_learning_rate_of_zero_moves_nothing() -> None:
    params, grads = tensors(0), tensors(1)
    before = copies(params)
    metrics = AdamW(params).step(params, grads, AdamParams(learning_rate=0.0, weight_decay=0.5))
    assert equal(params, before)
    assert metrics["optim/update_norm"] == 0.0


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("limit", [0.0, 1.0])
def test_a_gradient_that_is_not_finite_changes_nothing(value: float, limit: float) -> None:
    params, optimizer = tensors(0), AdamW(tensors(0))
    optimizer.step(params, tensors(1), AdamParams())
    before, state = copies(params), copies(optimizer.state())
    grads = tensors(2)
    grads["b"][1, 2] = value
    with pytest.raises(NonFiniteError, match=r"gradient of b is NaN or infinite \(1 of 3"):
        optimizer.step(params, grads, AdamParams(grad_clip_norm=limit))
    assert equal(params, before)
    assert equal(optimizer.state(), state)


def test_large_and_tiny_gradients_have_a_norm() -> None:
    assert global_norm({"a": torch.full((2,), 3e38)}) == pytest.approx(3e38 * math.sqrt(2), rel=1e-6)
    assert global_norm({"a": torch.full((2,), 1e-40)}) == pytest.approx(1e-40 * math.sqrt(2), rel=1e-4)


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"learning_rate": -1.0}, "adam_params.learning_rate: -1.0 is not allowed; it must be 0 or more"),
        ({"weight_decay": -0.1}, "weight_decay: -0.1"),
        ({"beta1": 1.0}, "beta1: 1.0 is not allowed; it must be at least 0 and below 1"),
        ({"beta2": -0.1}, "beta2: -0.1"),
        ({"eps": 0.0}, "eps: 0.0 is not allowed"),
        ({"learning_rate": 1.1e15}, "learning_rate: 1100000000000000.0 is not allowed"),
        ({"weight_decay": 1e300}, "weight_decay: 1e+300 is not allowed; it must be 0 or more and at most 1e+15"),
        ({"eps": 1e16}, "eps: 1e+16 is not allowed"),
        ({"grad_clip_norm": -1.0}, "grad_clip_norm: -1.0 is not allowed; it must be 0 (no clipping) or more"),
        ({"eps": 1e-60}, "eps: 1e-60 is not allowed; it must be above 0, large enough for float32 and at most 1e+15"),
    ],
)
def test_settings_that_make_no_step_are_refused(change: dict[str, float], text: str) -> None:
    params, optimizer = tensors(0), AdamW(tensors(0))
    with pytest.raises(InvalidInputError) as caught:
        optimizer.step(params, tensors(1), AdamParams(**change))
    assert text in str(caught.value)
    assert equal(params, tensors(0))
    assert optimizer.steps == 0


def test_parameters_without_gradient_stay_with_the_smallest_eps() -> None:
    params = tensors(0)
    before = copies(params)
    AdamW(params).step(params, {name: torch.zeros_like(value) for name, value in params.items()}, AdamParams())
    assert equal(params, before)


def test_state_round_trips_and_goes_on_alike() -> None:
    params = tensors(0)
    first = AdamW(params)
    for step in range(3):
        first.step(params, tensors(step + 1), AdamParams())
    second, other = AdamW(tensors(9)), copies(params)
    second.load_state(copies(first.state()))
    assert equal(first.state(), second.state())
    first.step(params, tensors(7), AdamParams())
    second.step(other, tensors(7), AdamParams())
    assert equal(params, other)


def test_a_state_of_other_parameters_is_refused() -> None:
    optimizer = AdamW(tensors(0))
    state = copies(optimizer.state())
    for key, value, text in (
        ("m.a", None, "'m.a' is unknown or missing"),
        ("m.x", torch.zeros(1), "'m.x' is unknown or missing"),
        ("v.b", torch.zeros(4, 3), r"'v.b' is torch.float32 \[4, 3\], expected torch.float32 \[3, 4\]"),
        ("v.b", torch.zeros(3, 4, dtype=torch.float16), "torch.float16"),
    ):
        changed = {name: tensor for name, tensor in (state | {key: value}).items() if tensor is not None}
        with pytest.raises(InvalidInputError, match=text):
            optimizer.load_state(changed)
    for what, bad in (("params", {"a": torch.zeros(1)}), ("grads", {})):
        args = {"params": tensors(0), "grads": tensors(0)} | {what: bad}
        with pytest.raises(InvalidInputError, match=what):
            optimizer.step(args["params"], args["grads"], AdamParams())


def test_dimuon_is_refused_by_name() -> None:
    settings = AdamParams(learning_rate=0.5)
    assert adam_params(OptimStepRequest(model_id="m", adam_params=settings)) == settings
    with pytest.raises(InvalidInputError, match="no Dimuon") as caught:
        adam_params(OptimStepRequest(model_id="m", optimizer_params=DimuonParams(learning_rate=1.0)))
    assert caught.value.field == "optimizer_params"

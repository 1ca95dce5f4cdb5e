"""Each loss, its gradient and its metrics against the formula written out in plain float64."""

from __future__ import annotations

import math
from collections.abc import Mapping

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from tinsmith.engine.training.losses import LOSSES, MetricTotals, evaluate
from tinsmith.wire import losses as table
from tinsmith.wire.messages.training import ForwardBackwardOutput
from tinsmith.wire.rules.loss_rules import loss_options
from tinsmith.wire.rules.split_join import combine_metrics
from tinsmith.wire.values.tensors import TensorData

REINFORCEMENT = ("importance_sampling", "ppo", "cispo", "dro", "gspo")
TOKEN_WISE = ("importance_sampling", "ppo", "cispo", "dro")


def case(
    seed: int, size: int, *, with_weights: bool, with_thresholds: bool = False
) -> tuple[Tensor, dict[str, Tensor]]:
    """Logprobs and inputs as float32; some advantages and weights are 0."""
    random = np.random.default_rng(seed)
    logprobs_N = -random.gamma(1.0, 2.0, size)
    inputs = {
        "logprobs": logprobs_N + random.normal(0, 0.5, size),
        "advantages": random.normal(size=size) * (random.random(size) < 0.8),
        "sequence_ratio_mask": (np.arange(size) >= size // 3).astype(float),
    }
    if with_weights:
        inputs["weights"] = random.choice([0.0, 1.0, 0.5, -2.0], size)
    if with_thresholds:
        inputs["clip_low_threshold"] = random.uniform(0.3, 1.0, size)
        inputs["clip_high_threshold"] = random.uniform(1.0, 2.0, size)
    tensors = {name: torch.tensor(value, dtype=torch.float32) for name, value in inputs.items()}
    return torch.tensor(logprobs_N, dtype=torch.float32), tensors


def reference(name: str, p: float, inputs: Mapping[str, float], options: Mapping[str, float], s: float) -> float:
    """One token's loss, on Python floats. `s` is the sequence's ratio."""
    advantage, ratio = inputs["advantages"], math.exp(p - inputs["logprobs"])
    low = inputs.get("clip_low_threshold", options.get("clip_low_threshold", 0.0))
    high = inputs.get("clip_high_threshold", options.get("clip_high_threshold", 0.0))

    def clip(x: float) -> float:
        return min(max(x, low), high)

    value = {
        "importance_sampling": lambda: -ratio * advantage,
        "ppo": lambda: -min(ratio * advantage, clip(ratio) * advantage),
        "cispo": lambda: -clip(ratio) * p * advantage,
        "dro": lambda: -(p * advantage - options["beta"] / 2 * (p - inputs["logprobs"]) ** 2),
        "gspo": lambda: -min(s * advantage, clip(s) * advantage),
    }[name]()
    return value * inputs.get("weights", 1.0)


def reference_slope(name: str, p: float, inputs: Mapping[str, float], options: Mapping[str, float], s: float) -> float:
    """One token's dL/dp by the rules of calculus, what is stopped being a constant."""
    advantage, ratio = inputs["advantages"], math.exp(p - inputs["logprobs"])
    low = inputs.get("clip_low_threshold", options.get("clip_low_threshold", 0.0))
    high = inputs.get("clip_high_threshold", options.get("clip_high_threshold", 0.0))

    def ppo(r: float) -> float:
        is_clipped = (advantage > 0 and r > high) or (advantage < 0 and r < low)
        return 0.0 if is_clipped else -r * advantage

    value = {
        "importance_sampling": lambda: -ratio * advantage,
        "ppo": lambda: ppo(ratio),
        "cispo": lambda: -min(max(ratio, low), high) * advantage,
        "dro": lambda: -(advantage - options["beta"] * (p - inputs["logprobs"])),
        "gspo": lambda: ppo(s),
    }[name]()
    return value * inputs.get("weights", 1.0)


def rows(inputs: Mapping[str, Tensor]) -> list[dict[str, float]]:
    size = len(inputs["logprobs"])
    return [{key: float(value[i]) for key, value in inputs.items()} for i in range(size)]


def sequence_ratio(logprobs_N: Tensor, inputs: Mapping[str, Tensor]) -> float:
    marked = [i for i in range(len(logprobs_N)) if inputs["sequence_ratio_mask"][i] != 0]
    return math.exp(math.fsum(float(logprobs_N[i]) - float(inputs["logprobs"][i]) for i in marked) / len(marked))


OPTIONS: Mapping[str, dict[str, float]] = {
    "importance_sampling": {},
    "ppo": {"clip_low_threshold": 0.7, "clip_high_threshold": 1.3},
    "cispo": {"clip_low_threshold": 0.5, "clip_high_threshold": 1.5},
    "dro": {"beta": 0.3},
    "gspo": {"clip_low_threshold": 0.9, "clip_high_threshold": 1.1},
}


def test_every_loss_of_the_table_that_is_not_refused_is_computed() -> None:
    computed = {name for name, spec in table.LOSSES.items() if not spec.refusal} - {"custom"}
    assert set(LOSSES) == computed
    assert {name for name, loss in LOSSES.items() if loss.is_token_wise} == {"cross_entropy", *TOKEN_WISE}


@pytest.mark.parametrize("name", REINFORCEMENT)
@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 2**32 - 1),
    size=st.integers(1, 40),
    with_weights=st.booleans(),
    with_thresholds=st.booleans(),
    with_defaults=st.booleans(),
)
def test_reinforcement_losses_and_gradients(
    name: str, seed: int, size: int, with_weights: bool, with_thresholds: bool, with_defaults: bool
) -> None:
    clips = with_thresholds and name in ("ppo", "cispo", "gspo")
    logprobs_N, inputs = case(seed, size, with_weights=with_weights, with_thresholds=clips)
    options = loss_options(name, None if with_defaults else OPTIONS[name])
    s = sequence_ratio(logprobs_N, inputs)
    result = evaluate(LOSSES[name], logprobs_N, inputs, options)
    expected_N = [reference(name, float(logprobs_N[i]), row, options, s) for i, row in enumerate(rows(inputs))]
    slopes_N = [reference_slope(name, float(logprobs_N[i]), row, options, s) for i, row in enumerate(rows(inputs))]
    loss_N = LOSSES[name].per_token(logprobs_N, inputs, options).loss_N
    np.testing.assert_allclose(loss_N.numpy(), expected_N, rtol=2e-5, atol=2e-5)
    assert result.gradient_N is not None
    np.testing.assert_allclose(result.gradient_N.numpy(), slopes_N, rtol=2e-5, atol=2e-5)
    assert float(result.metrics["loss:sum"]) == pytest.approx(math.fsum(expected_N), rel=1e-4, abs=1e-4)


@pytest.mark.parametrize("name", REINFORCEMENT)
@settings(max_examples=30, deadline=None)
@given(seed=st.integers(0, 2**32 - 1), size=st.integers(1, 40), with_weights=st.booleans())
def test_diagnostics(name: str, seed: int, size: int, with_weights: bool) -> None:
    logprobs_N, inputs = case(seed, size, with_weights=with_weights)
    options = OPTIONS[name]
    metrics = {key: float(value) for key, value in evaluate(LOSSES[name], logprobs_N, inputs, options).metrics.items()}
    counted = [
        (float(logprobs_N[i]) - row["logprobs"], row["advantages"])
        for i, row in enumerate(rows(inputs))
        if row["advantages"] != 0 and row.get("weights", 1.0) != 0
    ]
    differences = [difference for difference, _ in counted]
    assert metrics["tokens:sum"] == len(counted)
    assert metrics["kl_sample_train_v1:sum"] == pytest.approx(-math.fsum(differences), abs=1e-4)
    assert metrics["kl_sample_train_v2:sum"] == pytest.approx(math.fsum(d * d for d in differences) / 2, abs=1e-4)
    assert metrics["log_ratio_abs:max"] == pytest.approx(max(map(abs, differences), default=0.0), abs=1e-5)
    if "clip_low_threshold" not in options:
        assert "clipped_tokens:sum" not in metrics
        return
    low, high = options["clip_low_threshold"], options["clip_high_threshold"]
    s = sequence_ratio(logprobs_N, inputs)
    clipped = 0
    for difference, advantage in counted:
        ratio = s if name == "gspo" else math.exp(difference)
        if name == "cispo":
            clipped += not low <= ratio <= high
        else:
            clipped += (ratio > high and advantage > 0) or (ratio < low and advantage < 0)
    assert metrics["clipped_tokens:sum"] == clipped


@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 2**32 - 1), size=st.integers(1, 30), targets=st.sampled_from([None, 1, 3]))
def test_cross_entropy(seed: int, size: int, targets: int | None) -> None:
    random = np.random.default_rng(seed)
    shape = (size,) if targets is None else (size, targets)
    logprobs, weights = -random.gamma(1.0, 2.0, shape), random.choice([0.0, 1.0, -0.5, 3.0], shape)
    result = evaluate(
        LOSSES["cross_entropy"],
        torch.tensor(logprobs, dtype=torch.float32),
        {"weights": torch.tensor(weights, dtype=torch.float32)},
        {},
    )
    assert float(result.metrics["loss:sum"]) == pytest.approx(-(logprobs * weights).sum(), rel=1e-5, abs=1e-5)
    assert float(result.metrics["tokens:sum"]) == np.count_nonzero(weights)
    assert float(result.metrics["weights:sum"]) == pytest.approx(weights.sum())
    assert float(result.metrics["weights:min"]) == weights.min()
    assert result.gradient_N is not None
    assert torch.equal(result.gradient_N, torch.tensor(-weights, dtype=torch.float32))


def test_cells_that_csr_leaves_out_count_for_nothing_even_if_impossible() -> None:
    targets = TensorData([3], "int64", [2, 2], [0, 1, 1], [1])
    weights = TensorData([0.5], "float32", [2, 2], [0, 1, 1], [1]).to_torch()
    assert targets.tolist() == [[0, 3], [0, 0]]
    logprobs = torch.tensor([[-math.inf, -2.0], [-math.inf, -1.0]])
    result = evaluate(LOSSES["cross_entropy"], logprobs, {"weights": weights}, {})
    assert float(result.metrics["loss:sum"]) == 1.0
    assert result.gradient_N is not None
    assert result.gradient_N.tolist() == [[0, -0.5], [0, 0]]


@pytest.mark.parametrize("name", TOKEN_WISE)
def test_padding_of_any_size_does_no_harm(name: str) -> None:
    """A prompt's q may be so low that the ratio overflows; with weight 0 it counts for nothing."""
    logprobs_N = torch.tensor([-1.0, -2.0])
    inputs = {
        "logprobs": torch.tensor([-1e6, -2.5]),
        "advantages": torch.tensor([0.0, 1.0]),
        "weights": torch.tensor([0.0, 1.0]),
    }
    alone = {key: value[1:] for key, value in inputs.items()}
    whole = evaluate(LOSSES[name], logprobs_N, inputs, OPTIONS[name])
    part = evaluate(LOSSES[name], logprobs_N[1:], alone, OPTIONS[name])
    assert whole.metrics == part.metrics
    assert whole.gradient_N is not None
    assert part.gradient_N is not None
    assert whole.gradient_N.tolist() == [0.0, *part.gradient_N.tolist()]


@pytest.mark.parametrize("name", ["cross_entropy", *TOKEN_WISE])
@settings(max_examples=20, deadline=None)
@given(seed=st.integers(0, 2**32 - 1), size=st.integers(2, 40), data=st.data())
def test_any_cut_into_pieces_gives_the_same(name: str, seed: int, size: int, data: st.DataObject) -> None:
    cut = data.draw(st.integers(1, size - 1))
    logprobs_N, inputs = case(seed, size, with_weights=True)
    options = OPTIONS.get(name, {})
    whole = evaluate(LOSSES[name], logprobs_N, inputs, options)
    pieces = [
        evaluate(LOSSES[name], logprobs_N[side], {key: value[side] for key, value in inputs.items()}, options)
        for side in (slice(None, cut), slice(cut, None))
    ]
    totals = MetricTotals()
    for piece in pieces:
        totals.add(piece.metrics)
    outputs = [
        ForwardBackwardOutput("x", [{}], {key: float(value) for key, value in piece.metrics.items()})
        for piece in pieces
    ]
    expected = {key: pytest.approx(float(value), rel=1e-12, abs=1e-12) for key, value in whole.metrics.items()}
    assert totals.result() == expected
    assert combine_metrics(outputs) == expected
    joined_N = torch.cat([piece.gradient_N for piece in pieces if piece.gradient_N is not None])
    assert whole.gradient_N is not None
    assert torch.equal(joined_N, whole.gradient_N)


def test_metric_names_have_one_colon_and_a_suffix_that_joins() -> None:
    logprobs_N, inputs = case(0, 5, with_weights=True)
    for name, loss in LOSSES.items():
        for metric in evaluate(loss, logprobs_N, inputs, OPTIONS.get(name, {})).metrics:
            assert metric.count(":") == 1
            assert metric.rpartition(":")[2] in ("sum", "max", "min", "mean")


def test_means_are_weighted_by_datums_as_clients_do() -> None:
    totals = MetricTotals()
    totals.add({"a:mean": torch.tensor(1.0), "b:min": torch.tensor(3.0)}, datums=3)
    totals.add({"a:mean": torch.tensor(5.0), "b:min": torch.tensor(2.0)}, datums=1)
    assert totals.result() == {"a:mean": 2.0, "b:min": 2.0}
    outputs = [
        ForwardBackwardOutput("x", [{}] * 3, {"a:mean": 1.0, "b:min": 3.0}),
        ForwardBackwardOutput("x", [{}], {"a:mean": 5.0, "b:min": 2.0}),
    ]
    assert combine_metrics(outputs) == totals.result()
    with pytest.raises(ValueError, match="must end in :sum"):
        totals.add({"a": torch.tensor(1.0)})


def test_without_gradient_nothing_is_recorded() -> None:
    logprobs_N, inputs = case(1, 5, with_weights=False)
    result = evaluate(LOSSES["ppo"], logprobs_N.requires_grad_(), inputs, OPTIONS["ppo"], with_gradient=False)
    assert result.gradient_N is None
    assert not any(value.requires_grad for value in result.metrics.values())


def test_gspo_keeps_or_drops_a_sequence_as_a_whole() -> None:
    logprobs_N = torch.full((4,), -1.0)
    inputs = {
        "logprobs": torch.tensor([0.0, -1.5, -1.5, -1.5]),
        "advantages": torch.tensor([0.0, 1.0, -1.0, 2.0]),
        "sequence_ratio_mask": torch.tensor([0.0, 1.0, 1.0, 1.0]),
    }
    result = evaluate(LOSSES["gspo"], logprobs_N, inputs, OPTIONS["gspo"])  # the ratio is exp(0.5), above the threshold
    assert result.gradient_N is not None
    assert result.gradient_N.tolist() == pytest.approx([0.0, 0.0, math.exp(0.5), 0.0])
    assert float(result.metrics["clipped_tokens:sum"]) == 2

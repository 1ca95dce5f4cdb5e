"""Uploaded losses give the same results as in the client."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn import functional

from tinsmith.client.losses.custom_loss import gradients, loss_of_handle
from tinsmith.client.losses.loss_graph import LossHandle, trace
from tinsmith.engine.training.custom_loss.interpreter import LossProgram
from tinsmith.engine.training.losses import MetricTotals
from tinsmith.errors import InvalidInputError, NonFiniteError
from tinsmith.wire.codecs import json_codec
from tinsmith.wire.messages.training import CreateCustomLossRequest
from tinsmith.wire.values.inputs import Datum, ModelInput
from tinsmith.wire.values.tensors import TensorData


def plain(logprobs: Any, advantages: Any) -> Any:
    return -(logprobs * advantages).sum(), {}


def clipped(logprobs: Any, advantages: Any) -> Any:
    ratio = torch.exp(logprobs - logprobs.detach() * 0.9)
    bounded = torch.clamp(ratio, 0.8, max=math.inf)
    kept = torch.where(advantages != 0, -torch.minimum(ratio * advantages, bounded[..., :] * advantages), 0.0)
    return kept.sum(), {"custom/ratio:mean": ratio.mean(), "custom/clipped:sum": (ratio > 1.2).sum()}


def by_length(logprobs: Any, advantages: Any) -> Any:
    size = logprobs.shape[0]
    weights = logprobs.new_ones(size, dtype=torch.float32).cumsum(0) / math.sqrt(size)
    loss = -(logprobs * weights + advantages * logprobs**2 / logprobs.size(0)).mean()
    return loss, {"custom/tokens:sum": logprobs.numel() * 2}


def masked(logprobs: Any, advantages: Any) -> Any:
    chosen = logprobs[advantages > -10.0]
    top = logprobs.topk(1)
    return -torch.logsumexp(chosen, dim=0) + top.values.sum() - chosen.max(dim=0)[0], {}


def functions(logprobs: Any, advantages: Any) -> Any:
    soft = functional.softmax(logprobs, dim=0)
    penalty = functional.kl_div(functional.log_softmax(logprobs, 0), soft.detach() + 0.1, reduction="sum")
    preference = -functional.logsigmoid(0.1 * (logprobs.sum() - advantages.sum()))
    gate = functional.relu(logprobs + 1) + functional.softplus(advantages)
    return preference + penalty + (gate * gate).mean(), {"custom/p:mean": preference}


def shaped(logprobs: Any, advantages: Any) -> Any:
    pairs = logprobs.unsqueeze(1) - logprobs.unsqueeze(0)
    product = torch.matmul(pairs, advantages.to(torch.float64).float())
    joined = torch.cat([product, logprobs.flip(0)]).view(2, -1).transpose(0, 1).reshape(-1)
    lower = torch.tril(torch.ones_like(pairs), diagonal=-1)
    return (torch.tanh(pairs) * lower).sum() + joined.cumsum(0).mean(), {}


LOSSES = [plain, clipped, by_length, masked, functions, shaped]
RANKS: Any = {"logprobs": 1, "advantages": 1}


def uploaded(fn: Any, ranks: Any) -> LossProgram:
    """The loss as the engine gets it: traced by the client, through JSON."""
    traced = trace(fn, ranks)
    request = CreateCustomLossRequest(
        session_id="s", custom_loss_seq_id=0, name=traced.name, inputs=traced.inputs, graph=traced.graph
    )
    return LossProgram(json_codec.decode(json_codec.encode(request), CreateCustomLossRequest))


def data_of(seed: int, sizes: list[int]) -> tuple[list[Datum], list[Tensor]]:
    random = np.random.default_rng(seed)
    data, logprobs = [], []
    for size in sizes:
        inputs = {
            "target_tokens": random.integers(0, 9, size),
            "advantages": random.normal(size=size).astype("float32"),
        }
        data.append(Datum(ModelInput.from_ints([1] * size), inputs))
        logprobs.append(torch.tensor(-random.gamma(1.0, 1.0, size), dtype=torch.float32))
    return data, logprobs


def evaluated(
    loss: LossProgram, logprobs: list[Tensor], data: list[dict[str, Tensor]], *, with_gradient: bool = True
) -> tuple[list[Tensor | None], dict[str, float]]:
    """The gradients and combined metrics of a whole call."""
    totals, found = MetricTotals(), []
    for tensor, inputs in zip(logprobs, data, strict=True):
        result = loss.evaluate(tensor, inputs, with_gradient=with_gradient)
        totals.add(result.metrics)
        found.append(result.gradient_N)
    return found, totals.result()


@pytest.mark.parametrize("fn", LOSSES)
@settings(max_examples=15, deadline=None)
@given(seed=st.integers(0, 10**6), sizes=st.lists(st.integers(1, 9), min_size=1, max_size=4))
def test_the_server_computes_what_the_client_would(fn: Any, seed: int, sizes: list[int]) -> None:
    data, logprobs = data_of(seed, sizes)
    traced = trace(fn, RANKS)
    handle = LossHandle(traced.name, tuple(traced.inputs), "s", traced.module)
    outputs = [{"logprobs": TensorData.from_torch(tensor)} for tensor in logprobs]
    expected = gradients(loss_of_handle(handle), data, outputs)
    tensors = [{"advantages": datum.loss_fn_inputs["advantages"].to_torch()} for datum in data]
    found, metrics = evaluated(uploaded(fn, RANKS), logprobs, tensors)
    for mine, theirs in zip(found, expected.gradients, strict=True):
        assert mine is not None
        np.testing.assert_allclose(mine.numpy(), theirs, rtol=1e-6, atol=1e-7)
    named = expected.metrics | {"loss:sum": expected.loss}
    assert metrics == {name: pytest.approx(value, rel=1e-5, abs=1e-6) for name, value in named.items()}


def test_ranks_zero_and_two() -> None:
    def fn(logprobs: Any, beta: Any, weights: Any) -> Any:
        return -(logprobs * weights).sum() * beta, {}

    loss = uploaded(fn, {"logprobs": 2, "beta": 0, "weights": 2})
    weights = torch.tensor([[1.0, 2.0], [0.0, 3.0]])
    result = loss.evaluate(torch.full((2, 2), -1.0), {"beta": torch.tensor(0.5), "weights": weights})
    assert float(result.metrics["loss:sum"]) == 3.0
    assert result.gradient_N is not None
    assert torch.equal(result.gradient_N, -0.5 * weights)
    with pytest.raises(InvalidInputError, match=r"data\[3\]: beta has 1 dimensions, the loss declares 0"):
        loss.evaluate(torch.zeros(2, 2), {"beta": torch.zeros(1), "weights": weights}, where="data[3]")


def test_integer_inputs_stay_integers() -> None:
    loss = uploaded(lambda logprobs, rows: (logprobs[rows].sum(), {}), {"logprobs": 1, "rows": 1})
    result = loss.evaluate(torch.tensor([-1.0, -2.0, -4.0]), {"rows": torch.tensor([2, 2, 0])})
    assert result.gradient_N is not None
    assert result.gradient_N.tolist() == [1.0, 0.0, 2.0]
    with pytest.raises(
        InvalidInputError, match=r"datum: custom loss '<lambda>', node getitem .*index 7 is out of bounds"
    ):
        loss.evaluate(torch.zeros(3), {"rows": torch.tensor([7])})


def test_without_gradient() -> None:
    data, logprobs = data_of(0, [4])
    tensors = [{"advantages": data[0].loss_fn_inputs["advantages"].to_torch()}]
    found, metrics = evaluated(uploaded(plain, RANKS), logprobs, tensors, with_gradient=False)
    assert found == [None]
    assert list(metrics) == ["loss:sum"]
    assert not logprobs[0].requires_grad


def evaluate(fn: Any, logprobs: Tensor) -> Any:
    return uploaded(fn, {"logprobs": 1}).evaluate(logprobs, {}, where="data[2]")


def test_losses_that_are_not_one_finite_number_are_refused() -> None:
    with pytest.raises(InvalidInputError, match=r"must be a single real number, got a tensor of shape \[3\]; sum it"):
        evaluate(lambda logprobs: (logprobs, {}), torch.zeros(3))
    with pytest.raises(InvalidInputError, match="must be a single real number"):
        evaluate(lambda logprobs: ((logprobs > 0).sum(), {}), torch.zeros(3))
    with pytest.raises(InvalidInputError, match="no longer depends on the logprobs"):
        evaluate(lambda logprobs: (logprobs.detach().sum(), {}), torch.zeros(3))
    with pytest.raises(InvalidInputError, match=r"metric 'custom/a:sum' must be a single number, got a tensor"):
        evaluate(lambda logprobs: (logprobs.sum(), {"custom/a:sum": logprobs}), torch.zeros(3))
    with pytest.raises(NonFiniteError, match=r"data\[2\]: custom loss '<lambda>': the loss is inf"):
        evaluate(lambda logprobs: (logprobs.exp().sum(), {}), torch.full((2,), 1000.0))
    with pytest.raises(NonFiniteError, match=r"data\[2\]: the custom loss's gradient is inf at \[1\]"):
        evaluate(lambda logprobs: (logprobs.sqrt().sum(), {}), torch.tensor([1.0, 0.0]))


def test_an_operation_that_fails_is_named() -> None:
    with pytest.raises(InvalidInputError, match=r"node add \(operator.add\): .*shape mismatch"):
        evaluate(lambda logprobs: ((logprobs + logprobs[1:]).sum(), {}), torch.zeros(5))
    with pytest.raises(InvalidInputError, match=r"node floordiv .*zero"):
        evaluate(lambda logprobs: (logprobs.sum() * (1 // (logprobs.shape[0] - 5)), {}), torch.zeros(5))

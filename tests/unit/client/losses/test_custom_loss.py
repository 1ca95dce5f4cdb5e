"""Losses written in Python: the data of both passes, the gradients, and the errors for a wrong loss."""

from __future__ import annotations

import math
import sys
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tinsmith.client.losses.custom_loss import CustomLoss, backward_data, forward_data, gradients, result_metrics
from tinsmith.errors import InvalidInputError, TinkerError, WireError
from tinsmith.wire.messages.training import ForwardBackwardOutput, LossFnOutput
from tinsmith.wire.values.inputs import Datum, ModelInput, PromptProvenanceSpan, SampledProvenanceSpan
from tinsmith.wire.values.tensors import TensorData


def datum(*targets: int, **inputs: Any) -> Datum:
    return Datum(ModelInput.from_ints(list(range(len(targets)))), {"target_tokens": list(targets), **inputs})


def matrix_datum(rows: int, columns: int) -> Datum:
    targets = np.arange(rows * columns).reshape(rows, columns)
    return Datum(ModelInput.from_ints(list(range(rows))), {"target_tokens": targets})


def outputs_of(*rows: Any) -> list[LossFnOutput]:
    return [{"logprobs": TensorData.from_numpy(np.array(row, np.float32))} for row in rows]


def test_the_forward_pass_carries_targets_and_zero_weights() -> None:
    (sent,) = forward_data([datum(5, 6, 7, advantages=[1.0, 2.0, 3.0])])
    assert sent.loss_fn_inputs == {
        "target_tokens": TensorData([5, 6, 7], "int64"),
        "weights": TensorData([0.0, 0.0, 0.0], "float32"),
    }
    assert sent.model_input.to_ints() == [0, 1, 2]


def test_given_weights_are_sent_in_the_forward_pass() -> None:
    (sent,) = forward_data([datum(5, 6, weights=[0.5, 2.0])])
    assert sent.loss_fn_inputs["weights"].data == [0.5, 2.0]


def test_weights_have_the_shape_of_the_targets() -> None:
    (sent,) = forward_data([matrix_datum(2, 3)])
    assert sent.loss_fn_inputs["weights"].shape == [2, 3]
    assert not sent.loss_fn_inputs["weights"].is_sparse


def test_sparse_targets_get_sparse_weights() -> None:
    targets = TensorData([4], "int64", [3, 20], [0, 0, 1, 1], [7])
    (sent,) = forward_data([Datum(ModelInput.from_ints([1, 2, 3]), {"target_tokens": targets})])
    assert sent.loss_fn_inputs["weights"].is_sparse
    assert sent.loss_fn_inputs["weights"].tolist() == np.zeros((3, 20)).tolist()


def test_spans_stay_with_their_datum() -> None:
    spans = [PromptProvenanceSpan(sequence_id="s", length=1), SampledProvenanceSpan(sequence_id="s", length=1)]
    (sent,) = forward_data([datum(5, 6).with_provenance(spans, spans)])
    (back,) = backward_data([datum(5, 6).with_provenance(spans, spans)], [np.ones(2, np.float32)])
    assert sent.model_input_spans == back.loss_fn_input_spans == spans


def test_no_data_is_refused() -> None:
    with pytest.raises(InvalidInputError, match="No data provided"):
        forward_data([])


def test_missing_targets_are_named() -> None:
    with pytest.raises(InvalidInputError, match=r"data\[1\].loss_fn_inputs has no 'target_tokens'"):
        forward_data([datum(1), Datum(ModelInput.from_ints([1]), {"weights": [1.0]})])


def test_the_loss_sees_leaf_tensors_and_the_data() -> None:
    data = [datum(1, 2, advantages=[1.0, 2.0]), matrix_datum(2, 2)]

    def loss_fn(seen: list[Datum], logprobs: list[torch.Tensor]) -> Any:
        assert seen == data
        assert all(tensor.is_leaf and tensor.requires_grad and tensor.dtype == torch.float32 for tensor in logprobs)
        assert [tuple(tensor.shape) for tensor in logprobs] == [(2,), (2, 2)]
        return torch.cat([tensor.reshape(-1) for tensor in logprobs]).sum(), {}

    custom = gradients(loss_fn, data, outputs_of([-1, -2], [[-1, -2], [-3, -4]]))
    assert custom.loss == -13.0
    assert [gradient.tolist() for gradient in custom.gradients] == [[1, 1], [[1, 1], [1, 1]]]


def test_gradients_are_those_of_the_loss() -> None:
    def loss_fn(_: list[Datum], logprobs: list[torch.Tensor]) -> Any:
        return (logprobs[0] ** 2).sum() + 3 * logprobs[1].sum(), {"a": 1, "b:mean": torch.tensor(2.5)}

    custom = gradients(loss_fn, [datum(1, 2), datum(3)], outputs_of([-1, -0.5], [-2]))
    assert custom.loss == 1.25 - 6
    assert custom.metrics == {"a": 1.0, "b:mean": 2.5}
    assert [gradient.tolist() for gradient in custom.gradients] == [[-2, -1], [3]]
    assert all(gradient.dtype == np.float32 for gradient in custom.gradients)


def test_what_the_loss_does_not_read_gets_zeros() -> None:
    custom = gradients(
        lambda _, logprobs: (logprobs[0].sum(), {}), [datum(1), matrix_datum(1, 2)], outputs_of([-1], [[-1, -2]])
    )
    assert [gradient.tolist() for gradient in custom.gradients] == [[1], [[0, 0]]]


def test_the_servers_arrays_are_left_alone() -> None:
    outputs = outputs_of([-1.0, -2.0])

    def loss_fn(_: list[Datum], logprobs: list[torch.Tensor]) -> Any:
        with torch.no_grad():
            logprobs[0].add_(5)
        return logprobs[0].sum(), {}

    gradients(loss_fn, [datum(1, 2)], outputs)
    assert outputs[0]["logprobs"].data == [-1.0, -2.0]


def test_the_loss_may_have_one_element_or_another_precision() -> None:
    def loss_fn(_: list[Datum], logprobs: list[torch.Tensor]) -> Any:
        return logprobs[0].double().sum().reshape(1, 1), {"np:sum": np.float32(0.5), "t:sum": logprobs[0].sum()}

    custom = gradients(loss_fn, [datum(1, 2)], outputs_of([-1, -2]))
    assert (custom.loss, custom.metrics) == (-3.0, {"np:sum": 0.5, "t:sum": -3.0})


def test_gradients_are_taken_wherever_the_call_is_made() -> None:
    with torch.no_grad():
        custom = gradients(lambda _, logprobs: (logprobs[0].sum(), {}), [datum(1)], outputs_of([-1]))
    assert custom.gradients[0].tolist() == [1]


def test_a_model_trained_here_gets_its_gradients_too() -> None:
    scale = torch.tensor(2.0, requires_grad=True)
    gradients(lambda _, logprobs: (scale * logprobs[0].sum(), {}), [datum(1, 2)], outputs_of([-1, -2]))
    assert scale.grad is not None
    assert scale.grad.item() == -3.0


def test_errors_of_the_loss_pass_through() -> None:
    def loss_fn(_: list[Datum], logprobs: list[torch.Tensor]) -> Any:
        raise ZeroDivisionError("mine")

    with pytest.raises(ZeroDivisionError, match="mine"):
        gradients(loss_fn, [datum(1)], outputs_of([-1]))


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (lambda p: p[0].sum(), r"must return \(loss, metrics\), returned Tensor"),
        (lambda p: (p[0].sum(), {}, 1), r"returned 3 values"),
        (lambda p: (p[0].sum(), None), "metrics must be numbers by name, got NoneType"),
        (lambda p: (p[0].sum(), {1: 2.0}), "names that are not strings"),
        (lambda p: (1.0, {}), "must be a torch tensor, got float"),
        (lambda p: (p[0], {}), r"one number, got shape \(2,\); sum it"),
        (lambda p: (p[0].sum().to(torch.complex64), {}), "real number, got torch.complex64"),
        (lambda p: (p[0].argmax(), {}), "real number, got torch.int64"),
        (lambda p: (p[0].detach().sum(), {}), "does not depend on the logprobs"),
        (lambda p: (torch.tensor(1.0), {}), "does not depend on the logprobs"),
        (lambda p: (torch.tensor(1.0, requires_grad=True) * 1, {}), "does not depend on the logprobs"),
        (lambda p: (p[0].sum() * math.nan, {}), "the loss is nan; the logprobs it was given are all finite"),
        (lambda p: (p[0].sum() * math.inf, {}), "the loss is -inf"),
        (lambda p: (p[0].sum(), {"m": [1, 2]}), "metric 'm' must be one number, got list"),
        (lambda p: (p[0].sum(), {"m": "3"}), "metric 'm' must be one number, got str"),
        (lambda p: (p[0].sum(), {"m": torch.ones(2)}), "metric 'm' must be one number, got Tensor"),
        (lambda p: (p[0].sum(), {"m": None}), "metric 'm' must be one number, got NoneType"),
        (lambda p: ((p[0] - p[0].detach()).abs().sqrt().sum(), {}), r"gradient for data\[0\] is nan at \[0\]"),
    ],
)
def test_a_wrong_loss_is_explained(body: Callable[[list[torch.Tensor]], Any], message: str) -> None:
    with pytest.raises(InvalidInputError, match=message):
        gradients(lambda _, logprobs: body(logprobs), [datum(1, 2)], outputs_of([-1, -2]))


def test_a_loss_that_runs_backward_itself_is_refused() -> None:
    def loss_fn(_: list[Datum], logprobs: list[torch.Tensor]) -> Any:
        loss = logprobs[0].sum()
        loss.backward(retain_graph=True)
        return loss, {}

    with pytest.raises(InvalidInputError, match=r"must not call backward\(\) itself"):
        gradients(loss_fn, [datum(1)], outputs_of([-1]))


def test_the_datum_behind_an_infinite_loss_is_named() -> None:
    with pytest.raises(InvalidInputError, match=r"the loss is -inf; the logprob of data\[1\] at \[0, 1\] is -inf"):
        gradients(
            lambda _, p: (p[0].sum() + p[1].sum(), {}),
            [datum(1), matrix_datum(1, 2)],
            outputs_of([-1], [[-1, -math.inf]]),
        )


def test_the_datum_behind_a_nan_gradient_is_named() -> None:
    def loss_fn(_: list[Datum], p: list[torch.Tensor]) -> Any:
        return torch.where(torch.isinf(p[1]), 0.0, p[1] * p[1].exp().log()).sum() + p[0].sum(), {}

    with pytest.raises(InvalidInputError, match=r"data\[1\] is nan at \[1\], where the logprob is -inf; mask such"):
        gradients(loss_fn, [datum(1), datum(2, 3)], outputs_of([-1], [-1, -math.inf]))


@pytest.mark.parametrize(
    ("outputs", "message"),
    [
        ([], "returned 0 outputs for 1 datums"),
        ([{"other": TensorData([1.0], "float32")}], r"loss_fn_outputs\[0\]: the forward pass returned no 'logprobs'"),
        (outputs_of([-1]), r"logprobs of shape \(1,\) for targets of shape \(2,\)"),
    ],
)
def test_a_wrong_answer_of_the_server_is_explained(outputs: list[LossFnOutput], message: str) -> None:
    with pytest.raises(WireError, match=message):
        gradients(lambda _, logprobs: (logprobs[0].sum(), {}), [datum(1, 2)], outputs)


def test_the_backward_pass_is_weighted_with_minus_the_gradient() -> None:
    sent = backward_data(
        [datum(5, 6, advantages=[1.0, 1.0]), matrix_datum(1, 2)],
        [np.array([2.0, -0.5], np.float32), np.array([[0.0, 1.0]], np.float32)],
    )
    assert [set(item.loss_fn_inputs) for item in sent] == [{"target_tokens", "weights"}] * 2
    assert [item.loss_fn_inputs["weights"].tolist() for item in sent] == [[-2.0, 0.5], [[0.0, -1.0]]]
    assert sent[0].loss_fn_inputs["target_tokens"].data == [5, 6]


def test_sparse_gradients_travel_sparse() -> None:
    gradient = np.zeros((4, 50), np.float32)
    gradient[2, 7] = 3
    (sent,) = backward_data([matrix_datum(4, 50)], [gradient])
    assert sent.loss_fn_inputs["weights"].is_sparse
    assert np.array_equal(sent.loss_fn_inputs["weights"].to_numpy(), -gradient)


def test_every_datum_needs_a_gradient() -> None:
    with pytest.raises(InvalidInputError, match="1 for 2 datums"):
        backward_data([datum(1), datum(2)], [np.zeros(1, np.float32)])


@given(st.lists(st.lists(st.floats(-20, 0, width=32), min_size=1, max_size=6), min_size=1, max_size=4), st.data())
@settings(deadline=None, max_examples=60)
def test_the_surrogate_has_the_gradient_of_the_loss(rows: list[list[float]], draw: st.DataObject) -> None:
    """What the whole scheme rests on: d/dp sum(-w p) = dL/dp."""
    factors = [
        torch.tensor(draw.draw(st.lists(st.floats(-5, 5, width=32), min_size=len(row), max_size=len(row))))
        for row in rows
    ]

    def loss_of(logprobs: list[torch.Tensor]) -> torch.Tensor:
        return torch.stack([(f * p.exp() + f * p).sum() for f, p in zip(factors, logprobs, strict=True)]).sum()

    data = [datum(*range(len(row))) for row in rows]
    custom = gradients(lambda _, logprobs: (loss_of(logprobs), {}), data, outputs_of(*rows))
    sent = backward_data(data, custom.gradients)
    for row, item, factor in zip(rows, sent, factors, strict=True):
        logprobs = torch.tensor(row, requires_grad=True)
        (-logprobs * item.loss_fn_inputs["weights"].to_torch()).sum().backward()
        assert logprobs.grad is not None
        expected = factor * torch.tensor(row).exp() + factor
        torch.testing.assert_close(logprobs.grad, expected, rtol=1e-5, atol=1e-6)


def test_metrics_keep_the_callers_names_and_say_both_losses() -> None:
    server = ForwardBackwardOutput("T", outputs_of([-1]), {"loss:sum": 7.5, "x:mean": 1.0, "tokens:sum": 3.0})
    custom = CustomLoss(-2.0, {"mine": 3.0, "x:mean": 5.0, "loss:sum": 99.0, "surrogate_loss:sum": 98.0}, [])
    result = result_metrics(server, custom)
    assert result.metrics == {
        "tokens:sum": 3.0,
        "mine": 3.0,
        "x:mean": 5.0,
        "loss:sum": -2.0,
        "surrogate_loss:sum": 7.5,
    }
    assert result.loss_fn_output_type == "T"
    assert result.loss_fn_outputs == server.loss_fn_outputs
    assert server.metrics["loss:sum"] == 7.5


def test_a_server_that_reports_no_loss_costs_only_that_metric() -> None:
    result = result_metrics(ForwardBackwardOutput("T", [], {"x:mean": 1.0}), CustomLoss(-2.0, {}, []))
    assert result.metrics == {"x:mean": 1.0, "loss:sum": -2.0}


def test_missing_torch_is_said_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch", None)
    with pytest.raises(TinkerError, match="pip install torch"):
        gradients(lambda _, logprobs: (logprobs[0], {}), [datum(1)], outputs_of([-1]))
    assert len(forward_data([datum(1)])) == 1


def test_no_warning_is_given() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        gradients(lambda _, p: (p[0].sum(), {"m": p[0].sum()}), [datum(1)], outputs_of([-1]))

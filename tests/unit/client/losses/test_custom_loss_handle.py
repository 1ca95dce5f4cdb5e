"""A traced loss that runs in the client, for servers that run none."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from tinsmith.client.losses.custom_loss import check_inputs, gradients, loss_of_handle
from tinsmith.client.losses.loss_graph import LossHandle, trace
from tinsmith.errors import InvalidInputError
from tinsmith.wire.messages.training import LossFnOutput
from tinsmith.wire.values.inputs import Datum, ModelInput
from tinsmith.wire.values.tensors import TensorData


def datum(*targets: int, **inputs: Any) -> Datum:
    return Datum(ModelInput.from_ints(list(range(len(targets)))), {"target_tokens": list(targets), **inputs})


def outputs_of(*rows: Any) -> list[LossFnOutput]:
    return [{"logprobs": TensorData.from_numpy(np.array(row, np.float32))} for row in rows]


def scaled(logprobs: Any, advantages: Any, beta: Any) -> Any:
    weighted = beta * logprobs * advantages
    return -weighted.sum(), {"custom/total:sum": weighted.sum(), "custom/level:mean": logprobs.mean()}


def handle_of(fn: Any, **ranks: Any) -> LossHandle:
    traced = trace(fn, {"logprobs": 1, **ranks})
    return LossHandle(traced.name, tuple(traced.inputs), "session", traced.module)


BETA = TensorData([2.0], "float32", [])
MATRIX = Datum(ModelInput.from_ints([1]), {"target_tokens": np.array([[1, 2]])})


def test_a_traced_loss_runs_here() -> None:
    handle = handle_of(scaled, advantages=1, beta=0)
    data = [datum(1, 2, advantages=[1.0, -1.0], beta=BETA), datum(3, advantages=[0.5], beta=BETA)]
    custom = gradients(loss_of_handle(handle), data, outputs_of([-1, -2], [-4]))
    assert custom.loss == -(2 * 1 + 2 * -2)
    assert custom.metrics == {"custom/total:sum": 2 - 4, "custom/level:mean": (-1.5 - 4) / 2}
    assert [gradient.tolist() for gradient in custom.gradients] == [[-2, 2], [-1]]


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (datum(3, beta=BETA), r"data\[1\].loss_fn_inputs\['advantages'\]: is missing; the loss 'scaled' reads it"),
        (datum(3, advantages=[1.0], beta=np.ones(1)), r"\['beta'\]: has 1 dimensions, but beta .* declared with 0"),
        (MATRIX, r"\['target_tokens'\]: has 2 dimensions, but logprobs .* declared with 1"),
    ],
)
def test_data_that_does_not_fit_a_traced_loss_is_refused(wrong: Datum, message: str) -> None:
    good = datum(1, 2, advantages=[1.0, -1.0], beta=BETA)
    check_inputs(handle_of(scaled, advantages=1, beta=0), [good])
    with pytest.raises(InvalidInputError, match=message):
        check_inputs(handle_of(scaled, advantages=1, beta=0), [good, wrong])


def test_a_traced_loss_of_several_numbers_is_refused() -> None:
    with pytest.raises(InvalidInputError, match=r"'<lambda>' of data\[0\] must be one number, got shape \(2,\)"):
        gradients(loss_of_handle(handle_of(lambda logprobs: (logprobs, {}))), [datum(1, 2)], outputs_of([-1, -2]))

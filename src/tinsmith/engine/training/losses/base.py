"""What a loss is: a function from the logprobs of the targets to one number per target, differentiated by autograd.

`Loss` is the protocol that each file in this folder implements; a loss sees logprobs and the datum's tensors, never the
model. `evaluate` computes a loss with its gradient and metrics. Metrics of micro-batches join by the suffix of their
name (`:sum`, `:mean`, `:min`, `:max`), as clients join those of chunks (`wire/rules/split_join.py`), so that results do
not depend on how a call was cut; a mean is weighted by datums.

Shapes: N targets. For cross-entropy they can also be [N, K]; every tensor then has that shape.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class TokenLoss:
    """The loss of each target, and diagnostics by name, detached numbers whose suffix says how they join."""

    loss_N: Tensor
    metrics: dict[str, Tensor]


class Loss(Protocol):
    """One loss of the protocol; all state is in its arguments, checked before by `wire.rules.loss_rules.check_loss`."""

    is_token_wise: bool
    """Whether targets are independent of each other. If not, a call must get exactly one whole datum."""

    def per_token(self, logprobs_N: Tensor, inputs: Mapping[str, Tensor], options: Mapping[str, float]) -> TokenLoss:
        """Return the loss at each target; `inputs` hold the datum's other tensors in the dtype of the logprobs."""
        ...


@dataclass(frozen=True, slots=True)
class Evaluation:
    """dL/dlogprob for each target (None if not asked for) and the metrics, `loss:sum` among them."""

    gradient_N: Tensor | None
    metrics: dict[str, Tensor]


def evaluate(
    loss: Loss,
    logprobs_N: Tensor,
    inputs: Mapping[str, Tensor],
    options: Mapping[str, float],
    *,
    with_gradient: bool = True,
) -> Evaluation:
    """Return the loss of some targets with its gradient; the graph that the logprobs came from is not touched."""
    leaf_N = logprobs_N.detach().requires_grad_(with_gradient)
    with torch.set_grad_enabled(with_gradient):
        result = loss.per_token(leaf_N, inputs, options)
        gradient_N = torch.autograd.grad(result.loss_N.sum(), leaf_N)[0] if with_gradient else None
    return Evaluation(gradient_N, {"loss:sum": total(result.loss_N)} | result.metrics)


def total(values_N: Tensor) -> Tensor:
    """Return a detached sum in double precision: metrics must not depend on how a batch was cut into pieces."""
    return values_N.detach().sum(dtype=torch.float64)


class MetricTotals:
    """Metrics of the pieces seen so far. Numbers stay on their device until `result`."""

    def __init__(self) -> None:
        self._values: dict[str, Tensor] = {}
        self._datums = 0

    def add(self, metrics: Mapping[str, Tensor], datums: int = 1) -> None:
        """Add one piece, which has `datums` datums (used for means only)."""
        self._datums += datums
        for name, value in metrics.items():
            suffix = name.rpartition(":")[2]
            if suffix not in _JOINS:
                raise ValueError(f"metric {name!r}: the name must end in :{', :'.join(_JOINS)}")
            value = value.detach() * datums if suffix == "mean" else value.detach()
            self._values[name] = _JOINS[suffix](self._values[name], value) if name in self._values else value

    def result(self) -> dict[str, float]:
        """Return the metrics of all pieces together."""
        return {
            name: float(value) / (max(self._datums, 1) if name.endswith(":mean") else 1)
            for name, value in self._values.items()
        }


_JOINS: Mapping[str, Callable[[Tensor, Tensor], Tensor]] = {
    "sum": torch.add,
    "mean": torch.add,
    "min": torch.minimum,
    "max": torch.maximum,
}

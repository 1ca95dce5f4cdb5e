"""What a loss is: a function from the logprobs of the targets, differentiable, to one number per target.

Owns: the `Loss` protocol, and the evaluation of a loss with its gradient.
Does not know: models. A loss sees logprobs and the datum's tensors, nothing else.
Shapes: N targets. For cross-entropy they may as well be [N, K]; every tensor then has that shape.
"""

from __future__ import annotations

from collections.abc import Mapping
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
    """One loss of the protocol; all state is in its arguments, checked before by `wire.losses.check_loss`."""

    is_token_wise: bool
    """Whether targets are independent of each other. If not, a call must get exactly one whole datum."""

    def per_token(self, logprobs_N: Tensor, inputs: Mapping[str, Tensor], options: Mapping[str, float]) -> TokenLoss:
        """The loss at each target; `inputs` hold the datum's other tensors in the dtype of the logprobs."""
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
    """The loss of some targets with its gradient; the graph that the logprobs came from is not touched."""
    leaf_N = logprobs_N.detach().requires_grad_(with_gradient)
    with torch.set_grad_enabled(with_gradient):
        result = loss.per_token(leaf_N, inputs, options)
        gradient_N = torch.autograd.grad(result.loss_N.sum(), leaf_N)[0] if with_gradient else None
    return Evaluation(gradient_N, {"loss:sum": total(result.loss_N)} | result.metrics)


def total(values_N: Tensor) -> Tensor:
    """A detached sum in double precision: metrics must not depend on how a batch was cut into pieces."""
    return values_N.detach().sum(dtype=torch.float64)

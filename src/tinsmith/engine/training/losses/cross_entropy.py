"""Cross-entropy: -w p, for one target per position or several."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from tinsmith.engine.training.losses.base import TokenLoss, total


class CrossEntropy:
    """Exactly the sum of -weight * logprob, because clients compute the gradients of their own losses through it."""

    is_token_wise = True

    def per_token(self, logprobs_N: Tensor, inputs: Mapping[str, Tensor], options: Mapping[str, float]) -> TokenLoss:
        weights_N = inputs["weights"]
        is_weighted_N = weights_N != 0
        # A logprob may be -inf where the weight is 0 (an unlisted target); 0 * inf would make the sum NaN.
        loss_N = torch.where(is_weighted_N, -weights_N * logprobs_N, torch.zeros_like(logprobs_N))
        # A negative weight tells that the loss is no mean: the client sent the gradient of a loss of its own.
        least = weights_N.detach().min() if weights_N.numel() else weights_N.new_zeros(())
        counts = {"tokens:sum": total(is_weighted_N), "weights:sum": total(weights_N)}
        return TokenLoss(loss_N, counts | {"weights:min": least.double()})


LOSS = CrossEntropy()

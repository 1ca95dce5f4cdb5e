"""DRO: -(p A - beta / 2 (p - q)^2)."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from tinsmith.engine.training.losses.base import TokenLoss
from tinsmith.engine.training.losses.ratios import diagnostics, is_counted, weighted


class DRO:
    """A quadratic penalty keeps the policy close to the one that sampled.

    The penalty does not depend on the advantage: it also acts on tokens whose advantage is 0, unless their weight is 0.
    """

    is_token_wise = True

    def per_token(self, logprobs_N: Tensor, inputs: Mapping[str, Tensor], options: Mapping[str, float]) -> TokenLoss:
        log_ratio_N = logprobs_N - inputs["logprobs"]
        loss_N = 0.5 * options["beta"] * log_ratio_N.square() - logprobs_N * inputs["advantages"]
        if "weights" in inputs:
            loss_N = torch.where(inputs["weights"] != 0, loss_N, torch.zeros_like(loss_N))
        return TokenLoss(weighted(loss_N, inputs), diagnostics(log_ratio_N, is_counted(inputs)))


LOSS = DRO()

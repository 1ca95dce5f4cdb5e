"""Importance sampling: -r A."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from tinsmith.engine.training.losses.base import TokenLoss
from tinsmith.engine.training.losses.ratios import diagnostics, is_counted, log_ratio, weighted


class ImportanceSampling:
    """The policy gradient, corrected for the policy that drew the samples."""

    is_token_wise = True

    def per_token(self, logprobs_N: Tensor, inputs: Mapping[str, Tensor], options: Mapping[str, float]) -> TokenLoss:
        counted_N = is_counted(inputs)
        log_ratio_N = log_ratio(logprobs_N, inputs, counted_N)
        loss_N = weighted(-log_ratio_N.exp() * inputs["advantages"], inputs)
        return TokenLoss(loss_N, diagnostics(log_ratio_N, counted_N))


LOSS = ImportanceSampling()

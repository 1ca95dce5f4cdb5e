"""CISPO: -stopgrad(clip(r, low, high)) p A."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from tinsmith.engine.training.losses.base import TokenLoss, total
from tinsmith.engine.training.losses.ratios import diagnostics, is_counted, log_ratio, thresholds, weighted


class CISPO:
    """Clips the ratio as a factor of the gradient, so that every token keeps its gradient."""

    is_token_wise = True

    def per_token(self, logprobs_N: Tensor, inputs: Mapping[str, Tensor], options: Mapping[str, float]) -> TokenLoss:
        counted_N = is_counted(inputs)
        log_ratio_N = log_ratio(logprobs_N, inputs, counted_N)
        ratio_N = log_ratio_N.detach().exp()
        low_N, high_N = thresholds(inputs, options, ratio_N)
        policy_N = torch.where(counted_N, logprobs_N, torch.zeros_like(logprobs_N))
        loss_N = weighted(-ratio_N.clamp(low_N, high_N) * policy_N * inputs["advantages"], inputs)
        is_clipped_N = ((ratio_N < low_N) | (ratio_N > high_N)) & counted_N
        metrics = diagnostics(log_ratio_N, counted_N) | {"clipped_tokens:sum": total(is_clipped_N)}
        return TokenLoss(loss_N, metrics)


LOSS = CISPO()

"""PPO: -min(r A, clip(r, low, high) A)."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from tinsmith.engine.training.losses.base import TokenLoss, total
from tinsmith.engine.training.losses.ratios import clipped_objective, diagnostics, is_counted, log_ratio, weighted


class PPO:
    """Clips each token's ratio: beyond the thresholds there is no more to gain, and so no gradient."""

    is_token_wise = True

    def per_token(self, logprobs_N: Tensor, inputs: Mapping[str, Tensor], options: Mapping[str, float]) -> TokenLoss:
        counted_N = is_counted(inputs)
        log_ratio_N = log_ratio(logprobs_N, inputs, counted_N)
        objective_N, is_clipped_N = clipped_objective(log_ratio_N.exp(), inputs, options)
        metrics = diagnostics(log_ratio_N, counted_N) | {"clipped_tokens:sum": total(is_clipped_N & counted_N)}
        return TokenLoss(weighted(-objective_N, inputs), metrics)


LOSS = PPO()

"""GSPO, the token variant: PPO with the ratio of the whole sequence, s = exp(mean of p - q over the marked tokens)."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from tinsmith.engine.training.losses.base import TokenLoss, total
from tinsmith.engine.training.losses.ratios import clipped_objective, diagnostics, is_counted, weighted


class GSPO:
    """Each token has the value of the sequence's ratio and the gradient of its own logprob."""

    is_token_wise = False

    def per_token(self, logprobs_N: Tensor, inputs: Mapping[str, Tensor], options: Mapping[str, float]) -> TokenLoss:
        counted_N = is_counted(inputs)
        difference_N = logprobs_N.detach() - inputs["logprobs"]
        sequence_log_ratio = difference_N[inputs["sequence_ratio_mask"] != 0].mean()
        own_N = torch.where(counted_N, logprobs_N - logprobs_N.detach(), torch.zeros_like(logprobs_N))
        objective_N, is_clipped_N = clipped_objective(torch.exp(sequence_log_ratio + own_N), inputs, options)
        metrics = diagnostics(difference_N, counted_N) | {
            "clipped_tokens:sum": total(is_clipped_N & counted_N),
            "sequence_log_ratio_abs:max": sequence_log_ratio.abs().double(),
        }
        return TokenLoss(weighted(-objective_N, inputs), metrics)


LOSS = GSPO()

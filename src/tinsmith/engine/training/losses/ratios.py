"""What the reinforcement-learning losses share: the probability ratio, weights, clip thresholds and diagnostics.

p is the logprob under the model in training, q the one at sampling time (`logprobs`), r = exp(p - q), A the advantage.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from tinsmith.engine.training.losses.base import total


def is_counted(inputs: Mapping[str, Tensor]) -> Tensor:
    """Return which tokens count: advantage and weight are not 0. Prompts are commonly padded with zeros."""
    counted_N = inputs["advantages"] != 0
    return counted_N & (inputs["weights"] != 0) if "weights" in inputs else counted_N


def log_ratio(logprobs_N: Tensor, inputs: Mapping[str, Tensor], counted_N: Tensor) -> Tensor:
    """Return p - q; 0 for tokens that do not count, whose q may be anything and must not overflow into 0 * inf."""
    return torch.where(counted_N, logprobs_N - inputs["logprobs"], torch.zeros_like(logprobs_N))


def weighted(loss_N: Tensor, inputs: Mapping[str, Tensor]) -> Tensor:
    """Return the loss times the weights, if there are any."""
    return loss_N * inputs["weights"] if "weights" in inputs else loss_N


def thresholds(inputs: Mapping[str, Tensor], options: Mapping[str, float], like_N: Tensor) -> tuple[Tensor, Tensor]:
    """Return each token's low and high clip threshold; thresholds given per token take precedence over the options."""
    low_N, high_N = (
        inputs[name] if name in inputs else like_N.new_full((), options[name])
        for name in ("clip_low_threshold", "clip_high_threshold")
    )
    return low_N, high_N


def clipped_objective(
    ratio_N: Tensor, inputs: Mapping[str, Tensor], options: Mapping[str, float]
) -> tuple[Tensor, Tensor]:
    """Return PPO's objective min(r A, clip(r) A), and where clipping removed the gradient."""
    low_N, high_N = thresholds(inputs, options, ratio_N)
    advantages_N = inputs["advantages"]
    objective_N = torch.minimum(ratio_N * advantages_N, ratio_N.clamp(low_N, high_N) * advantages_N)
    with torch.no_grad():
        is_clipped_N = ((ratio_N > high_N) & (advantages_N > 0)) | ((ratio_N < low_N) & (advantages_N < 0))
    return objective_N, is_clipped_N


def diagnostics(log_ratio_N: Tensor, counted_N: Tensor) -> dict[str, Tensor]:
    """Return how far the policy is from the one that sampled. Divide the KL estimates by `tokens:sum` for means.

    v1 is q - p, which is unbiased; v2 is half its square, which has less variance and is never negative.
    """
    log_ratio_N = torch.where(counted_N, log_ratio_N.detach(), torch.zeros_like(log_ratio_N))
    return {
        "tokens:sum": total(counted_N),
        "kl_sample_train_v1:sum": total(-log_ratio_N),
        "kl_sample_train_v2:sum": total(0.5 * log_ratio_N.square()),
        "log_ratio_abs:max": log_ratio_N.abs().amax().double() if log_ratio_N.numel() else total(log_ratio_N),
    }

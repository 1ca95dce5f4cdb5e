"""Rotary positions: the frequencies of each kind of scaling, and the rotation itself.

Shapes: T tokens, H heads (query or key), C head dim, F = C / 2 frequencies.
"""

from __future__ import annotations

import math

import torch

from tinsmith.engine.models.config import RopeConfig


class Rope:
    """Cosines and sines for positions."""

    def __init__(self, config: RopeConfig, head_dim: int, device: torch.device, dtype: torch.dtype) -> None:
        frequencies_F, self._scale = frequencies(config, head_dim)
        self._frequencies_F = frequencies_F.to(device)
        self._dtype = dtype

    def angles(self, positions_T: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """cos_T1F and sin_T1F, to be used with `rotate`."""
        angles_TF = positions_T.to(torch.float32).unsqueeze(1) * self._frequencies_F
        cos_TF, sin_TF = angles_TF.cos(), angles_TF.sin()
        if self._scale != 1.0:
            cos_TF, sin_TF = cos_TF * self._scale, sin_TF * self._scale
        return cos_TF.to(self._dtype).unsqueeze(1), sin_TF.to(self._dtype).unsqueeze(1)


def rotate(x_THC: torch.Tensor, cos_T1F: torch.Tensor, sin_T1F: torch.Tensor) -> torch.Tensor:
    """Each head's first and second half turned against each other by its token's angles."""
    first_THF, second_THF = x_THC.chunk(2, dim=-1)
    return torch.cat((first_THF * cos_T1F - second_THF * sin_T1F, second_THF * cos_T1F + first_THF * sin_T1F), dim=-1)


def frequencies(config: RopeConfig, head_dim: int) -> tuple[torch.Tensor, float]:
    """Angle per position for each of the C / 2 pairs, and what cosines and sines are multiplied by."""
    exponents_F = torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim
    plain_F = 1.0 / (config.theta**exponents_F)
    if config.kind == "linear":
        return plain_F / config.factor, 1.0
    if config.kind == "llama3":
        return _llama3(config, plain_F), 1.0
    if config.kind == "yarn":
        return _yarn(config, head_dim, config.theta**exponents_F), _yarn_attention_factor(config)
    if config.kind == "factors":
        return plain_F / torch.tensor(config.factors, dtype=torch.float32), 1.0
    return plain_F, 1.0


def _llama3(config: RopeConfig, plain_F: torch.Tensor) -> torch.Tensor:
    """Long wavelengths stretched by the factor, short ones left, a smooth change between."""
    context, low, high = config.original_context_length, config.low_freq_factor, config.high_freq_factor
    wavelengths_F = 2 * math.pi / plain_F
    smooth_F = (context / wavelengths_F - low) / (high - low)
    between_F = (1 - smooth_F) * plain_F / config.factor + smooth_F * plain_F
    stretched_F = torch.where(wavelengths_F > context / low, plain_F / config.factor, between_F)
    return torch.where(wavelengths_F < context / high, plain_F, stretched_F)


def _yarn(config: RopeConfig, head_dim: int, periods_F: torch.Tensor) -> torch.Tensor:
    """Fast rotations kept, slow ones stretched by the factor, a linear ramp between."""

    def dimension(rotations: float) -> float:
        turns = config.original_context_length / (rotations * 2 * math.pi)
        return head_dim * math.log(turns) / (2 * math.log(config.theta))

    low, high = dimension(config.beta_fast), dimension(config.beta_slow)
    if config.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    if low == high:
        high += 0.001
    ramp_F = ((torch.arange(head_dim // 2, dtype=torch.float32) - low) / (high - low)).clamp(0, 1)
    return ramp_F / (config.factor * periods_F) + (1 - ramp_F) / periods_F


def _yarn_attention_factor(config: RopeConfig) -> float:
    def scale(mscale: float) -> float:
        return 1.0 if config.factor <= 1 else 0.1 * mscale * math.log(config.factor) + 1.0

    if config.attention_factor is not None:
        return config.attention_factor
    if config.mscale and config.mscale_all_dim:
        return scale(config.mscale) / scale(config.mscale_all_dim)
    return scale(1.0)

"""Causal attention over packed sequences, and rotary position embeddings (RoPE).

Packed means that sequences are concatenated without padding; no token attends to another sequence. RoPE rotates each
pair of a head's numbers by an angle that grows with the position, at a frequency of its own; models differ in how they
stretch these frequencies to a longer context.

Shapes: T tokens of all sequences, N tokens of one, H query heads, K key/value heads, C head dim, F frequencies
(C / 2, or fewer).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TypeAlias

import torch
from torch.nn.functional import scaled_dot_product_attention

from tinsmith.engine.models.config import ModelConfig, RopeConfig


class PackedAttention:
    """The attention of concatenated sequences of the given lengths."""

    def __init__(self, config: ModelConfig, lengths: Sequence[int]) -> None:
        self._config = config
        self._lengths = tuple(lengths)

    def __call__(self, layer: int, q_THC: torch.Tensor, k_TKC: torch.Tensor, v_TKC: torch.Tensor) -> torch.Tensor:
        config, outputs, start = self._config, [], 0
        window, scale, cap = config.sliding_window(layer), config.score_scale, config.attention_softcap
        for length in self._lengths:
            rows = slice(start, start + length)
            parts = q_THC[rows], k_TKC[rows], v_TKC[rows]
            outputs.append(_capped(*parts, window, scale, cap) if cap else _causal(*parts, window, scale))
            start += length
        return torch.cat(outputs) if len(outputs) > 1 else outputs[0]

    def positions(self, device: torch.device) -> torch.Tensor:
        return positions_of(self._lengths, device)


def positions_of(lengths: Sequence[int], device: torch.device) -> torch.Tensor:
    """Return positions_T, counted from 0 in each sequence."""
    return torch.cat([torch.arange(length, device=device) for length in lengths])


def _causal(
    q_NHC: torch.Tensor, k_NKC: torch.Tensor, v_NKC: torch.Tensor, window: int | None, scale: float
) -> torch.Tensor:
    """Compute the attention within one sequence."""
    q, k, v = (x.transpose(0, 1).unsqueeze(0) for x in (q_NHC, k_NKC, v_NKC))
    is_shared = q_NHC.shape[1] != k_NKC.shape[1]
    if window is not None and q_NHC.shape[0] > window:
        mask_NN = sliding_mask(q_NHC.shape[0], window, q.device)
        out = scaled_dot_product_attention(q, k, v, attn_mask=mask_NN, enable_gqa=is_shared, scale=scale)
    else:
        out = scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=is_shared, scale=scale)
    return out.squeeze(0).transpose(0, 1)


def _capped(
    q_NHC: torch.Tensor, k_NKC: torch.Tensor, v_NKC: torch.Tensor, window: int | None, scale: float, cap: float
) -> torch.Tensor:
    """Compute the same with bounded scores, which torch has no function for."""
    length, heads = q_NHC.shape[:2]
    k_NHC, v_NHC = (x_NKC.repeat_interleave(heads // x_NKC.shape[1], dim=1) for x_NKC in (k_NKC, v_NKC))
    scores_HNN = softcap(torch.einsum("nhc,mhc->hnm", q_NHC, k_NHC).float() * scale, cap)
    mask_NN = sliding_mask(length, window or length, q_NHC.device)
    weights_HNN = scores_HNN.masked_fill(~mask_NN, float("-inf")).softmax(dim=-1).to(q_NHC.dtype)
    return torch.einsum("hnm,mhc->nhc", weights_HNN, v_NHC)


def softcap(x: torch.Tensor, cap: float) -> torch.Tensor:
    """Return numbers that are bounded by `cap`, and near 0 are those given."""
    return torch.tanh(x / cap) * cap


def sliding_mask(length: int, window: int, device: torch.device) -> torch.Tensor:
    """Return True where query i sees key j: j <= i and j > i - window."""
    index_N = torch.arange(length, device=device)
    distance_NN = index_N.unsqueeze(1) - index_N.unsqueeze(0)
    return (distance_NN >= 0) & (distance_NN < window)


Angles: TypeAlias = tuple[torch.Tensor, torch.Tensor]
"""cos_T1F and sin_T1F for `rotate`."""


class Rope:
    """The cosines and sines of positions."""

    def __init__(self, config: RopeConfig, head_dim: int, device: torch.device, dtype: torch.dtype) -> None:
        frequencies_F, self._scale = frequencies(config, head_dim)
        self._frequencies_F = frequencies_F.to(device)
        self._dtype = dtype

    def angles(self, positions_T: torch.Tensor) -> Angles:
        angles_TF = positions_T.to(torch.float32).unsqueeze(1) * self._frequencies_F
        cos_TF, sin_TF = angles_TF.cos(), angles_TF.sin()
        if self._scale != 1.0:
            cos_TF, sin_TF = cos_TF * self._scale, sin_TF * self._scale
        return cos_TF.to(self._dtype).unsqueeze(1), sin_TF.to(self._dtype).unsqueeze(1)


def rotate(x_THC: torch.Tensor, cos_T1F: torch.Tensor, sin_T1F: torch.Tensor) -> torch.Tensor:
    """Rotate each head's first and second F numbers against each other by its token's angles; keep what comes after."""
    pairs = cos_T1F.shape[-1]
    first_THF, second_THF, *rest = x_THC.tensor_split((pairs, 2 * pairs), dim=-1)
    turned = first_THF * cos_T1F - second_THF * sin_T1F, second_THF * cos_T1F + first_THF * sin_T1F
    return torch.cat((*turned, *rest), dim=-1)


def frequencies(config: RopeConfig, head_dim: int) -> tuple[torch.Tensor, float]:
    """Return the angle per position of each pair, and the factor for cosines and sines."""
    head_dim = config.rotary_dim or head_dim
    exponents_F = torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim
    plain_F = 1.0 / (config.theta**exponents_F)
    if config.kind == "linear":
        return plain_F / config.factor, 1.0
    if config.kind == "llama3":
        return _llama3(config, plain_F), 1.0
    if config.kind == "yarn":
        return _yarn(config, head_dim, config.theta**exponents_F), _yarn_attention_factor(config)
    if config.kind == "factors":
        scale = 1.0 if config.attention_factor is None else config.attention_factor
        return plain_F / torch.tensor(config.factors, dtype=torch.float32), scale
    return plain_F, 1.0


def _llama3(config: RopeConfig, plain_F: torch.Tensor) -> torch.Tensor:
    """Stretch long wavelengths by the factor, keep short ones, and change smoothly in between."""
    context, low, high = config.original_context_length, config.low_freq_factor, config.high_freq_factor
    wavelengths_F = 2 * math.pi / plain_F
    smooth_F = (context / wavelengths_F - low) / (high - low)
    between_F = (1 - smooth_F) * plain_F / config.factor + smooth_F * plain_F
    stretched_F = torch.where(wavelengths_F > context / low, plain_F / config.factor, between_F)
    return torch.where(wavelengths_F < context / high, plain_F, stretched_F)


def _yarn(config: RopeConfig, head_dim: int, periods_F: torch.Tensor) -> torch.Tensor:
    """Keep fast rotations, stretch slow ones by the factor, with a linear ramp in between."""

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

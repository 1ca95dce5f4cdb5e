"""Causal attention over packed sequences: no padding, no token sees another sequence.

Shapes: T tokens of all sequences, N tokens of one, H query heads, K key/value heads, C head dim.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch.nn.functional import scaled_dot_product_attention

from tinsmith.engine.models.config import ModelConfig


class PackedAttention:
    """The `attend` of training: sequences of the given lengths lie one after another."""

    def __init__(self, config: ModelConfig, lengths: Sequence[int]) -> None:
        self._config = config
        self._lengths = tuple(lengths)

    def __call__(self, layer: int, q_THC: torch.Tensor, k_TKC: torch.Tensor, v_TKC: torch.Tensor) -> torch.Tensor:
        window = self._config.sliding_window(layer)
        outputs, start = [], 0
        for length in self._lengths:
            rows = slice(start, start + length)
            outputs.append(_causal(q_THC[rows], k_TKC[rows], v_TKC[rows], window))
            start += length
        return torch.cat(outputs) if len(outputs) > 1 else outputs[0]

    def positions(self, device: torch.device) -> torch.Tensor:
        """positions_T: each sequence counts from 0."""
        return torch.cat([torch.arange(length, device=device) for length in self._lengths])


def _causal(q_NHC: torch.Tensor, k_NKC: torch.Tensor, v_NKC: torch.Tensor, window: int | None) -> torch.Tensor:
    """Attention within one sequence."""
    q_HNC, k_KNC, v_KNC = q_NHC.transpose(0, 1), k_NKC.transpose(0, 1), v_NKC.transpose(0, 1)
    groups = q_HNC.shape[0] // k_KNC.shape[0]
    if groups > 1:
        k_KNC, v_KNC = k_KNC.repeat_interleave(groups, 0), v_KNC.repeat_interleave(groups, 0)
    q, k, v = q_HNC.unsqueeze(0), k_KNC.unsqueeze(0), v_KNC.unsqueeze(0)
    if window is not None and q_NHC.shape[0] > window:
        out = scaled_dot_product_attention(q, k, v, attn_mask=sliding_mask(q_NHC.shape[0], window, q.device))
    else:
        out = scaled_dot_product_attention(q, k, v, is_causal=True)
    return out.squeeze(0).transpose(0, 1)


def sliding_mask(length: int, window: int, device: torch.device) -> torch.Tensor:
    """True where query i sees key j: j <= i and j > i - window."""
    index_N = torch.arange(length, device=device)
    distance_NN = index_N.unsqueeze(1) - index_N.unsqueeze(0)
    return (distance_NN >= 0) & (distance_NN < window)

"""Causal attention over packed sequences: no padding, no token sees another sequence.

Shapes: T tokens of all sequences, N tokens of one, H query heads, K key/value heads, C head dim.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch.nn.functional import scaled_dot_product_attention

from tinsmith.engine.models.config import ModelConfig


class PackedAttention:
    """The `attend` of sequences of the given lengths that lie one after another."""

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
        return positions_of(self._lengths, device)


def positions_of(lengths: Sequence[int], device: torch.device) -> torch.Tensor:
    """positions_T: each sequence counts from 0."""
    return torch.cat([torch.arange(length, device=device) for length in lengths])


def _causal(q_NHC: torch.Tensor, k_NKC: torch.Tensor, v_NKC: torch.Tensor, window: int | None) -> torch.Tensor:
    """Attention within one sequence."""
    q, k, v = (x.transpose(0, 1).unsqueeze(0) for x in (q_NHC, k_NKC, v_NKC))
    is_shared = q_NHC.shape[1] != k_NKC.shape[1]
    if window is not None and q_NHC.shape[0] > window:
        mask_NN = sliding_mask(q_NHC.shape[0], window, q.device)
        out = scaled_dot_product_attention(q, k, v, attn_mask=mask_NN, enable_gqa=is_shared)
    else:
        out = scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=is_shared)
    return out.squeeze(0).transpose(0, 1)


def sliding_mask(length: int, window: int, device: torch.device) -> torch.Tensor:
    """True where query i sees key j: j <= i and j > i - window."""
    index_N = torch.arange(length, device=device)
    distance_NN = index_N.unsqueeze(1) - index_N.unsqueeze(0)
    return (distance_NN >= 0) & (distance_NN < window)

"""The loops of `row_ops.CompiledRows`: like `cpu_kernels`, for training.

Shapes: as in `row_ops`.
"""

from __future__ import annotations

import math

import numpy as np
from numba import prange

from tinsmith.engine.cpu_kernels import Floats, compiled, exponential


@compiled()
def norm(x_TD: Floats, weight_D: Floats, eps: np.float32, scale_T1: Floats, out_TD: Floats) -> None:
    """out = x / rms(x) * weight, and 1 / rms(x)."""
    rows, width = x_TD.shape
    for t in prange(rows):
        total = np.float32(0)
        for d in range(width):
            total += x_TD[t, d] * x_TD[t, d]
        scale = np.float32(1) / math.sqrt(total / np.float32(width) + eps)
        scale_T1[t, 0] = scale
        for d in range(width):
            out_TD[t, d] = x_TD[t, d] * scale * weight_D[d]


@compiled()
def scaled(x_TD: Floats, scale_T1: Floats, weight_D: Floats, out_TD: Floats) -> None:
    """out = x * scale * weight."""
    rows, width = x_TD.shape
    for t in prange(rows):
        scale = scale_T1[t, 0]
        for d in range(width):
            out_TD[t, d] = x_TD[t, d] * scale * weight_D[d]


@compiled()
def add_norm_back(grad_TD: Floats, x_TD: Floats, scale_T1: Floats, weight_D: Floats, out_TD: Floats) -> None:
    """out += the gradient at x, from that at x * scale * weight with scale = 1 / rms(x)."""
    rows, width = x_TD.shape
    for t in prange(rows):
        scale, along = scale_T1[t, 0], np.float32(0)
        for d in range(width):
            along += grad_TD[t, d] * weight_D[d] * (x_TD[t, d] * scale)
        along /= np.float32(width)
        for d in range(width):
            out_TD[t, d] += (grad_TD[t, d] * weight_D[d] - x_TD[t, d] * scale * along) * scale


@compiled()
def gate_back(active_grad_TI: Floats, gate_up_TE: Floats, out_TE: Floats) -> None:
    """The gradient at both halves of gate_up, from that at silu(gate) * up."""
    rows, width = active_grad_TI.shape
    one = np.float32(1)
    for t in prange(rows):
        for i in range(width):
            value, grad = gate_up_TE[t, i], active_grad_TI[t, i]
            share = one / (one + exponential(-value))
            out_TE[t, i] = grad * gate_up_TE[t, width + i] * (share * (one + value * (one - share)))
            out_TE[t, width + i] = grad * (value * share)


@compiled()
def turn(x_THC: Floats, heads: int, cos_T1F: Floats, sin_T1F: Floats, out_THC: Floats) -> None:
    """The two halves of each of the first heads turned against each other by their token's angles."""
    rows, all_heads, head_dim = x_THC.shape
    half = head_dim // 2
    for t in prange(rows):
        for h in range(heads):
            for f in range(half):
                first, second = x_THC[t, h, f], x_THC[t, h, half + f]
                out_THC[t, h, f] = first * cos_T1F[t, 0, f] - second * sin_T1F[t, 0, f]
                out_THC[t, h, half + f] = second * cos_T1F[t, 0, f] + first * sin_T1F[t, 0, f]
        for h in range(heads, all_heads):
            for c in range(head_dim):
                out_THC[t, h, c] = x_THC[t, h, c]

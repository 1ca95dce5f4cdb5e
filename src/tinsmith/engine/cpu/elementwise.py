"""Norms, rotary embeddings and the MLP's gate on a CPU, for sampling and training: one compiled loop each.

In torch each of these is a chain of calls, every one of which reads and writes the whole tensor. Here a row is read
once, computed in registers and written once. numba compiles the loops on first use, which takes some seconds once per
machine, and caches them on disk.

A row's result depends on that row and its position alone, in an order of sums that is the same in every batch: that is
what makes a sample independent of what runs beside it. Everything is float32.

Shapes: T rows, D hidden, E stacked outputs, H normed heads, K key/value heads, C head dim, F rotated pairs, B block
size, N blocks of the cache, I intermediate. The training loops use those of `training/row_ops`.
"""

from __future__ import annotations

import functools
import math
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import torch
from llvmlite import ir
from numba import config, get_num_threads, njit, prange, set_num_threads, types
from numba.extending import intrinsic

Floats: TypeAlias = npt.NDArray[np.float32]
Integers: TypeAlias = npt.NDArray[np.int64]

FAST = {"reassoc", "contract", "nsz", "arcp"}
"""Compiler flags: sums may be split over vector lanes (always in the same way); infinities and NaN are respected."""

compiled = functools.partial(njit, cache=True, parallel=True, fastmath=FAST, error_model="numpy")


@intrinsic
def _as_float(context: Any, bits: Any) -> Any:
    """Return the float32 with these bits."""

    def codegen(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.bitcast(arguments[0], ir.FloatType())

    return types.float32(types.int32), codegen


_LOG2_E, _LN_2, _LN_2_LOW = np.float32(1.4426950408889634), np.float32(0.693359375), np.float32(-2.12194440e-4)
_LEAST, _MOST = np.float32(-87.3), np.float32(88.3)


@njit(cache=True, fastmath={"contract", "nsz"}, error_model="numpy")
def exponential(x: np.float32) -> np.float32:
    """Return e^x with a relative error of at most 1e-7, in a form that lets the loops around it be vectorised.

    x is split into n ln 2 + r with |r| <= ln 2 / 2. e^r is a polynomial (that of the Cephes library), and 2^n is made
    by writing n into the exponent bits of a float.
    """
    y = min(max(x, _LEAST), _MOST)
    n = np.floor(y * _LOG2_E + np.float32(0.5))
    r = y - n * _LN_2 - n * _LN_2_LOW
    p = np.float32(1.9875691500e-4)
    p = p * r + np.float32(1.3981999507e-3)
    p = p * r + np.float32(8.3334519073e-3)
    p = p * r + np.float32(4.1665795894e-2)
    p = p * r + np.float32(1.6666665459e-1)
    p = p * r + np.float32(5.0000001201e-1)
    p = p * r * r + r + np.float32(1)
    value = p * _as_float(np.int32(np.int32(n) + np.int32(127)) << np.int32(23))
    if x < _LEAST:
        return np.float32(0)
    if x > _MOST:
        return np.float32(np.inf)
    return value if x == x else x


@njit(cache=True, fastmath={"contract", "nsz"}, error_model="numpy")
def hyperbolic_tangent(x: np.float32) -> np.float32:
    """Return tanh x with a relative error of at most 3e-7: near 0 by a polynomial (Cephes), else by e^2x."""
    z = x * x
    p = np.float32(-5.70498872745e-3)
    p = p * z + np.float32(2.06390887954e-2)
    p = p * z + np.float32(-5.37397155531e-2)
    p = p * z + np.float32(1.33314422036e-1)
    p = p * z + np.float32(-3.33332819422e-1)
    near = p * z * x + x
    far: np.float32 = np.float32(1) - np.float32(2) / (exponential(np.float32(2) * abs(x)) + np.float32(1))
    if abs(x) < np.float32(0.625):
        return near
    return far if x > np.float32(0) else -far


_GELU, _GELU_CUBE = np.float32(math.sqrt(2 / math.pi)), np.float32(0.044715)


@njit(cache=True, fastmath={"contract", "nsz"}, error_model="numpy")
def gelu_share(x: np.float32) -> np.float32:
    """Return gelu(x) / x, with the tanh form of gelu: (1 + tanh u) / 2 = 1 / (1 + e^-2u)."""
    u = _GELU * (x + _GELU_CUBE * x * x * x)
    share: np.float32 = np.float32(1) / (np.float32(1) + exponential(np.float32(-2) * u))
    return share


GRAIN = 32768
"""Work on fewer numbers than this stays on one thread: on a busy machine, waiting for a second one takes longer."""


def thread_limit() -> int:
    """Return how many threads kernels may use: as many as torch."""
    return min(torch.get_num_threads(), int(config.NUMBA_NUM_THREADS))


def use_threads(numbers: int) -> None:
    """Set how many threads the next kernels use, by the size of their work: all that torch may use, or one."""
    count = thread_limit() if numbers >= GRAIN else 1
    if get_num_threads() != count:
        set_num_threads(count)


def _start_threads() -> None:
    """Make numba start its threads now. They are OpenMP's, like torch's, and starting them also sets torch's number."""
    count = torch.get_num_threads()
    set_num_threads(get_num_threads())
    torch.set_num_threads(count)


_start_threads()


@njit(cache=True, fastmath={"nsz"}, error_model="numpy")
def scaled_by(x: np.float32, scale: np.float32, weight: np.float32) -> np.float32:
    """Return x * scale * weight, multiplied from left to right.

    With `FAST`, products may be regrouped, and each compiled kernel could round them differently; but the backward pass
    computes a norm a second time and must get the same bits.
    """
    return x * scale * weight


@compiled()
def add_norm(x_TD: Floats, y_TD: Floats, factor: np.float32, weight_D: Floats, eps: np.float32, out_TD: Floats) -> None:
    """Compute x += factor * y and out = x / rms(x) * weight."""
    rows, width = x_TD.shape
    for t in prange(rows):
        total = np.float32(0)
        for d in range(width):
            value = x_TD[t, d] + factor * y_TD[t, d]
            x_TD[t, d] = value
            total += value * value
        scale = np.float32(1) / math.sqrt(total / np.float32(width) + eps)
        for d in range(width):
            out_TD[t, d] = scaled_by(x_TD[t, d], scale, weight_D[d])


@compiled()
def add_only(x_TD: Floats, y_TD: Floats, factor: np.float32, out_TD: Floats) -> None:
    """Compute x += factor * y and out = x, for models that have no norm there."""
    rows, width = x_TD.shape
    for t in prange(rows):
        for d in range(width):
            value = x_TD[t, d] + factor * y_TD[t, d]
            x_TD[t, d] = value
            out_TD[t, d] = value


@compiled()
def norm_runs(x_TE: Floats, start: int, weight_E: Floats, size: int, eps: np.float32) -> None:
    """Normalise, in place, numbers from `start` on that have a weight: each run of `size` of them by itself."""
    for t in prange(x_TE.shape[0]):
        for first in range(0, len(weight_E), size):
            total = np.float32(0)
            for e in range(size):
                total += x_TE[t, start + first + e] * x_TE[t, start + first + e]
            scale = np.float32(1) / math.sqrt(total / np.float32(size) + eps)
            for e in range(size):
                x_TE[t, start + first + e] = scaled_by(x_TE[t, start + first + e], scale, weight_E[first + e])


@compiled()
def bound(x_TE: Floats, cap: np.float32) -> None:
    """Compute x = cap * tanh(x / cap)."""
    rows, width = x_TE.shape
    for t in prange(rows):
        for e in range(width):
            x_TE[t, e] = cap * hyperbolic_tangent(x_TE[t, e] / cap)


@compiled()
def gate_gelu(gate_up_TE: Floats, out_TI: Floats) -> None:
    """Compute gelu(first half) * second half, with the tanh form of gelu."""
    rows, width = out_TI.shape
    for t in prange(rows):
        for i in range(width):
            value = gate_up_TE[t, i]
            out_TI[t, i] = value * gelu_share(value) * gate_up_TE[t, width + i]


@compiled()
def gate(gate_up_TE: Floats, out_TI: Floats) -> None:
    """Compute silu(first half) * second half."""
    rows, width = out_TI.shape
    one = np.float32(1)
    for t in prange(rows):
        for i in range(width):
            value = gate_up_TE[t, i]
            out_TI[t, i] = value / (one + exponential(-value)) * gate_up_TE[t, width + i]


@compiled()
def turn_and_keep(
    qkv_TE: Floats,
    heads: int,
    norms_HC: Floats,
    eps: np.float32,
    cos_TF: Floats,
    sin_TF: Floats,
    block_T: Integers,
    slot_T: Integers,
    keys_NKCB: Floats,
    values_NKBC: Floats,
) -> None:
    """Normalise (if there are head norms) and rotate queries and keys in place; copy keys and values to the cache."""
    kv_heads, head_dim = keys_NKCB.shape[1], keys_NKCB.shape[2]
    half = cos_TF.shape[1]
    turned = heads + kv_heads
    for t in prange(qkv_TE.shape[0]):
        for h in range(turned):
            start = h * head_dim
            if len(norms_HC):
                total = np.float32(0)
                for c in range(head_dim):
                    total += qkv_TE[t, start + c] * qkv_TE[t, start + c]
                scale = np.float32(1) / math.sqrt(total / np.float32(head_dim) + eps)
                for c in range(head_dim):
                    qkv_TE[t, start + c] *= scale * norms_HC[h, c]
            for f in range(half):
                first, second = qkv_TE[t, start + f], qkv_TE[t, start + half + f]
                qkv_TE[t, start + f] = first * cos_TF[t, f] - second * sin_TF[t, f]
                qkv_TE[t, start + half + f] = second * cos_TF[t, f] + first * sin_TF[t, f]
        block, slot = block_T[t], slot_T[t]
        for k in range(kv_heads):
            key, value = (heads + k) * head_dim, (turned + k) * head_dim
            for c in range(head_dim):
                keys_NKCB[block, k, c, slot] = qkv_TE[t, key + c]
                values_NKBC[block, k, slot, c] = qkv_TE[t, value + c]


@compiled()
def norm(x_TD: Floats, weight_D: Floats, eps: np.float32, scale_T1: Floats, out_TD: Floats) -> None:
    """Compute out = x / rms(x) * weight, and store 1 / rms(x)."""
    rows, width = x_TD.shape
    for t in prange(rows):
        total = np.float32(0)
        for d in range(width):
            total += x_TD[t, d] * x_TD[t, d]
        scale = np.float32(1) / math.sqrt(total / np.float32(width) + eps)
        scale_T1[t, 0] = scale
        for d in range(width):
            out_TD[t, d] = scaled_by(x_TD[t, d], scale, weight_D[d])


@compiled()
def scaled(x_TD: Floats, scale_T1: Floats, weight_D: Floats, out_TD: Floats) -> None:
    """Compute out = x * scale * weight."""
    rows, width = x_TD.shape
    for t in prange(rows):
        scale = scale_T1[t, 0]
        for d in range(width):
            out_TD[t, d] = scaled_by(x_TD[t, d], scale, weight_D[d])


@compiled()
def add_norm_back(grad_TD: Floats, x_TD: Floats, scale_T1: Floats, weight_D: Floats, out_TD: Floats) -> None:
    """Add the gradient of x to out, given that of x * scale * weight with scale = 1 / rms(x)."""
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
    """Compute the gradient of both halves of gate_up, given that of silu(gate) * up."""
    rows, width = active_grad_TI.shape
    one = np.float32(1)
    for t in prange(rows):
        for i in range(width):
            value, grad = gate_up_TE[t, i], active_grad_TI[t, i]
            share = one / (one + exponential(-value))
            out_TE[t, i] = grad * gate_up_TE[t, width + i] * (share * (one + value * (one - share)))
            out_TE[t, width + i] = grad * (value * share)


@compiled()
def gate_gelu_back(active_grad_TI: Floats, gate_up_TE: Floats, out_TE: Floats) -> None:
    """Compute the gradient of both halves of gate_up, given that of gelu(gate) * up."""
    rows, width = active_grad_TI.shape
    one, two, three = np.float32(1), np.float32(2), np.float32(3)
    for t in prange(rows):
        for i in range(width):
            value, grad = gate_up_TE[t, i], active_grad_TI[t, i]
            share = gelu_share(value)
            slope = two * _GELU * (one + three * _GELU_CUBE * value * value)
            out_TE[t, i] = grad * gate_up_TE[t, width + i] * (share * (one + value * slope * (one - share)))
            out_TE[t, width + i] = grad * (value * share)


@compiled()
def turn(x_THC: Floats, heads: int, cos_T1F: Floats, sin_T1F: Floats, out_THC: Floats) -> None:
    """Rotate the first F numbers of each of the first `heads` heads against the next F by their token's angles."""
    rows, all_heads, head_dim = x_THC.shape
    half = cos_T1F.shape[2]
    for t in prange(rows):
        for h in range(heads):
            for f in range(half):
                first, second = x_THC[t, h, f], x_THC[t, h, half + f]
                out_THC[t, h, f] = first * cos_T1F[t, 0, f] - second * sin_T1F[t, 0, f]
                out_THC[t, h, half + f] = second * cos_T1F[t, 0, f] + first * sin_T1F[t, 0, f]
            for c in range(2 * half, head_dim):
                out_THC[t, h, c] = x_THC[t, h, c]
        for h in range(heads, all_heads):
            for c in range(head_dim):
                out_THC[t, h, c] = x_THC[t, h, c]

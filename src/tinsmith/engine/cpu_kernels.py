"""The sampler's small operations on a CPU, each as one compiled loop instead of many calls of torch.

Owns: norm with residual, rotation and filling of the cache, the gate of the MLP. Compiled by numba at their first use,
which takes some seconds once per machine, and kept on disk.
Does not know: tensors, models, who holds which block.

A row's result depends on that row and its position alone, in an order of sums that is the same in every batch: that is
what makes a sample independent of what runs beside it. Everything is float32.

Shapes: T rows, D hidden, E stacked outputs, H normed heads, K key/value heads, C head dim, F = C / 2, B block size,
N blocks of the cache, I intermediate.
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
"""Sums may be split over vector lanes, always in the same way; infinities and NaN keep their meaning."""

compiled = functools.partial(njit, cache=True, parallel=True, fastmath=FAST, error_model="numpy")


@intrinsic
def _as_float(context: Any, bits: Any) -> Any:
    """The float32 that has these bits."""

    def codegen(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.bitcast(arguments[0], ir.FloatType())

    return types.float32(types.int32), codegen


_LOG2_E, _LN_2, _LN_2_LOW = np.float32(1.4426950408889634), np.float32(0.693359375), np.float32(-2.12194440e-4)
_LEAST, _MOST = np.float32(-87.3), np.float32(88.3)


@njit(cache=True, fastmath={"contract", "nsz"}, error_model="numpy")
def exponential(x: np.float32) -> np.float32:
    """e to the x, off by 1e-7 of it at most, in a form that loops over it can be vectorised with.

    x = n ln 2 + r with |r| <= ln 2 / 2: a polynomial in r (that of the Cephes library), times 2 to the n.
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


GRAIN = 32768
"""Work on fewer numbers than this is not worth a second thread: on a busy machine it would have to be waited for."""


def thread_limit() -> int:
    """Threads that kernels may use: as many as torch's."""
    return min(torch.get_num_threads(), int(config.NUMBA_NUM_THREADS))


def use_threads(numbers: int) -> None:
    """Choose the threads of the kernels that this thread calls next, by the size of their work: torch's, or one."""
    count = thread_limit() if numbers >= GRAIN else 1
    if get_num_threads() != count:
        set_num_threads(count)


def _start_threads() -> None:
    """Have numba start its threads now: they are OpenMP's, as torch's are, and it sets torch's number as well."""
    count = torch.get_num_threads()
    set_num_threads(get_num_threads())
    torch.set_num_threads(count)


_start_threads()


@compiled()
def add_norm(x_TD: Floats, y_TD: Floats, weight_D: Floats, eps: np.float32, out_TD: Floats) -> None:
    """x += y, and out = x / rms(x) * weight."""
    rows, width = x_TD.shape
    for t in prange(rows):
        total = np.float32(0)
        for d in range(width):
            value = x_TD[t, d] + y_TD[t, d]
            x_TD[t, d] = value
            total += value * value
        scale = np.float32(1) / math.sqrt(total / np.float32(width) + eps)
        for d in range(width):
            out_TD[t, d] = x_TD[t, d] * scale * weight_D[d]


@compiled()
def gate(gate_up_TE: Floats, out_TI: Floats) -> None:
    """silu of the first half times the second."""
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
    """Queries and keys normed (if there are norms) and turned in place; keys and values into the cache."""
    kv_heads, head_dim = keys_NKCB.shape[1], keys_NKCB.shape[2]
    half = head_dim // 2
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

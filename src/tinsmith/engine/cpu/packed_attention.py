"""Causal attention over packed sequences, forward and backward, on a CPU: the attention of training.

The trick is that of FlashAttention: the full matrix of scores, queries x keys, is never stored. A block of queries is
multiplied with all keys it may see, softmaxed and multiplied with the values while its scores are still in the
processor's cache. For the backward pass only the output and one number per row are kept, the logarithm of the row's sum
of exponentials; from that number and q k^T the weights are recomputed exactly (`_softmax_back`).

All products use the tile of `tile`, so keys and values are first copied into panels: `_token_panels` lays out k^T for q
k^T, `_column_panels` lays out values for weights v. Causality saves work at the granularity of tiles: a tile that lies
entirely above the diagonal is skipped, and what a tile on the diagonal computes beyond it is set to zero (`_clear`).

Threads share the work by (head, sequence). Each result is computed by one thread, in an order of sums that depends on
its sequence alone, so neither the batch nor the number of threads changes a bit.

Shapes: T tokens of all sequences, S sequences, H query heads, E heads of queries, keys and values side by side, C head
dim, Q queries of a block, M keys of a sequence, rounded up so that tiles fit, N panels of P = PANEL. `ld` is the
distance between two rows of [Q, M], in numbers.
"""

from __future__ import annotations

import math

import numpy as np
from numba import njit, prange

from tinsmith.engine.cpu.elementwise import FAST, Floats, Integers, compiled, exponential, hyperbolic_tangent
from tinsmith.engine.cpu.product import LANES, PANEL
from tinsmith.engine.cpu.tile import BYTES, make_strided_tile

ROWS = 6
"""Rows of a tile: the most that leave enough registers for the panel."""

BLOCK = math.lcm(PANEL, ROWS) * (2 if PANEL < 32 else 1)
"""Queries of a block: a multiple of both a tile's rows and a panel's columns."""

_tile = make_strided_tile(ROWS, LANES, PANEL // LANES)
_ONE = np.float32(1)

_inner = {"cache": True, "fastmath": FAST, "error_model": "numpy"}
# Loops use unsigned indices. A signed index might be negative, which numba would have to handle, and the loop would not
# be vectorised.


@njit(cache=True, fastmath=FAST | {"nnan"}, error_model="numpy")
def _largest(x_QM: Floats, row: int, left: int, right: int) -> np.float32:
    """Return the largest number of a row. If it has a NaN, the result is arbitrary; the exponentials keep the NaN."""
    n, top = np.uint64(row), np.float32(-np.inf)
    for m in range(np.uint64(left), np.uint64(right)):
        top = x_QM[n, m] if x_QM[n, m] > top else top
    return top


@njit(**_inner)
def _exponentials(x_QM: Floats, row: int, left: int, right: int, top: np.float32) -> np.float32:
    """Replace x by e^(x - top) and return the sum."""
    n, total = np.uint64(row), np.float32(0)
    for m in range(np.uint64(left), np.uint64(right)):
        weight = exponential(x_QM[n, m] - top)
        x_QM[n, m] = weight
        total += weight
    return total


@njit(**_inner)
def _scale(x_QM: Floats, row: int, left: int, right: int, factor: np.float32) -> None:
    n = np.uint64(row)
    for m in range(np.uint64(left), np.uint64(right)):
        x_QM[n, m] *= factor


@njit(**_inner)
def _clear(x_QM: Floats, row: int, left: int, right: int) -> None:
    n = np.uint64(row)
    for m in range(np.uint64(left), np.uint64(right)):
        x_QM[n, m] = np.float32(0)


@njit(**_inner)
def _bound(x_QM: Floats, row: int, left: int, right: int, cap: np.float32) -> None:
    """Compute x = cap * tanh(x / cap)."""
    n = np.uint64(row)
    for m in range(np.uint64(left), np.uint64(right)):
        x_QM[n, m] = cap * hyperbolic_tangent(x_QM[n, m] / cap)


@njit(**_inner)
def _bound_back(
    scores_QM: Floats, grad_QM: Floats, row: int, left: int, right: int, along: np.float32, cap: np.float32
) -> None:
    """Subtract `along` from the gradient and multiply it by the derivative of the bound, given the bounded scores.

    What is left for `_softmax_back` to do is the same with 0 for `along`.
    """
    n = np.uint64(row)
    for m in range(np.uint64(left), np.uint64(right)):
        share = scores_QM[n, m] / cap
        grad_QM[n, m] = (grad_QM[n, m] - along) * (_ONE - share * share)


@njit(**_inner)
def _softmax_back(
    scores_QM: Floats, grad_QM: Floats, row: int, left: int, right: int, log_sum: np.float32, along: np.float32
) -> None:
    """Turn scores into weights, and the gradient of the weights into that of the scores, both in place."""
    n = np.uint64(row)
    for m in range(np.uint64(left), np.uint64(right)):
        weight = exponential(scores_QM[n, m] - log_sum)
        scores_QM[n, m] = weight
        grad_QM[n, m] = weight * (grad_QM[n, m] - along)


@njit(**_inner)
def _dot(x_QC: Floats, row: int, y_THC: Floats, token: int, head: int) -> np.float32:
    n, t, h, total = np.uint64(row), np.uint64(token), np.uint64(head), np.float32(0)
    for c in range(np.uint64(x_QC.shape[1])):
        total += x_QC[n, c] * y_THC[t, h, c]
    return total


@njit(**_inner)
def _rows_of(x_THC: Floats, head: int, start: int, count: int, factor: np.float32, out_QC: Floats) -> None:
    """Copy some tokens of a head, times a factor; the remaining rows are set to zero."""
    h = np.uint64(head)
    for q in range(np.uint64(count)):
        t = np.uint64(start) + q
        for c in range(np.uint64(out_QC.shape[1])):
            out_QC[q, c] = x_THC[t, h, c] * factor
    for q in range(np.uint64(count), np.uint64(out_QC.shape[0])):
        for c in range(np.uint64(out_QC.shape[1])):
            out_QC[q, c] = np.float32(0)


@njit(**_inner)
def _put_rows(x_QC: Floats, count: int, out_THC: Floats, start: int, head: int) -> None:
    h = np.uint64(head)
    for q in range(np.uint64(count)):
        t = np.uint64(start) + q
        for c in range(np.uint64(x_QC.shape[1])):
            out_THC[t, h, c] = x_QC[q, c]


@njit(**_inner)
def _token_panels(x_THC: Floats, head: int, start: int, count: int, out_NCP: Floats) -> None:
    """Lay out panels of P tokens side by side (the right operand of q k^T); missing tokens are zero."""
    h, whole = np.uint64(head), np.uint64(count)
    for n in range(np.uint64(out_NCP.shape[0])):
        for p in range(np.uint64(PANEL)):
            token = n * np.uint64(PANEL) + p
            t = np.uint64(start) + token
            for c in range(np.uint64(out_NCP.shape[1])):
                out_NCP[n, c, p] = x_THC[t, h, c] if token < whole else np.float32(0)


@njit(**_inner)
def _column_panels(x_THC: Floats, head: int, start: int, count: int, factor: np.float32, out_NMP: Floats) -> None:
    """Lay out panels of P columns, token below token (the right operand of weights v); missing tokens are zero."""
    h = np.uint64(head)
    for n in range(np.uint64(out_NMP.shape[0])):
        for m in range(np.uint64(count)):
            t = np.uint64(start) + m
            for p in range(np.uint64(PANEL)):
                out_NMP[n, m, p] = x_THC[t, h, n * np.uint64(PANEL) + p] * factor
        for m in range(np.uint64(count), np.uint64(out_NMP.shape[1])):
            for p in range(np.uint64(PANEL)):
                out_NMP[n, m, p] = np.float32(0)


@njit(**_inner)
def _scores(q: int, C: int, panels: int, low: int, first: int, count: int, out: int, ld: int) -> None:
    """Compute out = q k^T where a query of the block may see a key, rounded up to whole tiles."""
    for m in range(low, first + count, PANEL):
        for r in range(max(0, m - first) // ROWS * ROWS, count, ROWS):
            _tile(q + r * C * BYTES, C, 1, panels + m * C * BYTES, PANEL, out + (r * ld + m) * BYTES, ld, C, 1)


@njit(**_inner)
def _sums(
    weights: int, ld: int, panels: int, C: int, M: int, low: int, first: int, count: int, length: int, out: int
) -> None:
    """Compute out = weights v: for each query, the sum over the keys that it sees."""
    for c in range(0, C, PANEL):
        for r in range(0, count, ROWS):
            depth = min(length, first + r + ROWS) - low
            values = panels + (c * M + low * PANEL) * BYTES
            _tile(weights + (r * ld + low) * BYTES, ld, 1, values, PANEL, out + (r * C + c) * BYTES, C, depth, 1)


@njit(**_inner)
def _add_to_keys(
    weights: int, ld: int, panels: int, block: int, C: int, low: int, first: int, count: int, out: int
) -> None:
    """Compute out += weights^T x: for each key, the sum over the queries that see it."""
    for c in range(0, C, PANEL):
        for m in range(low, first + count, ROWS):
            skip = max(0, m - first)
            x = panels + (c * block + skip * PANEL) * BYTES
            _tile(weights + (skip * ld + m) * BYTES, 1, ld, x, PANEL, out + (m * C + c) * BYTES, C, count - skip, 0)


@njit(**_inner)
def _stride(length: int) -> int:
    """Return the distance between two rows of scores: room for whole tiles, and an odd multiple of 16.

    Rows at a distance of a power of two would compete for the same places in the processor's cache.
    """
    return (length + PANEL + ROWS) // 16 * 16 | 16


@njit(**_inner)
def _whole(length: int, unit: int) -> int:
    return (length + unit - 1) // unit * unit


@njit(**_inner)
def _first_key(first: int, window: int) -> int:
    """Return the first key that a query of the block may see, rounded down to a block."""
    return max(0, first - window + 1) // BLOCK * BLOCK if window else 0


@njit(**_inner)
def _new(rows: int, columns: int, depth: int) -> Floats:
    return np.empty((rows, columns, depth), np.float32)


@njit(**_inner)
def _forward(
    qkv_TEC: Floats,
    start: int,
    length: int,
    h: int,
    window: int,
    softener: np.float32,
    cap: np.float32,
    out_THC: Floats,
    log_sum_TH: Floats,
) -> None:
    """Compute one head of one sequence."""
    C, heads = out_THC.shape[2], out_THC.shape[1]
    kv_heads = (qkv_TEC.shape[1] - heads) // 2
    key = heads + h // (heads // kv_heads)
    M, ld, block = _whole(length, PANEL), _stride(length), min(BLOCK, _whole(length, ROWS))
    keys_NCP, values_NMP = _new(M // PANEL, C, PANEL), _new(C // PANEL, M, PANEL)
    q_QC, out_QC, scores_QM = _new(1, block, C)[0], _new(1, block, C)[0], _new(1, block, ld)[0]
    _token_panels(qkv_TEC, key, start, length, keys_NCP)
    _column_panels(qkv_TEC, key + kv_heads, start, length, _ONE, values_NMP)
    scores = scores_QM.ctypes.data
    for first in range(0, length, BLOCK):
        count, low = min(BLOCK, length - first), _first_key(first, window)
        _rows_of(qkv_TEC, h, start + first, count, softener, q_QC)
        _scores(q_QC.ctypes.data, C, keys_NCP.ctypes.data, low, first, count, scores, ld)
        for n in range(count):
            right = first + n + 1
            left = max(low, right - window) if window else 0
            if cap > 0:
                _bound(scores_QM, n, left, right, cap)
            top = _largest(scores_QM, n, left, right)
            total = _exponentials(scores_QM, n, left, right, top)
            _scale(scores_QM, n, left, right, _ONE / total)
            _clear(scores_QM, n, low, left)
            _clear(scores_QM, n, right, first + n // ROWS * ROWS + ROWS)
            log_sum_TH[start + first + n, h] = top + math.log(total)
        _sums(scores, ld, values_NMP.ctypes.data, C, M, low, first, count, length, out_QC.ctypes.data)
        _put_rows(out_QC, count, out_THC, start + first, h)


@njit(**_inner)
def _backward(
    qkv_TEC: Floats,
    start: int,
    length: int,
    h: int,
    window: int,
    softener: np.float32,
    cap: np.float32,
    out_THC: Floats,
    log_sum_TH: Floats,
    grad_THC: Floats,
    grad_TEC: Floats,
    parts_PTHC: Floats,
) -> None:
    """Compute the gradients of one head of one sequence.

    Several query heads may share a key/value head, so each writes its part of those gradients to `parts_PTHC`; the
    caller adds them up.
    """
    C, heads = out_THC.shape[2], out_THC.shape[1]
    kv_heads = (qkv_TEC.shape[1] - heads) // 2
    key = heads + h // (heads // kv_heads)
    M, ld, tall = _whole(length, PANEL), _stride(length), _whole(length, ROWS)
    block = min(BLOCK, tall)
    keys_NCP, values_NCP, keys_NMP = _new(M // PANEL, C, PANEL), _new(M // PANEL, C, PANEL), _new(C // PANEL, M, PANEL)
    _token_panels(qkv_TEC, key, start, length, keys_NCP)
    _token_panels(qkv_TEC, key + kv_heads, start, length, values_NCP)
    _column_panels(qkv_TEC, key, start, length, softener, keys_NMP)
    k_sum_MC, v_sum_MC = np.zeros((tall, C), np.float32), np.zeros((tall, C), np.float32)
    q_QC, grad_QC, out_QC = _new(1, block, C)[0], _new(1, block, C)[0], _new(1, block, C)[0]
    q_NQP, grad_NQP = _new(C // PANEL, block, PANEL), _new(C // PANEL, block, PANEL)
    scores_QM, inner_QM = _new(1, block, ld)[0], _new(1, block, ld)[0]
    scores, inner = scores_QM.ctypes.data, inner_QM.ctypes.data
    for first in range(0, length, BLOCK):
        count, low, token = min(BLOCK, length - first), _first_key(first, window), start + first
        _rows_of(qkv_TEC, h, token, count, softener, q_QC)
        _rows_of(grad_THC, h, token, count, _ONE, grad_QC)
        _column_panels(qkv_TEC, h, token, count, softener, q_NQP)
        _column_panels(grad_THC, h, token, count, _ONE, grad_NQP)
        _scores(q_QC.ctypes.data, C, keys_NCP.ctypes.data, low, first, count, scores, ld)
        _scores(grad_QC.ctypes.data, C, values_NCP.ctypes.data, low, first, count, inner, ld)
        for n in range(count):
            right, stop = first + n + 1, first + n // ROWS * ROWS + ROWS
            left = max(low, right - window) if window else 0
            along = _dot(grad_QC, n, out_THC, token + n, h)
            if cap > 0:
                _bound(scores_QM, n, left, right, cap)
                _bound_back(scores_QM, inner_QM, n, left, right, along, cap)
                along = np.float32(0)
            _softmax_back(scores_QM, inner_QM, n, left, right, log_sum_TH[token + n, h], along)
            _clear(scores_QM, n, low, left)
            _clear(scores_QM, n, right, stop)
            _clear(inner_QM, n, low, left)
            _clear(inner_QM, n, right, stop)
        _sums(inner, ld, keys_NMP.ctypes.data, C, M, low, first, count, length, out_QC.ctypes.data)
        _put_rows(out_QC, count, grad_TEC, token, h)
        _add_to_keys(inner, ld, q_NQP.ctypes.data, block, C, low, first, count, k_sum_MC.ctypes.data)
        _add_to_keys(scores, ld, grad_NQP.ctypes.data, block, C, low, first, count, v_sum_MC.ctypes.data)
    _put_rows(k_sum_MC, length, parts_PTHC[0], start, h)
    _put_rows(v_sum_MC, length, parts_PTHC[1], start, h)


@compiled()
def attend(
    is_back: bool,
    qkv_TEC: Floats,
    start_S: Integers,
    length_S: Integers,
    window: int,
    softener: np.float32,
    cap: np.float32,
    out_THC: Floats,
    log_sum_TH: Floats,
    grad_THC: Floats,
    grad_TEC: Floats,
    parts_PTHC: Floats,
) -> None:
    """Compute attention within each sequence and the log of each row's sum.

    Scores are multiplied by `softener` and bounded by `cap`. `window` 0: over all earlier keys; `cap` 0: no bound.
    With `is_back`, compute the gradients of the queries and each query head's part of those of keys and values;
    otherwise the last three arguments are ignored. Both share one function because each parallel function takes seconds
    to compile.
    """
    for item in prange(out_THC.shape[1] * len(start_S)):
        h, s = item // len(start_S), item % len(start_S)
        start, length = start_S[s], length_S[s]
        if is_back:
            grads = grad_THC, grad_TEC, parts_PTHC
            _backward(qkv_TEC, start, length, h, window, softener, cap, out_THC, log_sum_TH, *grads)
        else:
            _forward(qkv_TEC, start, length, h, window, softener, cap, out_THC, log_sum_TH)

"""Attention of new tokens over the cache's blocks on a CPU, as one compiled loop.

Owns: the kernel, and how a step's rows are shared out to it: in pieces of a few tokens of one sequence, so that a
block that was read serves them all.
Does not know: tensors, models, who holds which block.

A row's result depends on that row and its position alone: its scores and its sums of values are chains over the head
dim and over the positions in order (`cpu_tile`), and positions that it must not look at have weight zero.

Shapes: T rows, E stacked outputs, H query heads, K key/value heads, G = H / K, C head dim, B block size, N blocks of
the cache, S sequences, W blocks of the longest, I pieces, R = rows of a piece: its tokens times G, L positions.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
from numba import njit, prange

from tinsmith.engine.block_attention import NewTokens
from tinsmith.engine.cpu_kernels import FAST, Floats, Integers, compiled, exponential
from tinsmith.engine.cpu_tile import BYTES, LINE, make_product

PIECE_TOKENS = 16
"""Tokens of a sequence that are computed together."""
_LANES = 8
_WIDE = 2 * _LANES

_wide_product, _narrow_product = make_product(_LANES, 2), make_product(_LANES, 1)


@dataclass(frozen=True, slots=True)
class Pieces:
    """A step's rows for the kernel."""

    row_I: Integers
    """First row of each piece."""
    count_I: Integers
    """Its tokens."""
    position_I: Integers
    """The position of the first."""
    owner_I: Integers
    """Its sequence's row of the table."""


def pieces_of(batch: Sequence[NewTokens], threads: int) -> Pieces:
    """The pieces of a step, in an order in which equal shares of them are equal shares of work."""
    found = np.array(
        [
            (new.row + offset, min(PIECE_TOKENS, new.count - offset), new.start + offset, owner)
            for owner, new in enumerate(batch)
            for offset in range(0, new.count, PIECE_TOKENS)
        ],
        np.int64,
    )
    work_I = found[:, 1] * (found[:, 1] + found[:, 2])
    order_I = np.argsort(-work_I, kind="stable")
    dealt_I = np.concatenate([order_I[hand::threads] for hand in range(threads)])
    return Pieces(*np.ascontiguousarray(found[dealt_I].T))


@njit
def _times(
    rows: int, x: int, x_row: int, w: int, out: int, out_row: int, depth: int, columns: int, begins: int, ahead: int
) -> None:
    """rows x depth times depth x columns, a multiple of 8; meanwhile as much memory is asked for at `ahead`."""
    pace = LINE // (rows // 6 + 1)
    column = 0
    while column + _WIDE <= columns:
        to = out + column * BYTES
        _wide_product(rows, x, x_row, w + column * BYTES, columns, to, out_row, depth, begins, ahead, pace)
        column, ahead = column + _WIDE, ahead + depth * LINE
    if column < columns:
        to = out + column * BYTES
        _narrow_product(rows, x, x_row, w + column * BYTES, columns, to, out_row, depth, begins, ahead, pace)


@njit(fastmath=FAST, error_model="numpy")
def _soften(scores_L: Floats) -> np.float32:
    """Scores to weights; what these are to be multiplied by."""
    top, total = np.float32(-np.inf), np.float32(0)
    for j in range(len(scores_L)):
        top = max(top, scores_L[j])
    for j in range(len(scores_L)):
        weight = exponential(scores_L[j] - top)
        scores_L[j] = weight
        total += weight
    return np.float32(1) / total


Attend: TypeAlias = Callable[
    [Floats, Integers, Integers, Integers, Integers, Integers, int, Floats, Floats, Floats], Any
]
"""attend(qkv_TE, row_I, count_I, position_I, owner_I, table_SW, window, keys_NKCB, values_NKBC, out_TE): attention of
each row over the blocks of its sequence up to its position; window 0: over all of them."""


@functools.cache
def attend_kernel(C: int, B: int) -> Attend:
    """Attention for one head dim and block size."""
    softener = np.float32(1 / math.sqrt(C))

    @compiled()
    def attend(
        qkv_TE: Floats,
        row_I: Integers,
        count_I: Integers,
        position_I: Integers,
        owner_I: Integers,
        table_SW: Integers,
        window: int,
        keys_NKCB: Floats,
        values_NKBC: Floats,
        out_TE: Floats,
    ) -> None:
        kv_heads = keys_NKCB.shape[1]
        groups = out_TE.shape[1] // (kv_heads * C)
        keys, values = keys_NKCB.ctypes.data, values_NKBC.ctypes.data
        for item in prange(len(row_I) * kv_heads):
            i, k = item // kv_heads, item % kv_heads
            row, position = row_I[i], position_I[i]
            rows, end = count_I[i] * groups, position + count_I[i]
            low = max(0, position + 1 - window) // B if window else 0
            high = (end + B - 1) // B
            length = (high - low) * B
            blocks_W = table_SW[owner_I[i], low:high]
            scratch, share_R = np.empty(rows * (length + 2 * C), np.float32), np.empty(rows, np.float32)
            scores_RL = scratch[: rows * length].reshape(rows, length)
            q_RC = scratch[rows * length : rows * (length + C)].reshape(rows, C)
            out_RC = scratch[rows * (length + C) :].reshape(rows, C)
            for r in range(rows):
                start = (k * groups + r % groups) * C
                from_C, to_C = qkv_TE[row + r // groups, start : start + C], q_RC[r]
                for c in range(C):
                    to_C[c] = from_C[c] * softener
            block = keys + (blocks_W[0] * kv_heads + k) * C * B * BYTES
            for b in range(high - low):
                if b + 1 < high - low:
                    following = keys + (blocks_W[b + 1] * kv_heads + k) * C * B * BYTES
                else:
                    following = values + (blocks_W[0] * kv_heads + k) * C * B * BYTES
                to = scores_RL.ctypes.data + b * B * BYTES
                _times(rows, q_RC.ctypes.data, C, block, to, length, C, B, 1, following)
                block = following
            for r in range(rows):
                used = position + r // groups + 1
                skipped = (max(0, used - window) if window else 0) - low * B
                used -= low * B
                scores_RL[r, :skipped] = np.float32(0)
                share_R[r] = _soften(scores_RL[r, skipped:used])
                scores_RL[r, used:] = np.float32(0)
            for b in range(high - low):
                following = values + (blocks_W[min(b + 1, high - low - 1)] * kv_heads + k) * C * B * BYTES
                weights = scores_RL.ctypes.data + b * B * BYTES
                begins = 1 if b == 0 else 0
                _times(rows, weights, length, block, out_RC.ctypes.data, C, B, C, begins, following)
                block = following
            for r in range(rows):
                start = (k * groups + r % groups) * C
                from_C, to_C = out_RC[r], out_TE[row + r // groups, start : start + C]
                for c in range(C):
                    to_C[c] = from_C[c] * share_R[r]

    return attend  # type: ignore[no-any-return]

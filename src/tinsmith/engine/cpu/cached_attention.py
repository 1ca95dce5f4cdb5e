"""Attention of new tokens over the key/value cache, on a CPU: the attention of sampling, as one compiled loop.

The trick. The cache is made of blocks that may lie anywhere in memory, and a table lists the blocks of each sequence
(`sampling/kv_cache`). Reading them is what takes the time. So a step's new tokens are cut into pieces of up to 16
tokens of one sequence, and the query heads that share a key/value head are treated as further rows of the piece: a
block is read once and serves all of these rows. Keys are stored transposed (head dim x positions) and values as they
are, so both products, q k^T and weights v, can use the tile of `tile` on a block directly. While one block is
multiplied, the next one in the table is prefetched, which the processor could not guess by itself.

Exactness. A row's result depends on that row and its position alone: its scores are sums over the head dim and its
output is a sum over the positions, both in order, and positions that it must not see get weight zero.

Shapes: T rows, E stacked outputs, H query heads, K key/value heads, G = H / K, C head dim, B block size, N blocks of
the cache, S sequences, W blocks of the longest one, I pieces, R rows of a piece (its tokens times G), L positions.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import numpy as np
from numba import njit, prange

from tinsmith.engine.cpu.elementwise import FAST, Floats, Integers, compiled, exponential, hyperbolic_tangent
from tinsmith.engine.cpu.tile import BYTES, LINE, make_product

PIECE_TOKENS = 16
"""Tokens of a sequence that form a piece, at most."""
_LANES = 8
_WIDE = 2 * _LANES

_wide_product, _narrow_product = make_product(_LANES, 2), make_product(_LANES, 1)


class Pieces(NamedTuple):
    """A step's rows, cut into pieces."""

    row_I: Integers
    """The first row of each piece."""
    count_I: Integers
    """The number of its tokens."""
    position_I: Integers
    """The position of its first token."""
    owner_I: Integers
    """The row of its sequence in the block table."""


def pieces_of(batch: Iterable[tuple[int, int, int]], threads: int) -> Pieces:
    """Return the pieces of a step, ordered so that equal shares of them are about equal shares of work.

    `batch` has, for each sequence, its first row, the number of its new tokens, and the position of the first. Threads
    take contiguous shares of the pieces, so these are sorted by work and dealt out like cards.
    """
    found = np.array(
        [
            (row + offset, min(PIECE_TOKENS, count - offset), start + offset, owner)
            for owner, (row, count, start) in enumerate(batch)
            for offset in range(0, count, PIECE_TOKENS)
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
    """Multiply rows x depth by depth x columns (a multiple of 8), and prefetch as much memory at `ahead`."""
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
    """Turn scores into unnormalised weights; return the factor that normalises them."""
    top, total = np.float32(-np.inf), np.float32(0)
    for j in range(len(scores_L)):
        top = max(top, scores_L[j])
    for j in range(len(scores_L)):
        weight = exponential(scores_L[j] - top)
        scores_L[j] = weight
        total += weight
    return np.float32(1) / total


@njit(fastmath=FAST, error_model="numpy")
def _bound(scores_L: Floats, cap: np.float32) -> None:
    for j in range(len(scores_L)):
        scores_L[j] = cap * hyperbolic_tangent(scores_L[j] / cap)


@njit(fastmath=FAST, error_model="numpy")
def _attend_piece(
    head: int,
    row: int,
    count: int,
    position: int,
    table_W: Integers,
    window: int,
    softener: np.float32,
    cap: np.float32,
    qkv_TE: Floats,
    keys_NKCB: Floats,
    values_NKBC: Floats,
    out_TE: Floats,
) -> None:
    """Compute the attention of one piece for the query heads of one key/value head."""
    kv_heads, C, B = keys_NKCB.shape[1], keys_NKCB.shape[2], keys_NKCB.shape[3]
    groups = out_TE.shape[1] // (kv_heads * C)
    size = C * B * BYTES
    keys = np.int64(keys_NKCB.ctypes.data) + head * size
    values = np.int64(values_NKBC.ctypes.data) + head * size
    rows = count * groups
    low = max(0, position + 1 - window) // B if window else 0
    blocks_W = table_W[low : (position + count + B - 1) // B]
    blocks, length = len(blocks_W), len(blocks_W) * B
    scores_RL, share_R = np.empty((rows, length), np.float32), np.empty(rows, np.float32)
    q_RC, out_RC = np.empty((rows, C), np.float32), np.empty((rows, C), np.float32)
    scores, q, out = np.int64(scores_RL.ctypes.data), np.int64(q_RC.ctypes.data), np.int64(out_RC.ctypes.data)
    for r in range(rows):
        start = (head * groups + r % groups) * C
        from_C, to_C = qkv_TE[row + r // groups, start : start + C], q_RC[r]
        for c in range(C):
            to_C[c] = from_C[c] * softener
    block = keys + blocks_W[0] * kv_heads * size
    for b in range(blocks):
        is_last = b + 1 == blocks
        following = values + blocks_W[0] * kv_heads * size if is_last else keys + blocks_W[b + 1] * kv_heads * size
        _times(rows, q, C, block, scores + b * B * BYTES, length, C, B, np.int64(1), following)
        block = following
    for r in range(rows):
        end = position + r // groups + 1
        first = max(0, end - window) if window else 0
        scores_RL[r, : first - low * B] = np.float32(0)
        if cap > 0:
            _bound(scores_RL[r, first - low * B : end - low * B], cap)
        share_R[r] = _soften(scores_RL[r, first - low * B : end - low * B])
        scores_RL[r, end - low * B :] = np.float32(0)
    for b in range(blocks):
        following = values + blocks_W[min(b + 1, blocks - 1)] * kv_heads * size
        _times(rows, scores + b * B * BYTES, length, block, out, C, B, C, np.int64(b == 0), following)
        block = following
    for r in range(rows):
        start = (head * groups + r % groups) * C
        from_C, to_C = out_RC[r], out_TE[row + r // groups, start : start + C]
        for c in range(C):
            to_C[c] = from_C[c] * share_R[r]


@compiled()
def attend(
    qkv_TE: Floats,
    row_I: Integers,
    count_I: Integers,
    position_I: Integers,
    owner_I: Integers,
    table_SW: Integers,
    window: int,
    softener: np.float32,
    cap: np.float32,
    keys_NKCB: Floats,
    values_NKBC: Floats,
    out_TE: Floats,
) -> None:
    """Compute the attention of each row over its sequence, up to its own position.

    Scores are multiplied by `softener` and bounded by `cap`. `window` 0: no limit; `cap` 0: no bound.
    """
    kv_heads = keys_NKCB.shape[1]
    for item in prange(len(row_I) * kv_heads):
        i = item // kv_heads
        table_W = table_SW[owner_I[i]]
        piece = row_I[i], count_I[i], position_I[i]
        head, scores = item % kv_heads, (window, softener, cap)
        _attend_piece(head, *piece, table_W, *scores, qkv_TE, keys_NKCB, values_NKBC, out_TE)

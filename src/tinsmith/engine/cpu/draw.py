"""Draws tokens from whole distributions (no top-k, no top-p) on a CPU: `sampling/draw` as one compiled loop.

The trick. Drawing means finding the token at which the running sum of probabilities passes a random number. A running
sum over the whole vocabulary cannot be vectorised, so the vocabulary is cut into blocks of 256. The sum of each block
is a vectorised loop; the search then goes over the few block sums first, and over the tokens of one block afterwards.
No softmax is stored: probabilities are used unnormalised, and the random number is scaled by their total instead.

A row is computed on its own, in an order of sums that is the same in every batch.

Shapes: S rows, V vocabulary, I draws, W blocks of the vocabulary, N tokens in a block.
"""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt
import torch
from numba import njit, prange

from tinsmith.engine.cpu.elementwise import FAST, Floats, Integers, compiled, exponential, use_threads

_BLOCK = 256
GREEDY = 0.0
"""As a temperature: take the most likely token."""


def draw_plain(
    logits_SV: torch.Tensor, row_I: Integers, temperature_I: Floats, number_I: npt.NDArray[np.float64]
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return tokens_I drawn from these rows at these temperatures, their logprobs_I at temperature 1, and norms_I.

    The norm is the log of a row's summed exponentials, in float64. The logprob of any token of the row, to the bit, is
    its logit minus the norm, computed in float64 and rounded.
    """
    tokens_I, logprobs_I = torch.empty(len(row_I), dtype=torch.int64), torch.empty(len(row_I))
    norms_I = torch.empty(len(row_I), dtype=torch.float64)
    use_threads(logits_SV.shape[1] * len(row_I) if len(row_I) > 1 else 0)
    filled = tokens_I.numpy(), logprobs_I.numpy(), norms_I.numpy()
    _draw(logits_SV.contiguous().numpy(), row_I, temperature_I, number_I, *filled)
    return tokens_I, logprobs_I, norms_I


@njit(fastmath=FAST, error_model="numpy")
def _peak(logits_V: Floats) -> np.float32:
    top = np.float32(-np.inf)
    for v in range(len(logits_V)):
        top = max(top, logits_V[v])
    return top


@njit(fastmath=FAST, error_model="numpy")
def _mass(logits_V: Floats, top: np.float32, sharpness: np.float32) -> np.float32:
    """Return the sum of exp((logit - top) * sharpness)."""
    total = np.float32(0)
    for v in range(len(logits_V)):
        total += exponential((logits_V[v] - top) * sharpness)
    return total


@njit(error_model="numpy")
def _masses(logits_V: Floats, top: np.float32, sharpness: np.float32, masses_W: npt.NDArray[np.float64]) -> float:
    """Store the mass of each block, and return the total."""
    total = 0.0
    for w in range(len(masses_W)):
        masses_W[w] = _mass(logits_V[w * _BLOCK : (w + 1) * _BLOCK], top, sharpness)
        total += masses_W[w]
    return total


@njit(error_model="numpy")
def _search(masses_W: npt.NDArray[np.float64], target: float) -> tuple[int, float]:
    """Return the entry (with mass) in which the running sum passes the target, and the rest of the target."""
    passed, last, before = 0.0, 0, 0.0
    for w in range(len(masses_W)):
        if masses_W[w] > 0:
            last, before = w, passed
            passed += masses_W[w]
            if passed > target:
                break
    return last, max(target - before, 0.0)


@njit(error_model="numpy")
def _draw_one(logits_V: Floats, temperature: np.float32, number: float) -> tuple[int, float, float]:
    """Draw by inverse transform sampling, block first, then token: return the token, its logprob and the norm."""
    top, one, token = _peak(logits_V), np.float32(1), 0
    masses_W = np.empty((len(logits_V) + _BLOCK - 1) // _BLOCK, np.float64)
    total = _masses(logits_V, top, one, masses_W)
    if temperature == GREEDY:
        while token < len(logits_V) - 1 and logits_V[token] != top:
            token += 1
    else:
        sharpness = one / temperature
        mass = total if sharpness == one else _masses(logits_V, top, sharpness, masses_W)
        block, left = _search(masses_W, number * mass)
        piece_N = logits_V[block * _BLOCK : (block + 1) * _BLOCK]
        within_N = np.empty(len(piece_N), np.float64)
        for n in range(len(piece_N)):
            within_N[n] = exponential((piece_N[n] - top) * sharpness)
        token = block * _BLOCK + _search(within_N, left)[0]
    norm = top + math.log(total)
    return token, logits_V[token] - norm, norm


@compiled()
def _draw(
    logits_SV: Floats,
    row_I: Integers,
    temperature_I: Floats,
    number_I: npt.NDArray[np.float64],
    token_I: Integers,
    logprob_I: Floats,
    norm_I: npt.NDArray[np.float64],
) -> None:
    for i in prange(len(row_I)):
        token_I[i], logprob_I[i], norm_I[i] = _draw_one(logits_SV[row_I[i]], temperature_I[i], number_I[i])

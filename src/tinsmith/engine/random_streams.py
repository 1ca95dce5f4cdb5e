"""Counter-based random numbers: a number depends on what it is for, never on what else is being drawn.

Owns: Philox4x32-10 (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", 2011), vectorised over samples.
Does not know: distributions, tokens, torch.

A sample's number at a position is a function of (seed, sample index, position). Streams for other purposes use the
other counter words, so that they never overlap.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

Words = npt.NDArray[np.uint64]
"""32-bit words, one per sample, held in 64 bits so that products keep their upper half."""

SAMPLED_TOKENS = 0
"""Purpose of the numbers that choose sampled tokens."""
PROMPT_ALTERNATIVES = 1
"""Purpose of the numbers that draw alternatives to prompt tokens."""

_ROUNDS = 10
_MULTIPLIERS = (np.uint64(0xD2511F53), np.uint64(0xCD9E8D57))
_WEYL = (np.uint64(0x9E3779B9), np.uint64(0xBB67AE85))
_LOW = np.uint64(0xFFFFFFFF)
_HALF = np.uint64(32)


def philox(counter: tuple[Words, Words, Words, Words], key: tuple[Words, Words]) -> tuple[Words, Words, Words, Words]:
    """Four random words for each counter and key."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(_ROUNDS):
        product0, product1 = c0 * _MULTIPLIERS[0], c2 * _MULTIPLIERS[1]
        c0, c1, c2, c3 = (
            (product1 >> _HALF) ^ c1 ^ k0,
            product1 & _LOW,
            (product0 >> _HALF) ^ c3 ^ k1,
            product0 & _LOW,
        )
        k0, k1 = (k0 + _WEYL[0]) & _LOW, (k1 + _WEYL[1]) & _LOW
    return c0, c1, c2, c3


def uniforms(
    seeds: Sequence[int],
    indices: Sequence[int] | npt.NDArray[Any],
    positions: Sequence[int] | npt.NDArray[Any],
    purpose: int = SAMPLED_TOKENS,
    draw: int = 0,
) -> npt.NDArray[np.float64]:
    """One number in [0, 1) with 53 random bits for each (seed, sample index, position). Seeds count modulo 2**64."""
    seed_words = np.array([seed % 2**64 for seed in seeds], np.uint64)
    position_words = np.asarray(positions, np.int64).astype(np.uint64)
    index_words = np.asarray(indices, np.int64).astype(np.uint64)
    same = np.ones_like(seed_words)
    counter = (
        position_words & _LOW,
        index_words & _LOW,
        same * np.uint64(purpose),
        same * np.uint64(draw),
    )
    high, low, _, _ = philox(counter, (seed_words & _LOW, seed_words >> _HALF))
    bits = ((high << _HALF) | low) >> np.uint64(11)
    return bits.astype(np.float64) * 2.0**-53

"""From logits to tokens: temperature, top-k, top-p and the chosen token's logprob, for a batch of rows.

Owns: the arithmetic of drawing. Every row is computed by itself: the same logits, rule and random number give the
same token whatever the other rows are.
Does not know: models, where random numbers come from, when a sample ends.

Shapes: S rows, V vocabulary, N candidates, W blocks of the vocabulary, K listed tokens, I draws.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch.nn.functional import pad

from tinsmith.engine.packed_linear import can_compile, can_pack

NUCLEUS_CANDIDATES = 256
"""Top-p looks at this many of the likeliest tokens first; only flat distributions need them all sorted."""
_BLOCK = 256
_COLDEST = 1e-30
"""Below this the likeliest token has all the mass anyway; a division by less would overflow."""


@dataclass(frozen=True, slots=True)
class DrawRule:
    """How one row is drawn. Temperature 0 takes the likeliest token; top_k -1 and top_p 1 restrict nothing."""

    temperature: float = 1.0
    top_k: int = -1
    top_p: float = 1.0

    @property
    def is_greedy(self) -> bool:
        return self.temperature == 0

    @property
    def is_restricted(self) -> bool:
        return self.top_k > 0 or self.top_p < 1


def draw_from(
    logits_SV: torch.Tensor, rows: Sequence[int], rules: Sequence[DrawRule], uniforms_I: npt.NDArray[np.float64]
) -> tuple[torch.Tensor, torch.Tensor]:
    """`draw` from these rows of the logits, which may be listed more than once: tokens_I and logprobs_I."""
    if not can_pack(logits_SV.device, logits_SV.dtype) or not can_compile():
        return _draw_listed(logits_SV, rows, rules, uniforms_I)
    from tinsmith.engine.cpu_drawing import draw_plain

    temperatures_I = np.array([_divisor(rule) for rule in rules], np.float32)
    tokens_I, logprobs_I = draw_plain(logits_SV, np.array(rows, np.int64), temperatures_I, uniforms_I)
    restricted = [i for i, rule in enumerate(rules) if rule.is_restricted and not rule.is_greedy]
    if restricted:
        tokens_I[restricted], logprobs_I[restricted] = _draw_listed(
            logits_SV, [rows[i] for i in restricted], [rules[i] for i in restricted], uniforms_I[restricted]
        )
    return tokens_I, logprobs_I


def _draw_listed(
    logits_SV: torch.Tensor, rows: Sequence[int], rules: Sequence[DrawRule], uniforms_I: npt.NDArray[np.float64]
) -> tuple[torch.Tensor, torch.Tensor]:
    picked_IV = logits_SV if list(rows) == list(range(len(logits_SV))) else logits_SV[list(rows)]
    return draw(picked_IV, picked_IV.log_softmax(dim=1), rules, uniforms_I)


def draw(
    logits_SV: torch.Tensor,
    logprobs_SV: torch.Tensor,
    rules: Sequence[DrawRule],
    uniforms_S: npt.NDArray[np.float64],
) -> tuple[torch.Tensor, torch.Tensor]:
    """tokens_S, and their logprobs_S under the model's own distribution (temperature 1, nothing restricted)."""
    tokens_S = torch.empty(len(rules), dtype=torch.int64, device=logits_SV.device)
    for kind, rows in _kinds(rules, logits_SV.shape[1]).items():
        picked_SV = logits_SV if len(rows) == len(rules) else logits_SV[rows]
        tokens_S[rows] = _draw_kind(kind, picked_SV, [rules[row] for row in rows], uniforms_S[rows])
    return tokens_S, logprobs_SV.gather(1, tokens_S.unsqueeze(1)).squeeze(1)


def topk(logprobs_SV: torch.Tensor, k: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The k likeliest tokens of each row, likeliest first: tokens_SK and logprobs_SK."""
    values_SK, tokens_SK = logprobs_SV.topk(min(k, logprobs_SV.shape[1]), dim=1)
    return tokens_SK, values_SK


def _kinds(rules: Sequence[DrawRule], vocabulary: int) -> dict[int, list[int]]:
    """Rows by how they are drawn: 0 greedy, -1 from all tokens, else the number of candidates to sort.

    That number depends on the row alone, so that ties are broken alike in every batch.
    """
    kinds: dict[int, list[int]] = {}
    for i, rule in enumerate(rules):
        if rule.is_greedy:
            kind = 0
        elif not rule.is_restricted:
            kind = -1
        else:
            kind = min(rule.top_k if rule.top_k > 0 else NUCLEUS_CANDIDATES, vocabulary)
        kinds.setdefault(kind, []).append(i)
    return kinds


def _draw_kind(
    kind: int, logits_SV: torch.Tensor, rules: Sequence[DrawRule], uniforms_S: npt.NDArray[np.float64]
) -> torch.Tensor:
    if kind == 0:
        return logits_SV.argmax(dim=1)
    probs_SV = _tempered(logits_SV, rules)
    numbers_S1 = torch.from_numpy(uniforms_S).to(logits_SV.device).unsqueeze(1)
    if kind < 0:
        return _from_all(probs_SV, numbers_S1)
    return _from_candidates(kind, probs_SV, rules, numbers_S1)


def _divisor(rule: DrawRule) -> float:
    """A temperature that can be divided by; 0 where the likeliest token is wanted."""
    return 0.0 if rule.is_greedy else max(rule.temperature, _COLDEST)


def _tempered(logits_SV: torch.Tensor, rules: Sequence[DrawRule]) -> torch.Tensor:
    """probs_SV at each row's temperature."""
    if all(rule.temperature == 1 for rule in rules):
        return logits_SV.softmax(dim=1)
    temperatures_S1 = torch.tensor([[_divisor(rule)] for rule in rules], device=logits_SV.device)
    shifted_SV = logits_SV - logits_SV.amax(dim=1, keepdim=True)
    return shifted_SV.div_(temperatures_S1).softmax(dim=1)


def _from_all(probs_SV: torch.Tensor, numbers_S1: torch.Tensor) -> torch.Tensor:
    """The inverse of the distribution function: first the block of the vocabulary, then the token in it."""
    rows, vocabulary = probs_SV.shape
    blocks_SWN = pad(probs_SV, (0, -vocabulary % _BLOCK)).view(rows, -1, _BLOCK)
    cumulative_SW = blocks_SWN.sum(dim=2).double().cumsum(dim=1)
    block_S1, left_S1 = _search(cumulative_SW, numbers_S1 * cumulative_SW[:, -1:])
    within_SN = blocks_SWN[torch.arange(rows, device=probs_SV.device), block_S1.squeeze(1)].double().cumsum(dim=1)
    token_S1, _ = _search(within_SN, left_S1)
    return (block_S1 * _BLOCK + token_S1).squeeze(1).clamp_(max=vocabulary - 1)  # NaN would point beyond


def _from_candidates(
    count: int, probs_SV: torch.Tensor, rules: Sequence[DrawRule], numbers_S1: torch.Tensor
) -> torch.Tensor:
    """Draw from the likeliest tokens; rows whose nucleus is larger than that sort the whole vocabulary."""
    device = probs_SV.device
    values_SN, tokens_SN = probs_SV.topk(count, dim=1)
    limits_S1 = torch.tensor([[rule.top_p] for rule in rules], dtype=torch.float64, device=device)
    has_top_k_S1 = torch.tensor([[rule.top_k > 0] for rule in rules], device=device)
    cumulative_SN = values_SN.double().cumsum(dim=1)
    limits_S1 = limits_S1 * torch.where(has_top_k_S1, cumulative_SN[:, -1:], 1.0)
    picked_S1 = _from_nucleus(cumulative_SN, limits_S1, numbers_S1)
    chosen_S = tokens_SN.gather(1, picked_S1).squeeze(1)
    too_few = (~has_top_k_S1 & (cumulative_SN[:, -1:] < limits_S1)).squeeze(1)
    if count < probs_SV.shape[1] and bool(too_few.any()):
        chosen_S[too_few] = _from_candidates(
            probs_SV.shape[1],
            probs_SV[too_few],
            [rule for rule, is_short in zip(rules, too_few.tolist(), strict=True) if is_short],
            numbers_S1[too_few],
        )
    return chosen_S


def _from_nucleus(cumulative_SN: torch.Tensor, limits_S1: torch.Tensor, numbers_S1: torch.Tensor) -> torch.Tensor:
    """Draw from the smallest set of first candidates whose mass reaches the limit."""
    last_S1 = torch.searchsorted(cumulative_SN, limits_S1).clamp_(max=cumulative_SN.shape[1] - 1)
    picked_S1, _ = _search(cumulative_SN, numbers_S1 * cumulative_SN.gather(1, last_S1))
    return picked_S1.minimum(last_S1)


def _search(cumulative_SN: torch.Tensor, targets_S1: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The first entry above the target (never one without mass), and what of the target lies within it."""
    last_S1 = torch.searchsorted(cumulative_SN, cumulative_SN[:, -1:].contiguous())
    last_S1.clamp_(max=cumulative_SN.shape[1] - 1)  # NaN is beyond every entry
    index_S1 = torch.searchsorted(cumulative_SN, targets_S1, right=True).minimum(last_S1)
    before_S1 = cumulative_SN.gather(1, (index_S1 - 1).clamp(min=0)).masked_fill(index_S1 == 0, 0.0)
    return index_S1, (targets_S1 - before_S1).clamp_(min=0.0)

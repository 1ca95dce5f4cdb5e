"""From logits to tokens: temperature, top-k, top-p, min-p, and the random numbers that decide.

Two tricks make a sample reproducible whatever runs beside it, and after any number of restarts.

- Random numbers are counter-based. An ordinary generator has a state that advances with each draw, so a number depends
on everything drawn before it. Philox4x32-10 (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", 2011) is a
function instead: it scrambles a counter with a key, like a block cipher. The key is the seed; the counter is (position,
sample index, purpose, draw). So the number for a sample's token at a position can be computed at any time, in any
order, and streams for different purposes never overlap. - Tokens are drawn by inverse transform sampling: the token is
the one at which the running sum of probabilities passes the number. A row needs exactly one number, and only its own
logits. The vocabulary is searched in two stages, over the sums of blocks of 256 tokens and then within one block, in
double precision, which is faster and more exact than one long running sum.

Top-k and top-p need only the most likely tokens in order, so 256 candidates are sorted first, and the whole vocabulary
only for rows whose nucleus is larger than that.

Shapes: S rows, V vocabulary, N candidates, W blocks of the vocabulary, K listed tokens, I draws.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import torch
from torch.nn.functional import pad

from tinsmith.engine.cpu.linear import can_compile, can_pack
from tinsmith.engine.sampling.logit_changes import RowChanges
from tinsmith.wire.values.numbers import Array

Listed: TypeAlias = tuple[Array, Array]
"""The most likely tokens at a position and their logprobs, as arrays; a list of pairs would be ten times as large."""
NUCLEUS_CANDIDATES = 256
"""How many of the most likely tokens top-p considers first; only flat distributions need all of them sorted."""
_BLOCK = 256
_COLDEST = 1e-30
"""Lowest temperature: here the most likely token has all the mass anyway, and dividing by less would overflow."""
_HOTTEST = 1e30
"""Highest temperature: here all tokens have the same mass anyway."""


@dataclass(frozen=True, slots=True)
class DrawRule:
    """How to draw from one row.

    Temperature 0 takes the most likely token; top_k -1, top_p 1 and min_p 0 restrict nothing.
    """

    temperature: float = 1.0
    top_k: int = -1
    top_p: float = 1.0
    min_p: float = 0.0

    @property
    def is_greedy(self) -> bool:
        return self.temperature == 0

    @property
    def is_restricted(self) -> bool:
        return self.needs_order or self.min_p > 0

    @property
    def needs_order(self) -> bool:
        """Whether the most likely tokens must be sorted."""
        return self.top_k > 0 or self.top_p < 1


def draw_from(
    logits_SV: torch.Tensor,
    rows: Sequence[int],
    rules: Sequence[DrawRule],
    uniforms_I: npt.NDArray[np.float64],
    changes: Mapping[int, RowChanges] | None = None,
    counts: Mapping[int, int] | None = None,
) -> tuple[torch.Tensor, torch.Tensor, dict[int, Listed]]:
    """Draw from these rows of the logits, each as often as it is named: return tokens_I, logprobs_I and lists.

    `changes` are applied to copies of the rows for these draws; the logprobs are those of the unchanged rows. `counts`
    says for which draws to list the most likely tokens, and how many. Each way of drawing normalises logits in its own
    order of sums, so it makes the lists as well: a token has the same logprob in its list as on its own, to the bit.
    """
    changes, counts = changes or {}, counts or {}
    lists: dict[int, Listed] = {}
    if not can_pack(logits_SV.device, logits_SV.dtype) or not can_compile():
        tokens_I, logprobs_I, lists = _draw_rows(logits_SV, rows, rules, uniforms_I, counts)
        slow = []
    else:
        from tinsmith.engine.cpu.draw import draw_plain

        temperatures_I = np.array([_divisor(rule) for rule in rules], np.float32)
        tokens_I, logprobs_I, norms_I = draw_plain(logits_SV, np.array(rows, np.int64), temperatures_I, uniforms_I)
        slow = [i for i, rule in enumerate(rules) if rule.is_restricted and not rule.is_greedy and i not in changes]
        if counts:
            others = changes.keys() | slow
            plain = {i: k for i, k in counts.items() if i not in others}
            lists = _lists(logits_SV, rows, plain, norms_I)
    if slow:
        tokens_I[slow], logprobs_I[slow], some = _draw_rows(
            logits_SV,
            [rows[i] for i in slow],
            [rules[i] for i in slow],
            uniforms_I[slow],
            {place: counts[i] for place, i in enumerate(slow) if i in counts},
        )
        lists |= {slow[place]: listed for place, listed in some.items()}
    for i, change in changes.items():
        tokens_I[i], logprobs_I[i], listed = _draw_changed(
            logits_SV[rows[i]], rules[i], uniforms_I[i : i + 1], change, counts.get(i)
        )
        lists |= {i: listed} if listed is not None else {}
    return tokens_I, logprobs_I, lists


def _draw_changed(
    logits_V: torch.Tensor, rule: DrawRule, uniform_1: npt.NDArray[np.float64], change: RowChanges, k: int | None
) -> tuple[torch.Tensor, torch.Tensor, Listed | None]:
    """Draw one token from a changed copy of a row. One row at a time, so that no other row can matter."""
    changed_1V = logits_V.clone().unsqueeze(0)
    change.apply(changed_1V[0])
    scores_1V = logits_V.log_softmax(dim=0).unsqueeze(0)
    tokens_1, logprobs_1 = draw(changed_1V, scores_1V, [rule], uniform_1)
    return tokens_1[0], logprobs_1[0], None if k is None else _lists(scores_1V, [0], {0: k})[0]


def _draw_rows(
    logits_SV: torch.Tensor,
    rows: Sequence[int],
    rules: Sequence[DrawRule],
    uniforms_I: npt.NDArray[np.float64],
    counts: Mapping[int, int],
) -> tuple[torch.Tensor, torch.Tensor, dict[int, Listed]]:
    """Draw from unchanged rows in torch."""
    picked_IV = logits_SV if list(rows) == list(range(len(logits_SV))) else logits_SV[list(rows)]
    scores_IV = picked_IV.log_softmax(dim=1)
    tokens_I, logprobs_I = draw(picked_IV, scores_IV, rules, uniforms_I)
    return tokens_I, logprobs_I, _lists(scores_IV, range(len(rules)), counts)


def _lists(
    scores_SV: torch.Tensor, rows: Sequence[int], counts: Mapping[int, int], norms_I: torch.Tensor | None = None
) -> dict[int, Listed]:
    """Return the most likely tokens for each draw in `counts`; the scores are logprobs, or logits if norms are given.

    Subtracting a norm and rounding keep the order.
    """
    alike: dict[int, list[int]] = {}
    for i, k in counts.items():
        alike.setdefault(k, []).append(i)
    lists: dict[int, Listed] = {}
    for k, draws in alike.items():
        tokens_IK, values_IK = topk(scores_SV[[rows[i] for i in draws]], k)
        if norms_I is not None:
            values_IK = values_IK.double() - norms_I[draws].unsqueeze(1)
        tables = tokens_IK.to(torch.int32).cpu().numpy(), values_IK.float().cpu().numpy()
        lists.update(zip(draws, zip(*tables, strict=True), strict=True))
    return lists


def draw(
    logits_SV: torch.Tensor,
    logprobs_SV: torch.Tensor,
    rules: Sequence[DrawRule],
    uniforms_S: npt.NDArray[np.float64],
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return tokens_S, and their logprobs_S under the model's own distribution (temperature 1, unrestricted)."""
    tokens_S = torch.empty(len(rules), dtype=torch.int64, device=logits_SV.device)
    for kind, rows in _kinds(rules, logits_SV.shape[1]).items():
        picked_SV = logits_SV if len(rows) == len(rules) else logits_SV[rows]
        tokens_S[rows] = _draw_kind(kind, picked_SV, [rules[row] for row in rows], uniforms_S[rows])
    return tokens_S, logprobs_SV.gather(1, tokens_S.unsqueeze(1)).squeeze(1)


def draw_alternatives(
    logits_SV: torch.Tensor, logprobs_SV: torch.Tensor, temperature: float, uniforms_SK: npt.NDArray[np.float64]
) -> tuple[torch.Tensor, torch.Tensor]:
    """Draw several tokens for each row from its whole distribution: return tokens_SK and logprobs_SK."""
    rules = [DrawRule(temperature)] * len(logits_SV)
    if rules and rules[0].is_greedy:
        tokens_SK = logits_SV.argmax(dim=1, keepdim=True).expand(uniforms_SK.shape)
    else:
        whole = _Blocks(_tempered(logits_SV, rules))
        numbers_SK = torch.from_numpy(uniforms_SK).to(logits_SV.device)
        tokens_SK = torch.stack([whole.draw(numbers_S.unsqueeze(1)) for numbers_S in numbers_SK.unbind(1)], dim=1)
    return tokens_SK, logprobs_SV.gather(1, tokens_SK)


def topk(logprobs_SV: torch.Tensor, k: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the k most likely tokens of each row, in order: tokens_SK and logprobs_SK."""
    values_SK, tokens_SK = logprobs_SV.topk(min(k, logprobs_SV.shape[1]), dim=1)
    return tokens_SK, values_SK


def _kinds(rules: Sequence[DrawRule], vocabulary: int) -> dict[int, list[int]]:
    """Group rows by how they are drawn: 0 greedy, -1 from all tokens, -2 from those that min_p leaves, else the number
    of candidates to sort.

    That number depends on the row alone, so that ties are broken the same way in every batch.
    """
    kinds: dict[int, list[int]] = {}
    for i, rule in enumerate(rules):
        if rule.is_greedy:
            kind = 0
        elif not rule.needs_order:
            kind = -2 if rule.min_p > 0 else -1
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
    if kind == -2:
        probs_SV = probs_SV.masked_fill(probs_SV < _least(probs_SV.amax(dim=1, keepdim=True), rules), 0.0)
    if kind < 0:
        return _Blocks(probs_SV).draw(numbers_S1)
    return _from_candidates(kind, probs_SV, rules, numbers_S1)


def _least(highest_S1: torch.Tensor, rules: Sequence[DrawRule]) -> torch.Tensor:
    """Return the lowest probability that min_p leaves in each row, given the highest."""
    return highest_S1 * torch.tensor([[rule.min_p] for rule in rules], device=highest_S1.device)


def _divisor(rule: DrawRule) -> float:
    """Return a temperature that float32 can be divided by; 0 for greedy."""
    return 0.0 if rule.is_greedy else min(max(rule.temperature, _COLDEST), _HOTTEST)


def _tempered(logits_SV: torch.Tensor, rules: Sequence[DrawRule]) -> torch.Tensor:
    """Return probs_SV at each row's temperature."""
    if all(rule.temperature == 1 for rule in rules):
        return logits_SV.softmax(dim=1)
    temperatures_S1 = torch.tensor([[_divisor(rule)] for rule in rules], device=logits_SV.device)
    shifted_SV = logits_SV - logits_SV.amax(dim=1, keepdim=True)
    return shifted_SV.div_(temperatures_S1).softmax(dim=1)


class _Blocks:
    """Distributions over the whole vocabulary, to draw from by inverse transform sampling."""

    def __init__(self, probs_SV: torch.Tensor) -> None:
        rows, self._vocabulary = probs_SV.shape
        self._rows_S = torch.arange(rows, device=probs_SV.device)
        self._blocks_SWN = pad(probs_SV, (0, -self._vocabulary % _BLOCK)).view(rows, -1, _BLOCK)
        self._cumulative_SW = self._blocks_SWN.sum(dim=2).double().cumsum(dim=1)

    def draw(self, numbers_S1: torch.Tensor) -> torch.Tensor:
        """Return a token for each row: find the block of the vocabulary first, then the token in it."""
        block_S1, left_S1 = _search(self._cumulative_SW, numbers_S1 * self._cumulative_SW[:, -1:])
        within_SN = self._blocks_SWN[self._rows_S, block_S1.squeeze(1)].double().cumsum(dim=1)
        token_S1, _ = _search(within_SN, left_S1)
        tokens_S = (block_S1 * _BLOCK + token_S1).squeeze(1)
        return tokens_S.clamp_(max=self._vocabulary - 1)  # NaN would point past the end


def _from_candidates(
    count: int, probs_SV: torch.Tensor, rules: Sequence[DrawRule], numbers_S1: torch.Tensor
) -> torch.Tensor:
    """Draw from the `count` most likely tokens; rows whose nucleus is larger sort the whole vocabulary."""
    device = probs_SV.device
    values_SN, tokens_SN = probs_SV.topk(count, dim=1)
    limits_S1 = torch.tensor([[rule.top_p] for rule in rules], dtype=torch.float64, device=device)
    has_top_k_S1 = torch.tensor([[rule.top_k > 0] for rule in rules], device=device)
    cumulative_SN = values_SN.double().cumsum(dim=1)
    limits_S1 = limits_S1 * torch.where(has_top_k_S1, cumulative_SN[:, -1:], 1.0)
    kept_S1 = (values_SN >= _least(values_SN[:, :1], rules)).sum(dim=1, keepdim=True)
    picked_S1 = _from_nucleus(cumulative_SN, limits_S1, kept_S1, numbers_S1)
    chosen_S = tokens_SN.gather(1, picked_S1).squeeze(1)
    is_cut_S1 = kept_S1 < count
    too_few = (~has_top_k_S1 & ~is_cut_S1 & (cumulative_SN[:, -1:] < limits_S1)).squeeze(1)
    if count < probs_SV.shape[1] and bool(too_few.any()):
        chosen_S[too_few] = _from_candidates(
            probs_SV.shape[1],
            probs_SV[too_few],
            [rule for rule, is_short in zip(rules, too_few.tolist(), strict=True) if is_short],
            numbers_S1[too_few],
        )
    return chosen_S


def _from_nucleus(
    cumulative_SN: torch.Tensor, limits_S1: torch.Tensor, kept_S1: torch.Tensor, numbers_S1: torch.Tensor
) -> torch.Tensor:
    """Draw from the smallest number of first candidates whose mass reaches the limit, and at most from `kept`."""
    last_S1 = torch.searchsorted(cumulative_SN, limits_S1).clamp_(max=cumulative_SN.shape[1] - 1)
    last_S1 = last_S1.minimum((kept_S1 - 1).clamp_(min=0))
    picked_S1, _ = _search(cumulative_SN, numbers_S1 * cumulative_SN.gather(1, last_S1))
    return picked_S1.minimum(last_S1)


def _search(cumulative_SN: torch.Tensor, targets_S1: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the entry (with mass) in which the running sum passes the target, and the rest of the target."""
    last_S1 = torch.searchsorted(cumulative_SN, cumulative_SN[:, -1:].contiguous())
    last_S1.clamp_(max=cumulative_SN.shape[1] - 1)  # NaN sorts after every entry
    index_S1 = torch.searchsorted(cumulative_SN, targets_S1, right=True).minimum(last_S1)
    before_S1 = cumulative_SN.gather(1, (index_S1 - 1).clamp(min=0)).masked_fill(index_S1 == 0, 0.0)
    return index_S1, (targets_S1 - before_S1).clamp_(min=0.0)


Words = npt.NDArray[np.uint64]
"""32-bit words, one per sample, stored in 64 bits so that products keep their upper half."""

SAMPLED_TOKENS = 0
"""Purpose: numbers that choose sampled tokens."""
PROMPT_ALTERNATIVES = 1
"""Purpose: numbers that draw alternatives to prompt tokens."""

_ROUNDS = 10
_MULTIPLIERS = (np.uint64(0xD2511F53), np.uint64(0xCD9E8D57))
_WEYL = (np.uint64(0x9E3779B9), np.uint64(0xBB67AE85))
_LOW = np.uint64(0xFFFFFFFF)
_HALF = np.uint64(32)


def philox(counter: tuple[Words, Words, Words, Words], key: tuple[Words, Words]) -> tuple[Words, Words, Words, Words]:
    """Return four random words for each counter and key."""
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
    """Return a number in [0, 1) with 53 random bits for each (seed, sample index, position). Seeds are modulo 2**64."""
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

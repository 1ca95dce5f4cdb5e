"""The computation of one sampler step: chunks of sequences in, drawn tokens out.

It lays out the step's rows, with the rows of an adapter side by side, runs them through the decoder, and computes
logits only for the rows that need them.

Shapes: T rows, S rows that need logits, D hidden, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from collections.abc import Sequence as List
from dataclasses import dataclass

import numpy as np
import torch

from tinsmith.engine.sampling.block_attention import BlockCache, NewTokens
from tinsmith.engine.sampling.decoder import FrozenAdapter, InferenceDecoder, RowAdapters
from tinsmith.engine.sampling.draw import draw_from, topk, uniforms
from tinsmith.engine.sampling.logit_changes import RowChanges
from tinsmith.engine.sampling.sequence import Listed, Sequence
from tinsmith.errors import InvalidInputError, NonFiniteError, TinkerError

SCORED_ROWS = 64
"""Prompt positions scored at a time, to limit the memory of their logits."""


@dataclass(frozen=True, slots=True)
class Chunk:
    """The next `count` tokens of a sequence; their cache blocks are reserved."""

    sequence: Sequence
    count: int

    @property
    def ends(self) -> bool:
        """Return whether the chunk reaches the sequence's end, so that a token is drawn."""
        return self.count == self.sequence.pending

    @property
    def adapter(self) -> Hashable:
        return self.sequence.state.job.adapter


@dataclass(frozen=True, slots=True)
class Drawn:
    """The tokens drawn for one sequence: one, or for a prompt one per sample."""

    sequence: Sequence
    tokens: list[int]
    logprobs: list[float]
    topk: list[Listed | None]
    error: TinkerError | None = None


class SampleBatch:
    """Runs sampler steps on one decoder and cache."""

    def __init__(self, decoder: InferenceDecoder, cache: BlockCache) -> None:
        self._decoder = decoder
        self._cache = cache

    def run(self, chunks: List[Chunk], adapters: Mapping[Hashable, FrozenAdapter]) -> list[Drawn]:
        """Compute the chunks, and draw tokens for those that reach their sequence's end."""
        ordered = _by_adapter(chunks)
        starts = _starts([chunk.count for chunk in ordered])
        hidden_TD = self._hidden(ordered, starts, adapters)
        for chunk, start in zip(ordered, starts, strict=True):
            if chunk.sequence.index is None:
                self._score_prompt(chunk, hidden_TD[start : start + chunk.count], adapters)
        ending = [(chunk, start + chunk.count - 1) for chunk, start in zip(ordered, starts, strict=True) if chunk.ends]
        if not ending:
            return []
        last_SD = hidden_TD[[row for _, row in ending]]
        logits_SV = self._decoder.unembed(last_SD, _row_adapters([(chunk, 1) for chunk, _ in ending], adapters))
        return _drawn([chunk.sequence for chunk, _ in ending], logits_SV)

    def _hidden(
        self, chunks: List[Chunk], starts: List[int], adapters: Mapping[Hashable, FrozenAdapter]
    ) -> torch.Tensor:
        tokens: list[int] = []
        positions: list[int] = []
        batch = []
        for chunk, row in zip(chunks, starts, strict=True):
            sequence, first = chunk.sequence, chunk.sequence.computed
            tokens += sequence.tokens.part(first, first + chunk.count)
            positions += range(first, first + chunk.count)
            batch.append(NewTokens(row, first, chunk.count, sequence.blocks))
        device = self._decoder.device
        return self._decoder.hidden_cached(
            torch.tensor(tokens, device=device),
            torch.tensor(positions, device=device),
            self._cache,
            batch,
            _row_adapters([(chunk, chunk.count) for chunk in chunks], adapters),
        )

    def _score_prompt(self, chunk: Chunk, hidden_TD: torch.Tensor, adapters: Mapping[Hashable, FrozenAdapter]) -> None:
        """Compute the logits of the prompt positions that are needed for prompt scores."""
        plan, first = chunk.sequence.state.plan, chunk.sequence.computed
        begin = max(first, plan.first_needed)
        end = min(first + chunk.count, len(plan.prompt) - 1)
        for start in range(begin, end, SCORED_ROWS):
            rows_TD = hidden_TD[start - first : min(start + SCORED_ROWS, end) - first]
            logits_TV = self._decoder.unembed(rows_TD, _row_adapters([(chunk, len(rows_TD))], adapters))
            chunk.sequence.state.scores.add(start + 1, logits_TV)


def _by_adapter(chunks: List[Chunk]) -> list[Chunk]:
    """Return the chunks with those of one adapter side by side, single tokens before longer runs."""
    order: dict[Hashable, int] = {}
    for chunk in chunks:
        order.setdefault(chunk.adapter, len(order))
    return sorted(chunks, key=lambda chunk: (order[chunk.adapter], chunk.count))


def _starts(counts: List[int]) -> list[int]:
    starts, total = [], 0
    for count in counts:
        starts.append(total)
        total += count
    return starts


def _row_adapters(parts: List[tuple[Chunk, int]], adapters: Mapping[Hashable, FrozenAdapter]) -> RowAdapters:
    """Return the rows of each adapter, given each chunk with its number of rows, in order."""
    merged: list[tuple[int, int, Hashable]] = []
    row = 0
    for chunk, count in parts:
        if merged and merged[-1][2] == chunk.adapter:
            merged[-1] = (merged[-1][0], row + count, chunk.adapter)
        else:
            merged.append((row, row + count, chunk.adapter))
        row += count
    return RowAdapters([(start, stop, adapters[name]) for start, stop, name in merged if name is not None])


def _drawn(sequences: List[Sequence], logits_SV: torch.Tensor) -> list[Drawn]:
    """Draw for all rows at once; the row of a prompt is used for each of its samples."""
    wanted = [(row, index) for row, sequence in enumerate(sequences) for index in _samples(sequence)]
    rows = [row for row, _ in wanted]
    states = [sequences[row].state for row in rows]
    numbers = uniforms(
        [state.job.seed for state in states], [index for _, index in wanted], [sequences[row].drawn for row in rows]
    )
    results, changes = _changes(sequences)
    tokens, logprobs = draw_from(
        logits_SV,
        rows,
        [state.rule for state in states],
        numbers,
        {i: changes[row] for i, row in enumerate(rows) if row in changes},
    )
    listed = _listed(sequences, logits_SV)
    for row, token, logprob in zip(rows, tokens.tolist(), logprobs.tolist(), strict=True):
        results[row].tokens.append(token)
        results[row].logprobs.append(logprob)
        results[row].topk.append(_agreeing(listed[row], token, logprob) if row in listed else None)
    return [_checked(result, logits_V) for result, logits_V in zip(results, logits_SV, strict=True)]


def _changes(sequences: List[Sequence]) -> tuple[list[Drawn], dict[int, RowChanges]]:
    """Return a result to fill for each row, and the changes of the rows that have any.

    A grammar may turn out to be too complex while it is followed; that is the error of its row.
    """
    results, changes = [], {}
    for row, sequence in enumerate(sequences):
        result = Drawn(sequence, [], [], [])
        try:
            change = sequence.changes()
        except InvalidInputError as error:
            change, result = None, Drawn(sequence, [], [], [], error)
        if change is not None:
            changes[row] = change
        results.append(result)
    return results, changes


def _samples(sequence: Sequence) -> List[int]:
    if sequence.index is not None:
        return (sequence.index,)
    request, plan = sequence.state.job.request, sequence.state.plan
    return range(request.num_samples) if plan.max_new else ()


def _listed(sequences: List[Sequence], logits_SV: torch.Tensor) -> dict[int, Listed]:
    """Return the most likely tokens of the rows whose requests ask for them."""
    asked: dict[int, list[int]] = {}
    for row, sequence in enumerate(sequences):
        k = sequence.state.job.request.topk_sample_logprobs
        if k:
            asked.setdefault(k, []).append(row)
    listed: dict[int, Listed] = {}
    for k, rows in asked.items():
        tokens_SK, values_SK = topk(logits_SV[rows].log_softmax(dim=1), k)
        tables = tokens_SK.to(torch.int32).cpu().numpy(), values_SK.float().cpu().numpy()
        for row, tokens_K, values_K in zip(rows, *tables, strict=True):
            listed[row] = tokens_K, values_K
    return listed


def _agreeing(listed: Listed, token: int, logprob: float) -> Listed:
    """Return a table with the logprob of the token that was drawn.

    The drawing kernel sums the distribution in another order than the table, so all entries move by the difference.
    """
    tokens_K, values_K = listed
    (places,) = np.nonzero(tokens_K == token)
    if not places.size:
        return listed
    place, value = places[0], values_K.dtype.type(logprob)
    moved_K = values_K + (value - values_K[place])
    moved_K[:place] = np.maximum(moved_K[:place], value)
    moved_K[place:] = np.minimum(moved_K[place:], value)
    moved_K[place] = value
    return tokens_K, moved_K


def _checked(drawn: Drawn, logits_V: torch.Tensor) -> Drawn:
    """Return the tokens, or an error if the logits overflowed: there is no distribution to draw from then."""
    if drawn.error is not None:
        return drawn
    numbers = drawn.logprobs or [float(logits_V.amax())]
    is_finite = all(number - number == 0 for number in numbers)
    if is_finite:
        return drawn
    whose = "the base model's" if drawn.sequence.state.job.adapter is None else "the adapter's"
    error = NonFiniteError(f"{whose} output is not finite, so no token can be drawn; sample from an earlier checkpoint")
    return Drawn(drawn.sequence, [], [], [], error)

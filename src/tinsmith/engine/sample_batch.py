"""One step's arithmetic: chunks of sequences in, drawn tokens out.

Owns: laying out a step's rows (an adapter's side by side), and which rows need logits.
Does not know: why these sequences were chosen, or what becomes of the tokens.

Shapes: T rows, S rows that need logits, D hidden, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from collections.abc import Sequence as List
from dataclasses import dataclass

import torch

from tinsmith.engine.block_attention import BlockCache, NewTokens
from tinsmith.engine.inference import InferenceDecoder
from tinsmith.engine.random_streams import uniforms
from tinsmith.engine.row_adapters import FrozenAdapter, RowAdapters
from tinsmith.engine.sample_state import Sequence
from tinsmith.engine.sampling_math import draw_from, topk
from tinsmith.errors import TinkerError
from tinsmith.wire.sampling import TopkRow

SCORED_ROWS = 64
"""Prompt positions scored at a time: bounds the memory of their logits."""


@dataclass(frozen=True, slots=True)
class Chunk:
    """The next `count` tokens of a sequence, for which the cache has room."""

    sequence: Sequence
    count: int

    @property
    def ends(self) -> bool:
        """Whether it is all there is, so that a token is to be drawn."""
        return self.count == self.sequence.pending

    @property
    def adapter(self) -> Hashable:
        return self.sequence.state.job.adapter


@dataclass(frozen=True, slots=True)
class Drawn:
    """Tokens for one sequence: one, or for a prompt one per sample."""

    sequence: Sequence
    tokens: list[int]
    logprobs: list[float]
    topk: list[TopkRow]
    error: TinkerError | None = None


class SampleBatch:
    """Runs steps over a cache."""

    def __init__(self, decoder: InferenceDecoder, cache: BlockCache) -> None:
        self._decoder = decoder
        self._cache = cache

    def run(self, chunks: List[Chunk], adapters: Mapping[Hashable, FrozenAdapter]) -> list[Drawn]:
        """Compute the chunks; tokens are drawn for those that reach their sequence's end."""
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
            tokens += sequence.tokens[first : first + chunk.count]
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
        """Logits of prompt positions about whose successors something was asked."""
        plan, first = chunk.sequence.state.plan, chunk.sequence.computed
        begin = max(first, plan.first_needed)
        end = min(first + chunk.count, len(plan.prompt) - 1)
        for start in range(begin, end, SCORED_ROWS):
            rows_TD = hidden_TD[start - first : min(start + SCORED_ROWS, end) - first]
            logits_TV = self._decoder.unembed(rows_TD, _row_adapters([(chunk, len(rows_TD))], adapters))
            chunk.sequence.state.scores.add(start + 1, logits_TV)


def _by_adapter(chunks: List[Chunk]) -> list[Chunk]:
    """Chunks of one adapter side by side; single tokens before longer runs."""
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
    """The rows of each adapter, given the rows of each chunk in order."""
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
    """Draw for all rows at once; the row of a prompt serves each of its samples."""
    wanted = [(row, index) for row, sequence in enumerate(sequences) for index in _samples(sequence)]
    rows = [row for row, _ in wanted]
    states = [sequences[row].state for row in rows]
    numbers = uniforms(
        [state.job.seed for state in states], [index for _, index in wanted], [sequences[row].drawn for row in rows]
    )
    tokens, logprobs = draw_from(logits_SV, rows, [state.rule for state in states], numbers)
    results = [Drawn(sequence, [], [], []) for sequence in sequences]
    listed = _listed(sequences, logits_SV)
    for row, token, logprob in zip(rows, tokens.tolist(), logprobs.tolist(), strict=True):
        results[row].tokens.append(token)
        results[row].logprobs.append(logprob)
        results[row].topk.append(listed.get(row))
    return [_checked(result, logits_V) for result, logits_V in zip(results, logits_SV, strict=True)]


def _samples(sequence: Sequence) -> List[int]:
    if sequence.index is not None:
        return (sequence.index,)
    request, plan = sequence.state.job.request, sequence.state.plan
    return range(request.num_samples) if plan.max_new else ()


def _listed(sequences: List[Sequence], logits_SV: torch.Tensor) -> dict[int, TopkRow]:
    """The likeliest tokens of the rows that ask for them."""
    asked: dict[int, list[int]] = {}
    for row, sequence in enumerate(sequences):
        k = sequence.state.job.request.topk_sample_logprobs
        if k:
            asked.setdefault(k, []).append(row)
    listed: dict[int, TopkRow] = {}
    for k, rows in asked.items():
        tokens_SK, values_SK = topk(logits_SV[rows].log_softmax(dim=1), k)
        for row, tokens, values in zip(rows, tokens_SK.tolist(), values_SK.tolist(), strict=True):
            listed[row] = list(zip(tokens, values, strict=True))
    return listed


def _checked(drawn: Drawn, logits_V: torch.Tensor) -> Drawn:
    """Weights that overflowed give no distribution to draw from: no logprob is finite then."""
    numbers = drawn.logprobs or [float(logits_V.amax())]
    is_finite = all(number - number == 0 for number in numbers)
    if is_finite:
        return drawn
    adapter = drawn.sequence.state.job.adapter
    whose = "the base model's" if adapter is None else f"adapter {adapter!r}'s"
    error = TinkerError(f"{whose} output is not finite, so no token can be drawn; sample an earlier checkpoint")
    return Drawn(drawn.sequence, [], [], [], error)

"""Samples from the test arithmetic.

Tokens are a hash of (weights, prompt, seed, sample index, position), or of (weights, prompt, position) at temperature
0. Temperatures above 0, top_k and top_p do not change them; options that need a distribution to change (min_p,
penalties, bias, output formats) are refused. Logprobs equal those of a forward pass over the same
tokens. For stop strings, a token below 256 is that character, and every other token is U+FFFD. Without a `stop`, token
0 ends a sample.

Shapes: T prompt tokens, M sampled tokens, N those of several samples, concatenated, D features, K entries of a top-k
table, V vocabulary.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from tinsmith.engine.protocol import ModelCard
from tinsmith.errors import InvalidInputError
from tinsmith.testing import arithmetic
from tinsmith.wire.messages.sampling import (
    FILL_LOGPROB,
    FILL_TOKEN,
    PromptAltTokens,
    SampledSequence,
    SampleRequest,
    SampleResponse,
    SamplingParams,
    StopReason,
    TopkLogprobs,
)
from tinsmith.wire.rules.sample_rules import NOT_ASKED, check_sample
from tinsmith.wire.values.numbers import Array
from tinsmith.wire.values.tensors import TensorData

END_TOKEN = 0


@dataclass(slots=True, eq=False)
class Drawing:
    """A validated request, and what was drawn for it."""

    weights_D: Array
    request: SampleRequest
    card: ModelCard
    prompt: list[int]
    length: int
    """The most tokens that a sample may have."""
    key: bytes
    """Identifies the weights and the prompt."""
    streams: list[bytes]
    """Four bytes for each token of each sample."""
    sequences: list[SampledSequence] = field(default_factory=list)

    @classmethod
    def of(cls, weights_D: Array, request: SampleRequest, seed: int, card: ModelCard) -> Drawing:
        params = request.sampling_params
        check_sample(request, vocab_size=card.vocab_size, max_context_length=card.max_context_length)
        _refuse_what_needs_a_distribution(params)
        prompt = request.prompt.to_ints()
        length = card.max_context_length - len(prompt) if params.max_tokens is None else params.max_tokens
        key = weights_D.tobytes() + struct.pack(f"<{len(prompt)}i", *prompt)
        numbers = range(request.num_samples)
        names = [b"greedy" if params.temperature == 0 else b"%d %d" % (seed, index) for index in numbers]
        streams = [hashlib.shake_128(key + name).digest(4 * length) for name in names]
        return cls(weights_D, request, card, prompt, length, key, streams)

    @property
    def size(self) -> int:
        return self.length * len(self.streams)

    def response(self) -> SampleResponse:
        return _response(self.weights_D, self.prompt, self.sequences, self.request, self.key, self.card)


def draw(drawings: Sequence[Drawing]) -> None:
    """Draw the samples of requests. Several together take little longer than one, and give the same bits."""
    rows = _rows(drawings)
    lengths = np.array([row.tokens_M.size for row in rows])
    starts = np.cumsum(lengths) - lengths
    tokens_N = np.concatenate([row.tokens_M for row in rows])
    before_N = np.empty_like(tokens_N)
    before_N[1:] = tokens_N[:-1]
    is_drawn = lengths > 0
    before_N[starts[is_drawn]] = np.array([row.drawing.prompt[-1] for row in rows])[is_drawn]
    offsets = np.array([len(row.drawing.prompt) - 1 for row in rows])
    positions_N = np.arange(tokens_N.size) + np.repeat(offsets - starts, lengths)
    contexts_N = arithmetic.contexts_at(before_N, positions_N)
    weights_ND = np.repeat(np.array([row.drawing.weights_D for row in rows]), lengths, axis=0)
    logprobs_N = arithmetic.logprobs(weights_ND, contexts_N, tokens_N)
    for row, start in zip(rows, starts.tolist(), strict=True):
        drawing, end = row.drawing, start + row.tokens_M.size
        k = drawing.request.topk_sample_logprobs
        topk = _topk(drawing.weights_D, contexts_N[start:end], k, drawing.card) if k else None
        sequence = SampledSequence(row.reason, "", row.tokens_M, logprobs_N[start:end], topk)
        drawing.sequences.append(sequence)


class _Row(NamedTuple):
    """The tokens of one sample."""

    drawing: Drawing
    tokens_M: Array
    reason: StopReason


def _rows(drawings: Sequence[Drawing]) -> list[_Row]:
    """Return all samples of all requests, each up to its stop."""
    numbers = np.frombuffer(b"".join([stream for drawing in drawings for stream in drawing.streams]), "<u4")
    vocabularies = np.array([drawing.card.vocab_size for drawing in drawings], np.uint32)
    tokens = (numbers % np.repeat(vocabularies, [drawing.size for drawing in drawings])).astype(np.int32)
    rows, start = [], 0
    for drawing in drawings:
        params, length = drawing.request.sampling_params, drawing.length
        for _ in drawing.streams:
            tokens_M = tokens[start : start + length]
            end = _end(tokens_M.tolist(), params.stop, params.stop_token_ids or [])
            rows.append(_Row(drawing, tokens_M[:end], "length" if end is None else "stop"))
            start += length
    return rows


def _refuse_what_needs_a_distribution(params: SamplingParams) -> None:
    """Refuse the options that would change these tokens, unless their value has no effect."""
    without_effect = {"min_p": 0, "frequency_penalty": 0, "presence_penalty": 0, "repetition_penalty": 1}
    for name in (*without_effect, "logit_bias", "output_format"):
        value = getattr(params, name)
        if value and value != without_effect.get(name):
            raise InvalidInputError(
                f"sampling_params.{name}: the in-memory backend draws without a distribution and cannot apply it",
                field=f"sampling_params.{name}",
            )


def _end(tokens: list[int], stop: str | list[str | int] | None, also: list[int]) -> int | None:
    """Return the number of tokens up to and including the first stop."""
    ends = [tokens.index(item) + 1 for item in also if item in tokens]
    if stop is None:
        return min([*ends, tokens.index(END_TOKEN) + 1] if END_TOKEN in tokens else ends, default=None)
    stops = [stop] if isinstance(stop, str) else stop
    if any(isinstance(item, str) for item in stops):
        text = "".join(chr(token) if token < 256 else "\ufffd" for token in tokens)
        ends += [text.index(item) + len(item) for item in stops if isinstance(item, str) and item and item in text]
    else:
        ends += [tokens.index(item) + 1 for item in stops if isinstance(item, int) and item in tokens]
    return min(ends, default=None)


def _response(
    weights_D: Array,
    prompt: list[int],
    sequences: list[SampledSequence],
    request: SampleRequest,
    key: bytes,
    card: ModelCard,
) -> SampleResponse:
    """Return the samples, and the requested scores of the prompt."""
    asked = request.prompt_logprobs or request.topk_prompt_logprobs or request.prompt_alt_tokens_k
    if not asked and request.target_prompt_logprobs is None:
        return SampleResponse(sequences)
    prompt_T = np.array(prompt, np.int32)
    before = arithmetic.contexts(prompt_T[:-1])  # row i: the context of prompt token i + 1; the first token has none
    logprobs_T, topk, targets, alternatives = None, None, None, None
    skipped = max(0, before.size - (request.prompt_logprobs_last_n or before.size))
    if request.prompt_logprobs:
        logprobs_T = np.full(prompt_T.size, np.nan, np.float32)
        logprobs_T[1 + skipped :] = arithmetic.logprobs(weights_D, before[skipped:], prompt_T[1 + skipped :])
    if request.topk_prompt_logprobs:
        topk = _prompt_topk(weights_D, before, skipped, request.topk_prompt_logprobs, card)
    if request.target_prompt_logprobs is not None:
        targets = _target_logprobs(weights_D, before, request.target_prompt_logprobs)
    if request.prompt_alt_tokens_k:
        alternatives = _alternatives(weights_D, before, request.prompt_alt_tokens_k, key, card)
    return SampleResponse(sequences, logprobs_T, topk, targets, 0, alternatives)


def _topk(weights_D: Array, contexts_M: Array, k: int, card: ModelCard) -> TopkLogprobs | None:
    """Return the k most likely tokens after each prefix; ties in order of their ids."""
    k = min(k, card.vocab_size)
    if k == 0:
        return None
    vocabulary_V = np.arange(card.vocab_size)
    tokens_MK = np.empty((contexts_M.size, k), np.int32)
    logprobs_MK = np.empty((contexts_M.size, k), np.float32)
    for i, context in enumerate(contexts_M):
        logprobs_V = arithmetic.logprobs(weights_D, context, vocabulary_V)
        best_K = np.argsort(-logprobs_V, kind="stable")[:k]
        tokens_MK[i], logprobs_MK[i] = best_K, logprobs_V[best_K]
    return TopkLogprobs(tokens_MK, logprobs_MK)


def _prompt_topk(weights_D: Array, before: Array, skipped: int, k: int, card: ModelCard) -> TopkLogprobs:
    """Return a row per prompt token, with empty cells where a token is not scored."""
    k = min(k, card.vocab_size)
    tokens_TK = np.full((before.size + 1, k), FILL_TOKEN, np.int32)
    logprobs_TK = np.full((before.size + 1, k), FILL_LOGPROB, np.float32)
    scored = _topk(weights_D, before[skipped:], k, card)
    if scored is not None:
        tokens_TK[1 + skipped :], logprobs_TK[1 + skipped :] = scored.token_ids, scored.logprobs
    return TopkLogprobs(tokens_TK, logprobs_TK)


def _target_logprobs(weights_D: Array, before: Array, target: TensorData) -> TensorData:
    """Score row i after i + 1 prompt tokens. CSR returns CSR; dense returns dense, with NaN in empty cells."""
    if target.sparse_crow_indices is not None:
        rows = np.repeat(np.arange(before.size), np.diff(target.sparse_crow_indices))
        return target.replace(data=arithmetic.logprobs(weights_D, before[rows], target.array), dtype="float32")
    asked = target.array
    scored = arithmetic.logprobs(weights_D, before[:, None], np.maximum(asked, 0))
    return TensorData.from_numpy(np.where(asked == NOT_ASKED, np.float32(np.nan), scored))


def _alternatives(weights_D: Array, before: Array, k: int, key: bytes, card: ModelCard) -> PromptAltTokens:
    drawn = hashlib.shake_128(key + b"alternatives").digest(4 * k * before.size)
    tokens = (np.frombuffer(drawn, "<u4") % card.vocab_size).astype(np.int64).reshape(before.size, k)
    scored = arithmetic.logprobs(weights_D, before[:, None], tokens)
    return PromptAltTokens(TensorData.from_numpy(tokens), TensorData.from_numpy(scored))

"""Samples over the test arithmetic.

Tokens are a hash of (weights, prompt, seed, sample index, position); at temperature 0 of (weights, prompt, position).
Temperatures above 0, top_k and top_p do not change them. Logprobs are those that a forward pass gives for the same
tokens. A token below 256 reads as that character and every other as U+FFFD, which is what stop strings are matched on;
where no stop is given, token 0 ends a sample.

Does not know: jobs, files. Shapes: T prompt tokens, M sampled tokens, K entries of a top-k table, V vocabulary.
"""

from __future__ import annotations

import hashlib
import struct

import numpy as np

from tinsmith.engine.base import ModelCard
from tinsmith.testing import arithmetic
from tinsmith.testing.losses import refused, text_tokens
from tinsmith.wire.numbers import Array
from tinsmith.wire.sampling import (
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
from tinsmith.wire.tensors import TensorData

END_TOKEN = 0
NOT_ASKED = -1


def run(weights_D: Array, request: SampleRequest, seed: int, card: ModelCard) -> tuple[SampleResponse, int]:
    """The answer to a request, and the number of prompt tokens."""
    params = request.sampling_params
    prompt = text_tokens(request.prompt, card, "prompt")
    length = _length(params, len(prompt), card)
    key = weights_D.tobytes() + struct.pack(f"<{len(prompt)}i", *prompt)
    sequences = []
    for index in range(request.num_samples):
        stream = b"greedy" if params.temperature == 0 else b"%d %d" % (seed, index)
        tokens_M1, reason = _draw(prompt[-1], key + stream, length, params, card)
        tokens_M = tokens_M1[1:]
        contexts_M = arithmetic.contexts(tokens_M1[:-1], len(prompt) - 1)
        logprobs_M = arithmetic.logprobs(weights_D, contexts_M, tokens_M)
        topk = _topk(weights_D, contexts_M, request.topk_sample_logprobs, card)
        sequences.append(SampledSequence(reason, "", tokens_M, logprobs_M, topk))
    return _response(weights_D, prompt, sequences, request, key, card), len(prompt)


def _length(params: SamplingParams, prompt_length: int, card: ModelCard) -> int:
    room = card.max_context_length - prompt_length
    length = room if params.max_tokens is None else params.max_tokens
    if length > room:
        raise refused(
            f"max_tokens: {length} and a prompt of {prompt_length} tokens are more than the "
            f"{card.max_context_length} that {card.name} can hold"
        )
    return length


def _draw(last: int, key: bytes, length: int, params: SamplingParams, card: ModelCard) -> tuple[Array, StopReason]:
    """The prompt's last token and behind it the sampled ones."""
    tokens_M1 = np.empty(length + 1, np.int32)
    tokens_M1[0] = last
    tokens_M1[1:] = np.frombuffer(hashlib.shake_128(key).digest(4 * length), "<u4") % card.vocab_size
    end = _end(tokens_M1[1:].tolist(), params.stop)
    return (tokens_M1, "length") if end is None else (tokens_M1[: end + 1], "stop")


def _end(tokens: list[int], stop: str | list[str | int] | None) -> int | None:
    """The number of tokens up to and including the first stop."""
    if stop is None:
        return tokens.index(END_TOKEN) + 1 if END_TOKEN in tokens else None
    stops = [stop] if isinstance(stop, str) else stop
    if any(isinstance(item, str) for item in stops):
        text = "".join(chr(token) if token < 256 else "\ufffd" for token in tokens)
        ends = [text.index(item) + len(item) for item in stops if isinstance(item, str) and item and item in text]
    else:
        ends = [tokens.index(item) + 1 for item in stops if isinstance(item, int) and item in tokens]
    return min(ends, default=None)


def _response(
    weights_D: Array,
    prompt: list[int],
    sequences: list[SampledSequence],
    request: SampleRequest,
    key: bytes,
    card: ModelCard,
) -> SampleResponse:
    """The samples, and what was asked about the prompt."""
    asked = request.prompt_logprobs or request.topk_prompt_logprobs or request.prompt_alt_tokens_k
    if not asked and request.target_prompt_logprobs is None:
        return SampleResponse(sequences)
    prompt_T = np.array(prompt, np.int32)
    before = arithmetic.contexts(prompt_T[:-1])  # row i: what prompt token i + 1 is scored behind; the first has none
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
    """The k likeliest tokens behind each prefix; equals in the order of their ids."""
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
    """A row per prompt token, filled with "nothing" where none is scored."""
    k = min(k, card.vocab_size)
    tokens_TK = np.full((before.size + 1, k), FILL_TOKEN, np.int32)
    logprobs_TK = np.full((before.size + 1, k), FILL_LOGPROB, np.float32)
    scored = _topk(weights_D, before[skipped:], k, card)
    if scored is not None:
        tokens_TK[1 + skipped :], logprobs_TK[1 + skipped :] = scored.token_ids, scored.logprobs
    return TopkLogprobs(tokens_TK, logprobs_TK)


def _target_logprobs(weights_D: Array, before: Array, target: TensorData) -> TensorData:
    """Row i is scored behind i + 1 prompt tokens. CSR brings CSR; dense brings dense, NaN where nothing was asked."""
    if target.shape is None or len(target.shape) != 2 or target.shape[0] != before.size:
        raise refused(f"target_prompt_logprobs: has shape {target.shape}, needed is [{before.size}, K]")
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

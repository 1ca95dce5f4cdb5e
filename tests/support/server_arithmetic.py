"""The fake numbers. Nothing here is a model: each value follows from its inputs by a formula that a test can repeat."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from tinsmith.wire.messages.sampling import (
    FILL_LOGPROB,
    FILL_TOKEN,
    PromptAltTokens,
    SampledSequence,
    SampleRequest,
    SampleResponse,
    StopReason,
    TopkLogprobs,
)
from tinsmith.wire.messages.training import ForwardBackwardOutput
from tinsmith.wire.values.chunks import EncodedTextChunk
from tinsmith.wire.values.inputs import Datum, ModelInput
from tinsmith.wire.values.tensors import TensorData

VOCABULARY = 1000
DEFAULT_MAX_TOKENS = 16
NOT_ASKED = -1


def logprob(token: int, position: int) -> float:
    """The logprob of a target token at a position."""
    return -(1 + ((token * 31 + position * 7) % 97) / 97)


def logprobs_of(targets: Any) -> Any:
    """The logprobs of a target tensor, [N] or [N, K]; the row is the position."""
    rows = np.arange(targets.shape[0]).reshape(-1, *[1] * (targets.ndim - 1))
    return (-(1 + ((targets * 31 + rows * 7) % 97) / 97)).astype(np.float32)


def run_loss(data: Sequence[Datum], extra_metrics: dict[str, float]) -> ForwardBackwardOutput:
    """Logprobs of each datum's targets, and `loss:sum` = sum(-logprob * weight) in float32."""
    outputs, products = [], [np.zeros(0, np.float32)]
    for datum in data:
        targets = datum.loss_fn_inputs["target_tokens"].to_numpy()
        logprobs = logprobs_of(targets)
        outputs.append({"logprobs": TensorData.from_numpy(logprobs)})
        products.append((-logprobs * _weights(datum, logprobs)).reshape(-1))
    loss = float(np.sum(np.concatenate(products), dtype=np.float32))
    return ForwardBackwardOutput("TorchLossReturn", outputs, {"loss:sum": loss, **extra_metrics})


def _weights(datum: Datum, logprobs: Any) -> Any:
    """The weights; without any the advantages, and without those one per target."""
    for key in ("weights", "advantages"):
        if key in datum.loss_fn_inputs:
            return datum.loss_fn_inputs[key].to_numpy()
    return np.ones_like(logprobs)


def prompt_tokens(prompt: ModelInput) -> list[int | None]:
    """The prompt's tokens; None where media stands."""
    tokens: list[int | None] = []
    for chunk in prompt.chunks:
        tokens.extend(chunk.to_ints() if isinstance(chunk, EncodedTextChunk) else [None] * chunk.length)
    return tokens


def sampled_tokens(prompt: ModelInput, index: int, length: int) -> list[int]:
    """The tokens of sample number `index`."""
    start = sum(token for token in prompt_tokens(prompt) if token is not None) + index * 7
    return [(start + j) % VOCABULARY for j in range(length)]


def sampled_logprob(position: int) -> float:
    return -0.5 - position / 100


def run_sample(request: SampleRequest) -> SampleResponse:
    """The samples, and everything that was asked about the prompt."""
    tokens = prompt_tokens(request.prompt)
    scored_from = max(1, len(tokens) - (request.prompt_logprobs_last_n or len(tokens)))
    target = request.target_prompt_logprobs
    return SampleResponse(
        [_sequence(request, index) for index in range(request.num_samples)],
        _prompt_logprobs(tokens, scored_from) if request.prompt_logprobs else None,
        _prompt_topk(tokens, request.topk_prompt_logprobs, scored_from),
        None if target is None else _target_logprobs(target),
        0,
        _alternatives(tokens, request.prompt_alt_tokens_k),
    )


def _sequence(request: SampleRequest, index: int) -> SampledSequence:
    params = request.sampling_params
    length = DEFAULT_MAX_TOKENS if params.max_tokens is None else params.max_tokens
    tokens = sampled_tokens(request.prompt, index, length)
    stops = [stop for stop in params.stop if isinstance(stop, int)] if isinstance(params.stop, list) else []
    reason: StopReason = "length"
    for j, token in enumerate(tokens):
        if token in stops:
            tokens, reason = tokens[: j + 1], "stop"
            break
    logprobs = np.array([sampled_logprob(j) for j in range(len(tokens))], np.float32)
    rows = [_topk_row(token, sampled_logprob(j), request.topk_sample_logprobs) for j, token in enumerate(tokens)]
    topk = TopkLogprobs.from_rows(rows, "topk") if request.topk_sample_logprobs else None
    return SampledSequence(reason, "", np.array(tokens, np.int32), logprobs, topk)


def _topk_row(token: int, likeliest: float, k: int) -> list[tuple[int, float]]:
    return [((token + m) % VOCABULARY, likeliest - m / 10) for m in range(k)]


def _prompt_logprobs(tokens: Sequence[int | None], scored_from: int) -> Any:
    values = [
        logprob(token, i) if token is not None and i >= scored_from else math.nan for i, token in enumerate(tokens)
    ]
    return np.array(values, np.float32)


def _prompt_topk(tokens: Sequence[int | None], k: int, scored_from: int) -> TopkLogprobs | None:
    if k == 0:
        return None
    tokens_LK = np.full((len(tokens), k), FILL_TOKEN, np.int32)
    logprobs_LK = np.full((len(tokens), k), FILL_LOGPROB, np.float32)
    for i, token in enumerate(tokens):
        if token is not None and i >= scored_from:
            tokens_LK[i], logprobs_LK[i] = zip(*_topk_row(token, logprob(token, i), k), strict=True)
    return TopkLogprobs(tokens_LK, logprobs_LK)


def _target_logprobs(target: TensorData) -> TensorData:
    """Row i is scored at prompt position i + 1. CSR brings CSR, dense dense, with NaN where nothing was asked."""
    if not target.is_sparse:
        asked = target.to_numpy()
        values = [
            [math.nan if t == NOT_ASKED else logprob(t, i + 1) for t in row] for i, row in enumerate(asked.tolist())
        ]
        return TensorData.from_numpy(np.array(values, np.float32).reshape(asked.shape))
    assert target.sparse_crow_indices is not None
    rows = np.repeat(np.arange(len(target.sparse_crow_indices) - 1), np.diff(target.sparse_crow_indices)).tolist()
    scored = [logprob(token, row + 1) for row, token in zip(rows, target.array.tolist(), strict=True)]
    return target.replace(data=np.array(scored, np.float32), dtype="float32")


def _alternatives(tokens: Sequence[int | None], k: int) -> PromptAltTokens | None:
    if k == 0:
        return None
    rows = [_topk_row((token or 0) + 1, logprob(token or 0, i + 1), k) for i, token in enumerate(tokens[1:])]
    shape = (len(tokens) - 1, k)
    drawn = np.array([[token for token, _ in row] for row in rows], np.int64).reshape(shape)
    scores = np.array([[score for _, score in row] for row in rows], np.float32).reshape(shape)
    return PromptAltTokens(TensorData.from_numpy(drawn), TensorData.from_numpy(scores))

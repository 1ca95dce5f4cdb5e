"""Losses over the test arithmetic: per token the loss and its derivative, by the protocol's formulas.

Owns: reading a request's datums, and refusing what these losses cannot be computed from.
Does not know: jobs, optimizers. Shapes: N targets (one datum's, [N] or [N, K]), D features.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np

from tinsmith.engine.base import JobFailedError, ModelCard
from tinsmith.testing import arithmetic
from tinsmith.wire.chunks import EncodedTextChunk
from tinsmith.wire.inputs import Datum, ModelInput
from tinsmith.wire.numbers import Array
from tinsmith.wire.tensors import TensorData
from tinsmith.wire.training import ForwardBackwardInput, ForwardBackwardOutput, LossFnConfig

TokenLoss: TypeAlias = tuple[Array, Array]
"""The loss of each target, and its derivative with respect to the target's logprob."""


@dataclass(frozen=True, kw_only=True)
class Pass:
    """What one forward (and backward) pass gave."""

    output: ForwardBackwardOutput
    gradient_D: Array
    tokens: int


def run(weights_D: Array, work: ForwardBackwardInput, card: ModelCard) -> Pass:
    """Logprobs of all targets, the loss, and its gradient with respect to the weights."""
    if work.loss_fn not in LOSSES:
        known = ", ".join(LOSSES)
        raise refused(f"loss_fn: {work.loss_fn!r} is not computed by the test backend (it has: {known})")
    config = work.loss_fn_config or {}
    outputs, gradient_D, loss, tokens, targets = [], np.zeros(arithmetic.FEATURES), 0.0, 0, 0
    for i, datum in enumerate(work.data):
        where = f"data[{i}]"
        tokens_T = np.array(text_tokens(datum.model_input, card, f"{where}.model_input"), np.int64)
        targets_N = _input(datum, "target_tokens", where)
        _check_vocabulary(int(targets_N.max()), card, f"{where}.loss_fn_inputs['target_tokens']")
        contexts_T = arithmetic.contexts(tokens_T)
        phi_ND = arithmetic.features(contexts_T.reshape(-1, *[1] * (targets_N.ndim - 1)), targets_N)
        scores_N = arithmetic.scores(weights_D, phi_ND)
        logprobs_N = arithmetic.log_sigmoid(scores_N)
        loss_N, slope_N = LOSSES[work.loss_fn](logprobs_N, datum, config, where)
        coefficients_N = slope_N * -np.expm1(logprobs_N)
        gradient_D = gradient_D + (coefficients_N[..., None] * phi_ND).reshape(-1, arithmetic.FEATURES).sum(axis=0)
        outputs.append({"logprobs": TensorData.from_numpy(logprobs_N.astype(np.float32))})
        loss += float(loss_N.sum())
        tokens += tokens_T.size
        targets += targets_N.size
    metrics = {"loss:sum": loss, "tokens:sum": float(targets)}
    return Pass(output=ForwardBackwardOutput("TorchLossReturn", outputs, metrics), gradient_D=gradient_D, tokens=tokens)


def refused(message: str) -> JobFailedError:
    return JobFailedError(message, "user")


def text_tokens(model_input: ModelInput, card: ModelCard, where: str) -> list[int]:
    """The token ids of an input that must be text, in the model's vocabulary, and not too long."""
    for i, chunk in enumerate(model_input.chunks):
        if not isinstance(chunk, EncodedTextChunk):
            raise refused(f"{where}.chunks[{i}]: {chunk.type} is not read by this model; it reads text")
    tokens = model_input.to_ints()
    if not tokens:
        raise refused(f"{where}: is empty; a model needs at least one token")
    if len(tokens) > card.max_context_length:
        raise refused(
            f"{where}: {len(tokens)} tokens are more than the {card.max_context_length} that {card.name} can read"
        )
    _check_vocabulary(max(tokens), card, where)
    return tokens


def _check_vocabulary(token: int, card: ModelCard, where: str) -> None:
    if token >= card.vocab_size:
        raise refused(f"{where}: token {token} is not in the vocabulary of {card.name} (0 to {card.vocab_size - 1})")


def _input(datum: Datum, key: str, where: str) -> Array:
    if key not in datum.loss_fn_inputs:
        raise refused(f"{where}.loss_fn_inputs: {key!r} is missing")
    return datum.loss_fn_inputs[key].to_numpy()


def _floats(datum: Datum, key: str, like: Array, where: str) -> Array:
    values = _input(datum, key, where).astype(np.float64)
    if values.shape != like.shape:
        raise refused(f"{where}.loss_fn_inputs[{key!r}]: has shape {values.shape}, target_tokens {like.shape}")
    if not np.isfinite(values).all():
        raise refused(f"{where}.loss_fn_inputs[{key!r}]: holds NaN or infinity; only finite numbers can be trained on")
    return values


def _number(config: LossFnConfig, key: str, default: float) -> float:
    value = config.get(key, default)
    if isinstance(value, str):
        raise refused(f"loss_fn_config[{key!r}]: {value!r} is not a number")
    return value


def _cross_entropy(logprobs_N: Array, datum: Datum, config: LossFnConfig, where: str) -> TokenLoss:
    weights_N = _floats(datum, "weights", logprobs_N, where)
    return -weights_N * logprobs_N, -weights_N


def _importance_sampling(logprobs_N: Array, datum: Datum, config: LossFnConfig, where: str) -> TokenLoss:
    advantages_N = _floats(datum, "advantages", logprobs_N, where)
    surrogate_N = np.exp(logprobs_N - _floats(datum, "logprobs", logprobs_N, where)) * advantages_N
    return -surrogate_N, -surrogate_N


def _ppo(logprobs_N: Array, datum: Datum, config: LossFnConfig, where: str) -> TokenLoss:
    advantages_N = _floats(datum, "advantages", logprobs_N, where)
    ratio_N = np.exp(logprobs_N - _floats(datum, "logprobs", logprobs_N, where))
    low, high = _number(config, "clip_low_threshold", 0.8), _number(config, "clip_high_threshold", 1.2)
    free_N, clipped_N = ratio_N * advantages_N, np.clip(ratio_N, low, high) * advantages_N
    return -np.minimum(free_N, clipped_N), np.where(free_N <= clipped_N, -free_N, 0.0)


def _cispo(logprobs_N: Array, datum: Datum, config: LossFnConfig, where: str) -> TokenLoss:
    advantages_N = _floats(datum, "advantages", logprobs_N, where)
    ratio_N = np.exp(logprobs_N - _floats(datum, "logprobs", logprobs_N, where))
    low, high = _number(config, "clip_low_threshold", 0.0), _number(config, "clip_high_threshold", 4.0)
    slope_N = -np.clip(ratio_N, low, high) * advantages_N
    return slope_N * logprobs_N, slope_N


LOSSES: Mapping[str, Callable[[Array, Datum, LossFnConfig, str], TokenLoss]] = {
    "cross_entropy": _cross_entropy,
    "importance_sampling": _importance_sampling,
    "ppo": _ppo,
    "cispo": _cispo,
}

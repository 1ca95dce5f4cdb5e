"""Losses on the test arithmetic: the loss of each token and its derivative, by the protocol's formulas.

Requests have passed `check_loss` before. Shapes: N targets (one datum's, [N] or [N, K]), D features.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np

from tinsmith.engine.protocol import JobFailedError
from tinsmith.testing import arithmetic
from tinsmith.wire.messages.training import ForwardBackwardInput, ForwardBackwardOutput
from tinsmith.wire.rules.loss_rules import loss_options
from tinsmith.wire.values.inputs import Datum
from tinsmith.wire.values.numbers import Array
from tinsmith.wire.values.tensors import TensorData

TokenLoss: TypeAlias = tuple[Array, Array]
"""The loss of each target, and its derivative with respect to the target's logprob."""


@dataclass(frozen=True, kw_only=True)
class Pass:
    """The results of a forward (and backward) pass."""

    output: ForwardBackwardOutput
    gradient_D: Array
    tokens: int


def run(weights_D: Array, work: ForwardBackwardInput) -> Pass:
    """Logprobs of all targets, the loss, and its gradient with respect to the weights."""
    if work.loss_fn not in LOSSES:
        known = ", ".join(LOSSES)
        text = f"loss_fn: {work.loss_fn!r} is not computed by the test backend; it has {known}"
        raise JobFailedError(text, "user")
    options = loss_options(work.loss_fn, work.loss_fn_config)
    outputs, gradient_D, loss, tokens, targets = [], np.zeros(arithmetic.FEATURES), 0.0, 0, 0
    for datum in work.data:
        tokens_T = np.array(datum.model_input.to_ints(), np.int64)
        targets_N = datum.loss_fn_inputs["target_tokens"].to_numpy()
        contexts_T = arithmetic.contexts(tokens_T)
        phi_ND = arithmetic.features(contexts_T.reshape(-1, *[1] * (targets_N.ndim - 1)), targets_N)
        scores_N = arithmetic.scores(weights_D, phi_ND)
        logprobs_N = arithmetic.log_sigmoid(scores_N)
        loss_N, slope_N = LOSSES[work.loss_fn](logprobs_N, datum, options)
        coefficients_N = slope_N * -np.expm1(logprobs_N)
        gradient_D = gradient_D + (coefficients_N[..., None] * phi_ND).reshape(-1, arithmetic.FEATURES).sum(axis=0)
        outputs.append({"logprobs": TensorData.from_numpy(logprobs_N.astype(np.float32))})
        loss += float(loss_N.sum())
        tokens += tokens_T.size
        targets += targets_N.size
    metrics = {"loss:sum": loss, "tokens:sum": float(targets)}
    return Pass(output=ForwardBackwardOutput("TorchLossReturn", outputs, metrics), gradient_D=gradient_D, tokens=tokens)


def _floats(datum: Datum, key: str) -> Array:
    return datum.loss_fn_inputs[key].to_numpy().astype(np.float64)


def _cross_entropy(logprobs_N: Array, datum: Datum, options: Mapping[str, float]) -> TokenLoss:
    weights_N = _floats(datum, "weights")
    return -weights_N * logprobs_N, -weights_N


def _importance_sampling(logprobs_N: Array, datum: Datum, options: Mapping[str, float]) -> TokenLoss:
    advantages_N = _floats(datum, "advantages")
    surrogate_N = np.exp(logprobs_N - _floats(datum, "logprobs")) * advantages_N
    return -surrogate_N, -surrogate_N


def _ppo(logprobs_N: Array, datum: Datum, options: Mapping[str, float]) -> TokenLoss:
    advantages_N = _floats(datum, "advantages")
    ratio_N = np.exp(logprobs_N - _floats(datum, "logprobs"))
    low, high = options["clip_low_threshold"], options["clip_high_threshold"]
    free_N, clipped_N = ratio_N * advantages_N, np.clip(ratio_N, low, high) * advantages_N
    return -np.minimum(free_N, clipped_N), np.where(free_N <= clipped_N, -free_N, 0.0)


def _cispo(logprobs_N: Array, datum: Datum, options: Mapping[str, float]) -> TokenLoss:
    advantages_N = _floats(datum, "advantages")
    ratio_N = np.exp(logprobs_N - _floats(datum, "logprobs"))
    low, high = options["clip_low_threshold"], options["clip_high_threshold"]
    slope_N = -np.clip(ratio_N, low, high) * advantages_N
    return slope_N * logprobs_N, slope_N


LOSSES: Mapping[str, Callable[[Array, Datum, Mapping[str, float]], TokenLoss]] = {
    "cross_entropy": _cross_entropy,
    "importance_sampling": _importance_sampling,
    "ppo": _ppo,
    "cispo": _cispo,
}

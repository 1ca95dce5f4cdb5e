"""A stand-in for a language model, for tests: scores from hashed features, and a LoRA of eight numbers.

The logprob of a token after a prefix is log sigmoid(w . phi(prefix, token)). phi is a hash of the prefix's last token,
its position and the token; w = base + scale * A * B, elementwise, with A from the seed and B zero at first. So a fresh
adapter equals its base, gradients are real, training lowers the loss, and sampling and training agree exactly. The
probabilities of a vocabulary do not sum to one, so it is not a real language model.

Everything is elementwise numpy in a fixed order, so equal inputs give equal bits.

Shapes: N targets (any number of dimensions), D features.
"""

from __future__ import annotations

import hashlib
import math
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from tinsmith.engine.protocol import LoraSpec
from tinsmith.wire.messages.training import AdamParams
from tinsmith.wire.rules import optim_metrics
from tinsmith.wire.values.numbers import Array

FEATURES = 8
ATTENTION, MLP, UNEMBEDDING = slice(0, 3), slice(3, 6), slice(6, 8)
"""The features that train_attn, train_mlp and train_unembed enable."""

_STEP = np.uint64(0x9E3779B97F4A7C15)
_MIX = np.uint64(0xBF58476D1CE4E5B9)
_HALF, _ONE = np.uint64(32), np.uint64(1)
_UNIT = 2.0**-63


def _mixed(values: Array) -> Array:
    """Hash 64-bit numbers, in place."""
    values ^= values >> _HALF
    values *= _MIX
    values ^= values >> _HALF
    return values


_FEATURE_STEPS_D = _mixed(np.arange(1, FEATURES + 1, dtype=np.uint64) * _STEP) | _ONE


def numbers_from(text: str, count: int) -> Array:
    """Return `count` floats in [-1, 1) derived from a string."""
    drawn = hashlib.shake_128(text.encode()).digest(8 * count)
    numbers: Array = np.frombuffer(drawn, "<i8") * _UNIT
    return numbers


@lru_cache(maxsize=32)
def _steps(count: int) -> Array:
    return _mixed(np.arange(1, count + 1, dtype=np.uint64) * _STEP) | _ONE


def contexts(tokens: Array, offset: int = 0) -> Array:
    """Return each prefix as one number: its last token and that token's position (counted from `offset`)."""
    numbers = tokens.astype(np.uint64)
    numbers += _ONE
    numbers *= _steps(1 << (offset + len(tokens)).bit_length())[offset : offset + len(tokens)]
    return numbers


def contexts_at(tokens_N: Array, positions_N: Array) -> Array:
    """Return the same for tokens at any positions."""
    most = int(positions_N.max(initial=0)) + 1
    numbers: Array = (tokens_N.astype(np.uint64) + _ONE) * _steps(1 << most.bit_length())[positions_N]
    return numbers


def features(contexts_N: Array, targets_N: Array) -> Array:
    """Return phi [N, D] of targets after prefixes."""
    keys_N = contexts_N + targets_N.astype(np.uint64) * _STEP
    phi_ND: Array = _mixed(keys_N[..., None] * _FEATURE_STEPS_D).view(np.int64) * _UNIT
    return phi_ND


def scores(weights_D: Array, phi_ND: Array) -> Array:
    """Return w . phi; the weights may differ from row to row."""
    summed: Array = np.add.reduce(phi_ND * weights_D, -1)
    return summed


def logprobs(weights_D: Array, contexts_N: Array, targets_N: Array) -> Array:
    """Return float32 logprobs of targets after prefixes."""
    return log_sigmoid(scores(weights_D, features(contexts_N, targets_N))).astype(np.float32)


def log_sigmoid(scores_N: Array) -> Array:
    logs: Array = -np.logaddexp(0.0, -scores_N)
    return logs


@lru_cache(maxsize=64)
def base_weights(base_model: str) -> Array:
    """Return the frozen weights of a base model, derived from its name."""
    weights_D = numbers_from(f"base {base_model}", FEATURES)
    weights_D.flags.writeable = False
    return weights_D


@dataclass(kw_only=True)
class ArithmeticAdapter:
    """One model: parameters (A, then B), accumulated gradients and AdamW's state, all float64."""

    lora: LoraSpec
    base_model: str
    parameters: Array
    gradients: Array
    first_moments: Array
    second_moments: Array
    step: int = 0

    @classmethod
    def fresh(cls, lora: LoraSpec, base_model: str) -> ArithmeticAdapter:
        first = numbers_from(f"{lora.seed} {lora.rank}", FEATURES) * _mask(lora)
        zeros = np.zeros(2 * FEATURES)
        return cls(
            lora=lora,
            base_model=base_model,
            parameters=np.concatenate([first, np.zeros(FEATURES)]),
            gradients=zeros,
            first_moments=zeros,
            second_moments=zeros,
        )

    def weights(self) -> Array:
        """Return the base weights with the adapter added."""
        return merged(base_weights(self.base_model), self.parameters, self.lora.alpha / self.lora.rank)

    def add_gradient(self, gradient_D: Array) -> None:
        """Accumulate a gradient with respect to the merged weights."""
        scaled_D = gradient_D * _mask(self.lora) * (self.lora.alpha / self.lora.rank)
        first_D, second_D = self.parameters[:FEATURES], self.parameters[FEATURES:]
        self.gradients = self.gradients + np.concatenate([scaled_D * second_D, scaled_D * first_D])

    def reset_optimizer(self) -> None:
        self.gradients = self.first_moments = self.second_moments = np.zeros(2 * FEATURES)
        self.step = 0

    def optimize(self, params: AdamParams) -> dict[str, float]:
        """Do one AdamW step, reset the gradients, and return the metrics."""
        gradients = self.gradients
        norm = math.sqrt(math.fsum(gradients * gradients))
        if params.grad_clip_norm > 0 and norm > params.grad_clip_norm:
            gradients = gradients * (params.grad_clip_norm / norm)
        step = self.step + 1
        first = params.beta1 * self.first_moments + (1 - params.beta1) * gradients
        second = params.beta2 * self.second_moments + (1 - params.beta2) * gradients * gradients
        corrected = np.sqrt(second / (1 - params.beta2**step)) + params.eps
        change = -params.learning_rate * (first / (1 - params.beta1**step)) / corrected
        change = change - params.learning_rate * params.weight_decay * self.parameters
        metrics = {
            optim_metrics.GRAD_NORM: norm,
            optim_metrics.UPDATE_NORM: math.sqrt(math.fsum(change * change)),
            optim_metrics.LEARNING_RATE: params.learning_rate,
            optim_metrics.STEP: float(step),
        }
        self.parameters = self.parameters + change
        self.first_moments, self.second_moments, self.step = first, second, step
        self.gradients = np.zeros(2 * FEATURES)
        return metrics


def merged(base_D: Array, parameters: Array, scale: float) -> Array:
    weights_D: Array = base_D + scale * parameters[:FEATURES] * parameters[FEATURES:]
    return weights_D


def _mask(lora: LoraSpec) -> Array:
    mask_D = np.zeros(FEATURES)
    mask_D[ATTENTION] = lora.train_attn
    mask_D[MLP] = lora.train_mlp
    mask_D[UNEMBEDDING] = lora.train_unembed
    return mask_D

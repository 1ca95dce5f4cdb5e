"""A request for samples, checked against the model: what will be done for it, fixed before any work.

Owns: the meaning and the limits of every option of a sample request.
Does not know: caches, batches, tensors.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from tinsmith.engine.stop import StopRule, stop_rule
from tinsmith.errors import InvalidInputError
from tinsmith.wire.sampling import MAX_TOPK_CELLS, SampleRequest

if TYPE_CHECKING:
    from tinsmith.engine.models.config import ModelConfig

NOT_ASKED = -1
"""A cell of target_prompt_logprobs in which nothing is asked."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SampleJob:
    """Samples to draw. The seed is fixed by whoever accepts the request, so that a replay draws the same."""

    id: str
    request: SampleRequest
    seed: int
    adapter: Hashable = None
    """Name of a loaded adapter; None: the base model."""
    tenant: str = ""
    priority: int = 0


@dataclass(frozen=True, slots=True)
class SamplePlan:
    """What a checked request asks for."""

    prompt: tuple[int, ...]
    max_new: int
    stop: StopRule
    scores_prompt: bool
    first_scored: int
    """The first prompt position whose logprob (and top-k) is asked."""
    first_needed: int
    """The first prompt position whose hidden state is needed; what lies before it may come from the cache."""


def plan_sample(request: SampleRequest, config: ModelConfig, context_length: int) -> SamplePlan:
    """Check a request; an error names the field, its value and what is allowed."""
    prompt = _checked_prompt(request, config.vocab_size, context_length)
    _check_params(request)
    params = request.sampling_params
    room = max(context_length - len(prompt), 1)
    max_new = room if params.max_tokens is None else min(params.max_tokens, room)
    _check_listings(request, len(prompt), max_new)
    _check_targets(request, len(prompt), config.vocab_size)
    scores_prompt = bool(request.prompt_logprobs) or request.topk_prompt_logprobs > 0
    last_n = request.prompt_logprobs_last_n
    first_scored = 1 if last_n is None else len(prompt) - last_n
    needs_all = request.target_prompt_logprobs is not None or request.prompt_alt_tokens_k > 0
    first_needed = len(prompt) - 1
    if needs_all:
        first_needed = 0
    elif scores_prompt:
        first_needed = min(first_scored - 1, first_needed)
    return SamplePlan(
        prompt=prompt,
        max_new=max_new,
        stop=stop_rule(params.stop, config.eos_token_ids, config.vocab_size),
        scores_prompt=scores_prompt,
        first_scored=first_scored,
        first_needed=first_needed,
    )


def _checked_prompt(request: SampleRequest, vocab_size: int, context_length: int) -> tuple[int, ...]:
    prompt = tuple(request.prompt.to_ints())
    if not prompt:
        raise InvalidInputError("prompt: is empty; give at least one token", field="prompt")
    _check_tokens(prompt, vocab_size)
    if len(prompt) > context_length:
        raise InvalidInputError(
            f"prompt: {len(prompt)} tokens are more than the context of {context_length}", field="prompt"
        )
    return prompt


def _check_tokens(tokens: Sequence[int], vocab_size: int) -> None:
    for i, token in enumerate(tokens):
        if not 0 <= token < vocab_size:
            raise InvalidInputError(
                f"prompt[{i}]: token {token} is not in the vocabulary of {vocab_size}", field="prompt"
            )


def _check_params(request: SampleRequest) -> None:
    params = request.sampling_params
    if not (math.isfinite(params.temperature) and params.temperature >= 0):
        raise InvalidInputError(f"temperature: must be 0 or more, got {params.temperature}", field="temperature")
    if not 0 < params.top_p <= 1:
        raise InvalidInputError(f"top_p: must be above 0 and at most 1, got {params.top_p}", field="top_p")
    if params.top_k != -1 and params.top_k < 1:
        raise InvalidInputError(f"top_k: must be -1 (no limit) or at least 1, got {params.top_k}", field="top_k")


def _check_listings(request: SampleRequest, length: int, max_new: int) -> None:
    for name, rows in (
        ("topk_prompt_logprobs", length),
        ("prompt_alt_tokens_k", length),
        ("topk_sample_logprobs", max_new),
    ):
        k = getattr(request, name)
        if rows * k > MAX_TOPK_CELLS:
            raise InvalidInputError(
                f"{name}: {k} for each of {rows} tokens are too many (limit: {MAX_TOPK_CELLS} in all)", field=name
            )
    last_n = request.prompt_logprobs_last_n
    if last_n is None:
        return
    if not request.prompt_logprobs:
        raise InvalidInputError("prompt_logprobs_last_n: needs prompt_logprobs", field="prompt_logprobs_last_n")
    if not 1 <= last_n <= length - 1:
        raise InvalidInputError(
            f"prompt_logprobs_last_n: must be 1 to {length - 1} for a prompt of {length} tokens, got {last_n}",
            field="prompt_logprobs_last_n",
        )


def _check_targets(request: SampleRequest, length: int, vocab_size: int) -> None:
    target = request.target_prompt_logprobs
    if target is None:
        return
    shape = target.shape or [len(target)]
    where = "target_prompt_logprobs"
    if target.dtype != "int64" or len(shape) != 2 or shape[0] != length - 1:
        raise InvalidInputError(
            f"{where}: must be int64 of shape [{length - 1}, K], got {target.dtype} of shape {shape}", field=where
        )
    if shape[0] * shape[1] > MAX_TOPK_CELLS:
        raise InvalidInputError(f"{where}: shape {shape} has more than {MAX_TOPK_CELLS} cells", field=where)
    wrong = target.array[(target.array < NOT_ASKED) | (target.array >= vocab_size)]
    if wrong.size:
        raise InvalidInputError(
            f"{where}: token {int(wrong.flat[0])} is not in the vocabulary of {vocab_size} ({NOT_ASKED}: not asked)",
            field=where,
        )

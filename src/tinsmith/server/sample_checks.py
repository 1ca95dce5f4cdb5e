"""What is wrong with a sample request, before anything is queued. The errors name the field and what is allowed.

Does not know: who asks, which weights are meant.
"""

from __future__ import annotations

import math
from typing import NoReturn

import numpy as np

from tinsmith.engine.base import ModelCard
from tinsmith.errors import InvalidInputError
from tinsmith.wire.chunks import EncodedTextChunk, largest_token
from tinsmith.wire.sampling import SampleRequest, SamplingParams

MAX_TOPK = 1000
MAX_STOPS = 64
MAX_STOP_CHARS = 1000
MAX_PROMPT_CELLS = 2**24
"""Prompt positions times alternatives that one request may ask for."""


def check_sample(request: SampleRequest, card: ModelCard, *, max_samples: int) -> int:
    """Refuse what the model cannot draw; returns the length of the prompt."""
    length = _check_prompt(request, card)
    if request.num_samples > max_samples:
        _refuse("num_samples", f"{request.num_samples} is more than {max_samples}")
    _check_params(request.sampling_params, card, length)
    _check_extras(request, card, length)
    return length


def _check_prompt(request: SampleRequest, card: ModelCard) -> int:
    length = 0
    for index, chunk in enumerate(request.prompt.chunks):
        where = f"prompt.chunks[{index}]"
        if not isinstance(chunk, EncodedTextChunk):
            _refuse(where, f"{card.name} reads text only, not {chunk.type}")
        if largest_token(chunk) >= card.vocab_size:
            place, token = next(
                (place, token) for place, token in enumerate(chunk.to_ints()) if token >= card.vocab_size
            )
            _refuse(f"{where}.tokens[{place}]", f"{token} is not a token of {card.name} (0 to {card.vocab_size - 1})")
        length += chunk.length
    if not length:
        _refuse("prompt", "is empty; give at least one token")
    if length >= card.max_context_length:
        _refuse("prompt", f"{length} tokens leave no room in {card.name}'s context of {card.max_context_length}")
    return length


def _check_params(params: SamplingParams, card: ModelCard, length: int) -> None:
    if params.max_tokens is not None and length + params.max_tokens > card.max_context_length:
        room = card.max_context_length - length
        _refuse(
            "sampling_params.max_tokens",
            f"{params.max_tokens} is more than the {room} that fit behind a prompt of {length} tokens "
            f"(context {card.max_context_length})",
        )
    if not math.isfinite(params.temperature) or params.temperature < 0:
        _refuse("sampling_params.temperature", f"{params.temperature} is not 0 (greedy) or more")
    if not 0 < params.top_p <= 1:
        _refuse("sampling_params.top_p", f"{params.top_p} is not in (0, 1]")
    if params.top_k < -1 or params.top_k == 0:
        _refuse("sampling_params.top_k", f"{params.top_k} is not -1 (all) or more than 0")
    if params.seed is not None and not -(2**63) <= params.seed < 2**63:
        _refuse("sampling_params.seed", f"{params.seed} has more than 64 bits")
    _check_stop(params, card)


def _check_stop(params: SamplingParams, card: ModelCard) -> None:
    stops = [params.stop] if isinstance(params.stop, str) else list(params.stop or ())
    if len(stops) > MAX_STOPS:
        _refuse("sampling_params.stop", f"{len(stops)} are more than {MAX_STOPS}")
    for index, stop in enumerate(stops):
        where = f"sampling_params.stop[{index}]"
        if isinstance(stop, str) and not 0 < len(stop) <= MAX_STOP_CHARS:
            _refuse(where, f"a text of {len(stop)} characters; 1 to {MAX_STOP_CHARS} are allowed")
        if isinstance(stop, int) and not 0 <= stop < card.vocab_size:
            _refuse(where, f"{stop} is not a token of {card.name} (0 to {card.vocab_size - 1})")


def _check_extras(request: SampleRequest, card: ModelCard, length: int) -> None:
    for name in ("topk_prompt_logprobs", "topk_sample_logprobs", "prompt_alt_tokens_k"):
        value = getattr(request, name)
        if not value:
            continue
        if value > min(MAX_TOPK, card.vocab_size):
            _refuse(name, f"{value} is more than {min(MAX_TOPK, card.vocab_size)}")
        if value * length > MAX_PROMPT_CELLS:
            _refuse(name, f"{value} for each of {length} positions is too much (limit {MAX_PROMPT_CELLS} in all)")
    last_n = request.prompt_logprobs_last_n
    if last_n is not None and last_n > max(length - 1, 0):
        _refuse("prompt_logprobs_last_n", f"{last_n} is not between 1 and {length - 1}")
    targets = request.target_prompt_logprobs
    if targets is not None:
        shape = tuple(targets.shape or (len(targets.data),))
        if len(shape) != 2 or shape[0] != length - 1:
            _refuse("target_prompt_logprobs", f"has shape {list(shape)}; [{length - 1}, K] is needed for this prompt")
        if targets.dtype != "int64":
            _refuse("target_prompt_logprobs", f"has dtype {targets.dtype}; int64 is needed")
        if shape[0] * shape[1] > MAX_PROMPT_CELLS:
            _refuse("target_prompt_logprobs", f"has {shape[0] * shape[1]} cells (limit {MAX_PROMPT_CELLS})")
        ids = np.asarray(targets.data)
        if ids.size and (ids.min() < -1 or ids.max() >= card.vocab_size):
            _refuse("target_prompt_logprobs", f"holds ids that are not -1 or a token of {card.name}")


def _refuse(field: str, reason: str) -> NoReturn:
    raise InvalidInputError(f"{field}: {reason}", field=field)

"""Which sample requests are valid: the one rule set that client, server and engine apply.

The client calls `check_options`, which needs no model, so that a mistake is raised in the caller's own line. The server
calls `check_sample` before it journals a request, and the engine calls it again on what it reads from the journal: a
request that the server accepted cannot be refused later. Every error names the field, the value and what is allowed.
"""

from __future__ import annotations

import math
from typing import NoReturn

from tinsmith.errors import ContextLengthError, InvalidInputError
from tinsmith.wire.limits import MAX_GRAMMAR_BYTES, MAX_STOP_BYTES, MAX_STOP_CHARS
from tinsmith.wire.messages.sampling import MAX_TOPK_CELLS, OutputFormat, SampleRequest, SamplingParams
from tinsmith.wire.values.chunks import EncodedTextChunk, largest_token
from tinsmith.wire.values.tensors import TensorData

MAX_TOPK = 1000
"""Tokens listed for one position. Alternatives are drawn one after another, in a step that other requests share."""
RANGES = {"min_p": (0.0, 1.0), "frequency_penalty": (-2.0, 2.0), "presence_penalty": (-2.0, 2.0)}
MAX_REPETITION_PENALTY = 10.0
MAX_BIAS = 100.0
NOT_ASKED = -1
"""A cell of target_prompt_logprobs for which no logprob is wanted."""


def check_sample(request: SampleRequest, *, vocab_size: int, max_context_length: int) -> int:
    """Refuse a request that the model cannot answer; return the length of its prompt."""
    length = _check_prompt(request, vocab_size, max_context_length)
    check_options(request)
    params = request.sampling_params
    room = max_context_length - length
    if params.max_tokens is not None and params.max_tokens > room:
        _refuse(
            "sampling_params.max_tokens",
            f"{params.max_tokens} is more than the {room} tokens that fit after a prompt of {length} "
            f"(the context is {max_context_length})",
        )
    _check_tokens(params, vocab_size)
    _check_tables(request, vocab_size, length, room if params.max_tokens is None else params.max_tokens)
    if request.target_prompt_logprobs is not None:
        _check_target_tokens(request.target_prompt_logprobs, vocab_size)
    return length


def check_options(request: SampleRequest) -> None:
    """Refuse options that no model and no server could honour."""
    params = request.sampling_params
    if not (math.isfinite(params.temperature) and params.temperature >= 0):
        _refuse("sampling_params.temperature", f"{params.temperature} is not allowed; it must be 0 (greedy) or more")
    if not 0 < params.top_p <= 1:
        _refuse("sampling_params.top_p", f"{params.top_p} is not allowed; it must be above 0 and at most 1")
    if params.top_k < 1 and params.top_k != -1:
        _refuse("sampling_params.top_k", f"{params.top_k} is not allowed; it must be -1 (all tokens) or at least 1")
    _check_own_options(params)
    _check_stop_strings(params)
    last_n, target = request.prompt_logprobs_last_n, request.target_prompt_logprobs
    if last_n is not None and not request.prompt_logprobs:
        _refuse("prompt_logprobs_last_n", f"{last_n} is set but prompt_logprobs is not; ask for prompt logprobs too")
    if last_n is None and target is None:
        return
    if not all(isinstance(chunk, EncodedTextChunk) for chunk in request.prompt.chunks):
        return  # how many tokens an image takes is for the server to say
    length = request.prompt.length
    if last_n is not None and last_n > length - 1:
        _refuse(
            "prompt_logprobs_last_n",
            f"{last_n} is not allowed; a prompt of {length} tokens has {max(length - 1, 0)} logprobs",
        )
    if target is not None:
        _check_target_shape(target, length)


def _check_prompt(request: SampleRequest, vocab_size: int, max_context_length: int) -> int:
    length = 0
    for index, chunk in enumerate(request.prompt.chunks):
        where = f"prompt.chunks[{index}]"
        if not isinstance(chunk, EncodedTextChunk):
            _refuse(where, f"is of type {chunk.type}, which this model does not read; send encoded_text")
        if largest_token(chunk) >= vocab_size:
            place, token = next((place, token) for place, token in enumerate(chunk.to_ints()) if token >= vocab_size)
            _refuse_token(f"{where}.tokens[{place}]", token, vocab_size)
        length += chunk.length
    if not length:
        _refuse("prompt", "is empty; send at least one token")
    if length >= max_context_length:
        raise ContextLengthError(
            f"prompt: the prompt is too long: {length} tokens leave no room for a sample; "
            f"this model's maximum context length is {max_context_length} tokens",
            field="prompt",
        )
    return length


def _check_stop_strings(params: SamplingParams) -> None:
    stops = [params.stop] if isinstance(params.stop, str) else params.stop or ()
    for index, stop in enumerate(stops):
        if stop == "":
            _refuse(
                f"sampling_params.stop[{index}]", f"is an empty string; 1 to {MAX_STOP_CHARS} characters are allowed"
            )
    size_bytes = sum(len(stop.encode(errors="surrogatepass")) for stop in stops if isinstance(stop, str))
    if size_bytes > MAX_STOP_BYTES:
        _refuse("sampling_params.stop", f"the strings take {size_bytes} bytes together; {MAX_STOP_BYTES} are allowed")


def _check_own_options(params: SamplingParams) -> None:
    """Refuse values of tinsmith's own options that are out of range."""
    for name, (low, high) in RANGES.items():
        value = getattr(params, name)
        if value is not None and not low <= value <= high:
            _refuse(f"sampling_params.{name}", f"{value} is not allowed; it must be {low:g} to {high:g}")
    repetition = params.repetition_penalty
    if repetition is not None and not 0 < repetition <= MAX_REPETITION_PENALTY:
        _refuse(
            "sampling_params.repetition_penalty",
            f"{repetition} is not allowed; it must be above 0 and at most {MAX_REPETITION_PENALTY:g} (1 has no effect)",
        )
    for token, bias in (params.logit_bias or {}).items():
        if not -MAX_BIAS <= bias <= MAX_BIAS:
            _refuse(
                f"sampling_params.logit_bias[{token}]",
                f"{bias} is not allowed; it must be {-MAX_BIAS:g} to {MAX_BIAS:g}",
            )
    if params.output_format is not None:
        _check_output_format(params.output_format)


def _check_output_format(output: OutputFormat) -> None:
    """Refuse a text that is too long or does not belong to its type; `grammar_rules` compiles it."""
    where = "sampling_params.output_format.schema"
    if output.type == "json_object" and output.schema:
        _refuse(where, "must be empty for type json_object; use type json_schema to say what the object looks like")
    if output.type != "json_object" and not output.schema:
        _refuse(where, f"is empty; type {output.type} needs one")
    size_bytes = len(output.schema.encode(errors="surrogatepass"))
    if size_bytes > MAX_GRAMMAR_BYTES:
        _refuse(where, f"has {size_bytes} bytes; at most {MAX_GRAMMAR_BYTES} are allowed")


def _check_tokens(params: SamplingParams, vocab_size: int) -> None:
    """Refuse token ids that are not in the vocabulary."""
    stops = () if isinstance(params.stop, str) else params.stop or ()
    for name, listed in (("stop", stops), ("stop_token_ids", params.stop_token_ids or ())):
        for index, stop in enumerate(listed):
            if isinstance(stop, int) and not 0 <= stop < vocab_size:
                _refuse_token(f"sampling_params.{name}[{index}]", stop, vocab_size)
    for token in params.logit_bias or ():
        if not 0 <= token < vocab_size:
            _refuse_token("sampling_params.logit_bias", token, vocab_size)


def _check_tables(request: SampleRequest, vocab_size: int, length: int, max_tokens: int) -> None:
    """Bound the tables of the answer: the engine holds them in memory until the last token is drawn."""
    topk = min(MAX_TOPK, vocab_size)
    for name, most, rows in (
        ("topk_prompt_logprobs", topk, length),
        ("topk_sample_logprobs", topk, max_tokens * request.num_samples),
        ("prompt_alt_tokens_k", MAX_TOPK, length),  # drawn with replacement, so there may be more than tokens
    ):
        value = getattr(request, name)
        if value > most:
            _refuse(name, f"{value} is more than the {most} that are allowed for a token")
        if value * rows > MAX_TOPK_CELLS:
            _refuse(name, f"{value} for each of {rows} tokens is too many; {MAX_TOPK_CELLS} in all are allowed")


def _check_target_shape(target: TensorData, length: int) -> None:
    where = "target_prompt_logprobs"
    shape = _shape(target)
    if len(shape) != 2 or shape[0] != length - 1:
        _refuse(where, f"has shape {list(shape)}; a prompt of {length} tokens needs [{length - 1}, K]")
    if target.dtype != "int64":
        _refuse(where, f"has dtype {target.dtype}; token ids are int64")


def _check_target_tokens(target: TensorData, vocab_size: int) -> None:
    where = "target_prompt_logprobs"
    rows, columns = _shape(target)
    if max(rows, 1) * columns > MAX_TOPK_CELLS:  # a CSR tensor of a few bytes can have any shape
        _refuse(where, f"shape {[rows, columns]} has more than the {MAX_TOPK_CELLS} cells that are allowed")
    ids = target.array
    wrong = ids[(ids < NOT_ASKED) | (ids >= vocab_size)]
    if wrong.size:
        _refuse(
            where,
            f"holds {int(wrong.flat[0])}, which is not a token of this model "
            f"(allowed: 0 to {vocab_size - 1}, and {NOT_ASKED} where no logprob is wanted)",
        )


def _shape(tensor: TensorData) -> tuple[int, ...]:
    return tuple(tensor.shape) if tensor.shape is not None else tensor.array.shape


def _refuse_token(where: str, token: int, vocab_size: int) -> NoReturn:
    _refuse(where, f"{token} is not a token of this model (allowed: 0 to {vocab_size - 1})")


def _refuse(field: str, reason: str) -> NoReturn:
    raise InvalidInputError(f"{field}: {reason}", field=field)

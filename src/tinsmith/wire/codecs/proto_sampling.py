"""SampleResponse as protobuf."""

from __future__ import annotations

import numpy as np

from tinsmith.errors import InvalidInputError, WireError
from tinsmith.wire.codecs.protobuf import (
    MAX_ITEMS,
    MessageWriter,
    array_bytes,
    as_array,
    as_bytes,
    as_int,
    check_count,
    read_fields,
    read_tensor,
    tensor_message,
)
from tinsmith.wire.messages.sampling import PromptAltTokens, SampledSequence, SampleResponse, StopReason, TopkLogprobs
from tinsmith.wire.values.numbers import Array
from tinsmith.wire.values.tensors import TensorData

_INT32 = np.dtype("<i4")
_FLOAT32 = np.dtype("<f4")
_STOP_REASONS: tuple[StopReason, StopReason] = ("stop", "length")


def encode_response(response: SampleResponse) -> bytes:
    """Return the body of a sample's result."""
    message = MessageWriter()
    for sequence in response.sequences:
        message.message(1, _sequence_message(sequence))
    if response.prompt_logprobs_np is not None:
        message.blob(2, array_bytes(response.prompt_logprobs_np, _FLOAT32))
    if response.topk_prompt_logprobs_np is not None:
        message.message(3, _topk_message(response.topk_prompt_logprobs_np))
    if response.prompt_cache_hit_tokens:
        message.number(4, response.prompt_cache_hit_tokens)
    if response.target_prompt_logprobs is not None:
        message.message(5, tensor_message(response.target_prompt_logprobs))
    if response.prompt_alt_tokens is not None:
        alternatives = MessageWriter()
        alternatives.message(1, tensor_message(response.prompt_alt_tokens.tokens))
        alternatives.message(2, tensor_message(response.prompt_alt_tokens.logprobs))
        message.message(6, alternatives)
    return message.encode()


def decode_response(body: bytes | memoryview, max_sequences: int = MAX_ITEMS) -> SampleResponse:
    """Read the result in a body; arrays are views of it. Sequence ids come with the answer to the submit instead."""
    sequences: list[SampledSequence] = []
    prompt_logprobs: Array | None = None
    topk: TopkLogprobs | None = None
    cache_hits = 0
    target: TensorData | None = None
    alternatives: PromptAltTokens | None = None
    for number, kind, value in read_fields(memoryview(body), "SampleResponse"):
        if number == 1:
            check_count(len(sequences) + 1, max_sequences, "sequences")
            where = f"sequences[{len(sequences)}]"
            sequences.append(_read_sequence(as_bytes(value, kind, where), where))
        elif number == 2:
            prompt_logprobs = _absent_if_empty(as_array(value, kind, "prompt_logprobs", _FLOAT32))
        elif number == 3:
            topk = _read_topk(as_bytes(value, kind, "topk_prompt_logprobs"), "topk_prompt_logprobs")
        elif number == 4:
            cache_hits = as_int(value, kind, "prompt_cache_hit_tokens", 32)
        elif number == 5:
            target = read_tensor(as_bytes(value, kind, "target_prompt_logprobs"), "target_prompt_logprobs")
        elif number == 6:
            alternatives = _read_alternatives(as_bytes(value, kind, "prompt_alt_tokens"))
    return SampleResponse(sequences, prompt_logprobs, topk, target, cache_hits, alternatives)


def _sequence_message(sequence: SampledSequence) -> MessageWriter:
    message = MessageWriter()
    if sequence.stop_reason != "stop":
        message.number(1, _STOP_REASONS.index(sequence.stop_reason))
    if sequence.tokens_np is not None:
        message.blob(2, array_bytes(sequence.tokens_np, _INT32))
    if sequence.logprobs_np is not None:
        message.blob(3, array_bytes(sequence.logprobs_np, _FLOAT32))
    if sequence.topk_logprobs_np is not None:
        message.message(4, _topk_message(sequence.topk_logprobs_np))
    return message


def _topk_message(topk: TopkLogprobs) -> MessageWriter:
    length, k = topk.token_ids.shape
    message = MessageWriter()
    message.blob(1, array_bytes(topk.token_ids, _INT32))
    message.blob(2, array_bytes(topk.logprobs, _FLOAT32))
    message.number(3, k)
    message.number(4, length)
    return message


def _read_sequence(data: memoryview, where: str) -> SampledSequence:
    stop_reason: StopReason = "stop"
    tokens: Array = np.empty(0, _INT32)
    logprobs: Array | None = None
    topk: TopkLogprobs | None = None
    for number, kind, value in read_fields(data, where):
        if number == 1:
            index = as_int(value, kind, f"{where}.stop_reason")
            if index not in (0, 1):
                raise WireError(f"{where}.stop_reason: {index} is unknown", field=f"{where}.stop_reason")
            stop_reason = _STOP_REASONS[index]
        elif number == 2:
            tokens = as_array(value, kind, f"{where}.tokens", _INT32)
        elif number == 3:
            logprobs = _absent_if_empty(as_array(value, kind, f"{where}.logprobs", _FLOAT32))
        elif number == 4:
            inside = f"{where}.topk_sampled_logprobs"
            topk = _read_topk(as_bytes(value, kind, inside), inside)
    return SampledSequence(stop_reason, "", tokens, logprobs, topk)


def _read_topk(data: memoryview, where: str) -> TopkLogprobs | None:
    tokens: Array = np.empty(0, _INT32)
    logprobs: Array = np.empty(0, _FLOAT32)
    k = length = 0
    for number, kind, value in read_fields(data, where):
        if number == 1:
            tokens = as_array(value, kind, f"{where}.token_ids", _INT32)
        elif number == 2:
            logprobs = as_array(value, kind, f"{where}.logprobs", _FLOAT32)
        elif number == 3:
            k = as_int(value, kind, f"{where}.k")
        elif number == 4:
            length = as_int(value, kind, f"{where}.length")
    if k == 0 or length == 0:
        return None
    if k < 0 or length < 0 or tokens.size != k * length or logprobs.size != k * length:
        raise WireError(
            f"{where}: needs {length} x {k} entries, got {tokens.size} tokens and {logprobs.size} logprobs",
            field=where,
        )
    return TopkLogprobs(tokens.reshape(length, k), logprobs.reshape(length, k))


def _read_alternatives(data: memoryview) -> PromptAltTokens:
    where = "prompt_alt_tokens"
    tensors: dict[int, TensorData] = {}
    for number, kind, value in read_fields(data, where):
        if number in (1, 2):
            tensors[number] = read_tensor(as_bytes(value, kind, where), where)
    if len(tensors) != 2:
        raise WireError(f"{where}: must have both tokens and logprobs", field=where)
    try:
        return PromptAltTokens(tensors[1], tensors[2])
    except InvalidInputError as error:
        raise WireError(f"{where}: {error}", field=where) from None


def _absent_if_empty(array: Array) -> Array | None:
    return array if array.size else None

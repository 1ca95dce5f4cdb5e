"""Hypothesis strategies for the values that cross the wire."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from hypothesis import strategies as st

from tinsmith.types import (
    Datum,
    DmelChunk,
    EncodedTextChunk,
    ForwardBackwardInput,
    ForwardBackwardOutput,
    ForwardBackwardRequest,
    ImageChunk,
    ModelInput,
    PromptAltTokens,
    SampledSequence,
    SampleResponse,
    TensorData,
    TopkLogprobs,
)

LOSSES = ["cross_entropy", "importance_sampling", "ppo", "cispo", "dro", "gspo", "stable_reinforce", "custom"]
WEIGHT_KEYS = ["weights", "advantages", "logprobs"]

int64s = st.integers(-(2**63), 2**63 - 1)
token_ids = st.integers(0, 2**31 - 1)
finite32 = st.floats(width=32, allow_nan=False, allow_infinity=False)
logprobs = st.floats(-1000, 0, width=32)
maybe_nan = logprobs | st.just(float("nan"))
names = st.text(max_size=8)


def many(elements: st.SearchStrategy[Any], count: int) -> st.SearchStrategy[list[Any]]:
    return st.lists(elements, min_size=count, max_size=count)


@st.composite
def dense(draw: st.DrawFn, shape: tuple[int, ...], dtype: Any = None) -> TensorData:
    dtype = dtype or draw(st.sampled_from(["int64", "float32"]))
    values = draw(many(int64s if dtype == "int64" else finite32, math.prod(shape)))
    return TensorData(values, dtype, list(shape))


@st.composite
def csr(draw: st.DrawFn, rows: int, columns: int, dtype: Any = None, elements: Any = None) -> TensorData:
    dtype = dtype or draw(st.sampled_from(["int64", "float32"]))
    listed = draw(many(st.sets(st.integers(0, max(columns - 1, 0)), max_size=columns), rows))
    crow = np.cumsum([0, *map(len, listed)]).tolist()
    col = [column for row in listed for column in sorted(row)]
    natural = int64s if dtype == "int64" else finite32
    values = draw(many(natural if elements is None else elements, len(col)))
    return TensorData(values, dtype, [rows, columns], crow, col)


@st.composite
def any_tensor(draw: st.DrawFn) -> TensorData:
    shape = draw(st.lists(st.integers(0, 3), min_size=1, max_size=3))
    if len(shape) == 2 and draw(st.booleans()):
        return draw(csr(*shape))
    return draw(dense(tuple(shape)))


@st.composite
def chunks(draw: st.DrawFn) -> Any:
    kind = draw(st.sampled_from(["text", "text", "text", "image", "dmel"]))
    if kind == "text":
        tokens = draw(st.lists(token_ids, max_size=6))
        return EncodedTextChunk(tokens=np.array(tokens, np.int32) if draw(st.booleans()) else tokens)
    if kind == "image":
        data, expected = draw(st.binary(max_size=8)), draw(st.integers(0, 3))
        return ImageChunk(data=data, format=draw(st.sampled_from(["png", "jpeg"])), expected_tokens=expected)
    return DmelChunk(dmel=bytes([0, 1, draw(st.integers(0, 3))]) + draw(st.binary(max_size=4)))


@st.composite
def datums(draw: st.DrawFn) -> Datum:
    model_input = ModelInput(chunks=draw(st.lists(chunks(), max_size=3)))
    length, k = model_input.length, draw(st.integers(1, 3))
    targets = many(token_ids, length).map(lambda ids: TensorData(ids, "int64", [length]))
    inputs: dict[str, Any] = {"target_tokens": draw(targets | csr(length, k, "int64", token_ids))}
    for key in draw(st.sets(st.sampled_from(WEIGHT_KEYS))):
        inputs[key] = draw(dense((length,), "float32") | dense((length, k), "float32") | csr(length, k, "float32"))
    for key in draw(st.sets(names, max_size=2)) - {*inputs, *WEIGHT_KEYS}:
        inputs[key] = draw(any_tensor())
    return Datum(model_input, inputs)


@st.composite
def fb_requests(draw: st.DrawFn) -> ForwardBackwardRequest:
    finite = st.floats(allow_nan=False, allow_infinity=False)
    config = draw(st.dictionaries(names, finite | names, max_size=3))
    given: dict[str, Any] = {"loss_fn_config": config} if config else {}
    work = ForwardBackwardInput(
        data=draw(st.lists(datums(), max_size=3)), loss_fn=draw(st.sampled_from(LOSSES)), **given
    )
    seq_id = draw(st.integers(0, 2**31 - 1))
    return ForwardBackwardRequest(
        forward_backward_input=work, model_id=draw(names), **({"seq_id": seq_id} if seq_id else {})
    )


@st.composite
def fb_outputs(draw: st.DrawFn) -> ForwardBackwardOutput:
    layouts = draw(st.lists(st.dictionaries(names, st.lists(st.integers(1, 3), max_size=2), max_size=2), max_size=3))
    outputs = []
    for layout in layouts:
        for _ in range(draw(st.integers(1, 3))):
            shapes = {name: (draw(st.integers(0, 3)), *trailing) for name, trailing in layout.items()}
            outputs.append({name: draw(dense(shape)) for name, shape in shapes.items()})
    metrics = draw(st.dictionaries(names, st.floats(allow_nan=False, allow_infinity=False), max_size=3))
    return ForwardBackwardOutput("ArrayRecord", outputs, metrics)


@st.composite
def topk(draw: st.DrawFn, length: int) -> TopkLogprobs | None:
    """A table whose rows are of different lengths; those of length 0 are null."""
    row = st.lists(st.tuples(token_ids, logprobs), max_size=3)
    return TopkLogprobs.from_rows(draw(many(row | st.none(), length)), "topk")


@st.composite
def sequences(draw: st.DrawFn) -> SampledSequence:
    tokens = draw(st.lists(token_ids, max_size=5))
    scores = draw(st.none() | many(logprobs, len(tokens))) or None
    table = draw(st.none() | topk(len(tokens)))
    return SampledSequence(
        draw(st.sampled_from(["stop", "length"])), tokens=tokens, logprobs=scores, topk_logprobs_np=table
    )


@st.composite
def sample_responses(draw: st.DrawFn, *, binary_only: bool = False) -> SampleResponse:
    length, k = draw(st.integers(1, 5)), draw(st.integers(1, 3))
    scores = draw(st.none() | many(maybe_nan, length))
    extra: dict[str, Any] = {}
    if binary_only:
        scored = dense((length, k), "float32")
        extra["target_prompt_logprobs"] = draw(st.none() | scored | csr(length, k, "float32"))
        alternatives = st.builds(PromptAltTokens, dense((length, k), "int64"), scored)
        extra["prompt_alt_tokens"] = draw(st.none() | alternatives)
    return SampleResponse(
        draw(st.lists(sequences(), max_size=3)),
        prompt_logprobs_np=None if scores is None else np.array(scores, np.float32),
        topk_prompt_logprobs_np=draw(st.none() | topk(length)),
        prompt_cache_hit_tokens=draw(st.integers(0, 2**31 - 1)),
        **extra,
    )

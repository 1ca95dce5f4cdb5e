"""Protobuf in both directions, against the descriptor of each release that has one and its reading of our results."""

from __future__ import annotations

import base64
import json
import math
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from support.official import Official, official_release
from support.official_values import FLOAT32, TEXT, TOKENS, as_binary, assert_same, plain, values_of

from tinsmith import types
from tinsmith.wire.codecs import proto_outputs, proto_sampling, proto_training
from tinsmith.wire.messages.sampling import FILL_LOGPROB, FILL_TOKEN

THOROUGH = settings(
    max_examples=40, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck), database=None
)

# The type numbers of descriptor.proto
DOUBLE, INT64, INT32, BOOL, STRING, MESSAGE, BYTES, UINT32, ENUM = 1, 3, 5, 8, 9, 11, 12, 13, 14

MESSAGES: dict[str, dict[str, tuple[int, int]]] = {
    "ForwardBackwardRequest": {
        "model_id": (1, STRING),
        "seq_id": (2, INT32),
        "data": (3, MESSAGE),
        "loss_fn": (4, STRING),
        "loss_fn_config": (5, MESSAGE),
        "forward_only": (6, BOOL),
        "loss_fn_config_v2": (7, MESSAGE),
    },
    "LossConfigValue": {"number": (1, DOUBLE), "text": (2, STRING)},
    "Datum": {
        "model_input": (1, MESSAGE),
        "loss_fn_inputs": (2, MESSAGE),
        "model_input_spans": (3, MESSAGE),
        "loss_fn_input_spans": (4, MESSAGE),
    },
    "Chunk": {"encoded_text": (1, MESSAGE), "image": (2, MESSAGE), "dmel": (3, MESSAGE)},
    "EncodedTextChunk": {"tokens": (1, BYTES)},
    "ImageChunk": {
        "data": (1, BYTES),
        "format": (2, STRING),
        "expected_tokens": (3, INT32),
        "override_dimensions": (4, MESSAGE),
    },
    "ImageDimensions": {"width": (1, UINT32), "height": (2, UINT32)},
    "DmelChunk": {"dmel": (1, BYTES)},
    "Tensor": {"dense": (1, BYTES), "sparse_csr": (2, MESSAGE), "dtype": (3, ENUM), "shape": (4, INT64)},
    "SparseCsr": {"values": (1, BYTES), "crow_indices": (2, BYTES), "col_indices": (3, BYTES)},
    "ProvenanceSpan": {"prompt_tokens": (1, MESSAGE), "sampled_tokens": (2, MESSAGE)},
    "PromptProvenanceSpan": {"sequence_id": (1, STRING), "offset": (2, INT64), "length": (3, INT64)},
    "SampledProvenanceSpan": {"sequence_id": (1, STRING), "offset": (2, INT64), "length": (3, INT64)},
    "ForwardBackwardOutput": {
        "loss_fn_output_type": (1, STRING),
        "loss_fn_outputs": (2, MESSAGE),
        "metrics": (3, MESSAGE),
    },
    "ArrayRecord": {"type_tag": (1, STRING), "fields": (2, MESSAGE), "num_datums": (3, INT64)},
    "BatchedTensor": {"data": (1, BYTES), "offsets": (2, BYTES), "dtype": (3, ENUM), "trailing_shape": (4, INT64)},
    "SampleResponse": {
        "sequences": (1, MESSAGE),
        "prompt_logprobs": (2, BYTES),
        "topk_prompt_logprobs": (3, MESSAGE),
        "prompt_cache_hit_tokens": (4, INT32),
        "target_prompt_logprobs": (5, MESSAGE),
        "prompt_alt_tokens": (6, MESSAGE),
    },
    "SampledSequence": {
        "stop_reason": (1, ENUM),
        "tokens": (2, BYTES),
        "logprobs": (3, BYTES),
        "topk_sampled_logprobs": (4, MESSAGE),
    },
    "TopkLogprobs": {"token_ids": (1, BYTES), "logprobs": (2, BYTES), "k": (3, UINT32), "length": (4, UINT32)},
    "PromptAltTokens": {"tokens": (1, MESSAGE), "logprobs": (2, MESSAGE)},
}
"""What our codecs read and write."""

RENAMED = {"TopkPromptLogprobs": "TopkLogprobs", "prompt_length": "length"}
UNUSED = {"SamplingParams", "StopStrings", "StopTokens"}
"""In the descriptor, on no wire."""
ENUMS = {
    "StopReason": {"STOP_REASON_STOP": 0, "STOP_REASON_LENGTH": 1},
    "DType": {
        "DTYPE_UNSPECIFIED": 0,
        "DTYPE_FLOAT32": 1,
        "DTYPE_INT64": 2,
        "DTYPE_INT32": 3,
        "DTYPE_BFLOAT16": 4,
    },
}


@pytest.fixture
def binary(official: Official) -> Official:
    if not official.description["protobuf"]:
        pytest.skip(f"{official.release} speaks JSON only")
    return official


def test_descriptor_has_nothing_that_we_lack(binary: Official) -> None:
    for name, fields in binary.description["protobuf"].items():
        if name in UNUSED:
            continue
        if name in ENUMS:
            assert {key: value[0] for key, value in fields.items()}.items() <= ENUMS[name].items()
            continue
        ours = MESSAGES[RENAMED.get(name, name)]
        theirs = {RENAMED.get(field, field): (number, kind) for field, (number, kind, _) in fields.items()}
        assert theirs.items() <= ours.items(), name


def test_newest_descriptor_has_all_that_we_write(newest: Official) -> None:
    assert set(MESSAGES) | set(ENUMS) | UNUSED == set(newest.description["protobuf"])


@THOROUGH
@given(st.data())
def test_requests_we_encode_are_read_by_the_newest(newest: Official, data: st.DataObject) -> None:
    values = data.draw(values_of(types.ForwardBackwardRequest, newest.line))
    request = types.ForwardBackwardRequest(**values, forward_only=data.draw(st.booleans()))
    read = newest.ask("parse_protobuf", message="ForwardBackwardRequest", body=proto_training.encode_request(request))
    work = request.forward_backward_input
    assert read.get("model_id", "") == request.model_id
    assert read.get("seq_id", 0) == (request.seq_id or 0)
    assert read.get("forward_only", False) == request.forward_only
    assert read["loss_fn"] == work.loss_fn
    config = work.loss_fn_config or {}
    assert read.get("loss_fn_config", {}) == {k: v for k, v in config.items() if not isinstance(v, str)}
    typed = {k: next(iter(v.values())) for k, v in read.get("loss_fn_config_v2", {}).items()}
    assert typed == config
    for ours, theirs in zip(work.data, read["data"], strict=True):
        for chunk, message in zip(ours.model_input.chunks, theirs.get("model_input", []), strict=True):
            _assert_chunk(chunk, message)
        for key, tensor in ours.loss_fn_inputs.items():
            _assert_tensor(tensor, theirs["loss_fn_inputs"][key])


@THOROUGH
@given(st.data())
def test_our_bytes_decode_like_official_bytes(newest: Official, data: st.DataObject) -> None:
    """The same request encoded by both sides decodes to the same values in ours."""
    values = data.draw(values_of(types.ForwardBackwardRequest, newest.line))
    arguments = {"forward_only": data.draw(st.booleans())}
    sent = newest.ask("encode", type="ForwardBackwardRequest", values=values, arguments=arguments)
    theirs = proto_training.decode_request(base64.b64decode(sent["body"]))
    ours = types.ForwardBackwardRequest(**values, **arguments)
    again = proto_training.decode_request(proto_training.encode_request(ours))
    assert plain(theirs) == plain(again)
    assert_same(plain(theirs), as_binary(sent["read"]))


def test_provenance_spans_travel_both_ways(newest: Official) -> None:
    spans = {
        "model_input_spans": [
            {"kind": "prompt", "sequence_id": "a", "length": 2},
            {"kind": "sampled", "sequence_id": "b", "offset": 3, "length": 1},
        ],
        "loss_fn_input_spans": [{"kind": "sampled", "sequence_id": "b", "offset": 0, "length": 3}],
    }
    tensor = {"data": [1, 2, 3], "dtype": "int64", "shape": [3]}
    datum = {"model_input": {"chunks": [{"tokens": [1, 2, 3]}]}, "loss_fn_inputs": {"target_tokens": tensor}}
    values = {
        "forward_backward_input": {"data": [datum | spans], "loss_fn": "cross_entropy"},
        "model_id": "m",
        "seq_id": 1,
    }
    sent = newest.ask("encode", type="ForwardBackwardRequest", values=values)
    theirs = proto_training.decode_request(base64.b64decode(sent["body"])).forward_backward_input.data[0]
    expected = types.Datum(types.ModelInput.from_ints([1, 2, 3]), {"target_tokens": [1, 2, 3]}).with_provenance(
        [
            types.PromptProvenanceSpan(sequence_id="a", length=2),
            types.SampledProvenanceSpan(sequence_id="b", offset=3, length=1),
        ],
        [types.SampledProvenanceSpan(sequence_id="b", length=3)],
    )
    assert theirs == expected
    ours = types.ForwardBackwardRequest(
        forward_backward_input=types.ForwardBackwardInput(data=[expected], loss_fn="cross_entropy"), model_id="m"
    )
    read = newest.ask("parse_protobuf", message="ForwardBackwardRequest", body=proto_training.encode_request(ours))
    assert read["data"][0]["model_input_spans"] == [
        {"prompt_tokens": {"sequence_id": "a", "length": "2"}},
        {"sampled_tokens": {"sequence_id": "b", "offset": "3", "length": "1"}},
    ]


@pytest.mark.parametrize("kind", ["int64", "float32"])
@pytest.mark.parametrize("listed", range(8))
def test_torch_matrices_become_sparse_where_official_ones_do(newest: Official, kind: str, listed: int) -> None:
    """At the border between dense and CSR both choose alike."""
    import torch

    matrix = torch.zeros(4, 5, dtype=getattr(torch, kind))
    matrix.view(-1)[:listed] = 3
    ours = types.TensorData.from_torch_sparse(matrix)
    csr_bytes = listed * (matrix.element_size() + 8) + 5 * 8
    assert ours.is_sparse == (csr_bytes < matrix.numel() * matrix.element_size())
    assert ours.tolist() == matrix.tolist()


@st.composite
def outputs(draw: st.DrawFn) -> types.ForwardBackwardOutput:
    count = draw(st.integers(0, 4))
    columns = draw(st.sampled_from([None, 2, 3]))
    results = []
    for _ in range(count):
        rows = draw(st.integers(0, 3))
        cells = rows * (columns or 1)
        numbers = np.array(draw(st.lists(FLOAT32, min_size=cells, max_size=cells)), np.float32)
        logprobs = types.TensorData.from_numpy(numbers.reshape((rows, columns) if columns else (rows,)))
        results.append({"logprobs": logprobs, "ids": types.TensorData.from_numpy(np.arange(rows))})
    metrics = draw(st.dictionaries(TEXT, st.floats(allow_nan=False), max_size=3))
    return types.ForwardBackwardOutput(draw(st.sampled_from(["T", "a:T", "ArrayRecord"])), results, metrics)


@THOROUGH
@given(outputs())
def test_outputs_we_encode_are_read_by_the_newest(newest: Official, output: types.ForwardBackwardOutput) -> None:
    body = proto_outputs.encode_output(output)
    read = newest.ask("read_result", message="ForwardBackwardOutput", body=body)
    ours = proto_outputs.decode_output(body)
    assert ours.metrics == output.metrics
    assert ours.loss_fn_outputs == output.loss_fn_outputs
    assert read["loss_fn_output_type"] == ours.loss_fn_output_type
    assert _nested(read["metrics"]) == _nested(output.metrics)
    for mine, theirs in zip(output.loss_fn_outputs, read["loss_fn_outputs"], strict=True):
        for name, tensor in mine.items():
            assert theirs[name]["data"] == tensor.data
            assert theirs[name]["shape"] == (tensor.shape or [len(tensor)])


def test_outputs_of_several_records_and_narrow_types_are_joined(newest: Official) -> None:
    def batched(array: Any, offsets: list[int], dtype: str, trailing: list[int]) -> dict[str, Any]:
        return {
            "data": _base64(array),
            "offsets": _base64(np.array(offsets, np.int64)),
            "dtype": dtype,
            "trailing_shape": trailing,
        }

    bfloat16 = (np.array([1.5, -2.0, 3.25, 0.5], np.float32).view(np.uint32) >> 16).astype(np.uint16)
    values = {
        "loss_fn_output_type": "pkg:Out",
        "loss_fn_outputs": [
            {"fields": {"x": batched(bfloat16, [0, 4, 8], "DTYPE_BFLOAT16", [])}, "num_datums": 2},
            {"fields": {"x": batched(np.arange(6, dtype=np.int32), [0, 24], "DTYPE_INT32", [2])}},
        ],
        "metrics": {"loss:sum": 2.5},
    }
    body = base64.b64decode(newest.ask("make_protobuf", message="ForwardBackwardOutput", values=values))
    ours = proto_outputs.decode_output(body)
    assert [plain(output["x"]) for output in ours.loss_fn_outputs] == [
        {"data": [1.5, -2.0], "dtype": "float32", "shape": [2]},
        {"data": [3.25, 0.5], "dtype": "float32", "shape": [2]},
        {"data": [0, 1, 2, 3, 4, 5], "dtype": "int64", "shape": [3, 2]},
    ]
    assert ours.loss_fn_output_type == "Out"


@st.composite
def sample_responses(draw: st.DrawFn) -> types.SampleResponse:
    return types.SampleResponse(
        [draw(_sequences()) for _ in range(draw(st.integers(0, 3)))],
        draw(st.none() | st.lists(FLOAT32 | st.just(float("nan")), min_size=1, max_size=4).map(_floats)),
        draw(st.none() | _topk()),
        draw(st.none() | _target_logprobs()),
        draw(st.integers(0, 1000)),
        draw(st.none() | _alternatives()),
    )


@st.composite
def _sequences(draw: st.DrawFn) -> types.SampledSequence:
    tokens = draw(st.lists(TOKENS, max_size=4))
    logprobs = draw(st.none() | st.lists(FLOAT32, min_size=len(tokens), max_size=len(tokens)).map(_floats))
    return types.SampledSequence(
        draw(st.sampled_from(["stop", "length"])),
        "",
        np.array(tokens, np.int32),
        logprobs if logprobs is not None and logprobs.size else None,
        draw(st.none() | _topk()),
    )


@st.composite
def _topk(draw: st.DrawFn) -> types.TopkLogprobs:
    length, k = draw(st.integers(1, 3)), draw(st.integers(1, 3))
    tokens = np.array(draw(st.lists(TOKENS, min_size=length * k, max_size=length * k)), np.int32).reshape(length, k)
    logprobs = _floats(draw(st.lists(FLOAT32, min_size=length * k, max_size=length * k))).reshape(length, k)
    for row in range(length):
        used = draw(st.integers(0, k))
        tokens[row, used:], logprobs[row, used:] = FILL_TOKEN, FILL_LOGPROB
    return types.TopkLogprobs(tokens, logprobs)


@st.composite
def _target_logprobs(draw: st.DrawFn) -> types.TensorData:
    return types.TensorData.from_numpy(_floats(draw(st.lists(FLOAT32, min_size=4, max_size=4))).reshape(2, 2))


@st.composite
def _alternatives(draw: st.DrawFn) -> types.PromptAltTokens:
    tokens = np.array(draw(st.lists(TOKENS, min_size=4, max_size=4)), np.int64).reshape(2, 2)
    return types.PromptAltTokens(types.TensorData.from_numpy(tokens), draw(_target_logprobs()))


@THOROUGH
@given(sample_responses())
def test_samples_we_encode_are_read_by_the_newest(newest: Official, response: types.SampleResponse) -> None:
    body = proto_sampling.encode_response(response)
    assert proto_sampling.decode_response(body) == response
    read = newest.ask("read_result", message="SampleResponse", body=body)
    assert_same(_nested(_read(response)), _nested(read))


@pytest.mark.parametrize("release", ["0.24.0", "0.25.0", "0.30.0"])
@THOROUGH
@given(data=st.data())
def test_results_are_read_by_older_releases_too(newest: Official, release: str, data: st.DataObject) -> None:
    official = official_release(release)
    response = data.draw(sample_responses())
    read = official.ask("read_result", message="SampleResponse", body=proto_sampling.encode_response(response))
    assert_same(_nested(_read(response)), _known(_nested(read)))
    output = data.draw(outputs())
    read = official.ask("read_result", message="ForwardBackwardOutput", body=proto_outputs.encode_output(output))
    assert len(read["loss_fn_outputs"]) == len(output.loss_fn_outputs)


def _floats(values: list[float]) -> Any:
    return np.array(values, np.float32)


def _read(response: types.SampleResponse) -> dict[str, Any]:
    alternatives = response.prompt_alt_tokens
    return {
        "sequences": [
            {
                "stop_reason": sequence.stop_reason,
                "tokens": sequence.tokens,
                "logprobs": sequence.logprobs,
                "topk_logprobs": sequence.topk_logprobs,
            }
            for sequence in response.sequences
        ],
        "prompt_logprobs": response.prompt_logprobs,
        "topk_prompt_logprobs": response.topk_prompt_logprobs,
        "prompt_cache_hit_tokens": response.prompt_cache_hit_tokens,
        "target_prompt_logprobs": plain(response.target_prompt_logprobs),
        "prompt_alt_tokens": alternatives
        and {"tokens": plain(alternatives.tokens), "logprobs": plain(alternatives.logprobs)},
    }


def _known(value: Any) -> Any:
    """Without the fields that a release does not have."""
    if isinstance(value, dict):
        return {key: _known(item) for key, item in value.items() if item is not None}
    return [_known(item) for item in value] if isinstance(value, list) else value


def _nested(value: Any) -> Any:
    """As JSON would carry it: tuples as lists, infinities and NaN by name."""

    def named(number: float) -> Any:
        return number if math.isfinite(number) else str(number)

    return json.loads(json.dumps(value), parse_constant=lambda name: named(float(name)))


def _assert_chunk(chunk: Any, message: dict[str, Any]) -> None:
    if chunk.type == "encoded_text":
        assert _array(message["encoded_text"].get("tokens", ""), np.int32) == chunk.to_ints()
    elif chunk.type == "image":
        image = message["image"]
        assert base64.b64decode(image.get("data", "")) == chunk.data
        assert image["format"] == chunk.format
        assert image.get("expected_tokens") == chunk.expected_tokens
    else:
        assert base64.b64decode(message["dmel"].get("dmel", "")) == chunk.dmel


def _assert_tensor(tensor: types.TensorData, message: dict[str, Any]) -> None:
    dtype = np.int64 if tensor.dtype == "int64" else np.float32
    assert message["dtype"] == f"DTYPE_{tensor.dtype.upper()}"
    assert [int(dim) for dim in message.get("shape", [])] == (tensor.shape or [])
    if tensor.is_sparse:
        csr = message["sparse_csr"]
        assert _array(csr.get("values", ""), dtype) == tensor.data
        assert _array(csr["crow_indices"], np.int64) == tensor.sparse_crow_indices
        assert _array(csr.get("col_indices", ""), np.int64) == tensor.sparse_col_indices
    else:
        assert _array(message["dense"], dtype) == tensor.data


def _array(text: str, dtype: Any) -> list[Any]:
    values: list[Any] = np.frombuffer(base64.b64decode(text), dtype).tolist()
    return values


def _base64(array: Any) -> str:
    return base64.b64encode(array.tobytes()).decode()

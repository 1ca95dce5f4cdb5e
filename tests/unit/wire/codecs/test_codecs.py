"""Protobuf and JSON carry the same values."""

from __future__ import annotations

import struct
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support import wire_bytes as wb
from support.strategies import datums, fb_outputs, fb_requests, sample_responses

from tinsmith import types
from tinsmith.errors import InvalidInputError, WireError
from tinsmith.types import Datum, ForwardBackwardOutput, ForwardBackwardRequest, ModelInput, SampleResponse, TensorData
from tinsmith.wire.codecs import json_codec, protobuf
from tinsmith.wire.codecs.proto_outputs import decode_output, encode_output, without_metric
from tinsmith.wire.codecs.proto_sampling import decode_response, encode_response
from tinsmith.wire.codecs.proto_training import decode_request, encode_request
from tinsmith.wire.message import is_given
from tinsmith.wire.messages.sampling import FILL_LOGPROB, TopkLogprobs

PROMPT = types.PromptProvenanceSpan(sequence_id="s1", offset=3, length=1)
SAMPLED = types.SampledProvenanceSpan(sequence_id="s2", length=2)


def request_of(*data: Datum, **given_values: Any) -> ForwardBackwardRequest:
    config = {"loss_fn_config": given_values.pop("config")} if "config" in given_values else {}
    work = types.ForwardBackwardInput(data=list(data), loss_fn="ppo", **config)
    return ForwardBackwardRequest(forward_backward_input=work, model_id="model", **given_values)


def through_json(value: Any) -> Any:
    return json_codec.decode(json_codec.encode(value), type(value))


# forward_backward


@given(fb_requests())
@settings(deadline=None, max_examples=40)
def test_a_request_is_equal_after_protobuf_and_after_json(request: ForwardBackwardRequest) -> None:
    assert decode_request(encode_request(request)) == request
    assert through_json(request) == request


@given(datums())
@settings(deadline=None, max_examples=40)
def test_a_decoded_datum_encodes_to_the_same_bytes(datum: Datum) -> None:
    body = encode_request(request_of(datum))
    assert encode_request(decode_request(body)) == body


def test_a_request_is_these_bytes() -> None:
    datum = Datum(ModelInput.from_ints([1, 2]), {"weights": np.array([0.5, 1.0], np.float32)})
    chunk = wb.field(1, wb.field(1, wb.int32s(1, 2)))
    expected = (
        wb.field(1, "model")
        + wb.field(2, 7)
        + wb.field(3, wb.field(1, chunk) + wb.entry(2, "weights", wb.tensor(wb.float32s(0.5, 1.0), wb.FLOAT32, 2)))
        + wb.field(4, "ppo")
        + wb.field(5, wb.field(1, "clip") + wb.field(2, 0.2))
        + wb.entry(7, "clip", wb.field(1, 0.2))
        + wb.entry(7, "kind", wb.field(2, "soft"))
        + wb.field(6, 1)
    )
    request = request_of(datum, config={"clip": 0.2, "kind": "soft"}, seq_id=7, forward_only=True)
    assert encode_request(request) == expected
    assert decode_request(expected) == request


@pytest.mark.parametrize("body_type", [bytes, bytearray, memoryview])
def test_any_kind_of_buffer_is_read(body_type: Any) -> None:
    request = request_of(Datum(ModelInput.from_ints([1])))
    assert decode_request(body_type(encode_request(request))) == request


def test_an_empty_request_is_read_back() -> None:
    assert decode_request(encode_request(request_of())) == request_of()
    empty = Datum(ModelInput.empty())
    assert decode_request(encode_request(request_of(empty))).forward_backward_input.data == [empty]


def test_spans_are_carried() -> None:
    datum = Datum(ModelInput.from_ints([1, 2, 3]), {"target_tokens": [2, 3, 4]})
    marked = datum.with_provenance([PROMPT, SAMPLED], [SAMPLED, PROMPT])
    assert decode_request(encode_request(request_of(marked))).forward_backward_input.data == [marked]


@pytest.mark.parametrize(
    "chunk",
    [
        types.ImageChunk(data=b"x", format="png"),
        types.ImageChunk(data=b"", format="jpeg", expected_tokens=0),
        types.ImageChunk(
            data=b"x", format="png", override_dimensions=types.ImageDimensions(width=640, height=2**32 - 1)
        ),
        types.DmelChunk(dmel=b"\x00\x01\x05"),
    ],
)
def test_media_are_carried(chunk: Any) -> None:
    datum = Datum(ModelInput(chunks=[chunk]))
    assert decode_request(encode_request(request_of(datum))).forward_backward_input.data == [datum]


def test_an_old_images_tokens_travel_as_expected_tokens() -> None:
    datum = Datum(ModelInput(chunks=[types.ImageChunk(data=b"x", format="png", height=1, width=1, tokens=5)]))
    (chunk,) = decode_request(encode_request(request_of(datum))).forward_backward_input.data[0].model_input.chunks
    assert chunk == types.ImageChunk(data=b"x", format="png", expected_tokens=5)


def test_an_image_pointer_is_refused_by_position() -> None:
    pointer = types.ImageAssetPointerChunk(location="s3://x", format="png")
    with pytest.raises(InvalidInputError, match=r"data\[1\]: chunks\[0\]: .*ImageChunk") as caught:
        encode_request(request_of(Datum(ModelInput.empty()), Datum(ModelInput(chunks=[pointer]))))
    assert caught.value.field == "data[1]"


def test_a_scalar_tensor_arrives_as_one_value() -> None:
    datum = Datum(ModelInput.empty(), {"beta": np.array(0.5, np.float32)})
    (arrived,) = decode_request(encode_request(request_of(datum))).forward_backward_input.data
    assert arrived.loss_fn_inputs["beta"].data == [0.5]


@pytest.mark.parametrize("seq_id", [0, None])
def test_sequence_number_0_means_none_given(seq_id: int | None) -> None:
    body = encode_request(request_of(seq_id=seq_id))
    assert b"\x10" not in body
    assert not is_given(decode_request(body), "seq_id")
    assert not is_given(decode_request(body + wb.field(2, 0)), "seq_id")


def test_sequence_numbers_are_32_bits_wide() -> None:
    assert decode_request(encode_request(request_of(seq_id=2**31 - 1))).seq_id == 2**31 - 1
    with pytest.raises(InvalidInputError, match="seq_id: 2147483648 is not allowed") as caught:
        encode_request(request_of(seq_id=2**31))
    assert caught.value.field == "seq_id"
    for number in (2**31, -1, 2**63):
        with pytest.raises(WireError, match="seq_id"):
            decode_request(wb.request(rest=wb.field(2, number)))


@pytest.mark.parametrize(
    ("maps", "expected"),
    [
        (wb.entry(5, "a", 0.5), {"a": 0.5}),
        (wb.entry(7, "a", wb.field(1, 0.5)), {"a": 0.5}),
        (wb.entry(7, "a", wb.field(2, "x")), {"a": "x"}),
        (wb.entry(5, "a", 0.5) + wb.entry(7, "a", wb.field(1, 0.25)), {"a": 0.25}),
        (wb.entry(7, "a", wb.field(1, 0.25)) + wb.entry(5, "a", 0.5), {"a": 0.25}),
        (wb.entry(5, "a", 0.5) + wb.entry(7, "b", wb.field(2, "")), {"a": 0.5, "b": ""}),
        (wb.field(5, wb.field(1, "a")), {"a": 0.0}),
        (wb.field(5, wb.field(2, 0.5)), {"": 0.5}),
        (b"", None),
    ],
)
def test_the_loss_config_is_read_from_both_maps(maps: bytes, expected: Any) -> None:
    work = decode_request(wb.request(rest=maps)).forward_backward_input
    assert work.loss_fn_config == expected
    assert is_given(work, "loss_fn_config") is (expected is not None)


def test_unknown_fields_are_skipped() -> None:
    unknown = wb.field(15, 3) + wb.field(14, b"x") + wb.field(13, 0.5) + wb.varint(12 << 3 | 5) + bytes(4)
    chunk = wb.field(1, wb.field(1, wb.int32s(1)) + unknown) + unknown
    image = wb.field(2, wb.field(1, b"x") + wb.field(2, "png") + wb.field(4, wb.field(1, 2) + unknown) + unknown)
    datum = wb.field(1, chunk) + wb.field(1, image + unknown) + unknown
    arrived = decode_request(wb.request(datum, rest=unknown)).forward_backward_input.data[0]
    assert [part.type for part in arrived.model_input.chunks] == ["encoded_text", "image"]


@pytest.mark.parametrize(
    ("data", "number", "expected"),
    [
        (wb.float32s(0.5, -1.0), wb.FLOAT32, TensorData([0.5, -1.0], "float32")),
        (wb.int64s(1, -(2**40)), wb.INT64, TensorData([1, -(2**40)], "int64")),
        (wb.int32s(1, -2), wb.INT32, TensorData([1, -2], "int64")),
        (struct.pack("<2H", 0x3F00, 0xBF80), wb.BFLOAT16, TensorData([0.5, -1.0], "float32")),
    ],
)
def test_narrow_numbers_are_widened(data: bytes, number: int, expected: TensorData) -> None:
    (datum,) = decode_request(wb.request(wb.entry(2, "x", wb.tensor(data, number, 2)))).forward_backward_input.data
    assert datum.loss_fn_inputs["x"] == expected
    width = len(data) // 2
    result = decode_output(wb.output(("x", wb.batched(data, wb.int64s(0, width, 2 * width), number))))
    assert [one["x"].data for one in result.loss_fn_outputs] == [[value] for value in expected.data]
    assert {one["x"].dtype for one in result.loss_fn_outputs} == {expected.dtype}


@given(st.lists(st.integers(0, 2**16 - 1), min_size=1, max_size=20))
@settings(deadline=None, max_examples=30)
def test_every_bfloat16_is_read(bits: list[int]) -> None:
    body = wb.request(wb.entry(2, "x", wb.tensor(struct.pack(f"<{len(bits)}H", *bits), wb.BFLOAT16, len(bits))))
    array = decode_request(body).forward_backward_input.data[0].loss_fn_inputs["x"].array
    assert np.array_equal(array, (np.array(bits, np.uint32) << 16).view(np.float32), equal_nan=True)


@pytest.mark.parametrize("encode", [encode_request, json_codec.encode])
def test_a_text_that_is_no_unicode_is_refused(encode: Any) -> None:
    with pytest.raises(InvalidInputError):
        encode(ForwardBackwardRequest(forward_backward_input=request_of().forward_backward_input, model_id="\ud800"))


@pytest.mark.parametrize("value", [object(), 1 + 2j, np.array([1])], ids=lambda value: type(value).__name__)
def test_what_json_does_not_have_is_refused(value: Any) -> None:
    with pytest.raises(
        InvalidInputError, match=f"a value of type {type(value).__name__} cannot be sent as JSON; use strings"
    ):
        json_codec.encode(types.CreateSessionRequest(tags=[], user_metadata={"x": value}, sdk_version="1"))


# Outputs


@given(fb_outputs())
@settings(deadline=None, max_examples=40)
def test_an_output_is_equal_after_protobuf_and_after_json(output: ForwardBackwardOutput) -> None:
    assert decode_output(encode_output(output)) == output
    assert through_json(output) == output


def test_outputs_of_different_shapes_take_several_records() -> None:
    outputs = [{"logprobs": TensorData(np.ones((2, k), np.float32))} for k in (3, 3, 4)]
    body = encode_output(ForwardBackwardOutput("Kind", outputs, {}))
    assert body.count(b"logprobs") == 2
    assert decode_output(body).loss_fn_outputs == outputs


def test_records_are_joined_in_order() -> None:
    column = wb.batched(wb.float32s(1), wb.int64s(0, 4), wb.FLOAT32)
    record = wb.field(2, wb.entry(2, "x", column) + wb.field(3, 1))
    result = decode_output(wb.field(1, "Kind") + record + wb.field(2, wb.field(3, 2)) + record)
    assert [list(one) for one in result.loss_fn_outputs] == [["x"], [], [], ["x"]]


def test_a_record_without_a_count_counts_its_first_field() -> None:
    column = wb.batched(wb.float32s(1, 2), wb.int64s(0, 4, 8), wb.FLOAT32)
    assert len(decode_output(wb.output(("x", column))).loss_fn_outputs) == 2


def test_special_numbers_are_carried_in_protobuf() -> None:
    tensor = TensorData([float("nan"), float("inf"), float("-inf")], "float32")
    output = ForwardBackwardOutput("Kind", [{"x": tensor}], {"loss:sum": float("inf")})
    assert decode_output(encode_output(output)) == output


@pytest.mark.parametrize("metric", [float("nan"), float("inf")])
def test_special_metrics_are_refused_in_json_by_name(metric: float) -> None:
    with pytest.raises(InvalidInputError, match="loss:sum"):
        json_codec.encode(ForwardBackwardOutput("Kind", [], {"loss:sum": metric}))


def test_a_sparse_output_is_not_silently_cut() -> None:
    sparse = TensorData([1.0], "float32", [2, 3], [0, 1, 1], [2])
    try:
        result = decode_output(encode_output(ForwardBackwardOutput("Kind", [{"x": sparse}], {})))
    except InvalidInputError:
        return
    assert result.loss_fn_outputs[0]["x"].tolist() == sparse.tolist()


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        (b"", "ArrayRecord"),
        (wb.field(1, "Kind"), "Kind"),
        (wb.field(1, "a.b:Kind") + wb.field(2, b""), "Kind"),
        (wb.field(2, b""), ""),
    ],
)
def test_the_output_types_name(body: bytes, expected: str) -> None:
    assert decode_output(body).loss_fn_output_type == expected


# Samples


@given(sample_responses())
@settings(deadline=None, max_examples=40)
def test_a_sample_is_equal_after_protobuf_and_after_json(response: SampleResponse) -> None:
    assert decode_response(encode_response(response)) == response
    assert through_json(response) == response


@given(sample_responses(binary_only=True))
@settings(deadline=None, max_examples=40)
def test_a_sample_with_all_extras_is_equal_after_protobuf(response: SampleResponse) -> None:
    assert decode_response(encode_response(response)) == response


def test_absent_prompt_logprobs_are_nan_on_the_wire_and_none_in_lists() -> None:
    response = SampleResponse([], _prompt_logprobs_list=[None, -0.5])
    body = encode_response(response)
    assert body == wb.field(2, wb.float32s(float("nan"), -0.5))
    assert decode_response(body).prompt_logprobs == [None, -0.5]


def test_unused_top_k_cells_are_filled_and_cut() -> None:
    rows = [None, [(5, -0.5)], [(6, -0.25), (7, -1.0)]]
    response = SampleResponse([], _topk_prompt_logprobs_list=rows)
    table = response.topk_prompt_logprobs_np
    assert table is not None
    assert table.token_ids.tolist() == [[0, 0], [5, 0], [6, 7]]
    assert table.logprobs.tolist() == [[FILL_LOGPROB] * 2, [-0.5, FILL_LOGPROB], [-0.25, -1.0]]
    assert decode_response(encode_response(response)).topk_prompt_logprobs == rows


def test_a_top_k_row_that_begins_filled_is_null() -> None:
    table = TopkLogprobs(np.array([[0, 5]], np.int32), np.array([[FILL_LOGPROB, -1.0]], np.float32))
    assert table.to_rows() == [None]


@pytest.mark.parametrize(
    "body",
    [
        wb.field(2, b""),
        wb.field(3, wb.field(3, 0) + wb.field(4, 5)),
        wb.field(3, wb.field(3, 5) + wb.field(4, 0)),
        wb.field(3, b""),
    ],
)
def test_empty_prompt_answers_read_as_not_asked(body: bytes) -> None:
    assert decode_response(body) == SampleResponse([])


def test_empty_sequences() -> None:
    (sequence,) = decode_response(wb.field(1, wb.field(3, b""))).sequences
    assert (sequence.tokens, sequence.logprobs, sequence.topk_logprobs) == ([], None, None)
    assert sequence.stop_reason == "stop"


@pytest.mark.parametrize("logprob", [float("-inf"), float("inf")])
def test_infinite_logprobs_never_turn_into_none_in_json(logprob: float) -> None:
    responses = (
        SampleResponse([types.SampledSequence("stop", tokens=[1], logprobs=[logprob])]),
        SampleResponse([], _prompt_logprobs_list=[None, logprob]),
        SampleResponse([], _topk_prompt_logprobs_list=[[(1, logprob)]]),
    )
    for response in responses:
        assert decode_response(encode_response(response)) == response
        try:
            body = json_codec.encode(response)
        except InvalidInputError:
            continue
        assert json_codec.decode(body, SampleResponse) == response


def test_binary_only_answers_are_refused_in_json() -> None:
    with pytest.raises(InvalidInputError, match="only as protobuf"):
        json_codec.encode(SampleResponse([], target_prompt_logprobs=TensorData([[1.0]], "float32")))  # type: ignore[list-item]


def test_alternatives_must_be_of_one_shape() -> None:
    with pytest.raises(InvalidInputError, match=r"prompt_alt_tokens|shape"):
        types.PromptAltTokens(TensorData([1, 2], "int64", [2, 1]), TensorData([0.5], "float32", [1, 1]))


@pytest.mark.parametrize("dtype", ["int64", "float32"])
@pytest.mark.parametrize("count", [0, 1, 127, 128, 5000])
def test_tensors_read_alike_in_any_order_of_their_fields(dtype: Any, count: int) -> None:
    values = np.arange(count, dtype=np.int64 if dtype == "int64" else np.float32)
    written = protobuf.tensor_message(TensorData(values, dtype, [count])).encode()
    other = protobuf.MessageWriter()
    other.packed(4, [count])
    other.number(3, protobuf.DTYPE_NUMBERS[dtype])
    other.blob(1, values.tobytes())
    plain, slow = (protobuf.read_tensor(memoryview(body), "x") for body in (written, other.encode()))
    assert plain == slow
    assert (plain.dtype, plain.shape, plain.array.dtype) == (slow.dtype, slow.shape, slow.array.dtype)
    assert len(plain) == count


@pytest.mark.parametrize(
    "tail", [b"", b"\x18\x02\x22\x01\x03", b"\x18\x02\x22\x01\x02\x18\x01", b"\x18\x07\x22\x01\x02", b"\x18\x03"]
)
def test_what_is_not_plainly_a_tensor_is_read_field_by_field(tail: bytes) -> None:
    values = b"\x0a\x10" + bytes(16)
    told = []
    for body in (values + tail, tail + values):
        try:
            told.append(repr(protobuf.read_tensor(memoryview(body), "x")))
        except WireError as error:
            told.append(str(error))
    assert told[0] == told[1]


def test_a_metric_can_be_taken_out_of_a_result() -> None:
    tensor = TensorData(data=[1.0, 2.0], dtype="float32")
    metrics = {"loss:sum": 1.5, "weights:min": 0.0, "tokens:sum": 2.0}
    body = encode_output(ForwardBackwardOutput("TorchLossReturn", [{"logprobs": tensor}], metrics))
    del metrics["weights:min"]
    former = encode_output(ForwardBackwardOutput("TorchLossReturn", [{"logprobs": tensor}], metrics))
    assert without_metric(body, "weights:min") == former
    assert without_metric(former, "weights:min") == former

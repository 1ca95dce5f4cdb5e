"""Specific attacks: bodies whose lengths, nesting, offsets or compression promise more than they contain."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from support import wire_bytes as wb
from support.memory import MIB, memory_below

from tinsmith import types
from tinsmith.errors import InvalidInputError, LimitExceededError, WireError
from tinsmith.wire.codecs import json_codec
from tinsmith.wire.codecs.proto_outputs import decode_output
from tinsmith.wire.codecs.proto_sampling import decode_response
from tinsmith.wire.codecs.proto_training import decode_request

MILLION = 1_000_000


def loss_input(tensor: bytes) -> bytes:
    return wb.request(wb.entry(2, "x", tensor))


def column(data: bytes, offsets: tuple[int, ...], *trailing: int, dtype: int = wb.FLOAT32) -> bytes:
    return wb.output(("x", wb.batched(data, wb.int64s(*offsets), dtype, *trailing)))


# Counts


def test_a_million_empty_datums_stop_at_the_limit() -> None:
    body = wb.request(rest=wb.field(3, b"") * MILLION)
    with memory_below(MIB), pytest.raises(LimitExceededError, match="data: has more than 1000 entries") as caught:
        decode_request(body, max_datums=1000)
    assert caught.value.field == "data"


def test_a_million_empty_sequences_stop_at_the_limit() -> None:
    body = wb.field(1, b"") * MILLION
    with memory_below(MIB), pytest.raises(LimitExceededError, match="sequences: has more than 1000 entries"):
        decode_response(body, max_sequences=1000)


@pytest.mark.parametrize("count", [1001, 2**31, 2**62, 2**63 - 1])
def test_a_claimed_number_of_datums_stops_at_the_limit(count: int) -> None:
    with memory_below(MIB), pytest.raises(LimitExceededError, match="more than 1000 entries"):
        decode_output(wb.output(count=count), max_datums=1000)


def test_records_are_counted_together() -> None:
    record = wb.field(2, wb.field(3, 600))
    assert len(decode_output(record, max_datums=1000).loss_fn_outputs) == 600
    with pytest.raises(LimitExceededError):
        decode_output(record * 2, max_datums=1000)


def test_offsets_are_counted_before_anything_is_made_of_them() -> None:
    body = column(b"", (0,) * 50_000)
    with memory_below(4 * MIB), pytest.raises(LimitExceededError, match="loss_fn_outputs"):
        decode_output(body, max_datums=1000)


@pytest.mark.parametrize("count", [-1, -(2**63)])
def test_a_negative_number_of_datums_is_refused(count: int) -> None:
    with pytest.raises(WireError, match=r"num_datums|loss_fn_outputs"):
        decode_output(wb.output(count=count))


def test_columns_of_different_lengths_are_refused() -> None:
    one, two = (wb.batched(wb.float32s(1, 2), wb.int64s(*at), wb.FLOAT32) for at in ((0, 8), (0, 4, 8)))
    with pytest.raises(WireError, match=r"loss_fn_outputs\['b'\]"):
        decode_output(wb.output(("a", one), ("b", two)))


# Shapes and offsets


@pytest.mark.parametrize(
    "tensor",
    [
        wb.tensor(b"", wb.FLOAT32, -1),
        wb.tensor(b"", wb.FLOAT32, -1, 0),
        wb.tensor(wb.float32s(1), wb.FLOAT32, -1, -1),
        wb.tensor(b"", wb.FLOAT32, 2**62),
        wb.tensor(b"", wb.FLOAT32, 2**32, 2**32),
        wb.tensor(b"", wb.FLOAT32, 2**62, 2**62, 4),
        wb.tensor(b"", wb.FLOAT32, 0, 2**62, 2**62),
        wb.tensor(b"", wb.FLOAT32, 2**63 - 1, 0),
        wb.tensor(wb.float32s(1, 2), wb.FLOAT32, 3),
        wb.tensor(wb.float32s(1), wb.FLOAT32, *[1] * 9),
        wb.tensor(wb.float32s(1), wb.FLOAT32, *[1] * 10_000),
        wb.tensor(b"\x00\x00\x00", wb.FLOAT32, 1),
        wb.tensor(b"\x00", wb.BFLOAT16, 1),
        wb.tensor(b"", 0, 0),
        wb.tensor(b"", 5, 0),
        wb.tensor(b"", -1, 0),
        wb.field(1, 5),
        wb.field(3, b"x"),
        wb.field(4, 0.5),
        wb.csr_tensor(b"", wb.int64s(0), b"", wb.FLOAT32, 2**62, 1),
        wb.csr_tensor(b"", wb.int64s(0), b"", wb.FLOAT32, -1, 1),
        wb.csr_tensor(b"", b"", b"", wb.FLOAT32, 0, 1),
        wb.csr_tensor(b"", wb.int64s(0), b"", wb.FLOAT32),
        wb.csr_tensor(wb.float32s(1), wb.int64s(0, 1), wb.int64s(1), wb.FLOAT32, 1, 1),
        wb.csr_tensor(wb.float32s(1), wb.int64s(0, 1), wb.int64s(-1), wb.FLOAT32, 1, 1),
        wb.csr_tensor(wb.float32s(1), wb.int64s(0, 1), b"\x00" * 7, wb.FLOAT32, 1, 1),
        wb.csr_tensor(wb.float32s(1), wb.int64s(0, 2**63 - 1, -(2**63), 1), wb.int64s(0), wb.FLOAT32, 3, 1),
        wb.csr_tensor(wb.float32s(1), wb.int64s(0, 1, 0, 1), wb.int64s(0), wb.FLOAT32, 3, 1),
    ],
    ids=lambda tensor: tensor.hex()[:80],
)
def test_an_impossible_tensor_is_refused_by_name(tensor: bytes) -> None:
    with memory_below(MIB), pytest.raises(WireError, match=r"data\[0\].loss_fn_inputs\['x'\]") as caught:
        decode_request(loss_input(tensor))
    assert (caught.value.field or "").startswith("data[0].loss_fn_inputs['x']")


def test_a_huge_csr_tensor_is_read_but_not_unfolded() -> None:
    body = loss_input(wb.csr_tensor(wb.float32s(1), wb.int64s(0, 1), wb.int64s(2**61), wb.FLOAT32, 1, 2**62))
    with memory_below(MIB):
        tensor = decode_request(body).forward_backward_input.data[0].loss_fn_inputs["x"]
        assert tensor.shape == [1, 2**62]
        for unfold in (tensor.to_numpy, tensor.tolist):
            with pytest.raises(InvalidInputError, match="too large"):
                unfold()


@pytest.mark.parametrize(
    "body",
    [
        column(bytes(8), (0, 8, 4)),
        column(bytes(8), (0, 12)),
        column(bytes(8), (-4, 8)),
        column(bytes(8), (0, 3, 8)),
        column(bytes(8), (0, 2**63 - 1, -(2**63), 8)),
        column(bytes(8), (-(2**63), 8)),
        column(b"", (0, 4)),
        column(bytes(8), (0, 4, 8), 2),
        column(bytes(8), (0, 8), 0),
        column(bytes(8), (0, 8), 2, 0),
        column(bytes(8), (0, 8), -1),
        column(bytes(8), (0, 8), -1, -2),
        column(bytes(8), (0, 8), 3),
        column(bytes(8), (0, 8), 2**62),
        column(bytes(8), (0, 8), 2**62, 2**62),
        column(bytes(8), (0, 8), 2**32, 2**32),
        column(b"", (0, 0), 0, 2**62, 2**62),
        column(bytes(4), (0, 4), *[1] * 9),
        column(bytes(7), (0, 4)),
        column(bytes(8), (0, 8), dtype=9),
        column(bytes(8), (0, 8), dtype=0),
        wb.output(("x", wb.field(1, bytes(8)) + wb.field(2, b"\x00" * 9) + wb.field(3, 1))),
        wb.output(("x", wb.field(1, bytes(8)) + wb.field(2, 5))),
    ],
    ids=lambda body: body.hex()[30:],
)
def test_an_impossible_column_is_refused_by_name(body: bytes) -> None:
    with memory_below(MIB), pytest.raises(WireError, match=r"loss_fn_outputs\['x'\]"):
        decode_output(body)


@pytest.mark.parametrize("trailing", [(2**62,), (2**40, 2**40), (3,)])
def test_rows_of_any_width_may_be_absent(trailing: tuple[int, ...]) -> None:
    try:
        result = decode_output(column(b"", (0, 0), *trailing))
    except WireError:
        return
    assert [one["x"].data for one in result.loss_fn_outputs] == [[]]


@pytest.mark.parametrize(
    ("k", "length"), [(2, 2), (2**31, 2**33), (-1, -1), (1, -1), (2**62, 4), (1, 2**63 - 1), (2**63 - 1, 2**63 - 1)]
)
def test_a_top_k_table_of_another_size_is_refused(k: int, length: int) -> None:
    table = wb.field(1, wb.int32s(1)) + wb.field(2, wb.float32s(1)) + wb.field(3, k) + wb.field(4, length)
    with memory_below(MIB), pytest.raises(WireError, match="topk_prompt_logprobs"):
        decode_response(wb.field(3, table))
    with memory_below(MIB), pytest.raises(WireError, match=r"sequences\[0\].topk_sampled_logprobs"):
        decode_response(wb.field(1, wb.field(4, table)))


def test_a_ragged_top_k_list_does_not_unfold() -> None:
    rows: list[Any] = [None] * 3000 + [[[1, -0.5]] * 3000]
    body = json.dumps({"sequences": [], "topk_prompt_logprobs": rows}).encode()
    with memory_below(16 * MIB):
        try:
            json_codec.decode(body, types.SampleResponse)
        except WireError as error:
            assert "topk_prompt_logprobs" in str(error)  # noqa: PT017


# Malformed fields

DECODERS: list[Callable[[bytes], Any]] = [decode_request, decode_output, decode_response]
DATUM = wb.field(3, wb.field(1, wb.field(1, wb.field(1, wb.int32s(1)))))


@pytest.mark.parametrize("decode", DECODERS)
@pytest.mark.parametrize(
    "body",
    [
        b"\x80" * 10 + b"\x01",
        b"\x08" + b"\x80" * 10 + b"\x01",
        b"\x08" + b"\xff" * 9 + b"\x02",
        b"\x08" + b"\xff" * 9 + b"\x7f",
        b"\x08\x80",
        b"\x08",
        b"\x0b\x0c",
        b"\x0c",
        b"\x0e",
        b"\x0f",
        b"\x00\x00",
        b"\x02\x00",
        wb.varint(1 << 32) + b"\x00",
        b"\x0a\xff\xff\xff\xff\xff\xff\xff\xff\xff\x01",
        b"\x0a\x05abc",
        b"\x09\x00\x00",
        b"\x0d\x00",
        b"\x0a\x02\xff\xfe",
    ],
    ids=bytes.hex,
)
def test_malformed_protobuf_is_refused(decode: Callable[[bytes], Any], body: bytes) -> None:
    with pytest.raises(WireError):
        decode(body)


@pytest.mark.parametrize(
    ("body", "field"),
    [
        (wb.field(1, b"\xff"), "model_id"),
        (wb.field(1, 5), "model_id"),
        (wb.field(2, b"x"), "seq_id"),
        (wb.field(3, 5), "data"),
        (wb.field(4, "entropy"), "loss_fn"),
        (wb.field(1, "m"), "loss_fn"),
        (wb.request(rest=wb.field(5, wb.field(1, b"\xff"))), "loss_fn_config"),
        (wb.request(rest=wb.entry(5, "a", 5)), "loss_fn_config['a']"),
        (wb.request(rest=wb.entry(5, "a", "x")), "loss_fn_config['a']"),
        (wb.request(rest=wb.entry(7, "a", b"")), "loss_fn_config_v2['a']"),
        (wb.request(rest=wb.entry(7, "a", wb.field(2, b"\xff"))), "loss_fn_config_v2['a']"),
        (wb.request(rest=wb.field(6, b"x")), "forward_only"),
        (wb.request(wb.field(1, b"")), "data[0].model_input.chunks[0]"),
        (wb.request(b"", wb.field(1, wb.field(1, wb.field(1, b"\x00" * 3)))), "data[1].model_input.chunks[0]"),
        (wb.request(wb.field(1, wb.field(1, wb.field(1, wb.int32s(1, -1))))), "data[0].model_input.chunks[0]"),
        (wb.request(wb.field(1, wb.field(2, wb.field(2, "gif")))), "data[0].model_input.chunks[0]"),
        (wb.request(wb.field(1, wb.field(2, wb.field(2, "png") + wb.field(3, -1)))), "data[0].model_input.chunks[0]"),
        (
            wb.request(wb.field(1, wb.field(2, wb.field(2, "png") + wb.field(4, wb.field(1, -1))))),
            "data[0].model_input.chunks[0]",
        ),
        (
            wb.request(wb.field(1, wb.field(2, wb.field(2, "png") + wb.field(4, wb.field(1, 2**32))))),
            "data[0].model_input.chunks[0]",
        ),
        (wb.request(wb.entry(2, "weights", wb.tensor(b"", wb.FLOAT32)) + DATUM[2:]), "loss_fn_inputs['weights']"),
        (wb.request(wb.entry(2, "target_tokens", wb.tensor(b"", wb.FLOAT32))), "loss_fn_inputs['target_tokens']"),
        (wb.request(wb.field(3, b"")), "data[0].model_input_spans"),
        (wb.request(wb.field(3, wb.field(1, wb.field(3, 1)))), "data[0].model_input_spans"),
        (wb.request(wb.field(4, wb.field(2, wb.field(1, "s") + wb.field(3, -1)))), "data[0].loss_fn_input_spans"),
        (wb.request(wb.field(3, wb.field(1, wb.field(1, "s") + wb.field(3, 9)))), "data[0]"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_wrong_request_names_the_field(body: bytes, field: str) -> None:
    with pytest.raises(WireError) as caught:
        decode_request(body)
    assert field in f"{caught.value.field} {caught.value}"


@pytest.mark.parametrize("number", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("entry", [lambda x: wb.entry(5, "clip", x), lambda x: wb.entry(7, "clip", wb.field(1, x))])
def test_special_numbers_in_a_config_are_kept_or_refused_by_name(
    entry: Callable[[float], bytes], number: float
) -> None:
    try:
        config = decode_request(wb.request(rest=entry(number))).forward_backward_input.loss_fn_config
    except WireError as error:
        assert "clip" in str(error)  # noqa: PT017
        return
    assert config is not None
    assert np.array_equal([config["clip"]], [number], equal_nan=True)


# Messages of errors


@pytest.mark.parametrize(
    "decode",
    [
        lambda: json_codec.decode(b'{"session_id":"s","type":"%s"}' % (b"x" * MIB), types.CreateSessionResponse),
        lambda: json_codec.decode(b'{"prompt":{"chunks":[{"type":"%s"}]}}' % (b"x" * MIB), types.SampleRequest),
        lambda: json_codec.decode(b'{"data":[%s],"dtype":"int64"}' % (b"9" * 4000), types.TensorData),
        lambda: json_codec.decode(b'{"data":[%s],"dtype":"float32"}' % (b"9" * 4000), types.TensorData),
        lambda: json_codec.decode(b'{"data":[1],"dtype":"%s"}' % (b"x" * MIB), types.TensorData),
        lambda: json_codec.decode(b'{"loss_fn_inputs":{"%s":5}}' % (b"x" * MIB), types.Datum),
        lambda: decode_request(wb.field(4, "x" * MIB)),
        lambda: decode_request(wb.request(rest=wb.entry(5, "x" * MIB, 5))),
        lambda: decode_request(wb.request(wb.field(1, wb.field(2, wb.field(2, "x" * MIB))))),
        lambda: decode_output(wb.output(("x" * MIB, wb.field(1, 5)))),
    ],
    ids=["literal", "chunk", "int", "float", "dtype", "key", "loss_fn", "config", "format", "output"],
)
def test_the_message_of_an_error_stays_short(decode: Callable[[], Any]) -> None:
    with pytest.raises(WireError) as caught:
        decode()
    assert len(str(caught.value)) < 5000
    assert len(caught.value.field or "") < 5000

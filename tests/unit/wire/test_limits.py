"""Every text, list, map and nesting of every request has a limit in its type; what clients send is far below it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import msgspec
import pytest
from support.examples import requests

from tinsmith.errors import InvalidInputError, LimitExceededError, WireError
from tinsmith.wire import limits
from tinsmith.wire.codecs import json_codec
from tinsmith.wire.codecs.json_codec import decode
from tinsmith.wire.codecs.proto_training import decode_request
from tinsmith.wire.codecs.protobuf import MessageWriter
from tinsmith.wire.limits import MAX_DEPTH, MAX_VALUES, check_json
from tinsmith.wire.messages.sampling import SamplingParams
from tinsmith.wire.messages.sessions import CreateSessionRequest
from tinsmith.wire.routes import own
from tinsmith.wire.routes.table import ROUTES
from tinsmith.wire.values.chunks import EncodedTextChunk, ImageAssetPointerChunk
from tinsmith.wire.values.inputs import Datum, ModelInput, PromptProvenanceSpan
from tinsmith.wire.values.tensors import TensorData

inspect = msgspec.inspect
CHECKED = {Datum, ModelInput, TensorData, getattr(limits, "JsonObject"), getattr(limits, "JsonList")}  # noqa: B009
"""Types with checks of their own, tried below."""
CONVERTED = {"OptimStepRequest.optim_params"}
"""Fields of any form that become a type with limits as soon as they are read."""


def queries() -> list[type[Any]]:
    own_routes = [route for route in vars(own).values() if isinstance(route, type(ROUTES[0]))]
    return list(dict.fromkeys(route.query for route in (*ROUTES, *own_routes) if route.query is not None))


def unbounded(info: Any, where: str) -> Iterator[str]:
    """Places in a type that have no limit."""
    if isinstance(info, inspect.Metadata):
        yield from unbounded(info.type, where)
    elif isinstance(info, inspect.UnionType):
        for member in info.types:
            yield from unbounded(member, where)
    elif isinstance(info, inspect.StructType):
        for field in info.fields:
            yield from unbounded(field.type, f"{info.cls.__name__}.{field.encode_name}")
    elif isinstance(info, (inspect.ListType, inspect.VarTupleType, inspect.SetType)):
        if info.max_length is None:
            yield where
        yield from unbounded(info.item_type, f"{where}[]")
    elif isinstance(info, inspect.DictType):
        if info.max_length is None:
            yield where
        yield from unbounded(info.key_type, f"{where} key")
        yield from unbounded(info.value_type, f"{where}{{}}")
    elif isinstance(info, (inspect.StrType, inspect.BytesType)):
        if info.max_length is None:
            yield where
    elif isinstance(info, inspect.IntType):
        if info.le is None and info.lt is None:
            yield where
    elif isinstance(info, inspect.AnyType):
        if where not in CONVERTED:
            yield where
    elif isinstance(info, inspect.CustomType):
        if info.cls not in CHECKED:
            yield where
    else:
        assert isinstance(
            info,
            (inspect.LiteralType, inspect.FloatType, inspect.BoolType, inspect.NoneType, inspect.DateTimeType),
        ), (where, info)


@pytest.mark.parametrize("type_", [*requests(), *queries()], ids=lambda type_: type_.__name__)
def test_every_request_is_bounded_by_its_type(type_: type[Any]) -> None:
    assert list(unbounded(inspect.type_info(type_), type_.__name__)) == []


def nested(depth: int) -> Any:
    value: Any = 1
    for _ in range(depth):
        value = [value]
    return value


@pytest.mark.parametrize(
    ("value", "says"),
    [
        ({"a": nested(MAX_DEPTH)}, "nested more than"),
        ({"a": nested(100)}, "nested more than"),
        ({"a": [[]] * MAX_VALUES}, "more than 8192 values"),
        ({str(i): 1 for i in range(MAX_VALUES)}, "more than 8192 values"),
        ({"a": ["x" * 1000] * 600}, "more than 524288 characters"),
        ({"x" * 600_000: 1}, "more than 524288 characters"),
    ],
    ids=["deep", "deeper", "wide", "many keys", "long", "long key"],
)
def test_json_of_the_users_own_is_bounded(value: Any, says: str) -> None:
    with pytest.raises(InvalidInputError, match=says):
        check_json(value, "user_metadata")
    with pytest.raises(InvalidInputError, match=says):
        CreateSessionRequest(user_metadata=value)
    with pytest.raises(WireError, match=says) as caught:
        decode(msgspec.json.encode({"user_metadata": value}), CreateSessionRequest)
    assert caught.value.field == "user_metadata"


def test_nesting_that_python_cannot_follow_is_refused() -> None:
    with pytest.raises(InvalidInputError, match="nested too deeply"):
        CreateSessionRequest(user_metadata={"a": nested(5000)})
    with pytest.raises(WireError, match="nested too deeply"):
        decode(b'{"user_metadata":' + b"[" * 100_000, CreateSessionRequest)


def test_json_of_the_users_own_stays_what_it_is() -> None:
    value = {"a": [1, {"b": None}, "c" * 10_000], "d": nested(MAX_DEPTH - 2)}
    request = CreateSessionRequest(user_metadata=value)
    assert request.user_metadata == value
    assert decode(json_codec.encode(request), CreateSessionRequest) == request


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda: ModelInput(chunks=[EncodedTextChunk(tokens=[1])] * 65_537), "65537 chunks"),
        (lambda: Datum(ModelInput.empty(), {f"k{i}": TensorData([1], "int64") for i in range(65)}), "65 tensors"),
        (lambda: Datum(ModelInput.empty(), {"k" * 129: TensorData([1], "int64")}), "129 characters"),
        (lambda: Datum.from_builtins({"loss_fn_inputs": {str(i): 1 for i in range(65)}}), "65 tensors"),
        (lambda: ImageAssetPointerChunk(format="png", location="x" * 4097), "4097 characters"),
        (lambda: PromptProvenanceSpan(sequence_id="x" * 513, length=1), "513 characters"),
        (lambda: TensorData([1], "int64", [1] * 9), "9 dimensions"),
    ],
)
def test_data_is_bounded(make: Any, says: str) -> None:
    with pytest.raises(InvalidInputError, match=says):
        make()


@pytest.mark.parametrize(
    "params",
    [
        {"seed": 2**63},
        {"stop": ["x"] * 65},
        {"stop": "x" * 1001},
        {"stop": ["x" * 1001]},
        {"top_k": 2**70},
        {"stop_token_ids": [1] * 65},
        {"stop_token_ids": [2**70]},
        {"logit_bias": dict.fromkeys(range(1025), 1.0)},
        {"logit_bias": {2**70: 1.0}},
        {"output_format": {"type": "regex", "schema": "x" * 65_537}},
    ],
)
def test_sampling_parameters_are_bounded(params: Any) -> None:
    with pytest.raises(InvalidInputError, match=f"{next(iter(params))}.*: Expected"):
        SamplingParams(**params)


def _request(*datums: MessageWriter) -> bytes:
    message = MessageWriter()
    message.text(1, "m")
    message.number(2, 1)
    for datum in datums:
        message.message(3, datum)
    message.text(4, "cross_entropy")
    return message.encode()


def _repeated(number: int, count: int) -> MessageWriter:
    datum = MessageWriter()
    for _ in range(count):
        datum.message(number, MessageWriter())
    return datum


@pytest.mark.parametrize(
    ("body", "says"),
    [
        (_request(*[MessageWriter()] * 5), "data: has more than 4 entries"),
        (_request(_repeated(2, 100)), "kind|entries|dtype"),
        (_request(_repeated(1, 70_000)), "is unknown"),
        (_request(_repeated(3, 70_000)), "is unknown"),
    ],
)
def test_protobuf_is_bounded(body: bytes, says: str) -> None:
    with pytest.raises((WireError, LimitExceededError), match=says):
        decode_request(body, 4)


def test_a_shape_is_not_read_to_its_end() -> None:
    """A packed field of a million dimensions is refused at the ninth."""
    tensor, entry, datum = MessageWriter(), MessageWriter(), MessageWriter()
    tensor.number(3, 1)
    tensor.blob(4, b"\x01" * 1_000_000)
    entry.text(1, "weights")
    entry.message(2, tensor)
    datum.message(2, entry)
    with pytest.raises(LimitExceededError, match="more than 8 entries"):
        decode_request(_request(datum))

"""Decoders get arbitrary bytes: they return a value or raise WireError, and nothing else."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support import wire_bytes as wb
from support.examples import answers, example, requests

from tinsmith import types
from tinsmith.errors import WireError
from tinsmith.wire.codecs import json_codec, zstd
from tinsmith.wire.codecs.proto_outputs import decode_output, encode_output
from tinsmith.wire.codecs.proto_sampling import decode_response, encode_response
from tinsmith.wire.codecs.proto_training import decode_request, encode_request

JSON_TYPES: list[type[Any]] = [*requests(), *(cls for cls in answers() if cls not in requests())]
EVERY_TYPE = pytest.mark.parametrize("cls", JSON_TYPES, ids=lambda cls: cls.__name__)
BODIES: dict[type[Any], bytes] = {cls: json_codec.encode(example(cls, full=True)) for cls in JSON_TYPES}


def training_body() -> bytes:
    text = types.ModelInput.from_ints([1, 2, 3])
    sparse = types.TensorData([5, 7], "int64", [3, 64], [0, 1, 1, 2], [3, 60])
    marked = types.Datum(text, {"target_tokens": sparse, "weights": np.ones(3, np.float32)}).with_provenance(
        [types.PromptProvenanceSpan(sequence_id="p", length=3)],
        [types.SampledProvenanceSpan(sequence_id="s", offset=2, length=3)],
    )
    size = types.ImageDimensions(width=6, height=4)
    image = types.ImageChunk(data=b"png", format="png", expected_tokens=2, override_dimensions=size)
    media = types.ModelInput(chunks=[image, types.DmelChunk(dmel=b"\x00\x01\x01")])
    work = types.ForwardBackwardInput(
        data=[marked, types.Datum(media, {"advantages": np.ones((3, 2), np.float32)})],
        loss_fn="ppo",
        loss_fn_config={"clip": 0.5, "kind": "soft"},
    )
    return encode_request(
        types.ForwardBackwardRequest(forward_backward_input=work, model_id="m", seq_id=3, forward_only=True)
    )


def output_body() -> bytes:
    outputs = [{"x": types.TensorData(np.ones((2, k), np.float32))} for k in (2, 2, 3)]
    return encode_output(types.ForwardBackwardOutput("Kind", outputs, {"loss:sum": 1.5}))


def sample_body() -> bytes:
    rows = [None, [(1, -0.5), (2, -1.0)], [(3, -0.25)]]
    table = types.TensorData([[0.5], [0.25]], "float32")  # type: ignore[list-item]
    return encode_response(
        types.SampleResponse(
            [
                types.SampledSequence("length", tokens=[1, 2], logprobs=[-0.5, -1.0]),
                types.SampledSequence("stop", tokens=[1, 2, 3], _topk_logprobs_list=rows),
            ],
            prompt_cache_hit_tokens=3,
            target_prompt_logprobs=table,
            prompt_alt_tokens=types.PromptAltTokens(types.TensorData([[1], [2]], "int64"), table),  # type: ignore[list-item]
            _prompt_logprobs_list=[None, -0.5],
            _topk_prompt_logprobs_list=rows,
        )
    )


BINARY: dict[str, tuple[Callable[[bytes], Any], bytes]] = {
    "request": (lambda body: decode_request(body, max_datums=1000), training_body()),
    "output": (lambda body: decode_output(body, max_datums=1000), output_body()),
    "sample": (lambda body: decode_response(body, max_sequences=1000), sample_body()),
    "zstd": (lambda body: zstd.decompress(body, 1 << 20), zstd.compress(training_body())),
}


def refusal(decode: Callable[[bytes], Any], body: bytes) -> WireError | None:
    """The error of a refused body; every other exception is the test's failure."""
    try:
        decode(body)
    except WireError as caught:
        error = caught
    else:
        return None
    assert str(error).strip()
    return error


@st.composite
def damaged(draw: st.DrawFn, body: bytes) -> bytes:
    """A body with a few bytes flipped, removed, added, repeated or cut off."""
    data = bytearray(body)
    for _ in range(draw(st.integers(1, 4))):
        position = draw(st.integers(0, len(data)))
        change = draw(st.sampled_from(["flip", "set", "delete", "insert", "cut", "repeat"]))
        if change == "flip" and position < len(data):
            data[position] ^= 1 << draw(st.integers(0, 7))
        elif change == "set" and position < len(data):
            data[position] = draw(st.sampled_from([0, 1, 0x7F, 0x80, 0xFF]))
        elif change == "delete":
            del data[position : position + draw(st.integers(1, 8))]
        elif change == "insert":
            data[position:position] = draw(st.binary(min_size=1, max_size=8))
        elif change == "repeat":
            data[position:position] = data[position : position + draw(st.integers(1, 16))]
        elif change == "cut":
            del data[position:]
    return bytes(data)


# Binary bodies


@pytest.mark.parametrize("kind", BINARY)
def test_the_undamaged_bodies_are_good(kind: str) -> None:
    decode, body = BINARY[kind]
    assert refusal(decode, body) is None


@pytest.mark.parametrize("kind", BINARY)
@given(body=st.binary(max_size=64))
@settings(deadline=None, max_examples=50)
def test_random_bytes(kind: str, body: bytes) -> None:
    refusal(BINARY[kind][0], body)


@pytest.mark.parametrize("kind", BINARY)
@given(data=st.data())
@settings(deadline=None, max_examples=60)
def test_damaged_binary_bodies(kind: str, data: st.DataObject) -> None:
    decode, body = BINARY[kind]
    refusal(decode, data.draw(damaged(body)))


@pytest.mark.parametrize("kind", BINARY)
def test_bodies_cut_off_at_every_byte(kind: str) -> None:
    decode, body = BINARY[kind]
    for length in range(len(body)):
        refusal(decode, body[:length])


@pytest.mark.parametrize("kind", ["request", "output", "sample"])
def test_bits_of_every_byte_flipped_alone(kind: str) -> None:
    decode, body = BINARY[kind]
    for position in range(len(body)):
        for bit in (0, 1, 2, 7):
            refusal(decode, body[:position] + bytes([body[position] ^ 1 << bit]) + body[position + 1 :])


fields = st.integers(0, 8)
numbers = st.sampled_from([0, 1, 2, 3, 4, 5, 127, 2**31 - 1, 2**31, 2**32, 2**62, 2**63, 2**64 - 1, -1])
leaves = numbers | st.floats() | st.binary(max_size=24) | st.sampled_from(["", "ppo", "x", "png"])
trees: st.SearchStrategy[bytes] = st.recursive(
    st.builds(wb.field, fields, leaves),
    lambda inner: st.builds(wb.field, fields, st.lists(inner, max_size=4).map(b"".join)),
    max_leaves=8,
)


@pytest.mark.parametrize("kind", ["request", "output", "sample"])
@given(body=st.lists(trees, max_size=5).map(b"".join))
@settings(deadline=None, max_examples=40)
def test_well_formed_protobuf_of_the_wrong_content(kind: str, body: bytes) -> None:
    refusal(BINARY[kind][0], body)


# JSON bodies

ODD: list[Any] = [
    None,
    True,
    -1,
    0,
    1.5,
    2**31,
    2**53 + 1,
    2**63,
    2**64,
    10**30,
    -(10**30),
    1e308,
    "",
    "text",
    "\x00",
    "2026-13-45T99:99:99Z",
    "eA==",
    [],
    {},
    [[]],
    [None],
    [{}],
    ["a", 1],
    [1e300],
    [-1],
    [2**63],
    [[1], [2, 3]],
    {"type": "adamw"},
    {"type": None},
    {"type": []},
    {"type": {}},
    {"a": {"b": []}},
    {"data": [1], "dtype": "int64", "shape": [-1]},
    {"data": [], "dtype": "int64", "shape": [0, 2**62, 2**62]},
    {"data": {}, "dtype": "float32"},
    {"data": [1], "dtype": []},
    {"chunks": {}},
    {"chunks": [{"tokens": [1.5]}]},
    {"chunks": [{"type": {}}]},
]


PLACE = "\x01PLACE"
PLACE_JSON = json.dumps(PLACE).encode()


def places(document: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Every path into a document, the root's first."""
    yield path
    if isinstance(document, dict):
        for key, value in document.items():
            yield from places(value, (*path, key))
    elif isinstance(document, list):
        for index, value in enumerate(document):
            yield from places(value, (*path, index))


def replaced(document: Any, path: tuple[Any, ...], value: Any) -> Any:
    if not path:
        return value
    changed = copy.deepcopy(document)
    parent = changed
    for step in path[:-1]:
        parent = parent[step]
    parent[path[-1]] = value
    return changed


def decoder(cls: type[Any]) -> Callable[[bytes], Any]:
    return lambda body: json_codec.decode(body, cls)


@given(cls=st.sampled_from(JSON_TYPES), body=st.binary(max_size=64) | st.text(max_size=64).map(str.encode))
@settings(deadline=None, max_examples=120)
def test_random_text(cls: type[Any], body: bytes) -> None:
    refusal(decoder(cls), body)


@given(cls=st.sampled_from(JSON_TYPES), data=st.data())
@settings(deadline=None, max_examples=120)
def test_damaged_json(cls: type[Any], data: st.DataObject) -> None:
    refusal(decoder(cls), data.draw(damaged(BODIES[cls])))


@EVERY_TYPE
def test_an_odd_value_at_every_place_is_refused_or_can_be_written_again(cls: type[Any]) -> None:
    document = json.loads(BODIES[cls])
    for path in places(document):
        for value in ODD:
            body = json.dumps(replaced(document, path, value)).encode()
            if refusal(decoder(cls), body) is None:
                read = json_codec.decode(body, cls)
                assert json_codec.decode(json_codec.encode(read), cls) == read


@EVERY_TYPE
def test_a_wrong_value_is_refused_by_name(cls: type[Any]) -> None:
    document = json.loads(BODIES[cls])
    for path in places(document):
        named = [step for step in path if isinstance(step, str)]
        for value in (5, "wrong", {"wrong": 1}, [[]], -0.5):
            error = refusal(decoder(cls), json.dumps(replaced(document, path, value)).encode())
            if error is not None and named:
                told = f"{error.field} {error}".replace("[...]", ".key .3")  # the keys of the maps in the examples
                assert named[-1] in told, f"{path} = {value!r}: {error}"


def test_a_missing_key_is_refused_by_name_or_defaulted() -> None:
    for cls in JSON_TYPES:
        document = json.loads(BODIES[cls])
        for key in document:
            rest = {name: value for name, value in document.items() if name != key}
            error = refusal(decoder(cls), json.dumps(rest).encode())
            assert error is None or key in f"{error.field} {error}"


OTHER_DOCUMENTS = [b"", b" ", b"null", b"true", b"0", b'""', b"[]", b"{", b"{}{}", b"\xef\xbb\xbf{}", b"\x00", b"NaN"]


def test_other_documents() -> None:
    for cls in JSON_TYPES:
        for body in OTHER_DOCUMENTS:
            assert refusal(decoder(cls), body) is not None


DEPTH = 100_000


@EVERY_TYPE
@pytest.mark.parametrize(("opening", "closing"), [(b"[", b"]"), (b'{"a":', b"}")], ids=["list", "object"])
def test_deep_nesting(cls: type[Any], opening: bytes, closing: bytes) -> None:
    deep = opening * DEPTH + b"1" + closing * DEPTH
    assert refusal(decoder(cls), deep) is not None
    document = json.loads(BODIES[cls])
    for key in [*document, "field_of_the_future"]:
        marked = json.dumps(document | {key: PLACE}).encode()
        assert refusal(decoder(cls), marked.replace(PLACE_JSON, deep)) is not None


LITERALS = [
    b"NaN",
    b"Infinity",
    b"-Infinity",
    b"1e999",
    b"-1e999",
    b"9" * 400,
    b"9" * 4000,
    b"9" * 5000,
    b'"\\ud800"',
    b'"\xed\xa0\x80"',
]


@EVERY_TYPE
def test_literals_that_do_not_fit(cls: type[Any]) -> None:
    document = json.loads(BODIES[cls])
    for path in places(document):
        marked = json.dumps(replaced(document, path, PLACE)).encode()
        for literal in LITERALS:
            refusal(decoder(cls), marked.replace(PLACE_JSON, literal))


def test_repeated_keys_count_once() -> None:
    for cls in JSON_TYPES:
        body = BODIES[cls]
        doubled = body[:-1] + (b"," if len(body) > 2 else b"") + body[1:]
        assert json_codec.decode(doubled, cls) == json_codec.decode(body, cls)

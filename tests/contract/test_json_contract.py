"""JSON in both directions, for every message and every release: each side reads what the other writes."""

from __future__ import annotations

import base64
import json
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from support.official import Official, official_release
from support.official_values import as_binary, assert_same, plain, values_of
from support.releases import uses
from support.server_vintages import without_younger

from tinsmith import types
from tinsmith.wire.codecs import json_codec, proto_training, zstd
from tinsmith.wire.message import Message
from tinsmith.wire.routes.table import ROUTES

QUICK = settings(
    max_examples=8, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck), database=None
)

REQUESTS = sorted(
    {r.request for r in ROUTES if r.request is not None and hasattr(types, r.request.__name__)}
    | {types.SamplingParams, types.LoraConfig, types.AdamParams},
    key=lambda cls: cls.__name__,
)
RESPONSES = sorted(
    {cls for route in ROUTES for cls in (route.response, route.result) if cls is not None and issubclass(cls, Message)}
    | {
        types.TryAgainResponse,
        types.RequestFailedResponse,
        types.Checkpoint,
        types.TrainingRun,
        types.SessionSummary,
        types.SaveWeightsForSamplerResponse,
        types.SaveWeightsExternalResponse,
    },
    key=lambda cls: cls.__name__,
)
PATHS: dict[type, set[str]] = {}
for _route in ROUTES:
    if _route.request is not None:
        PATHS.setdefault(_route.request, set()).add(_route.path)


@pytest.mark.parametrize("cls", REQUESTS, ids=lambda cls: cls.__name__)
def test_requests_we_encode_are_accepted(official: Official, cls: type[Message]) -> None:
    """As far as a release has the fields: its own request types refuse younger ones, which its servers ignore."""
    if not official.has_type(cls.__name__):
        pytest.skip(f"{official.release} has no {cls.__name__}")
    if cls is types.ForwardBackwardRequest and official.line >= (0, 25):
        pytest.skip("protobuf since 0.25: test_protobuf_contract")

    @QUICK
    @given(_values(cls, official))
    def check(values: dict[str, Any]) -> None:
        ours = cls(**values)
        known = without_younger(json.loads(json_codec.encode(ours)), cls, official.line)
        read = official.ask("read", type=cls.__name__, body=json.dumps(known))
        assert_same(plain(ours), read)

    check()


@pytest.mark.parametrize("cls", REQUESTS, ids=lambda cls: cls.__name__)
def test_requests_it_encodes_are_understood(official: Official, cls: type[Message]) -> None:
    routes = [route for route in ROUTES if route.request is cls]
    if not official.has_type(cls.__name__) or (routes and not any(uses(official.release, r) for r in routes)):
        pytest.skip(f"{official.release} sends no {cls.__name__}")

    @QUICK
    @given(_values(cls, official))
    def check(values: dict[str, Any]) -> None:
        sent = official.ask("encode", type=cls.__name__, values=values)
        if sent["path"] is not None and cls in PATHS:
            assert sent["path"] in PATHS[cls]
        ours = _decoded(sent, cls)
        assert_same(plain(ours), sent["read"] if sent["encoding"] == "json" else as_binary(sent["read"]))

    check()


@pytest.mark.parametrize("cls", RESPONSES, ids=lambda cls: cls.__name__)
def test_responses_we_encode_are_accepted(official: Official, cls: type[Message]) -> None:
    if not official.has_type(cls.__name__):
        pytest.skip(f"{official.release} has no {cls.__name__}")

    @QUICK
    @given(_values(cls, official))
    def check(values: dict[str, Any]) -> None:
        ours = cls.model_validate(values)
        read = official.ask("read", type=cls.__name__, body=json_codec.encode(ours).decode())
        assert_same(plain(ours), read)

    check()


@pytest.mark.parametrize("cls", RESPONSES, ids=lambda cls: cls.__name__)
def test_responses_of_its_models_are_understood(official: Official, cls: type[Message]) -> None:
    if not official.has_type(cls.__name__):
        pytest.skip(f"{official.release} has no {cls.__name__}")

    @QUICK
    @given(_values(cls, official))
    def check(values: dict[str, Any]) -> None:
        dumped = official.ask("dump", type=cls.__name__, values=values)
        assert_same(plain(json_codec.decode(dumped["body"].encode(), cls)), dumped["read"])

    check()


def test_explicit_nulls_of_old_releases_are_read(official: Official) -> None:
    """0.3 to 0.17 write null for what was set to None."""
    sent = official.ask(
        "encode",
        type="CreateModelRequest",
        values={
            "session_id": "s",
            "model_seq_id": 0,
            "base_model": "b",
            "user_metadata": None,
            "lora_config": {"rank": 8, "seed": None},
        },
    )
    body = json.loads(sent["body"])
    assert ("user_metadata" in body) == (official.line < (0, 18))
    request = json_codec.decode(sent["body"].encode(), types.CreateModelRequest)
    assert request.user_metadata is None
    assert request.lora_config == types.LoraConfig(rank=8, **({"seed": None} if official.line < (0, 18) else {}))


def test_chunks_without_type_are_read(official: Official) -> None:
    """Releases before 0.18 leave the type of a chunk out, because nobody set it."""
    prompt = {"chunks": [{"tokens": [1, 2]}]}
    if official.line >= (0, 25):
        pytest.skip("later releases always write it")
    sent = official.ask("encode", type="SampleRequest", values={"prompt": prompt, "sampling_params": {}})
    if official.line < (0, 18):
        assert "type" not in json.loads(sent["body"])["prompt"]["chunks"][0]
    request = json_codec.decode(sent["body"].encode(), types.SampleRequest)
    assert request.prompt == types.ModelInput.from_ints([1, 2])


@pytest.mark.parametrize("category", ["user", "User", "SERVER", "unknown", "something else"])
def test_failure_categories_are_written_in_lower_case(official: Official, category: str) -> None:
    ours = types.RequestFailedResponse(error="x", category=category)
    read = official.ask("read", type="RequestFailedResponse", body=json_codec.encode(ours).decode())
    known = category.lower() in ("user", "server", "unknown")
    assert read["category"] == ours.category == (category.lower() if known else "unknown")


@QUICK
@given(st.data())
def test_forward_backward_of_0_24_is_read_in_all_its_encodings(newest: Official, data: st.DataObject) -> None:
    official = official_release("0.24.0")
    values = data.draw(_values(types.ForwardBackwardRequest, official))
    chunks = [chunk for d in values["forward_backward_input"]["data"] for chunk in d["model_input"]["chunks"]]
    if any(chunk["type"] == "image_asset_pointer" for chunk in chunks):
        return
    values["seq_id"] = 7
    results = []
    for config in ({}, {"proto_write_fwdbwd": True}, {"proto_write_fwdbwd": True, "proto_compress_fwdbwd": True}):
        sent = official.ask("encode", type="ForwardBackwardRequest", values=values, config=config)
        assert (sent["encoding"] == "binary") == bool(config)
        results.append(_decoded(sent, types.ForwardBackwardRequest))
    for result in results:
        assert_same(_comparable(result), _comparable(results[0]))


def _values(cls: type[Message], official: Official) -> st.SearchStrategy[dict[str, Any]]:
    return values_of(cls, official.line, official.fields(cls.__name__))


def _decoded(sent: dict[str, Any], cls: type[Message]) -> Message:
    if sent["encoding"] == "json":
        return json_codec.decode(sent["body"].encode(), cls)
    body = base64.b64decode(sent["body"])
    headers = {key.lower(): value for key, value in sent["headers"].items()}
    assert headers["content-type"] == "application/x-protobuf"
    if headers.get("content-encoding") == "zstd":
        body = zstd.decompress(body, 1 << 20)
    return proto_training.decode_request(body)


def _comparable(request: Message) -> Any:
    """A request without what JSON and protobuf say differently: the shape of flat tensors, an empty config."""
    values = plain(request)
    work = values["forward_backward_input"]
    work["loss_fn_config"] = work["loss_fn_config"] or None
    for datum in work["data"]:
        for tensor in datum["loss_fn_inputs"].values():
            tensor.setdefault("shape", [len(tensor["data"])])
    return values

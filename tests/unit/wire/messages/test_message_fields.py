"""Single messages: their defaults, their unusual fields, and what older releases send and read."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest

from tinsmith import types
from tinsmith.errors import InvalidInputError, RequestErrorCategory, WireError
from tinsmith.wire.codecs import json_codec
from tinsmith.wire.message import is_given

PROMPT = types.ModelInput.from_ints([1, 2, 3, 4])
PROMPT_JSON = {"chunks": [{"tokens": [1, 2, 3, 4], "type": "encoded_text"}]}


def as_json(value: Any) -> dict[str, Any]:
    decoded: dict[str, Any] = json.loads(json_codec.encode(value))
    return decoded


# Defaults (protocol.md 4 and 6)


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (
            types.AdamParams(),
            {
                "learning_rate": 1e-4,
                "beta1": 0.9,
                "beta2": 0.95,
                "eps": 1e-12,
                "weight_decay": 0.0,
                "grad_clip_norm": 0.0,
            },
        ),
        (types.LoraConfig(rank=8), {"rank": 8, "train_unembed": True, "train_mlp": True, "train_attn": True}),
        (
            types.DimuonParams(learning_rate=0.1),
            {"type": "dimuon", "learning_rate": 0.1, "grad_clip_norm": 0.0, "beta1": 0.9},
        ),
        (types.DimuonOptimizerConfig(), {"type": "dimuon", "version": 1}),
        (types.AdamOptimizerConfig(), {"type": "adamw"}),
        (types.SamplingParams(), {"temperature": 1.0, "top_k": -1, "top_p": 1.0}),
        (
            types.SampleRequest(prompt=PROMPT, sampling_params=types.SamplingParams()),
            {
                "prompt": PROMPT_JSON,
                "sampling_params": {"temperature": 1.0, "top_k": -1, "top_p": 1.0},
                "num_samples": 1,
                "topk_prompt_logprobs": 0,
                "topk_sample_logprobs": 0,
                "prompt_alt_tokens_k": 0,
                "type": "sample",
            },
        ),
        (
            types.ClientDynamicConfigResponse(),
            {"refresh_interval_sec": 300, "sample_cancel_enabled": False, "sample_cancel_max_batch_size": 64},
        ),
        (
            types.CreateModelRequest(session_id="s", model_seq_id=0, base_model="b"),
            {
                "session_id": "s",
                "model_seq_id": 0,
                "base_model": "b",
                "optimizer_config": {"type": "adamw"},
                "type": "create_model",
            },
        ),
        (
            types.CreateSessionRequest(sdk_version="0.36.0", user_metadata={}),
            {"tags": [], "user_metadata": {}, "sdk_version": "0.36.0", "type": "create_session"},
        ),
        (
            types.SaveWeightsRequest(model_id="m", path="ck1", seq_id=5),
            {"model_id": "m", "path": "ck1", "seq_id": 5, "overwrite": False, "type": "save_weights"},
        ),
        (types.SessionSearchRequest(), {"user_metadata": {}, "owner": {"type": "own"}, "limit": 50}),
    ],
    ids=lambda value: type(value).__name__ if not isinstance(value, dict) else "",
)
def test_defaults_are_written_out(value: Any, expected: dict[str, Any]) -> None:
    assert as_json(value) == expected


def test_the_client_configs_defaults_are_the_protocols() -> None:
    assert as_json(json_codec.decode(b"{}", types.ClientConfigResponse)) == {
        "pjwt_auth_enabled": False,
        "credential_default_source": "api_key",
        "sample_dispatch_bytes_semaphore_size": 10_485_760,
        "inflight_response_bytes_semaphore_size": 52_428_800,
        "parallel_fwdbwd_chunks": True,
        "proto_compress_fwdbwd": False,
        "fwdbwd_max_chunk_len": 1024,
        "fwdbwd_max_chunk_bytes_count": 5_000_000,
        "fwdbwd_dispatch_bytes_semaphore_size": 50_000_000,
        "billing_exception_max_pause_duration_sec": 3600,
        "sample_no_retries": False,
        "sample_enable_stuck_detection": True,
        "sample_max_concurrent_requests": 2000,
        "use_pyqwest_transport": True,
        "create_model_via_load_weights": False,
        "sample_use_retrieve_futures": False,
        "custom_loss_server_side": False,
        "sample_join_sampling_session": False,
        "proto_write_fwdbwd": False,
        "fwd_via_fwdbwd": False,
    }


def test_adam_params_can_be_dictionary_keys() -> None:
    assert hash(types.AdamParams()) == hash(types.AdamParams(learning_rate=1e-4))
    assert len({types.AdamParams(), types.AdamParams(), types.AdamParams(beta1=0.5)}) == 2


# OptimStepRequest


@pytest.mark.parametrize("params", [types.AdamParams(learning_rate=0.5), {"learning_rate": 0.5}])
@pytest.mark.parametrize("spelling", ["adam_params", "optim_params"])
def test_adams_parameters_travel_as_adam_params(spelling: str, params: Any) -> None:
    request = types.OptimStepRequest(model_id="m", **{spelling: params})
    assert request.optim_params == request.adam_params == types.AdamParams(learning_rate=0.5)
    assert request.optimizer_params is None
    assert set(as_json(request)) == {"model_id", "type", "adam_params"}


@pytest.mark.parametrize(
    "params", [types.DimuonParams(learning_rate=0.5), {"type": "dimuon", "learning_rate": np.float32(0.5)}]
)
@pytest.mark.parametrize("spelling", ["optimizer_params", "optim_params"])
def test_other_parameters_travel_as_optimizer_params(spelling: str, params: Any) -> None:
    request = types.OptimStepRequest(model_id="m", **{spelling: params})
    assert request.optim_params == request.optimizer_params == types.DimuonParams(learning_rate=0.5)
    assert request.adam_params is None
    assert set(as_json(request)) == {"model_id", "type", "optimizer_params"}


@pytest.mark.parametrize(
    "body",
    [
        b'{"model_id":"m","adam_params":{"learning_rate":0.5}}',
        b'{"model_id":"m","optim_params":{"learning_rate":0.5}}',
        b'{"model_id":"m","adam_params":{"learning_rate":0.5},"optimizer_params":null,"optim_params":null}',
    ],
)
def test_every_spelling_is_read_and_written_as_one(body: bytes) -> None:
    request = json_codec.decode(body, types.OptimStepRequest)
    assert request == types.OptimStepRequest(model_id="m", adam_params=types.AdamParams(learning_rate=0.5))
    assert set(as_json(request)) == {"model_id", "type", "adam_params"}


@pytest.mark.parametrize(
    "given",
    [
        {},
        {"adam_params": None},
        {"optim_params": None},
        {"adam_params": types.AdamParams(), "optimizer_params": types.DimuonParams(learning_rate=0.1)},
        {"adam_params": types.AdamParams(), "optim_params": types.DimuonParams(learning_rate=0.1)},
    ],
)
def test_a_step_needs_exactly_one_optimizers_parameters(given: dict[str, Any]) -> None:
    with pytest.raises(InvalidInputError, match="exactly one"):
        types.OptimStepRequest(model_id="m", **given)


@pytest.mark.parametrize("params", [5, "fast", [0.1], {"learning_rate": "x"}])
def test_wrong_optimizer_parameters_are_named(params: Any) -> None:
    with pytest.raises(InvalidInputError, match=r"optim_params|learning_rate"):
        types.OptimStepRequest(model_id="m", optim_params=params)


# Stop


@pytest.mark.parametrize("stop", [None, [], "END", ["a", "b"], [1, 2], [""]])
def test_stop_takes_texts_or_token_ids(stop: Any) -> None:
    params = types.SamplingParams(stop=stop)
    assert params.stop == stop
    assert as_json(params)["stop"] == stop
    assert json_codec.decode(json_codec.encode(params), types.SamplingParams) == params


def test_stop_at_nothing_is_not_stop_at_the_end_token() -> None:
    never, default = types.SamplingParams(stop=[]), types.SamplingParams()
    assert never != default
    assert is_given(never, "stop")
    assert not is_given(default, "stop")


@pytest.mark.parametrize("stop", [["a", 1], [1, "a"], [1.5], [True], [None], 5, {"a": 1}])
def test_other_stops_are_refused_by_name(stop: Any) -> None:
    with pytest.raises(InvalidInputError, match="stop"):
        types.SamplingParams(stop=stop)
    with pytest.raises(WireError, match="stop"):
        json_codec.decode(json.dumps({"stop": stop}).encode(), types.SamplingParams)


# Optimizers that a server reports

INFO = {"model_id": "m", "model_data": {"model_name": "x"}}


def info(optimizer: Any) -> types.GetInfoResponse:
    return json_codec.decode(json.dumps(INFO | {"optimizer_config": optimizer}).encode(), types.GetInfoResponse)


def test_known_optimizers_are_read_as_their_types() -> None:
    assert info({"type": "adamw"}).optimizer_config == types.AdamOptimizerConfig()
    assert info({"type": "dimuon", "version": 1}).optimizer_config == types.DimuonOptimizerConfig()


def test_no_optimizer_means_adam() -> None:
    answer = json_codec.decode(json.dumps(INFO).encode(), types.GetInfoResponse)
    assert answer.optimizer_config == types.AdamOptimizerConfig()


@pytest.mark.parametrize(
    "optimizer", [{"type": "lion", "sharpness": 3}, {"type": "dimuon", "version": 2}, {"type": "dimuon", "damping": 1}]
)
def test_an_unknown_optimizer_does_not_cost_the_answer(optimizer: dict[str, Any]) -> None:
    answer = info(optimizer)
    assert answer.model_data.model_name == "x"
    assert answer.optimizer_config.type == optimizer["type"]


def test_weights_info_reads_unknown_optimizers_too() -> None:
    body = b'{"base_model":"b","is_lora":true,"optimizer_config":{"type":"lion"}}'
    assert json_codec.decode(body, types.WeightsInfoResponse).optimizer_config.type == "lion"


def test_a_failure_is_read_whatever_the_case_of_its_category() -> None:
    answer = json_codec.decode(b'{"error":"x","category":"User"}', types.RequestFailedResponse)
    assert answer.category is RequestErrorCategory.User
    assert as_json(answer) == {"error": "x", "category": "user"}


# Numbers that JSON does not have


@pytest.mark.parametrize("number", [float("nan"), float("inf"), float("-inf"), np.float32("nan"), np.float64("inf")])
@pytest.mark.parametrize(
    "build",
    [
        lambda number: types.AdamParams(learning_rate=number),
        lambda number: types.SamplingParams(temperature=number),
        lambda number: types.OptimStepResponse(metrics={"grad_norm": number}),
        lambda number: types.OptimStepRequest(model_id="m", adam_params={"learning_rate": number}),
        lambda number: types.CustomLossNode(op="output", name="o", target="o", args=[number]),
    ],
    ids=["AdamParams", "SamplingParams", "OptimStepResponse", "OptimStepRequest", "CustomLossNode"],
)
def test_numbers_that_json_lacks_never_turn_into_null(build: Any, number: float) -> None:
    with pytest.raises(InvalidInputError, match=r"learning_rate|temperature|grad_norm|args"):
        json_codec.encode(build(number))


def test_extensions_are_invisible_until_they_are_given() -> None:
    plain = types.SamplingParams(max_tokens=3)
    assert plain.min_p is None
    assert json.loads(json_codec.encode(plain)) == {"max_tokens": 3, "temperature": 1.0, "top_k": -1, "top_p": 1.0}
    assert "min_p" not in plain.model_dump()
    given = types.SamplingParams(min_p=None, logit_bias={5: 1.5}, output_format=types.OutputFormat(type="json_object"))
    dumped = given.model_dump()
    assert (dumped["min_p"], dumped["logit_bias"], dumped["output_format"]["type"]) == (None, {5: 1.5}, "json_object")
    assert "frequency_penalty" not in dumped
    assert json_codec.decode(json_codec.encode(given), types.SamplingParams) == given


def test_token_ids_may_be_strings_as_in_json() -> None:
    assert types.SamplingParams(logit_bias={"5": 1.0}).logit_bias == {5: 1.0}  # type: ignore[dict-item]
    again = types.SamplingParams.model_validate_json('{"logit_bias": {"7": -1}}')
    assert again.logit_bias == {7: -1.0}
    with pytest.raises(InvalidInputError, match="logit_bias: Expected `int`, got `str`") as caught:
        types.SamplingParams(logit_bias={"five": 1.0})  # type: ignore[dict-item]
    assert caught.value.field == "logit_bias"

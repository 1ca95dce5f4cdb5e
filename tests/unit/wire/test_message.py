"""Messages: strict when built, tolerant when read, immutable afterwards."""

from __future__ import annotations

import copy
import json
import pickle
from typing import Any, Literal, get_args, get_origin, get_type_hints

import numpy as np
import pytest
from support.examples import example, message, messages, requests

from tinsmith import types
from tinsmith.errors import InvalidInputError, UnknownFieldError, WireError
from tinsmith.wire.codecs import json_codec
from tinsmith.wire.message import Message, is_given


def as_json(value: Any) -> dict[str, Any]:
    decoded: dict[str, Any] = json.loads(json_codec.encode(value))
    return decoded


# Building


def test_an_unknown_field_is_named_with_a_suggestion() -> None:
    with pytest.raises(UnknownFieldError) as caught:
        types.SamplingParams(max_token=5)  # type: ignore[call-arg]
    assert caught.value.field == "max_token"
    assert "SamplingParams has no field 'max_token'; did you mean 'max_tokens'?" in str(caught.value)
    assert "temperature" in str(caught.value)
    assert isinstance(caught.value, TypeError)


def test_an_unknown_field_unlike_any_other_lists_those_there_are() -> None:
    with pytest.raises(UnknownFieldError, match=r"has no field 'xyzzy'; it has: rank, seed") as caught:
        types.LoraConfig(rank=8, xyzzy=1)  # type: ignore[call-arg]
    assert "did you mean" not in str(caught.value)


@pytest.mark.parametrize(
    ("build", "field"),
    [
        (lambda: types.AdamParams(learning_rate="fast"), "learning_rate"),
        (lambda: types.AdamParams(beta1=None), "beta1"),
        (lambda: types.LoraConfig(rank=0), "rank"),
        (lambda: types.LoraConfig(rank=8.5), "rank"),
        (lambda: types.LoraConfig(rank=True), "rank"),
        (lambda: types.SamplingParams(max_tokens=-1), "max_tokens"),
        (lambda: types.SamplingParams(max_tokens="3"), "max_tokens"),
        (lambda: types.SamplingParams(temperature=[1.0]), "temperature"),
        (lambda: types.DimuonParams(learning_rate=-0.1), "learning_rate"),
        (lambda: types.DimuonParams(learning_rate=0.1, beta1=1.0), "beta1"),
        (lambda: types.SaveWeightsRequest(model_id="m", seq_id=-1), "seq_id"),
        (lambda: types.SaveWeightsRequest(model_id="m", seq_id=2**63), "seq_id"),
        (lambda: types.CreateModelRequest(session_id="s", model_seq_id=0, base_model=5), "base_model"),
        (lambda: types.CreateModelRequest(session_id="s", model_seq_id=0, base_model="b", lora_config={}), "rank"),
        (lambda: types.SessionSearchRequest(limit=201), "limit"),
        (lambda: types.UserSearchOwner(owner_urns=[]), "owner_urns"),
        (lambda: types.ForwardBackwardInput(data=[], loss_fn="entropy"), "loss_fn"),
        (lambda: types.ForwardBackwardInput(data=[3], loss_fn="ppo"), "data[0]"),
        (lambda: types.CreateSessionRequest(type="create_model"), "type"),
        (lambda: types.DimuonParams(learning_rate=0.1, type="adamw"), "type"),
    ],
)
def test_a_wrong_value_names_its_field(build: Any, field: str) -> None:
    with pytest.raises(InvalidInputError) as caught:
        build()
    assert field in str(caught.value)
    assert caught.value.field is None or field.split("[")[0] in f"{caught.value.field} {caught.value}"


def test_a_missing_field_is_named() -> None:
    with pytest.raises(InvalidInputError, match=r"LoraConfig: .*`rank`"):
        types.LoraConfig()  # type: ignore[call-arg]


def test_a_wrong_field_is_named_even_beside_numpy_scalars() -> None:
    with pytest.raises(InvalidInputError) as caught:
        types.AdamParams(learning_rate=np.float32(0.5), beta1="x")  # type: ignore[arg-type]
    assert caught.value.field == "beta1"


@pytest.mark.parametrize(
    ("given", "plain"),
    [
        (np.float32(0.5), 0.5),
        (np.float64(0.25), 0.25),
        (np.float16(2.0), 2.0),
        (np.int64(2), 2.0),
        (np.array(0.5), 0.5),
        (3, 3.0),
    ],
)
def test_numpy_scalars_stand_for_their_number(given: Any, plain: float) -> None:
    params = types.AdamParams(learning_rate=given)
    assert params.learning_rate == plain
    assert type(params.learning_rate) is float


def test_numpy_scalars_are_read_inside_containers() -> None:
    request = types.SamplingParams(max_tokens=np.int32(7), stop=[np.int64(1), np.int64(2)])  # type: ignore[list-item]
    assert (request.max_tokens, request.stop) == (7, [1, 2])
    assert types.SupportedModel(trainable=np.bool_(True)).trainable is True


def test_numpy_scalars_travel_in_free_form_fields() -> None:
    metadata = {"lr": np.float64(0.5), "steps": np.int64(3), "deep": [np.float32(1.5)]}
    request = types.CreateModelRequest(session_id="s", model_seq_id=0, base_model="b", user_metadata=metadata)
    assert as_json(request)["user_metadata"] == {"lr": 0.5, "steps": 3, "deep": [1.5]}


def test_a_tuple_stands_for_a_list() -> None:
    params = types.SamplingParams(stop=("a", "b"))  # type: ignore[arg-type]
    assert params.stop == ["a", "b"]
    assert params == types.SamplingParams(stop=["a", "b"])


def test_lists_and_dicts_are_copied() -> None:
    stop, config = ["a"], {"clip": 0.2}
    params = types.SamplingParams(stop=stop)
    work = types.ForwardBackwardInput(data=[], loss_fn="ppo", loss_fn_config=config)
    stop.append("b")
    config["clip"] = 0.9
    assert params.stop == ["a"]
    assert work.loss_fn_config == {"clip": 0.2}


def test_mutable_defaults_are_not_shared() -> None:
    first, second = types.SessionSearchRequest(), types.SessionSearchRequest()
    assert first.user_metadata is not second.user_metadata
    assert types.CreateSessionRequest().tags is not types.CreateSessionRequest().tags


def test_values_may_be_given_in_order() -> None:
    assert types.AdamParams(0.5, 0.8) == types.AdamParams(learning_rate=0.5, beta1=0.8)  # type: ignore[misc]


def test_too_many_values_are_refused() -> None:
    with pytest.raises(UnknownFieldError, match="AdamParams has 6 fields, got 7 arguments"):
        types.AdamParams(1, 2, 3, 4, 5, 6, 7)  # type: ignore[misc]


def test_a_value_given_twice_is_refused() -> None:
    with pytest.raises(TypeError, match="learning_rate"):
        types.AdamParams(0.1, learning_rate=0.2)  # type: ignore[misc]


# None and not given


def test_none_and_not_given_both_read_as_none() -> None:
    assert types.LoraConfig(rank=8).seed is None
    assert types.LoraConfig(rank=8, seed=None).seed is None


def test_none_and_not_given_are_different_values() -> None:
    absent, null = types.LoraConfig(rank=8), types.LoraConfig(rank=8, seed=None)
    assert absent != null
    assert not is_given(absent, "seed")
    assert is_given(null, "seed")
    assert is_given(types.LoraConfig(rank=8, seed=0), "seed")


def test_none_is_written_and_not_given_is_left_out() -> None:
    assert "seed" not in as_json(types.LoraConfig(rank=8))
    assert as_json(types.LoraConfig(rank=8, seed=None))["seed"] is None


@pytest.mark.parametrize(("body", "given"), [(b'{"rank":8}', False), (b'{"rank":8,"seed":null}', True)])
def test_reading_keeps_the_difference(body: bytes, given: bool) -> None:
    assert is_given(json_codec.decode(body, types.LoraConfig), "seed") is given


def test_is_given_of_an_unknown_name_fails() -> None:
    with pytest.raises(AttributeError):
        is_given(types.LoraConfig(rank=8), "sede")


# Every message


EVERY_MESSAGE = [message(cls, full=full) for cls in messages() for full in (False, True)]


def test_every_message_is_frozen() -> None:
    for value in EVERY_MESSAGE:
        for name in (*type(value).__struct_fields__, "novelty"):
            with pytest.raises(AttributeError):
                setattr(value, name, getattr(value, name, 1))


def test_every_message_survives_json() -> None:
    for value in EVERY_MESSAGE:
        assert json_codec.decode(json_codec.encode(value), type(value)) == value


def test_every_message_ignores_unknown_fields_when_read() -> None:
    for value in EVERY_MESSAGE:
        document = as_json(value) | {"field_of_the_future": {"deep": [1, None]}}
        assert json_codec.decode(json.dumps(document).encode(), type(value)) == value


def test_every_message_survives_pickle_and_copies() -> None:
    for value in EVERY_MESSAGE:
        assert pickle.loads(pickle.dumps(value)) == value
        assert copy.deepcopy(value) == value
        assert copy.copy(value) == value
        assert value.model_copy() == value


def test_every_message_is_read_back_from_its_dump() -> None:
    for value in EVERY_MESSAGE:
        assert type(value).model_validate(value.model_dump(mode="json", exclude_none=True)) == value.model_copy()
        dumped = json.loads(value.model_dump_json())
        assert dumped == value.model_dump(mode="json")
        assert type(value).model_validate_json(value.model_dump_json(exclude_none=True)) == value


def test_every_message_dumps_wire_names_only() -> None:
    for value in EVERY_MESSAGE:
        config = type(value).__struct_config__
        known = {*type(value).__struct_encode_fields__, *([config.tag_field] if config.tag_field else [])}
        assert set(value.model_dump()) <= known


def test_every_message_writes_its_literals() -> None:
    for value in EVERY_MESSAGE:
        document = as_json(value)
        config = type(value).__struct_config__
        if config.tag_field is not None:
            assert document[config.tag_field] == config.tag
        hint = get_type_hints(type(value)).get("type")
        if get_origin(hint) is Literal:
            assert document["type"] == get_args(hint)[0]


def test_every_message_reads_as_a_whole() -> None:
    for value in EVERY_MESSAGE:
        assert type(value).__name__ in repr(value)


@pytest.mark.parametrize("cls", requests(), ids=lambda cls: cls.__name__)
def test_a_request_needs_no_type(cls: type[Message]) -> None:
    value = message(cls, full=True)
    document = as_json(value)
    document.pop("type", None)
    assert json_codec.decode(json.dumps(document).encode(), cls) == value


def test_a_wrong_literal_is_refused_when_read() -> None:
    with pytest.raises(WireError, match="type"):
        json_codec.decode(b'{"session_id":"s","type":"create_model"}', types.CreateSessionResponse)


def test_model_copy_replaces_and_checks() -> None:
    params = types.SamplingParams(max_tokens=5, stop=None)
    changed = params.model_copy(update={"max_tokens": 6})
    assert (changed.max_tokens, params.max_tokens) == (6, 5)
    assert is_given(changed, "stop")
    assert not is_given(changed, "seed")
    with pytest.raises(InvalidInputError, match="max_tokens"):
        params.model_copy(update={"max_tokens": "six"})
    with pytest.raises(UnknownFieldError, match="max_token"):
        params.model_copy(update={"max_token": 6})


def test_model_dump_gives_plain_values() -> None:
    assert types.SamplingParams(max_tokens=5).model_dump(exclude_none=True) == {
        "max_tokens": 5,
        "temperature": 1.0,
        "top_k": -1,
        "top_p": 1.0,
    }
    assert types.AdamOptimizerConfig().model_dump() == {"type": "adamw"}
    prompt = types.ModelInput.from_ints([1, 2])
    request = types.SampleRequest(prompt=prompt, sampling_params=types.SamplingParams())
    dumped = request.model_dump(mode="json")
    assert dumped["prompt"] == {"chunks": [{"tokens": [1, 2], "type": "encoded_text"}]}
    assert dumped["sampling_params"]["stop"] is None


def test_model_validate_ignores_unknown_and_names_wrong_fields() -> None:
    assert types.LoraConfig.model_validate({"rank": 4, "later": 1}) == types.LoraConfig(rank=4)
    with pytest.raises(InvalidInputError, match="LoraConfig: rank"):
        types.LoraConfig.model_validate({"rank": "four"})


def test_examples_cover_the_numpy_backed_answers() -> None:
    for cls in (types.ForwardBackwardOutput, types.SampleResponse):
        value = example(cls)
        assert json_codec.decode(json_codec.encode(value), cls) == value

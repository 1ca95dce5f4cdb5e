"""The methods of pydantic models on messages, chunks and inputs."""

from __future__ import annotations

import json
import pickle
from typing import Any

import pytest

from tinsmith import types
from tinsmith.errors import InvalidInputError, UnknownFieldError
from tinsmith.wire.message import is_given
from tinsmith.wire.messages.weights import with_console

TEXT = types.EncodedTextChunk(tokens=[1, 2])
IMAGE = types.ImageChunk(data=b"x", format="png")
MIXED = types.ModelInput(chunks=[TEXT, IMAGE])
CHUNKS: list[Any] = [
    TEXT,
    IMAGE,
    types.ImageChunk(
        data=b"x", format="png", override_dimensions=types.ImageDimensions(width=2, height=3), height=4, tokens=5
    ),
    types.ImageAssetPointerChunk(format="jpeg", location="gs://x", expected_tokens=4),
    types.DmelChunk(dmel=b"\x00\x01\x05"),
]


@pytest.mark.parametrize("chunk", CHUNKS, ids=lambda chunk: chunk.type)
def test_a_chunk_is_read_back_from_its_dump(chunk: Any) -> None:
    cls = type(chunk)
    assert cls.model_validate(chunk.model_dump()) == chunk
    assert cls.model_validate_json(chunk.model_dump_json()) == chunk
    assert cls.model_validate(chunk) is chunk
    assert chunk.model_copy() == chunk.model_copy(deep=True) == chunk
    assert json.loads(chunk.model_dump_json()) == chunk.model_dump(mode="json")


def test_a_chunk_dumps_fields_of_other_releases_only_if_they_are_set() -> None:
    assert IMAGE.model_dump() == {"data": "eA==", "format": "png", "expected_tokens": None, "type": "image"}
    assert types.ImageChunk(data=b"x", format="png", height=4).model_dump()["height"] == 4


@pytest.mark.parametrize(
    ("cls", "value", "message"),
    [
        (types.ImageChunk, {"format": "png"}, "a chunk of type image needs data"),
        (
            types.ImageChunk,
            {"data": "eA==", "format": "png", "type": "dmel"},
            "ImageChunk has the type 'image', got 'dmel'",
        ),
        (types.ImageChunk, {"data": "eA==", "format": "png", "override_dimensions": {"width": 1}}, "width and height"),
        (types.EncodedTextChunk, [1], "EncodedTextChunk: expected an object, got list"),
        (types.ModelInput, [1], "an object with a list of chunks"),
        (types.AdamParams, [1], "AdamParams: "),
    ],
)
def test_what_cannot_be_read_is_named(cls: Any, value: Any, message: str) -> None:
    with pytest.raises(InvalidInputError, match=message):
        cls.model_validate(value)


@pytest.mark.parametrize("text", ["{", b"\xff", "\ud800", "[" * 100_000, None])
@pytest.mark.parametrize("cls", [types.AdamParams, types.ModelInput, types.ImageChunk])
def test_what_is_no_json_is_refused(cls: Any, text: Any) -> None:
    with pytest.raises(InvalidInputError, match=cls.__name__):
        cls.model_validate_json(text)


@pytest.mark.parametrize("value", [types.AdamParams(), MIXED, IMAGE])
def test_unknown_fields_and_options_are_refused(value: Any) -> None:
    with pytest.raises(UnknownFieldError, match="novelty"):
        value.model_copy(update={"novelty": 1})
    with pytest.raises(UnknownFieldError, match="model_dump has no option 'exclude_nones'"):
        value.model_dump(exclude_nones=True)
    with pytest.raises(UnknownFieldError, match="model_dump has no option 'exclude_nones'"):
        value.model_dump_json(exclude_nones=True)
    with pytest.raises(UnknownFieldError, match="model_validate has no option 'stirct'"):
        type(value).model_validate(value.model_dump(), stirct=True)
    with pytest.raises(InvalidInputError, match="mode: must be 'python' or 'json'"):
        value.model_dump(mode="jason")
    with pytest.raises(InvalidInputError, match="include: expected field names, got str"):
        value.model_dump(include="beta1")
    assert value.model_dump(by_alias=True, round_trip=True, warnings=False) == value.model_dump()


def test_nested_fields_are_selected() -> None:
    assert MIXED.model_dump(include={"chunks": {0: {"tokens"}}}) == {"chunks": [{"tokens": [1, 2]}]}
    assert MIXED.model_dump(exclude={"chunks": {"__all__": {"type", "expected_tokens"}}}) == {
        "chunks": [{"tokens": [1, 2]}, {"data": "eA==", "format": "png"}]
    }
    assert MIXED.model_dump(include={"chunks": {-1: {"type"}}}) == {"chunks": [{"type": "image"}]}
    assert MIXED.model_dump(exclude={"chunks": True}) == {}


def test_none_inside_a_dictionary_of_the_user_stays() -> None:
    event = types.GenericEvent(
        event_id="e", event_name="n", event_session_index=0, severity="INFO", event_data={"a": None}, timestamp=TIME
    )
    assert event.model_dump(exclude_none=True)["event_data"] == {"a": None}


TIME = types.Checkpoint.model_validate(
    {"checkpoint_id": "c", "checkpoint_type": "training", "tinker_path": "t", "time": "2026-01-02T03:04:05Z"}
).time


def test_defaults_and_what_was_not_given_can_be_left_out() -> None:
    params = types.SamplingParams(max_tokens=3, stop=None)
    assert params.model_dump(exclude_unset=True) == {"max_tokens": 3, "stop": None}
    assert params.model_dump(exclude_defaults=True) == {"max_tokens": 3}
    assert not is_given(types.SamplingParams.model_validate(params.model_dump(exclude_unset=True)), "seed")
    assert types.AdamOptimizerConfig().model_dump(exclude_unset=True) == {}
    assert MIXED.model_dump(exclude_defaults=True) == {
        "chunks": [{"tokens": [1, 2]}, {"data": "eA==", "format": "png"}]
    }


def test_json_text_has_null_unless_told_otherwise() -> None:
    assert json.loads(types.SamplingParams().model_dump_json())["seed"] is None
    assert "seed" not in json.loads(types.SamplingParams().model_dump_json(exclude_none=True))
    assert types.AdamOptimizerConfig().model_dump_json(indent=1) == '{\n "type": "adamw"\n}'


def test_fields_are_described() -> None:
    fields = types.SampleRequest.model_fields
    assert fields["prompt"].annotation is types.ModelInput
    assert fields["prompt"].is_required()
    assert (fields["num_samples"].default, fields["seq_id"].default) == (1, None)
    assert list(types.AdamOptimizerConfig.model_fields) == ["type"]
    assert types.AdamOptimizerConfig().model_fields["type"].get_default() == "adamw"
    optimizer = types.WeightsInfoResponse.model_fields["optimizer_config"]
    assert not optimizer.is_required()
    assert optimizer.get_default() is None
    assert optimizer.get_default(call_default_factory=True) == types.AdamOptimizerConfig()
    assert list(types.ModelInput.model_fields) == ["chunks"]
    assert types.ImageChunk.model_fields["data"].annotation is bytes


def test_a_deep_copy_shares_no_list() -> None:
    deep, shallow = MIXED.model_copy(deep=True), MIXED.model_copy()
    assert deep.chunks[0] is not MIXED.chunks[0]
    assert shallow.chunks[0] is MIXED.chunks[0]
    params = types.SamplingParams(stop=["a"])
    assert params.model_copy(deep=True).stop is not params.stop


def test_an_answer_leads_to_the_console_of_its_server() -> None:
    saved = types.SaveWeightsForSamplerResponse(path="tinker://run:train:0/sampler_weights/a b")
    hosted = "https://tinker.thinkingmachines.ai"
    assert saved.get_console_url() == f"{hosted}/checkpoints/run%3Atrain%3A0/sampler_weights%2Fa%20b"
    own = with_console(saved.model_copy(), "http://127.0.0.1:8000")
    assert own == saved
    assert own.model_dump() == saved.model_dump()
    for answer in (own, pickle.loads(pickle.dumps(own))):
        assert answer.get_console_url() == "http://127.0.0.1:8000/checkpoints/run%3Atrain%3A0/sampler_weights%2Fa%20b"
        assert answer.get_playground_url().startswith("http://127.0.0.1:8000/playground?mode=checkpoint&checkpoint=")
    with pytest.raises(InvalidInputError, match="Invalid tinker path 'nowhere'"):
        types.SaveWeightsResponse(path="nowhere").get_console_url()

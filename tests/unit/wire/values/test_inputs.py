"""ModelInput and Datum: user data is checked when it is passed in."""

from __future__ import annotations

import array
import copy
import pickle
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tinsmith.errors import InvalidInputError, PrecisionWarning, UnknownLossInputError
from tinsmith.types import (
    Datum,
    DmelChunk,
    EncodedTextChunk,
    ImageChunk,
    ModelInput,
    PromptProvenanceSpan,
    SampledProvenanceSpan,
    TensorData,
)

MAX_ID = 2**31 - 1
token_ids = st.lists(st.integers(0, MAX_ID), max_size=30)

PER_TOKEN = [
    "target_tokens",
    "weights",
    "advantages",
    "logprobs",
    "clip_low_threshold",
    "clip_high_threshold",
    "sequence_ratio_mask",
]


def datum(**inputs: Any) -> Datum:
    return Datum(ModelInput.from_ints([1, 2, 3]), inputs)


# ModelInput


@given(token_ids)
@settings(deadline=None, max_examples=50)
def test_tokens_come_back(tokens: list[int]) -> None:
    for given_tokens in (tokens, tuple(tokens), np.array(tokens, np.int32), np.array(tokens, np.int64)):
        model_input = ModelInput.from_ints(given_tokens)
        assert model_input.to_ints() == tokens
        assert model_input.length == len(tokens)
        assert model_input == ModelInput.from_ints(tokens)


@pytest.mark.parametrize(
    "tokens",
    [
        range(3),
        array.array("i", [0, 1, 2]),
        array.array("q", [0, 1, 2]),
        np.arange(3, dtype=np.uint8),
        np.arange(3, dtype=np.int16),
        np.arange(3, dtype=np.uint32),
        np.arange(3, dtype=np.uint64),
        np.arange(3, dtype=">i4"),
        np.arange(3, dtype=">i8"),
        np.arange(6)[::2] // 2,
        [np.int64(0), np.uint8(1), 2],
        np.array([0, 1, 2], object),
    ],
    ids=lambda tokens: f"{type(tokens).__name__} {getattr(tokens, 'dtype', '')}",
)
def test_any_sequence_of_integers_is_taken(tokens: Any) -> None:
    assert ModelInput.from_ints(tokens).to_ints() == [0, 1, 2]


@pytest.mark.parametrize("dtype", ["<i4", ">i4", "<i8", ">i8"])
@pytest.mark.parametrize("token", [0, 127, 128, 255, 256, 2**15, 2**24, MAX_ID])
def test_every_byte_order_is_checked_by_value(dtype: str, token: int) -> None:
    assert ModelInput.from_ints(np.array([token], dtype)).to_ints() == [token]


@pytest.mark.parametrize("dtype", ["<i4", ">i4", "<i8", ">i8", "i1", "<i2", ">i2"])
@pytest.mark.parametrize("token", [-1, -128])
def test_negative_ids_are_found_in_every_dtype(dtype: str, token: int) -> None:
    with pytest.raises(InvalidInputError, match=rf"tokens\[1\]: {token} is not a token id"):
        ModelInput.from_ints(np.array([1, token], dtype))


def test_the_lowest_id_is_found_in_every_byte_order() -> None:
    for dtype in ("<i4", ">i4"):
        with pytest.raises(InvalidInputError, match=r"tokens\[0\]"):
            ModelInput.from_ints(np.array([-(2**31)], dtype))


@pytest.mark.parametrize(
    ("tokens", "place"),
    [
        ([1, True], "tokens[1]"),
        ([1, 2.0], "tokens[1]"),
        ([1, -2], "tokens[1]"),
        ([1, 2**31], "tokens[1]"),
        ([1, 2**70], "tokens[1]"),
        ([1, "2"], "tokens[1]"),
        ([1, None], "tokens[1]"),
        ([[1, 2]], "flat"),
        ([[1], [2, 3]], "row 1"),
        (np.array([[1, 2]]), "flat"),
        (np.array(5), "flat"),
        (np.array([1.0]), "float64"),
        (np.array([True]), "bool"),
        (np.array([2**31]), "tokens[0]"),
        (np.array([1, 2**63], np.uint64), "tokens[1]"),
        ("hello", "str"),
        (b"hello", "bytes"),
        (5, "int"),
        (None, "NoneType"),
        (iter([1]), "iterator"),
        ({1: 2}, "dict"),
        ({1, 2}, "set"),
        ({}, "dict"),
    ],
)
def test_what_is_no_token_sequence_is_refused_at_its_place(tokens: Any, place: str) -> None:
    with pytest.raises(InvalidInputError) as caught:
        ModelInput.from_ints(tokens)
    assert "tokens" in str(caught.value)
    assert place in str(caught.value)


def test_numpy_tokens_are_kept_and_lists_copied() -> None:
    kept, copied = np.array([1, 2], np.int32), [1, 2]
    chunk = ModelInput.from_ints(kept).chunks[0]
    assert isinstance(chunk, EncodedTextChunk)
    assert np.shares_memory(chunk.tokens, kept)  # type: ignore[arg-type]
    model_input = ModelInput.from_ints(copied)
    copied.append(3)
    assert model_input.to_ints() == [1, 2]


def test_empty_inputs() -> None:
    assert ModelInput.empty() == ModelInput(chunks=[])
    assert (ModelInput.empty().length, ModelInput.empty().to_ints()) == (0, [])
    assert ModelInput.from_ints([]).length == 0
    assert ModelInput.from_ints(np.array([])).to_ints() == []
    assert ModelInput.from_ints([]) != ModelInput.empty()


def test_appending_makes_a_new_input() -> None:
    first = ModelInput.empty()
    second = first.append(EncodedTextChunk(tokens=[1, 2])).append_int(3)
    assert second.to_ints() == [1, 2, 3]
    assert second.length == 3
    assert first.length == 0
    with pytest.raises(InvalidInputError, match=r"tokens\[0\]"):
        second.append_int(-1)


def test_only_text_has_token_ids() -> None:
    mixed = ModelInput.from_ints([1]).append(ImageChunk(data=b"x", format="png", expected_tokens=4))
    assert mixed.length == 5
    with pytest.raises(InvalidInputError, match=r"chunks\[1\]: is of type image"):
        mixed.to_ints()


@pytest.mark.parametrize("chunks", [None, 5, "text", {"tokens": [1]}, EncodedTextChunk(tokens=[1])])
def test_chunks_must_be_a_list(chunks: Any) -> None:
    with pytest.raises(InvalidInputError, match="chunks: expected a list"):
        ModelInput(chunks=chunks)


@pytest.mark.parametrize("chunk", [5, None, [1, 2], {}, {"type": "video"}, {"type": []}, {"type": "image"}])
def test_a_wrong_chunk_is_named_by_its_position(chunk: Any) -> None:
    with pytest.raises(InvalidInputError, match=r"chunks\[1\]") as caught:
        ModelInput(chunks=[EncodedTextChunk(tokens=[1]), chunk])
    assert caught.value.field == "chunks[1]"


# Datum


@pytest.mark.parametrize("key", PER_TOKEN)
def test_lists_take_the_dtype_of_their_key(key: str) -> None:
    tensor = datum(**{key: [1, 2, 3]}).loss_fn_inputs[key]
    assert tensor == TensorData([1, 2, 3], "int64" if key == "target_tokens" else "float32", [3])


def test_nested_lists_tuples_arrays_and_tensors_are_taken() -> None:
    made = datum(
        target_tokens=((1, 2), (3, 4), (5, 6)),
        weights=np.ones((3, 2), np.float32),
        logprobs=TensorData([0.5, 0.5, 0.5], "float32"),
        other=np.arange(7),
    )
    shapes = {key: tensor.shape for key, tensor in made.loss_fn_inputs.items()}
    assert shapes == {"target_tokens": [3, 2], "weights": [3, 2], "logprobs": None, "other": [7]}


def test_arrays_are_kept_as_they_are() -> None:
    weights = np.ones(3, np.float32)
    assert np.shares_memory(datum(weights=weights).loss_fn_inputs["weights"].array, weights)


def test_a_list_under_an_unknown_key_is_a_key_error() -> None:
    with pytest.raises(UnknownLossInputError, match=r"loss_fn_inputs\['masc'\].*target_tokens") as caught:
        datum(masc=[1, 2, 3])
    assert isinstance(caught.value, KeyError)
    assert isinstance(caught.value, ValueError)
    assert caught.value.field == "loss_fn_inputs['masc']"


@pytest.mark.parametrize(
    ("key", "value", "place"),
    [
        ("weights", [0.5, True, 1.0], "loss_fn_inputs['weights'][1]"),
        ("weights", [0.5, None, 1.0], "loss_fn_inputs['weights'][1]"),
        ("weights", [0.5, 1e39, 1.0], "loss_fn_inputs['weights'][1]"),
        ("weights", [[1.0], [1.0, 2.0], [1.0]], "row 1"),
        ("weights", "abc", "str"),
        ("weights", 5, "int"),
        ("weights", [1.0, 2.0], "has 2 entries, but the model input has 3 tokens"),
        ("weights", np.ones(4, np.float32), "has 4 entries"),
        ("weights", np.ones(3, bool), "bool"),
        ("advantages", TensorData([1.0], "float32"), "has 1 entries"),
        ("target_tokens", [1, -2, 3], "loss_fn_inputs['target_tokens'][1]"),
        ("target_tokens", [1, 2**31, 3], "loss_fn_inputs['target_tokens'][1]"),
        ("target_tokens", [1, 2.0, 3], "loss_fn_inputs['target_tokens'][1]"),
        ("target_tokens", np.array([1, -2, 3]), "loss_fn_inputs['target_tokens'][1]"),
        ("target_tokens", np.array([[1], [2], [-3]]), "loss_fn_inputs['target_tokens'][2][0]"),
        ("target_tokens", np.ones(3, np.float32), "token ids must be int64, got float32"),
        ("target_tokens", np.array([1, 2**63, 3], np.uint64), "loss_fn_inputs['target_tokens'][1]"),
        ("anything", np.array(["a", "b", "c"]), "loss_fn_inputs['anything']"),
    ],
)
def test_a_wrong_loss_input_is_named_by_key_and_position(key: str, value: Any, place: str) -> None:
    with pytest.raises(InvalidInputError) as caught:
        datum(**{key: value})
    assert f"loss_fn_inputs['{key}']" in str(caught.value)
    assert place in str(caught.value)
    assert (caught.value.field or "").startswith(f"loss_fn_inputs['{key}']")


@pytest.mark.parametrize("inputs", [[1, 2], "text", 5, None])
def test_loss_inputs_must_be_a_mapping(inputs: Any) -> None:
    with pytest.raises(InvalidInputError, match="loss_fn_inputs"):
        Datum(ModelInput.empty(), inputs)


def test_a_key_must_be_a_text() -> None:
    with pytest.raises(InvalidInputError, match="loss_fn_inputs"):
        Datum(ModelInput.empty(), {1: np.zeros(0, np.float32)})  # type: ignore[dict-item]


@pytest.mark.parametrize("model_input", [[1, 2], None, {"chunks": []}, EncodedTextChunk(tokens=[1])])
def test_the_model_input_must_be_one(model_input: Any) -> None:
    with pytest.raises(InvalidInputError, match=r"model_input: .*make one with ModelInput.from_ints\(tokens\)"):
        Datum(model_input, {})


def test_lengths_are_not_checked_where_an_images_is_unknown() -> None:
    model_input = ModelInput(chunks=[ImageChunk(data=b"x", format="png")])
    assert Datum(model_input, {"weights": [1.0] * 7}).loss_fn_inputs["weights"].shape == [7]


def test_rounding_names_the_key_at_the_callers_line() -> None:
    with pytest.warns(PrecisionWarning, match=r"loss_fn_inputs\['weights'\]: 3 of 3 float64") as told:
        datum(weights=np.full(3, 0.1))
    assert told[0].filename == __file__


def test_data_without_loss_inputs() -> None:
    assert Datum(ModelInput.from_ints([1])).loss_fn_inputs == {}


# Provenance

PROMPT = PromptProvenanceSpan(sequence_id="s1", length=2)
SAMPLED = SampledProvenanceSpan(sequence_id="s1", offset=4, length=1)


def test_spans_that_tile_are_kept() -> None:
    plain = datum(target_tokens=[2, 3, 4])
    marked = plain.with_provenance([PROMPT, SAMPLED], [SAMPLED, PROMPT])
    assert marked.model_input_spans == [PROMPT, SAMPLED]
    assert marked.loss_fn_input_spans == [SAMPLED, PROMPT]
    assert plain.model_input_spans is None
    assert marked != plain


@pytest.mark.parametrize("spans", [[], [PROMPT], [PROMPT, PROMPT]])
def test_spans_must_cover_their_field_exactly(spans: Any) -> None:
    plain = datum(target_tokens=[2, 3, 4])
    with pytest.raises(InvalidInputError, match=r"model_input: the spans cover \d positions, but there are 3"):
        plain.with_provenance(spans, [PROMPT, SAMPLED])
    with pytest.raises(InvalidInputError, match=r"loss_fn_inputs: the spans cover \d positions, but there are 3"):
        plain.with_provenance([PROMPT, SAMPLED], spans)
    with pytest.raises(InvalidInputError, match="the spans cover"):
        Datum(plain.model_input, plain.loss_fn_inputs, spans, [PROMPT, SAMPLED])


def test_spans_come_together() -> None:
    with pytest.raises(InvalidInputError, match="set both or neither"):
        Datum(ModelInput.from_ints([1, 2]), {}, [PROMPT])


def test_spans_do_not_travel_in_json() -> None:
    marked = datum(target_tokens=[2, 3, 4]).with_provenance([PROMPT, SAMPLED], [PROMPT, SAMPLED])
    with pytest.raises(InvalidInputError, match="only as protobuf"):
        marked.to_builtins()


@pytest.mark.parametrize("span", [PromptProvenanceSpan, SampledProvenanceSpan])
@pytest.mark.parametrize(
    ("values", "field"),
    [
        ({"sequence_id": "", "length": 1}, "sequence_id"),
        ({"sequence_id": 5, "length": 1}, "sequence_id"),
        ({"sequence_id": "s", "length": -1}, "length"),
        ({"sequence_id": "s", "length": 1.0}, "length"),
        ({"sequence_id": "s", "length": True}, "length"),
        ({"sequence_id": "s", "length": 1, "offset": -1}, "offset"),
    ],
)
def test_a_wrong_span_names_its_field(span: Any, values: dict[str, Any], field: str) -> None:
    with pytest.raises(InvalidInputError, match=field):
        span(**values)


# As values


def test_values_cannot_be_changed() -> None:
    made = datum(weights=[1.0, 1.0, 1.0])
    for value, name in (
        (made, "model_input"),
        (made, "novelty"),
        (made.model_input, "chunks"),
        (made.model_input.chunks[0], "tokens"),
        (PROMPT, "length"),
        (DmelChunk(dmel=b"\x00\x01\x05"), "dmel"),
    ):
        with pytest.raises(AttributeError):
            setattr(value, name, 1)


def test_equality_is_of_contents() -> None:
    assert datum(weights=[1.0, 2.0, 3.0]) == datum(weights=np.array([1, 2, 3], np.float32))
    assert datum(weights=[1.0, 2.0, 3.0]) != datum(weights=[1.0, 2.0, 4.0])
    assert datum(weights=[1.0, 2.0, 3.0]) != datum(advantages=[1.0, 2.0, 3.0])
    assert datum() != ModelInput.from_ints([1, 2, 3])


def test_pickles_and_copies_are_equal() -> None:
    made = datum(target_tokens=[2, 3, 4], weights=np.ones(3, np.float32))
    for value in (made, made.with_provenance([PROMPT, SAMPLED], [PROMPT, SAMPLED]), made.model_input, PROMPT):
        assert pickle.loads(pickle.dumps(value)) == value
        assert copy.deepcopy(value) == value


@pytest.mark.parametrize("tokens", [np.arange(100_000), list(range(100_000))], ids=["array", "list"])
def test_the_repr_of_a_large_input_is_short(tokens: Any) -> None:
    made = Datum(ModelInput.from_ints(tokens), {"weights": np.ones(100_000, np.float32)})
    assert len(repr(made)) < 2000
    assert "ModelInput" in repr(made)

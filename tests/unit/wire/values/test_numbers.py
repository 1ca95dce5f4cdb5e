"""Long lists are packed before they are checked: they are as strict as short ones, and look the same."""

from __future__ import annotations

import copy
import dataclasses
import pickle
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tinsmith.errors import InvalidInputError
from tinsmith.wire.values.chunks import EncodedTextChunk, chunk_from_builtins, token_bytes
from tinsmith.wire.values.inputs import Datum, ModelInput
from tinsmith.wire.values.numbers import MAX_TOKEN_ID, float_array, int_array

LONG = list(range(2, 402))


def with_value(value: Any, place: int = 300) -> list[Any]:
    return [*LONG[:place], value, *LONG[place + 1 :]]


@pytest.mark.parametrize("value", [True, False, 1.0, 2.5, "3", None, [1], 2**63, -(2**63) - 1, np.float32(2), np.True_])
def test_what_is_no_integer_is_named(value: Any) -> None:
    for values in (with_value(value), tuple(with_value(value)), [*[0] * 200, value, *[1] * 200]):
        place = next(i for i, item in enumerate(values) if item is value)
        with pytest.raises(InvalidInputError, match=rf"^x\[{place}\]: "):
            int_array(values, "x")
        with pytest.raises(InvalidInputError, match=rf"^tokens\[{place}\]: "):
            EncodedTextChunk(tokens=values)
        with pytest.raises(InvalidInputError, match=rf"^loss_fn_inputs\['target_tokens'\]\[{place}\]: "):
            Datum(ModelInput.from_ints(values[:1] * len(values)), {"target_tokens": values})


@pytest.mark.parametrize("value", [-1, MAX_TOKEN_ID + 1, 2**32 - 1, 2**32, -(2**63), 2**63 - 1])
def test_what_is_no_token_id_is_named(value: int) -> None:
    assert int_array(with_value(value), "x")[300] == value
    with pytest.raises(
        InvalidInputError, match=rf"^loss_fn_inputs\['target_tokens'\]\[300\]: {value} is not a token id"
    ):
        Datum(ModelInput.from_ints(LONG), {"target_tokens": with_value(value)})
    with pytest.raises(InvalidInputError, match=rf"^tokens\[300\]: {value} is not a token id"):
        EncodedTextChunk(tokens=with_value(value))


@pytest.mark.parametrize("value", [True, "3", None, 1e39, -1e300, np.True_, [1.0]])
def test_what_is_no_float32_is_named(value: Any) -> None:
    with pytest.raises(InvalidInputError, match=r"^x\[300\]: "):
        float_array([float(item) if item is not value else value for item in with_value(value)], "x")


@pytest.mark.parametrize("value", [float("inf"), float("-inf"), float("nan"), 3.4028234e38, 1e-50, 7])
def test_odd_numbers_that_float32_has(value: float) -> None:
    found = float_array([*[0.5] * 300, value], "x")
    assert np.array_equal(found[300], np.float32(value), equal_nan=True)
    assert found.dtype == np.float32


@pytest.mark.parametrize("value", ["\ud800", 10**30, object(), {}, b"x" * 8])
def test_what_cannot_even_be_encoded_is_named(value: Any) -> None:
    if value == 10**30:
        assert float_array([*[0.5] * 300, value], "x")[300] == np.float32(1e30)
        return
    with pytest.raises(InvalidInputError, match=r"^x\[300\]: expected a number"):
        float_array([*[0.5] * 300, value], "x")
    for values in ([*LONG[:300], value], [1, value]):
        with pytest.raises(InvalidInputError, match=r": expected an integer"):
            EncodedTextChunk(tokens=values)
    with pytest.raises(InvalidInputError, match=r"^x\[1\]: expected a number"):
        float_array([0.5, value], "x")


@given(st.lists(st.floats(width=32) | st.integers(0, 9), min_size=1, max_size=20))
def test_floats_come_out_as_they_went_in(some: list[float]) -> None:
    values = some * 300
    assert np.array_equal(float_array(values, "x"), np.array(values, np.float32), equal_nan=True)


@pytest.mark.parametrize("count", [255, 256, 65535, 65536, 70_000])
def test_any_number_of_floats(count: int) -> None:
    values = np.linspace(-1, 1, count).astype(np.float32)
    assert np.array_equal(float_array(values.tolist(), "x"), values)


@given(st.lists(st.integers(-(2**63), 2**63 - 1), max_size=400))
def test_integers_come_out_as_they_went_in(values: list[int]) -> None:
    assert int_array(values, "x").tolist() == values


def test_numpy_integers_are_welcome() -> None:
    for value in (np.int64(7), np.uint8(1), np.int32(0)):
        chunk = EncodedTextChunk(tokens=with_value(value))
        assert chunk.to_ints()[300] == value
        assert {type(token) for token in chunk.to_ints()} == {int}


def test_tokens_are_a_list_for_whoever_looks() -> None:
    given_list = list(LONG)
    chunk = EncodedTextChunk(tokens=given_list)
    given_list[0] = 99  # the chunk has its own copy
    assert chunk.length == len(LONG)
    assert chunk.estimated_bytes == 4 * len(LONG)
    assert repr(chunk) == "EncodedTextChunk(tokens=[2, 3, 4, 5, 6, 7, 8, 9, ...], length=400)"
    packed = bytes(token_bytes(chunk))
    assert packed == np.array(LONG, "<i4").tobytes()
    assert type(chunk.tokens) is list
    assert chunk.tokens == LONG
    assert chunk.tokens is chunk.tokens
    assert bytes(token_bytes(chunk)) == packed
    assert not hasattr(chunk, "nonsense")


def test_a_list_that_was_handed_out_is_what_is_sent() -> None:
    chunk = EncodedTextChunk(tokens=LONG)
    chunk.tokens[0] = 77  # type: ignore[index]
    assert bytes(token_bytes(chunk))[:4] == b"\x4d\0\0\0"
    assert chunk.to_ints()[0] == 77


@pytest.mark.parametrize("is_looked_at", [True, False])
def test_chunks_are_copied_pickled_compared_and_replaced(is_looked_at: bool) -> None:
    chunk = EncodedTextChunk(tokens=LONG)
    if is_looked_at:
        assert chunk.tokens
    for same in (copy.copy(chunk), copy.deepcopy(chunk), pickle.loads(pickle.dumps(chunk))):
        assert same == EncodedTextChunk(tokens=LONG)
        assert same.tokens == LONG
        assert bytes(token_bytes(same)) == bytes(token_bytes(EncodedTextChunk(tokens=LONG)))
    assert chunk == EncodedTextChunk(tokens=np.array(LONG))
    assert chunk != EncodedTextChunk(tokens=LONG[1:])
    assert dataclasses.replace(chunk, tokens=[1, 2]).tokens == [1, 2]
    with pytest.raises(dataclasses.FrozenInstanceError):
        chunk.tokens = [1]  # type: ignore[misc]


def test_only_tokens_can_be_given() -> None:
    chunk = chunk_from_builtins({"tokens": LONG, "type": "encoded_text", "_packed": [1]})
    assert isinstance(chunk, EncodedTextChunk)
    assert chunk.to_builtins() == {"tokens": LONG, "type": "encoded_text"}

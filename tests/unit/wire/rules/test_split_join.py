"""Splitting a call into requests, and joining their results."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.strategies import datums

from tinsmith import types
from tinsmith.errors import InvalidInputError, TinkerError
from tinsmith.types import ClientConfigResponse, Datum, ForwardBackwardOutput, ModelInput, TensorData
from tinsmith.wire.rules.split_join import ChunkLimits, binary_bytes, combine, combine_metrics, json_bytes, split

sizes = st.lists(st.integers(0, 50), min_size=1, max_size=40)
limits = st.builds(ChunkLimits, max_datums=st.integers(1, 8), max_bytes=st.integers(0, 60))


def itself(size: int) -> int:
    return size


# Chunking


@given(sizes, limits)
@settings(deadline=None, max_examples=60)
def test_chunks_are_the_data_in_order(data: list[int], bounds: ChunkLimits) -> None:
    chunks = split(data, bounds, itself)
    assert list(itertools.chain(*chunks)) == data
    assert all(chunks)


@given(sizes, limits)
@settings(deadline=None, max_examples=60)
def test_chunks_hold_the_limits_or_are_one_datum(data: list[int], bounds: ChunkLimits) -> None:
    for chunk in split(data, bounds, itself):
        assert len(chunk) <= bounds.max_datums
        assert sum(chunk) <= bounds.max_bytes or len(chunk) == 1


@given(sizes, limits)
@settings(deadline=None, max_examples=60)
def test_a_chunk_closes_only_when_it_must(data: list[int], bounds: ChunkLimits) -> None:
    for chunk, following in itertools.pairwise(split(data, bounds, itself)):
        assert len(chunk) == bounds.max_datums or sum(chunk) + following[0] > bounds.max_bytes


@pytest.mark.parametrize(
    ("data", "expected"),
    [
        ([1], [[1]]),
        ([5, 5], [[5, 5]]),
        ([5, 6], [[5], [6]]),
        ([1, 100, 1], [[1], [100], [1]]),
        ([100], [[100]]),
        ([1, 1, 1, 1], [[1, 1, 1], [1]]),
        ([0, 0, 0, 0, 0], [[0, 0, 0], [0, 0]]),
        ([10, 0, 1], [[10, 0], [1]]),
    ],
)
def test_chunks_of_at_most_3_datums_and_10_bytes(data: list[int], expected: list[list[int]]) -> None:
    assert split(data, ChunkLimits(max_datums=3, max_bytes=10), itself) == expected


@pytest.mark.parametrize("data", [[], ()])
def test_no_data_is_refused(data: list[int]) -> None:
    with pytest.raises(InvalidInputError, match="No data provided") as caught:
        split(data, ChunkLimits(), itself)
    assert caught.value.field == "data"


def test_limits_come_from_the_servers_config() -> None:
    assert ChunkLimits.of(ClientConfigResponse()) == ChunkLimits(max_datums=1024, max_bytes=5_000_000) == ChunkLimits()
    config = ClientConfigResponse(fwdbwd_max_chunk_len=3, fwdbwd_max_chunk_bytes_count=10)
    assert ChunkLimits.of(config) == ChunkLimits(max_datums=3, max_bytes=10)


def test_a_call_of_1030_datums_is_split_after_1024() -> None:
    datum = Datum(ModelInput.from_ints([1, 2]))
    assert [len(chunk) for chunk in split([datum] * 1030, ChunkLimits(), binary_bytes)] == [1024, 6]


def test_the_estimate_of_a_datum_in_protobuf() -> None:
    chunks = [
        types.EncodedTextChunk(tokens=[1, 2, 3]),
        types.ImageChunk(data=bytes(100), format="png", expected_tokens=2),
    ]
    inputs = {
        "target_tokens": TensorData([5, 7], "int64", [5, 9], [0, 1, 2, 2, 2, 2], [0, 1]),
        "weights": np.ones((5, 2), np.float32),
    }
    csr = 2 * 8 + 6 * 8 + 2 * 8
    assert binary_bytes(Datum(ModelInput(chunks=chunks), inputs)) == 3 * 4 + 100 + csr + 10 * 4


def test_the_estimate_of_a_datum_in_json() -> None:
    chunks = [types.EncodedTextChunk(tokens=np.arange(3)), types.DmelChunk(dmel=b"\x00\x01\x02" + bytes(17))]
    inputs = {"weights": np.ones((5, 2), np.float32), "target_tokens": [1, 2, 3, 4, 5]}
    assert json_bytes(Datum(ModelInput(chunks=chunks), inputs)) == 3 * 10 + 20 + 10 * 10 + 5 * 10


@given(datums())
@settings(deadline=None, max_examples=20)
def test_estimates_count_what_is_there(datum: Datum) -> None:
    tensors = datum.loss_fn_inputs.values()
    assert binary_bytes(datum) >= sum(tensor.array.nbytes for tensor in tensors)
    assert json_bytes(datum) >= sum(10 * tensor.array.size for tensor in tensors)


def test_estimates_need_no_image_size() -> None:
    datum = Datum(ModelInput(chunks=[types.ImageChunk(data=bytes(7), format="png")]))
    assert (binary_bytes(datum), json_bytes(datum)) == (7, 7)


# Combining


def result(count: int, **metrics: float) -> ForwardBackwardOutput:
    outputs = [{"logprobs": TensorData([float(i)], "float32")} for i in range(count)]
    return ForwardBackwardOutput("Kind", outputs, {name.replace("__", ":"): value for name, value in metrics.items()})


def combined(name: str, *values: tuple[int, float]) -> dict[str, float]:
    """One metric's values, with the number of outputs of each chunk, after joining."""
    return combine_metrics([result(count, **{name.replace(":", "__"): value}) for count, value in values])


@pytest.mark.parametrize(
    ("name", "values", "expected"),
    [
        ("loss:sum", [(1, 1.5), (3, 2.5)], {"loss:sum": 4.0}),
        ("loss:mean", [(1, 1.0), (3, 5.0)], {"loss:mean": 4.0}),
        ("loss:mean", [(0, 1.0), (3, 5.0)], {"loss:mean": 5.0}),
        ("loss:mean", [(0, 1.0), (0, 5.0)], {"loss:mean": 3.0}),
        ("loss:min", [(1, 1.0), (1, -5.0)], {"loss:min": -5.0}),
        ("loss:max", [(1, 1.0), (1, -5.0)], {"loss:max": 1.0}),
        ("time:slack", [(1, 1.0), (3, 5.0)], {"time:slack": 1.0}),
        ("time:slack", [(2, 3.0)], {"time:slack": 0.0}),
        (
            "clock:unique",
            [(1, 7.0), (1, 8.0), (1, 9.0)],
            {"clock:unique": 7.0, "clock:unique_1": 8.0, "clock:unique_2": 9.0},
        ),
        ("data:hash2", [(1, 3.0), (1, 4.0)], {"data:hash2": 7}),
        ("data:hash2", [(1, 2**64 - 1), (1, 2)], {"data:hash2": 1}),
        ("data:hash2", [(1, -1)], {"data:hash2": 2**64 - 1}),
        ("data:hash_unordered", [(1, 2**64 - 1), (1, 2)], {"data:hash_unordered": 1}),
        ("loss:median", [(1, 1.0), (1, 2.0)], {}),
        ("loss:median", [(1, 1.0)], {"loss:median": 1.0}),
        ("loss", [(1, 1.0), (1, 2.0)], {}),
        ("loss", [(1, 1.0)], {"loss": 1.0}),
        ("sum", [(1, 1.0), (1, 2.0)], {}),
        ("", [(1, 1.0)], {"": 1.0}),
        ("a:b:sum", [(1, 1.0), (1, 2.0)], {"a:b:sum": 3.0}),
    ],
)
def test_each_suffix_has_its_rule(name: str, values: list[tuple[int, float]], expected: dict[str, float]) -> None:
    assert combined(name, *values) == expected


@given(st.lists(st.tuples(st.integers(0, 5), st.floats(-1e6, 1e6)), min_size=1, max_size=6))
@settings(deadline=None, max_examples=60)
def test_reductions_agree_with_plain_formulas(values: list[tuple[int, float]]) -> None:
    numbers = [value for _, value in values]
    weights = [count for count, _ in values] if any(count for count, _ in values) else [1] * len(values)
    mean = sum(map(math.prod, zip(weights, numbers, strict=True))) / sum(weights)
    assert combined("m:sum", *values)["m:sum"] == pytest.approx(sum(numbers))
    assert combined("m:mean", *values)["m:mean"] == pytest.approx(mean)
    assert combined("m:slack", *values)["m:slack"] == pytest.approx(max(numbers) - mean, abs=1e-6)
    assert combined("m:min", *values)["m:min"] == min(numbers)
    assert combined("m:max", *values)["m:max"] == max(numbers)
    assert len(combined("m:unique", *values)) == len(values)


@given(st.lists(st.integers(0, 2**53), min_size=1, max_size=5))
@settings(deadline=None, max_examples=50)
def test_hashes_do_not_depend_on_the_order_of_chunks(values: list[int]) -> None:
    forwards = combined("h:hash2", *[(1, float(value)) for value in values])
    backwards = combined("h:hash2", *[(1, float(value)) for value in reversed(values)])
    assert forwards == backwards == {"h:hash2": sum(values) % 2**64}


def test_a_metric_missing_in_any_chunk_is_dropped() -> None:
    first, second = result(1, loss__sum=1.0, extra__sum=2.0), result(1, loss__sum=3.0)
    assert combine_metrics([first, second]) == {"loss:sum": 4.0}
    assert combine_metrics([second, first]) == {"loss:sum": 4.0}


def test_outputs_are_joined_in_order_and_typed_by_the_first() -> None:
    first, second = (
        result(2, loss__sum=1.0),
        ForwardBackwardOutput("Other", result(1).loss_fn_outputs, {"loss:sum": 2.0}),
    )
    joined = combine([first, second])
    assert joined.loss_fn_output_type == "Kind"
    assert joined.loss_fn_outputs == [*first.loss_fn_outputs, *second.loss_fn_outputs]
    assert joined.metrics == {"loss:sum": 3.0}
    assert len(first.loss_fn_outputs) == 2


def test_one_result_stays_itself() -> None:
    one = result(3, loss__sum=1.0, loss__mean=2.0)
    assert combine([one]) == one


def test_dropped_metrics_are_told(caplog: pytest.LogCaptureFixture) -> None:
    combined("loss:median", (1, 1.0), (1, 2.0))
    assert "loss:median" in caplog.text


def test_nothing_to_combine_is_refused() -> None:
    with pytest.raises(InvalidInputError, match="no results"):
        combine([])


@pytest.mark.parametrize("number", [float("nan"), float("inf")])
@pytest.mark.parametrize("suffix", ["sum", "mean", "min", "max", "slack", "unique"])
def test_special_numbers_pass_through(suffix: str, number: float) -> None:
    values = combined(f"loss:{suffix}", (1, number), (1, number)).values()
    assert not any(math.isfinite(value) for value in values)


@pytest.mark.parametrize("number", [float("nan"), float("inf")])
def test_a_hash_that_is_no_number_does_not_break_the_result(number: float) -> None:
    try:
        joined = combine([result(1, h__hash2=number, loss__sum=1.0), result(1, h__hash2=1.0, loss__sum=2.0)])
    except TinkerError:
        return
    assert joined.metrics["loss:sum"] == 3.0

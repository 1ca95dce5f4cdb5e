"""TensorData: values come back exactly, or with a warning."""

from __future__ import annotations

import copy
import pickle
import warnings
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tinsmith.errors import InvalidInputError, PrecisionWarning
from tinsmith.wire.values.tensors import MAX_DENSE_CELLS, TensorData

INT_DTYPES = ["int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64"]
FLOAT_DTYPES = ["float16", "float32", "float64"]

int64s = st.integers(-(2**63), 2**63 - 1)
float32s = st.floats(width=32)


@st.composite
def grids(draw: st.DrawFn, elements: st.SearchStrategy[Any]) -> list[list[Any]]:
    rows, columns = draw(st.integers(1, 5)), draw(st.integers(0, 12))
    return draw(st.lists(st.lists(elements, min_size=columns, max_size=columns), min_size=rows, max_size=rows))


def csr() -> TensorData:
    """[[0, 5, 0], [7, 0, 0]]"""
    return TensorData([5, 7], "int64", [2, 3], [0, 1, 2], [1, 0])


# Lists


@given(st.lists(int64s, max_size=20))
@settings(deadline=None, max_examples=50)
def test_integers_come_back_from_a_list(values: list[int]) -> None:
    tensor = TensorData(values, "int64")
    assert tensor.data == tensor.tolist() == values
    assert (tensor.dtype, tensor.shape, tensor.array.dtype) == ("int64", None, np.int64)


@given(st.lists(float32s, max_size=20))
@settings(deadline=None, max_examples=50)
def test_float32_numbers_come_back_from_a_list(values: list[float]) -> None:
    tensor = TensorData(values, "float32")
    assert tensor.array.dtype == np.float32
    assert np.array_equal(tensor.data, values, equal_nan=True)


@given(grids(int64s))
@settings(deadline=None, max_examples=50)
def test_a_nested_list_brings_its_shape(rows: list[list[int]]) -> None:
    tensor = TensorData(rows, "int64")  # type: ignore[arg-type]
    assert tensor.shape == [len(rows), len(rows[0])]
    assert tensor.tolist() == rows
    assert tensor.data == [value for row in rows for value in row]
    assert len(tensor) == len(rows)


@pytest.mark.parametrize("given_values", [(1, 2), [np.int32(1), 2], [np.uint8(1), np.int64(2)], range(1, 3)])
def test_other_sequences_of_integers_are_read(given_values: Any) -> None:
    assert TensorData(given_values, "int64").data == [1, 2]


@pytest.mark.parametrize("given_values", [(1, 0.5), [np.float32(1), np.float64(0.5)], [np.int8(1), 0.5]])
def test_other_sequences_of_numbers_are_read(given_values: Any) -> None:
    assert TensorData(given_values, "float32").data == [1.0, 0.5]


def test_a_flat_list_takes_the_given_shape() -> None:
    assert TensorData([1, 2, 3, 4, 5, 6], "int64", [2, 3]).tolist() == [[1, 2, 3], [4, 5, 6]]
    assert TensorData([1], "int64", np.array([1, 1])).shape == [1, 1]  # type: ignore[arg-type]


@pytest.mark.parametrize("shape", [None, [0], [0, 3], [3, 0]])
def test_empty_tensors_keep_their_shape(shape: list[int] | None) -> None:
    tensor = TensorData([], "float32", shape)
    assert tensor.shape == shape
    assert tensor.data == []
    assert tensor.to_numpy().shape == tuple(shape or [0])


@pytest.mark.parametrize(
    ("values", "dtype", "place"),
    [
        ([1, True], "int64", "data[1]"),
        ([1, None], "int64", "data[1]"),
        ([1, 2.0], "int64", "data[1]"),
        ([1, "2"], "int64", "data[1]"),
        ([1, 2, 2**63], "int64", "data[2]"),
        ([-(2**63) - 1], "int64", "data[0]"),
        ([[1], [True]], "int64", "data[1][0]"),
        ([[1], 2], "int64", "data[1]"),
        ([1, [2]], "int64", "data[1]"),
        ([0.5, True], "float32", "data[1]"),
        ([0.5, None], "float32", "data[1]"),
        ([0.5, "x"], "float32", "data[1]"),
        ([0.5, 1e39], "float32", "data[1]"),
        ([0.5, -1e39], "float32", "data[1]"),
        ([0.5, 10**39], "float32", "data[1]"),
        ([0.5, 10**400], "float32", "data[1]"),
        ([[0.5], [1e39]], "float32", "data[1][0]"),
        ([[1, 2], [3]], "int64", "row 1"),
        ([[1.0], [2.0, 3.0]], "float32", "row 1"),
        ("12", "int64", "data"),
        (b"12", "int64", "data"),
        (5, "int64", "data"),
        (0.5, "float32", "data"),
        (iter([1]), "int64", "data"),
        ({}, "int64", "data"),
        ({1: 2}, "int64", "data"),
        ({1, 2}, "int64", "data"),
        ({0.5}, "float32", "data"),
    ],
)
def test_what_is_no_tensor_is_refused_at_its_place(values: Any, dtype: Any, place: str) -> None:
    with pytest.raises(InvalidInputError) as caught:
        TensorData(values, dtype)
    assert place in str(caught.value)
    assert len(str(caught.value)) < 300


@pytest.mark.parametrize(
    ("build", "field"),
    [
        (lambda: TensorData(), "data"),
        (lambda: TensorData([1]), "dtype"),
        (lambda: TensorData([1], "int32"), "dtype"),  # type: ignore[arg-type]
        (lambda: TensorData([1], ["int64"]), "dtype"),  # type: ignore[arg-type]
        (lambda: TensorData([1, 2], "int64", [3]), "shape"),
        (lambda: TensorData([1, 2], "int64", [-1, -2]), "shape"),
        (lambda: TensorData([1], "int64", [1.0]), "shape"),  # type: ignore[list-item]
        (lambda: TensorData([1], "int64", 1), "shape"),  # type: ignore[arg-type]
        (lambda: TensorData([1], "int64", {}), "shape"),  # type: ignore[arg-type]
        (lambda: TensorData([1], "int64", [1] * 100), "shape"),
        (lambda: TensorData([], "int64", [0, 2**62, 2**62]), "shape"),
        (lambda: TensorData([1], "int64", [1, 1], [0, 1]), "sparse_col_indices"),
        (lambda: TensorData([1], "int64", [1, 1], None, [0]), "sparse_crow_indices"),
        (lambda: TensorData([1], "int64", None, [0, 1], [0]), "shape"),
        (lambda: TensorData([1], "int64", [1], [0, 1], [0]), "shape"),
        (lambda: TensorData([1], "int64", [1, 1], [0, 1, 1], [0]), "sparse_crow_indices"),
        (lambda: TensorData([1], "int64", [1, 1], [1, 1], [0]), "sparse_crow_indices"),
        (lambda: TensorData([1], "int64", [1, 1], [0, 2], [0]), "sparse_crow_indices"),
        (lambda: TensorData([1, 2], "int64", [3, 1], [0, 2, 1, 2], [0, 0]), "sparse_crow_indices"),
        (lambda: TensorData([1], "int64", [1, 1], [0, 1], [1]), "sparse_col_indices"),
        (lambda: TensorData([1], "int64", [1, 1], [0, 1], [-1]), "sparse_col_indices"),
        (lambda: TensorData([1], "int64", [1, 1], [0, 1], [0, 0]), "sparse_col_indices"),
        (lambda: TensorData([1], "int64", [1, 1], [0, 1], ["0"]), "sparse_col_indices"),  # type: ignore[list-item]
    ],
)
def test_a_wrong_argument_is_named(build: Any, field: str) -> None:
    with pytest.raises(InvalidInputError) as caught:
        build()
    assert (caught.value.field or "").startswith(field)
    assert field in str(caught.value)


# numpy


@pytest.mark.parametrize("dtype", INT_DTYPES)
def test_integer_arrays_become_int64(dtype: str) -> None:
    tensor = TensorData.from_numpy(np.array([[1, 2], [3, 100]], dtype))
    assert (tensor.dtype, tensor.shape, tensor.tolist()) == ("int64", [2, 2], [[1, 2], [3, 100]])


@pytest.mark.parametrize("dtype", FLOAT_DTYPES)
def test_float_arrays_become_float32(dtype: str) -> None:
    tensor = TensorData.from_numpy(np.array([0.5, -2.0, np.inf, np.nan], dtype))
    assert (tensor.dtype, tensor.shape) == ("float32", [4])
    assert np.array_equal(tensor.array, np.array([0.5, -2.0, np.inf, np.nan], np.float32), equal_nan=True)


@pytest.mark.parametrize("dtype", [">i4", ">i8", ">f4", ">f8"])
def test_foreign_byte_order_is_turned(dtype: str) -> None:
    assert TensorData.from_numpy(np.array([1, 2**20], dtype)).data == [1, 2**20]


@pytest.mark.parametrize("dtype", ["bool", "complex64", "U1", "S1", "datetime64[s]"])
def test_other_arrays_are_refused(dtype: str) -> None:
    with pytest.raises(InvalidInputError, match="is not supported; use int64 or float32"):
        TensorData.from_numpy(np.zeros(2, dtype))


def test_object_arrays_need_a_dtype_and_are_checked() -> None:
    with pytest.raises(InvalidInputError, match="data"):
        TensorData.from_numpy(np.array([1, None]))
    with pytest.raises(InvalidInputError, match=r"data\[1\]"):
        TensorData(np.array([1, None]), "int64")
    assert TensorData(np.array([1, 2], object), "int64").data == [1, 2]


def test_unsigned_integers_beyond_int64_are_refused_at_their_place() -> None:
    with pytest.raises(InvalidInputError, match=r"data\[1\]\[0\]: 9223372036854775808 does not fit int64"):
        TensorData.from_numpy(np.array([[1], [2**63]], np.uint64))
    assert TensorData.from_numpy(np.array([2**63 - 1], np.uint64)).data == [2**63 - 1]


def test_floats_beyond_float32_are_refused_at_their_place() -> None:
    with pytest.raises(InvalidInputError, match=r"data\[0\]\[1\]: 1e\+39 does not fit float32"):
        TensorData.from_numpy(np.array([[1.0, 1e39]]))


@pytest.mark.parametrize("dtype", ["int64", "float32"])
def test_arrays_of_wire_dtype_are_not_copied(dtype: str) -> None:
    array = np.arange(6, dtype=dtype).reshape(2, 3)
    tensor = TensorData.from_numpy(array)
    assert np.shares_memory(tensor.array, array)
    assert np.shares_memory(tensor.to_numpy(), array)


def test_strided_arrays_are_read_in_their_order() -> None:
    array = np.arange(12).reshape(3, 4)
    assert TensorData.from_numpy(array.T).tolist() == array.T.tolist()
    assert TensorData.from_numpy(array[::2, ::-1]).tolist() == [[3, 2, 1, 0], [11, 10, 9, 8]]


@pytest.mark.parametrize("value", [np.array(5), np.array(0.5, np.float32)])
def test_a_scalar_keeps_its_empty_shape(value: Any) -> None:
    tensor = TensorData.from_numpy(value)
    assert tensor.shape == []
    assert tensor.data == [value.item()]
    assert tensor.to_numpy().shape == ()
    assert tensor.to_torch().shape == ()
    assert tensor != TensorData([value.item()], tensor.dtype)


def test_numpy_arrays_of_any_rank_are_kept() -> None:
    array = np.arange(24).reshape(2, 3, 4)
    assert np.array_equal(TensorData.from_numpy(array).to_numpy(), array)


# Precision


@pytest.mark.parametrize(
    "values",
    [
        np.array([0.5, 0.1]),
        np.array([1e-60]),
        np.array([2**24 + 1]),
        np.array([2**53 + 1]),
        np.array([2**63 - 1]),
        np.array([2**24 + 1], np.uint32),
    ],
    ids=["float64", "underflow", "2**24 + 1", "2**53 + 1", "2**63 - 1", "uint32"],
)
def test_rounding_is_told_at_the_callers_line(values: Any) -> None:
    with pytest.warns(PrecisionWarning, match="rounded to float32") as told:
        TensorData(values, "float32")
    assert [warning.filename for warning in told] == [__file__]


def test_rounding_says_how_many() -> None:
    with pytest.warns(PrecisionWarning, match="data: 1 of 3 float64 values") as told:
        TensorData.from_numpy(np.array([0.5, 0.1, np.nan]))
    assert told[0].filename == __file__


@pytest.mark.parametrize(
    "values",
    [
        np.array([0.5, np.inf, -np.inf, np.nan]),
        np.array([2**24, -(2**62)]),
        np.array([0.1], np.float32),
        np.array([0.1], np.float16),
        np.array([]),
        [0.1, 0.2],
    ],
)
def test_exact_values_pass_in_silence(values: Any) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        TensorData(values, "float32")


# CSR


def test_csr_unfolds() -> None:
    assert csr().is_sparse
    assert csr().tolist() == [[0, 5, 0], [7, 0, 0]]
    assert csr().to_numpy(-1).tolist() == [[-1, 5, -1], [7, -1, -1]]
    assert csr().to_torch(pad_value=-1).tolist() == [[-1, 5, -1], [7, -1, -1]]
    assert (len(csr()), csr().data, csr().nbytes) == (2, [5, 7], 2 * 8 + 3 * 8 + 2 * 8)


def test_csr_of_a_huge_shape_is_not_unfolded() -> None:
    tensor = TensorData([1.0], "float32", [1, MAX_DENSE_CELLS + 1], [0, 1], [MAX_DENSE_CELLS])
    for unfold in (tensor.to_numpy, tensor.to_torch, tensor.tolist):
        with pytest.raises(InvalidInputError, match="too large"):
            unfold()


def test_csr_indices_are_plain_and_its_own() -> None:
    crow, col = [0, 1, 2], [np.int64(1), np.int64(0)]
    tensor = TensorData([5, 7], "int64", [2, 3], crow, col)  # type: ignore[arg-type]
    crow[1] = 2
    assert tensor == csr()
    assert {type(index) for index in tensor.sparse_col_indices or ()} == {int}
    assert TensorData([5, 7], "int64", (2, 3), (0, 1, 2), np.array([1, 0])) == csr()  # type: ignore[arg-type]


# As a value


def test_equality_is_of_dtype_shape_and_values() -> None:
    tensor = TensorData([1, 2], "int64")
    assert tensor == TensorData(np.array([1, 2])) == TensorData([1, 2], "int64", [2])
    assert tensor != TensorData([1, 2], "float32")
    assert tensor != TensorData([1, 3], "int64")
    assert tensor != TensorData([1, 2], "int64", [2, 1])
    assert tensor != [1, 2]
    assert TensorData([float("nan")], "float32") == TensorData([float("nan")], "float32")
    assert csr() == csr()
    assert csr() != TensorData(csr().to_numpy())


def test_it_cannot_be_changed_or_hashed() -> None:
    tensor = TensorData([1], "int64")
    for name in ("array", "shape", "novelty"):
        with pytest.raises(AttributeError, match="immutable"):
            setattr(tensor, name, None)
    with pytest.raises(AttributeError, match="immutable"):
        del tensor.shape
    with pytest.raises(TypeError):
        hash(tensor)


def test_a_copy_can_have_another_shape() -> None:
    tensor = TensorData([1, 2], "int64")
    assert tensor.replace(shape=[2, 1]) == TensorData([[1], [2]], "int64")  # type: ignore[list-item]
    assert tensor.replace() == tensor


@pytest.mark.parametrize("tensor", [TensorData([0.5, float("nan")], "float32"), csr(), TensorData(np.array(3))])
def test_pickles_and_copies_are_equal(tensor: TensorData) -> None:
    assert pickle.loads(pickle.dumps(tensor)) == tensor
    assert copy.deepcopy(tensor) == tensor


@pytest.mark.parametrize("shape", [(1_000_000,), (1000, 1000)])
def test_the_repr_of_a_large_tensor_is_short(shape: tuple[int, ...]) -> None:
    text = repr(TensorData(np.zeros(shape, np.float32)))
    assert text.startswith(f"TensorData(float32{list(shape)}")
    assert len(text) < 300
    assert "csr" in repr(csr())


def test_builtins_round_trip() -> None:
    for tensor in (csr(), TensorData([1, 2], "int64"), TensorData([[0.5]], "float32"), TensorData(np.array(3))):  # type: ignore[list-item]
        assert TensorData.from_builtins(tensor.to_builtins()) == tensor


@pytest.mark.parametrize("number", [float("nan"), float("inf"), float("-inf")])
def test_json_has_no_such_numbers(number: float) -> None:
    with pytest.raises(InvalidInputError, match=r"data\[1\]: .* cannot be sent as JSON"):
        TensorData([0.5, number], "float32").to_builtins()

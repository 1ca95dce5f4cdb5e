"""Tensors from and to torch."""

from __future__ import annotations

import sys
import warnings

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tinsmith.errors import InvalidInputError, PrecisionWarning, TinkerError
from tinsmith.wire.values.inputs import Datum, ModelInput
from tinsmith.wire.values.tensors import TensorData


@pytest.mark.parametrize("dtype", ["int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64"])
def test_integer_tensors_become_int64(dtype: str) -> None:
    tensor = TensorData.from_torch(torch.tensor([[1, 2], [3, 100]], dtype=getattr(torch, dtype)))
    assert (tensor.dtype, tensor.shape, tensor.tolist()) == ("int64", [2, 2], [[1, 2], [3, 100]])


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32", "float64"])
def test_float_tensors_become_float32(dtype: str) -> None:
    given_tensor = torch.tensor([0.5, -2.0, float("inf"), float("nan")], dtype=getattr(torch, dtype))
    tensor = TensorData.from_torch(given_tensor)
    assert tensor.dtype == "float32"
    assert torch.equal(tensor.to_torch()[:3], given_tensor[:3].float())
    assert tensor.to_torch()[3].isnan()


@given(st.lists(st.integers(0, 2**16 - 1), max_size=20))
@settings(deadline=None, max_examples=50)
def test_every_bfloat16_widens_exactly(bits: list[int]) -> None:
    given_tensor = torch.tensor(bits, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)
    expected = (np.array(bits, np.uint32) << 16).view(np.float32)
    assert np.array_equal(TensorData.from_torch(given_tensor).array, expected, equal_nan=True)


@pytest.mark.parametrize("dtype", ["bool", "complex64", "float8_e4m3fn"])
def test_other_tensors_are_refused(dtype: str) -> None:
    with pytest.raises(InvalidInputError, match="data"):
        TensorData.from_torch(torch.zeros(2).to(getattr(torch, dtype)))


@pytest.mark.parametrize(
    "given_tensor",
    [
        torch.arange(6).reshape(2, 3),
        torch.arange(6).reshape(2, 3).T,
        torch.arange(12).reshape(2, 6)[:, ::2],
        torch.empty(0, dtype=torch.int64),
        torch.empty(0, 4),
        torch.tensor(5),
        torch.tensor([1.5], requires_grad=True),
        torch.nn.Parameter(torch.ones(2, 2)),
    ],
)
def test_tensors_come_back_equal(given_tensor: torch.Tensor) -> None:
    returned = TensorData.from_torch(given_tensor).to_torch()
    assert torch.equal(returned, given_tensor.detach())
    assert returned.shape == given_tensor.shape
    assert not returned.requires_grad


def test_a_returned_tensor_has_its_own_memory() -> None:
    data = TensorData([1, 2], "int64")
    data.to_torch()[0] = 9
    assert data.data == [1, 2]


def test_rounding_of_a_torch_tensor_is_told_at_the_callers_line() -> None:
    with pytest.warns(PrecisionWarning) as told:
        TensorData.from_torch(torch.tensor([0.1], dtype=torch.float64))
    assert told[0].filename == __file__


@pytest.mark.parametrize("layout", ["coo", "csr"])
def test_sparse_torch_tensors_are_read(layout: str) -> None:
    dense = torch.tensor([[0.0, 5.0], [7.0, 0.0]])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        sparse = dense.to_sparse() if layout == "coo" else dense.to_sparse_csr()
    assert TensorData.from_torch(sparse).tolist() == dense.tolist()


@st.composite
def padded(draw: st.DrawFn) -> tuple[torch.Tensor, int]:
    rows, columns, pad = draw(st.integers(1, 6)), draw(st.integers(1, 12)), draw(st.sampled_from([0, -100]))
    cells = st.just(pad) | st.integers(1, 9)
    values = draw(st.lists(cells, min_size=rows * columns, max_size=rows * columns))
    return torch.tensor(values).reshape(rows, columns), pad


@given(padded())
@settings(deadline=None, max_examples=50)
def test_csr_gives_the_padded_tensor_back(example: tuple[torch.Tensor, int]) -> None:
    dense, pad = example
    tensor = TensorData.from_torch_sparse(dense, pad_value=pad)
    assert torch.equal(tensor.to_torch(pad_value=pad), dense)
    assert tensor.nbytes <= TensorData.from_torch(dense).nbytes
    if tensor.is_sparse:
        assert pad not in tensor.data
        assert tensor.nbytes < TensorData.from_torch(dense).nbytes


def test_csr_is_used_only_where_it_is_smaller() -> None:
    assert not TensorData.from_torch_sparse(torch.ones(4, 4)).is_sparse
    assert not TensorData.from_torch_sparse(torch.zeros(100)).is_sparse
    assert TensorData.from_torch_sparse(torch.zeros(4, 100)).is_sparse
    assert not TensorData.from_torch_sparse(torch.zeros(0, 100)).is_sparse
    assert TensorData.from_torch_sparse(torch.eye(64)).data == [1.0] * 64


def test_a_datum_turns_sparse_2d_targets_and_weights_into_csr() -> None:
    targets = torch.zeros(3, 64, dtype=torch.int64)
    targets[:, 5] = 7
    datum = Datum(
        ModelInput.from_ints([1, 2, 3]),
        {"target_tokens": targets, "weights": targets.float(), "extra": targets, "advantages": torch.ones(3)},
    )
    assert {key: tensor.is_sparse for key, tensor in datum.loss_fn_inputs.items()} == {
        "target_tokens": True,
        "weights": True,
        "extra": False,
        "advantages": False,
    }
    assert torch.equal(datum.loss_fn_inputs["target_tokens"].to_torch(), targets)


def test_a_datum_names_the_key_of_a_wrong_tensor() -> None:
    with pytest.raises(InvalidInputError, match=r"loss_fn_inputs\['weights'\]"):
        Datum(ModelInput.from_ints([1]), {"weights": torch.tensor([True])})


def test_torch_scalars_stand_for_their_number() -> None:
    from tinsmith.types import AdamParams

    assert AdamParams(learning_rate=torch.tensor(0.5)).learning_rate == 0.5  # type: ignore[arg-type]


def test_the_constructor_takes_a_tensor() -> None:
    assert TensorData(data=torch.tensor([1, 2]), dtype="int64") == TensorData([1, 2], "int64")
    assert TensorData(torch.tensor([[1, 2], [3, 4]])).tolist() == [[1, 2], [3, 4]]
    assert TensorData(torch.tensor([0.5], dtype=torch.bfloat16, requires_grad=True)).data == [0.5]
    with pytest.raises(InvalidInputError, match="expected integers"):
        TensorData(torch.tensor([1.5]), "int64")
    with pytest.raises(InvalidInputError, match="do not fit shape"):
        TensorData(torch.tensor([1, 2]), "int64", shape=[3])


def test_lists_hold_the_pad_value_where_csr_lists_nothing() -> None:
    sparse = TensorData([7], "int64", [1, 2], [0, 1], [1])
    assert (sparse.tolist(), sparse.tolist(5), sparse.tolist(pad_value=5)) == ([[0, 7]], [[5, 7]], [[5, 7]])


def test_to_torch_without_torch_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch", None)
    with pytest.raises(ImportError, match=r"to_torch needs the package torch.*pip install torch") as told:
        TensorData([1], "int64").to_torch()
    assert isinstance(told.value, TinkerError)

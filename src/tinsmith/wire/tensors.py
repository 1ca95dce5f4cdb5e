"""TensorData: the one tensor type of the protocol, dense or CSR, int64 or float32.

Owns: conversion from and to lists, numpy and torch. numpy arrays are kept as they are; torch is never imported
unless the caller already uses it.
Does not know: which loss reads a tensor, or how it is encoded (see `json_codec` and `protobuf`).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal, Self, TypeAlias

import numpy as np

from tinsmith.errors import InvalidInputError, MissingPackageError
from tinsmith.wire.frozen import Frozen
from tinsmith.wire.numbers import Array, float_array, int_array, is_torch_tensor, torch_to_numpy

if TYPE_CHECKING:
    import torch

TensorDtype: TypeAlias = Literal["int64", "float32"]

NUMPY_DTYPES: Mapping[str, np.dtype[Any]] = {"int64": np.dtype("<i8"), "float32": np.dtype("<f4")}
INDEX_BYTES = 8
"""A CSR index is an int64."""
MAX_DIMS = 8
MAX_DENSE_CELLS = 2**28
"""A few bytes of CSR can name a shape of any size; this is where unfolding stops (1 GiB of float32)."""


class TensorData(Frozen):
    """A tensor on the wire. `shape` None means one dimension; CSR when the two index lists are set."""

    __slots__ = ("array", "dtype", "shape", "sparse_col_indices", "sparse_crow_indices")
    dtype: TensorDtype
    shape: list[int] | None
    sparse_crow_indices: list[int] | None
    sparse_col_indices: list[int] | None
    array: Array
    """The values in wire dtype: shaped if dense, the listed ones if CSR. Treat as read-only."""

    def __init__(
        self,
        data: Sequence[int] | Sequence[float] | Array | torch.Tensor | None = None,
        dtype: TensorDtype | None = None,
        shape: Sequence[int] | None = None,
        sparse_crow_indices: Sequence[int] | None = None,
        sparse_col_indices: Sequence[int] | None = None,
    ) -> None:
        if data is None:
            raise InvalidInputError("TensorData: data is required", field="data")
        if is_torch_tensor(data):
            data = torch_to_numpy(data, "data")
        _fill(self, data, dtype, shape, sparse_crow_indices, sparse_col_indices, "data")

    @classmethod
    def of_array(cls, array: Array, dtype: TensorDtype, shape: list[int] | None) -> TensorData:
        """Wrap an array that is known to be right (decoders): no checks, no copy."""
        self = cls.__new__(cls)
        _set(self, "dtype", dtype)
        _set(self, "shape", shape)
        _set(self, "sparse_crow_indices", None)
        _set(self, "sparse_col_indices", None)
        _set(self, "array", array)
        return self

    @classmethod
    def from_numpy(cls, array: Array) -> TensorData:
        """Integers become int64, floats float32 (with a warning where that rounds); bools are refused."""
        return tensor_of(np.asarray(array), "data")

    @classmethod
    def from_torch(cls, tensor: torch.Tensor) -> TensorData:
        """Like `from_numpy`; bfloat16 and half become float32 exactly."""
        return cls.from_numpy(torch_to_numpy(tensor, "data"))

    @classmethod
    def from_torch_sparse(cls, tensor: torch.Tensor, pad_value: float = 0) -> TensorData:
        """A 2-D tensor as CSR, listing the cells that differ from `pad_value`; dense where that is no larger."""
        return sparse_if_smaller(cls.from_torch(tensor), pad_value)

    def replace(self, **changes: Any) -> Self:
        """A copy with some constructor arguments replaced."""
        names = ("dtype", "shape", "sparse_crow_indices", "sparse_col_indices")
        return type(self)(**({"data": self.array} | {name: getattr(self, name) for name in names} | changes))

    @property
    def is_sparse(self) -> bool:
        return self.sparse_crow_indices is not None

    @property
    def data(self) -> list[int] | list[float]:
        """The values as one flat list (for CSR: the listed ones)."""
        flat: list[int] | list[float] = self.array.reshape(-1).tolist()
        return flat

    @property
    def nbytes(self) -> int:
        """Bytes of the values and indices on the binary wire."""
        indices = len(self.sparse_crow_indices or ()) + len(self.sparse_col_indices or ())
        return int(self.array.nbytes) + INDEX_BYTES * indices

    def to_numpy(self, pad_value: float = 0) -> Array:
        """The tensor as a dense array; cells that CSR does not list hold `pad_value`."""
        if not self.is_sparse:
            return self.array
        assert self.shape is not None
        assert self.sparse_crow_indices is not None
        if math.prod(self.shape) > MAX_DENSE_CELLS:
            raise InvalidInputError(f"shape {self.shape} is too large to hold dense (limit: {MAX_DENSE_CELLS} cells)")
        dense = np.full(self.shape, pad_value, self.array.dtype)
        rows = np.repeat(np.arange(self.shape[0]), np.diff(self.sparse_crow_indices))
        dense[rows, np.asarray(self.sparse_col_indices, np.int64)] = self.array
        return dense

    def to_torch(self, pad_value: float = 0) -> torch.Tensor:
        """The tensor as a dense torch tensor of its own memory."""
        try:
            import torch
        except ModuleNotFoundError as error:
            raise MissingPackageError("torch", "to_torch") from error
        return torch.from_numpy(np.array(self.to_numpy(pad_value)))

    def tolist(self, pad_value: float = 0) -> Any:
        """The dense tensor as nested lists; cells that CSR does not list hold `pad_value`."""
        return self.to_numpy(pad_value).tolist()

    def __len__(self) -> int:
        return self.shape[0] if self.shape else int(self.array.size)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, TensorData):
            return NotImplemented
        return (
            self.dtype == other.dtype
            and (self.shape or [len(self)]) == (other.shape or [len(other)])
            and self.sparse_crow_indices == other.sparse_crow_indices
            and self.sparse_col_indices == other.sparse_col_indices
            and np.array_equal(self.array, other.array, equal_nan=self.dtype == "float32")
        )

    def __repr__(self) -> str:
        kind = ", csr" if self.is_sparse else ""
        with np.printoptions(threshold=8, edgeitems=3):
            return f"TensorData({self.dtype}{list(self.shape or [len(self)])}{kind}, {self.array})"

    def to_builtins(self) -> dict[str, Any]:
        if self.dtype == "float32" and not np.isfinite(self.array).all():
            index = int(np.argmin(np.isfinite(self.array.reshape(-1))))
            raise InvalidInputError(f"data[{index}]: JSON has no {self.data[index]}; only finite numbers can be sent")
        fields = {
            "data": self.data,
            "dtype": self.dtype,
            "shape": self.shape,
            "sparse_crow_indices": self.sparse_crow_indices,
            "sparse_col_indices": self.sparse_col_indices,
        }
        return {name: value for name, value in fields.items() if value is not None}

    @classmethod
    def from_builtins(cls, value: Any) -> TensorData:
        if not isinstance(value, Mapping):
            raise InvalidInputError(f"expected a tensor object with data and dtype, got {type(value).__name__}")
        if value.get("dtype") is None:
            raise InvalidInputError("dtype is missing", field="dtype")
        return cls(
            value.get("data"),
            value["dtype"],
            value.get("shape"),
            value.get("sparse_crow_indices"),
            value.get("sparse_col_indices"),
        )


_set = object.__setattr__
_WIRE_DTYPES: Mapping[np.dtype[Any], TensorDtype] = {np.dtype("<i8"): "int64", np.dtype("<f4"): "float32"}
"""Arrays of these are on the wire as they are."""


def tensor_of(values: Any, where: str, dtype: TensorDtype | None = None) -> TensorData:
    """A dense tensor from an array or (with a dtype) a list; errors name `where`. Its shape is always set."""
    if type(values) is np.ndarray and values.flags.c_contiguous and values.dtype in _WIRE_DTYPES:
        natural = _WIRE_DTYPES[values.dtype]
        if dtype is None or dtype == natural:
            return TensorData.of_array(values, natural, list(values.shape))
    if type(values) is list and dtype is not None:
        array = int_array(values, where) if dtype == "int64" else float_array(values, where)
        if array.dtype == NUMPY_DTYPES[dtype] and array.flags.c_contiguous:
            return TensorData.of_array(array, dtype, list(array.shape))
        values = array
    tensor = TensorData.__new__(TensorData)
    _fill(tensor, values, dtype, None, None, None, where)
    tensor._init(shape=list(tensor.array.shape))
    return tensor


def tensors_from_builtins(values: Mapping[str, Any], where: str) -> dict[str, TensorData]:
    """Tensors by name from decoded JSON; errors name the one."""
    tensors = {}
    for key, value in values.items():
        try:
            tensors[key] = TensorData.from_builtins(value)
        except InvalidInputError as error:
            raise InvalidInputError(f"{where}[{key!r}]: {error}", field=f"{where}[{key!r}]") from None
    return tensors


def sparse_if_smaller(dense: TensorData, pad_value: float = 0) -> TensorData:
    """A 2-D tensor as CSR if that takes fewer bytes, else as it is."""
    if dense.array.ndim != 2:
        return dense
    listed = dense.array != pad_value
    rows = dense.array.shape[0]
    csr_bytes = int(listed.sum()) * (dense.array.itemsize + INDEX_BYTES) + (rows + 1) * INDEX_BYTES
    if csr_bytes >= dense.array.nbytes:
        return dense
    crow = np.concatenate(([0], np.cumsum(listed.sum(axis=1)))).tolist()
    return TensorData(dense.array[listed], dense.dtype, dense.shape, crow, np.nonzero(listed)[1].tolist())


def _fill(
    tensor: TensorData, data: Any, dtype: TensorDtype | None, shape: Any, crow: Any, col: Any, where: str
) -> None:
    """Check everything and set the fields."""
    dtype = dtype if dtype is not None else _natural_dtype(data, where)
    if not isinstance(dtype, str) or dtype not in NUMPY_DTYPES:
        raise InvalidInputError(f"{where}: dtype is {dtype!r}; the wire has int64 and float32", field="dtype")
    given = int_array(data, where) if dtype == "int64" else float_array(data, where)
    array = np.ascontiguousarray(given, NUMPY_DTYPES[dtype]).reshape(given.shape)
    dims = None if shape is None else _checked_shape(shape)
    if crow is None and col is None:
        array, dims = _dense(array, dims, where)
    else:
        _check_csr(array, dims, crow, col)
    tensor._init(
        dtype=dtype,
        shape=dims,
        sparse_crow_indices=_index_list(crow),
        sparse_col_indices=_index_list(col),
        array=array,
    )


def _natural_dtype(data: Any, where: str) -> TensorDtype:
    """The wire dtype that an array's own dtype maps to."""
    if not isinstance(data, np.ndarray):
        raise InvalidInputError(f"{where}: a plain list needs a dtype, 'int64' or 'float32'", field="dtype")
    if data.dtype.kind in "iu":
        return "int64"
    if data.dtype.kind == "f":
        return "float32"
    hint = "; pass .astype(int) or .astype(np.float32), whichever is meant" if data.dtype.kind == "b" else ""
    raise InvalidInputError(f"{where}: the wire has int64 and float32, not {data.dtype}{hint}", field=where)


def _checked_shape(shape: Sequence[int]) -> list[int]:
    dims: list[int] = int_array(shape, "shape").reshape(-1).tolist()
    if len(dims) > MAX_DIMS:
        raise InvalidInputError(f"shape: {len(dims)} dimensions, at most {MAX_DIMS} are allowed", field="shape")
    for i, dim in enumerate(dims):
        if dim < 0:
            raise InvalidInputError(f"shape[{i}]: {dim} is negative", field="shape")
    return dims


def _dense(array: Array, shape: list[int] | None, where: str) -> tuple[Array, list[int] | None]:
    """Values and shape that agree: a nested list brings its own shape, a flat one takes the given."""
    if shape is None:
        return array, (None if array.ndim == 1 else list(array.shape))
    if math.prod(shape) != array.size:
        raise InvalidInputError(
            f"{where}: {array.size} values do not fill shape {shape} ({math.prod(shape)} needed)", field="shape"
        )
    try:
        return array.reshape(shape), shape
    except ValueError:  # no elements, but dimensions that numpy cannot count
        raise InvalidInputError(f"shape: {shape} is beyond what an array can have", field="shape") from None


def _check_csr(array: Array, shape: list[int] | None, crow: Any, col: Any) -> None:
    if crow is None or col is None:
        missing = "sparse_crow_indices" if crow is None else "sparse_col_indices"
        raise InvalidInputError(f"a CSR tensor needs both index lists; {missing} is missing", field=missing)
    if shape is None or len(shape) != 2:
        raise InvalidInputError(f"a CSR tensor needs a shape of two dimensions, got {shape}", field="shape")
    rows, columns = shape
    crow_R1 = int_array(crow, "sparse_crow_indices")
    col_N = int_array(col, "sparse_col_indices")
    if crow_R1.shape != (rows + 1,):
        raise InvalidInputError(
            f"sparse_crow_indices: {rows} rows need {rows + 1} entries, got {crow_R1.size}", field="sparse_crow_indices"
        )
    if crow_R1[0] != 0 or crow_R1[-1] != array.size or (np.diff(crow_R1) < 0).any():
        raise InvalidInputError(
            f"sparse_crow_indices: must rise from 0 to the number of values ({array.size})", field="sparse_crow_indices"
        )
    if col_N.shape != (array.size,):
        raise InvalidInputError(
            f"sparse_col_indices: {array.size} values need as many entries, got {col_N.size}",
            field="sparse_col_indices",
        )
    if col_N.size and (col_N.min() < 0 or col_N.max() >= columns):
        index = int(np.argmax((col_N < 0) | (col_N >= columns)))
        raise InvalidInputError(
            f"sparse_col_indices[{index}]: {int(col_N[index])} is outside the {columns} columns",
            field="sparse_col_indices",
        )


def _index_list(indices: Any) -> list[int] | None:
    if indices is None:
        return None
    listed: list[int] = int_array(indices, "indices").tolist()
    return listed

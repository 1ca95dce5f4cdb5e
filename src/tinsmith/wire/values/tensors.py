"""TensorData: the one tensor type of the protocol, dense or CSR, int64 or float32.

It converts from and to lists, numpy and torch. numpy arrays are kept without a copy; torch is imported only by
`to_torch`. The bytes are made in `wire/codecs`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal, Self, TypeAlias

import numpy as np

from tinsmith.errors import InvalidInputError, MissingPackageError
from tinsmith.wire.values.frozen import Frozen
from tinsmith.wire.values.numbers import Array, float_array, int_array, is_torch_tensor, torch_to_numpy

if TYPE_CHECKING:
    import torch

TensorDtype: TypeAlias = Literal["int64", "float32"]

NUMPY_DTYPES: Mapping[str, np.dtype[Any]] = {"int64": np.dtype("<i8"), "float32": np.dtype("<f4")}
INDEX_BYTES = 8
"""A CSR index is an int64."""
MAX_DIMS = 8
MAX_DENSE_CELLS = 2**28
"""The largest CSR tensor that is made dense (1 GiB of float32): a few bytes of CSR can name a shape of any size."""


class TensorData(Frozen):
    """A tensor on the wire. With `shape` None it has one dimension; with the two index lists it is CSR."""

    __slots__ = ("array", "dtype", "shape", "sparse_col_indices", "sparse_crow_indices")
    dtype: TensorDtype
    shape: list[int] | None
    sparse_crow_indices: list[int] | None
    sparse_col_indices: list[int] | None
    array: Array
    """The values in wire dtype: in full shape if dense, the listed ones if CSR. Treat as read-only."""

    def __init__(
        self,
        data: Sequence[int] | Sequence[float] | Array | torch.Tensor | None = None,
        dtype: TensorDtype | None = None,
        shape: Sequence[int] | None = None,
        sparse_crow_indices: Sequence[int] | None = None,
        sparse_col_indices: Sequence[int] | None = None,
    ) -> None:
        if data is None:
            raise InvalidInputError("TensorData: data is missing", field="data")
        if is_torch_tensor(data):
            data = torch_to_numpy(data, "data")
        _fill(self, data, dtype, shape, sparse_crow_indices, sparse_col_indices, "data")

    @classmethod
    def of_array(cls, array: Array, dtype: TensorDtype, shape: list[int] | None) -> TensorData:
        """Wrap an array that is already checked (decoders): no checks, no copy."""
        self = cls.__new__(cls)
        _set(self, "dtype", dtype)
        _set(self, "shape", shape)
        _set(self, "sparse_crow_indices", None)
        _set(self, "sparse_col_indices", None)
        _set(self, "array", array)
        return self

    @classmethod
    def from_numpy(cls, array: Array) -> TensorData:
        """Make a tensor from an array: integers become int64, floats float32, with a warning if digits are lost."""
        return tensor_of(np.asarray(array), "data")

    @classmethod
    def from_torch(cls, tensor: torch.Tensor) -> TensorData:
        """Make a tensor from a torch tensor, like `from_numpy`; bfloat16 and float16 become float32, which is exact."""
        return cls.from_numpy(torch_to_numpy(tensor, "data"))

    @classmethod
    def from_torch_sparse(cls, tensor: torch.Tensor, pad_value: float = 0) -> TensorData:
        """Make a CSR tensor from the cells of a 2-D tensor that differ from `pad_value`; dense if that is no larger."""
        return sparse_if_smaller(cls.from_torch(tensor), pad_value)

    def replace(self, **changes: Any) -> Self:
        """Return a copy with some constructor arguments replaced."""
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
        """Return a dense array; cells that CSR does not list hold `pad_value`."""
        if not self.is_sparse:
            return self.array
        assert self.shape is not None
        assert self.sparse_crow_indices is not None
        if math.prod(self.shape) > MAX_DENSE_CELLS:
            raise InvalidInputError(f"shape {self.shape} is too large to make dense (limit: {MAX_DENSE_CELLS} cells)")
        dense = np.full(self.shape, pad_value, self.array.dtype)
        rows = np.repeat(np.arange(self.shape[0]), np.diff(self.sparse_crow_indices))
        dense[rows, np.asarray(self.sparse_col_indices, np.int64)] = self.array
        return dense

    def to_torch(self, pad_value: float = 0) -> torch.Tensor:
        """Return a dense torch tensor with its own memory."""
        try:
            import torch
        except ModuleNotFoundError as error:
            raise MissingPackageError("torch", "to_torch") from error
        return torch.from_numpy(np.array(self.to_numpy(pad_value)))

    def tolist(self, pad_value: float = 0) -> Any:
        """Return the dense tensor as nested lists; cells that CSR does not list hold `pad_value`."""
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
            raise InvalidInputError(
                f"data[{index}]: {self.data[index]} cannot be sent as JSON; only finite numbers can"
            )
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
            raise InvalidInputError("dtype is missing; it must be int64 or float32", field="dtype")
        return cls(
            value.get("data"),
            value["dtype"],
            value.get("shape"),
            value.get("sparse_crow_indices"),
            value.get("sparse_col_indices"),
        )


_set = object.__setattr__
_WIRE_DTYPES: Mapping[np.dtype[Any], TensorDtype] = {np.dtype("<i8"): "int64", np.dtype("<f4"): "float32"}
"""Arrays of these dtypes need no conversion."""


def tensor_of(values: Any, where: str, dtype: TensorDtype | None = None) -> TensorData:
    """Make a dense tensor from an array or (with a dtype) a list; errors name `where`. Its shape is always set."""
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
    """Read tensors by name from decoded JSON; an error names the tensor."""
    tensors = {}
    for key, value in values.items():
        try:
            tensors[key] = TensorData.from_builtins(value)
        except InvalidInputError as error:
            raise InvalidInputError(f"{where}[{key!r}]: {error}", field=f"{where}[{key!r}]") from None
    return tensors


def sparse_if_smaller(dense: TensorData, pad_value: float = 0) -> TensorData:
    """Return a 2-D tensor as CSR if that takes fewer bytes, else unchanged."""
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
    """Check the arguments and set the fields."""
    dtype = dtype if dtype is not None else _natural_dtype(data, where)
    if not isinstance(dtype, str) or dtype not in NUMPY_DTYPES:
        raise InvalidInputError(f"{where}: dtype {dtype!r} is not supported; use 'int64' or 'float32'", field="dtype")
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
    """Return the wire dtype for an array's own dtype."""
    if not isinstance(data, np.ndarray):
        raise InvalidInputError(f"{where}: a plain list needs a dtype, 'int64' or 'float32'", field="dtype")
    if data.dtype.kind in "iu":
        return "int64"
    if data.dtype.kind == "f":
        return "float32"
    hint = "; convert it with .astype(int) or .astype(np.float32)" if data.dtype.kind == "b" else ""
    raise InvalidInputError(f"{where}: dtype {data.dtype} is not supported; use int64 or float32{hint}", field=where)


def _checked_shape(shape: Sequence[int]) -> list[int]:
    dims: list[int] = int_array(shape, "shape").reshape(-1).tolist()
    if len(dims) > MAX_DIMS:
        raise InvalidInputError(f"shape: has {len(dims)} dimensions; at most {MAX_DIMS} are allowed", field="shape")
    for i, dim in enumerate(dims):
        if dim < 0:
            raise InvalidInputError(f"shape[{i}]: {dim} is negative", field="shape")
    return dims


def _dense(array: Array, shape: list[int] | None, where: str) -> tuple[Array, list[int] | None]:
    """Return the values in their shape: a nested list has its own shape, a flat list takes the one that is given."""
    if shape is None:
        return array, (None if array.ndim == 1 else list(array.shape))
    if math.prod(shape) != array.size:
        raise InvalidInputError(
            f"{where}: {array.size} values do not fit shape {shape}, which needs {math.prod(shape)}", field="shape"
        )
    try:
        return array.reshape(shape), shape
    except ValueError:  # no elements, but dimensions whose product overflows
        raise InvalidInputError(f"shape: {shape} is larger than an array can be", field="shape") from None


def _check_csr(array: Array, shape: list[int] | None, crow: Any, col: Any) -> None:
    if crow is None or col is None:
        missing = "sparse_crow_indices" if crow is None else "sparse_col_indices"
        raise InvalidInputError(f"a CSR tensor needs both index lists; {missing} is missing", field=missing)
    if shape is None or len(shape) != 2:
        raise InvalidInputError(f"a CSR tensor must have two dimensions, got shape {shape}", field="shape")
    rows, columns = shape
    crow_R1 = int_array(crow, "sparse_crow_indices")
    col_N = int_array(col, "sparse_col_indices")
    if crow_R1.shape != (rows + 1,):
        raise InvalidInputError(
            f"sparse_crow_indices: {rows} rows need {rows + 1} entries, got {crow_R1.size}", field="sparse_crow_indices"
        )
    if crow_R1[0] != 0 or crow_R1[-1] != array.size or (np.diff(crow_R1) < 0).any():
        raise InvalidInputError(
            f"sparse_crow_indices: must not decrease, start at 0 and end at the number of values ({array.size})",
            field="sparse_crow_indices",
        )
    if col_N.shape != (array.size,):
        raise InvalidInputError(
            f"sparse_col_indices: {array.size} values need {array.size} entries, got {col_N.size}",
            field="sparse_col_indices",
        )
    if col_N.size and (col_N.min() < 0 or col_N.max() >= columns):
        index = int(np.argmax((col_N < 0) | (col_N >= columns)))
        raise InvalidInputError(
            f"sparse_col_indices[{index}]: {int(col_N[index])} is not a column (allowed: 0 to {columns - 1})",
            field="sparse_col_indices",
        )


def _index_list(indices: Any) -> list[int] | None:
    if indices is None:
        return None
    listed: list[int] = int_array(indices, "indices").tolist()
    return listed

"""ForwardBackwardOutput as protobuf.

The outputs of datums that have the same fields, dtypes and trailing shapes are one record: per field all values in one
block, with the offset of each datum.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator

import numpy as np

from tinsmith.errors import WireError
from tinsmith.wire.codecs.protobuf import (
    DTYPE_NUMBERS,
    MAX_ITEMS,
    MessageWriter,
    array_bytes,
    as_array,
    as_bytes,
    as_double,
    as_int,
    as_ints,
    as_text,
    check_count,
    read_entry,
    read_fields,
    widen,
)
from tinsmith.wire.messages.training import ForwardBackwardOutput, LossFnOutput
from tinsmith.wire.values.numbers import Array
from tinsmith.wire.values.tensors import MAX_DENSE_CELLS, MAX_DIMS, NUMPY_DTYPES, TensorData, TensorDtype


def encode_output(output: ForwardBackwardOutput) -> bytes:
    """Return the body of a result of forward_backward."""
    message = MessageWriter()
    message.text(1, output.loss_fn_output_type)
    for group in _groups([{name: _dense(tensor) for name, tensor in row.items()} for row in output.loss_fn_outputs]):
        message.message(2, _record_message(group))
    for name, value in output.metrics.items():
        _add_metric(message, name, value)
    return message.encode()


def _add_metric(message: MessageWriter, name: str, value: float) -> None:
    entry = MessageWriter()
    entry.text(1, name)
    entry.double(2, value)
    message.message(3, entry)


def without_metric(body: bytes, name: str) -> bytes:
    """Return a result as it would be without one of its metrics; the same if it does not have it."""
    value = decode_metrics(body)[0].get(name)
    if value is None:
        return body
    metric = MessageWriter()
    _add_metric(metric, name, value)
    before, _, after = body.rpartition(metric.encode())
    return before + after


def decode_output(body: bytes | memoryview, max_datums: int = MAX_ITEMS) -> ForwardBackwardOutput:
    """Read the result in a body; tensors are views of it."""
    output_type, has_records = "", False
    outputs: list[LossFnOutput] = []
    metrics: dict[str, float] = {}
    for number, kind, value in read_fields(memoryview(body), "ForwardBackwardOutput"):
        if number == 1:
            output_type = as_text(value, kind, "loss_fn_output_type")
        elif number == 2:
            has_records = True
            outputs.extend(_read_record(as_bytes(value, kind, "loss_fn_outputs"), max_datums - len(outputs)))
        elif number == 3:
            key, inner_kind, inner = read_entry(value, kind, "metrics")
            metrics[key] = 0.0 if inner_kind is None else as_double(inner, inner_kind, f"metrics[{key!r}]")
    if has_records:
        output_type = output_type.rsplit(":", 1)[-1]
    return ForwardBackwardOutput(output_type or ("" if has_records else "ArrayRecord"), outputs, metrics)


def decode_metrics(body: bytes | memoryview) -> tuple[dict[str, float], int]:
    """Return the metrics of a result and its number of datums, without reading its tensors."""
    metrics: dict[str, float] = {}
    datums = 0
    for number, kind, value in read_fields(memoryview(body), "ForwardBackwardOutput"):
        if number == 3:
            key, inner_kind, inner = read_entry(value, kind, "metrics")
            metrics[key] = 0.0 if inner_kind is None else as_double(inner, inner_kind, f"metrics[{key!r}]")
        elif number == 2:
            for inner_number, inner_kind, inner in read_fields(
                as_bytes(value, kind, "loss_fn_outputs"), "loss_fn_outputs"
            ):
                if inner_number == 3:
                    datums += as_int(inner, inner_kind, "num_datums")
    return metrics, datums


def _dense(tensor: TensorData) -> TensorData:
    return TensorData.from_numpy(tensor.to_numpy()) if tensor.is_sparse else tensor


def _layout(output: LossFnOutput) -> dict[str, tuple[TensorDtype, tuple[int, ...]]]:
    return {name: (tensor.dtype, tensor.array.shape[1:]) for name, tensor in output.items()}


def _groups(outputs: list[LossFnOutput]) -> Iterator[list[LossFnOutput]]:
    group: list[LossFnOutput] = []
    for output in outputs:
        if group and _layout(group[0]) != _layout(output):
            yield group
            group = []
        group.append(output)
    if group:
        yield group


def _record_message(group: list[LossFnOutput]) -> MessageWriter:
    record = MessageWriter()
    for name, (dtype, trailing) in _layout(group[0]).items():
        tensors = [output[name] for output in group]
        offsets = np.cumsum([0, *(tensor.array.nbytes for tensor in tensors)])
        data = b"".join(array_bytes(tensor.array, NUMPY_DTYPES[dtype]) for tensor in tensors)
        batched = MessageWriter()
        batched.blob(1, data)
        batched.blob(2, array_bytes(offsets, NUMPY_DTYPES["int64"]))
        batched.number(3, DTYPE_NUMBERS[dtype])
        batched.packed(4, list(trailing))
        record.entry(2, name, batched)
    record.number(3, len(group))
    return record


def _read_record(data: memoryview, max_datums: int) -> list[LossFnOutput]:
    columns: dict[str, list[TensorData]] = {}
    count = 0
    for number, kind, value in read_fields(data, "loss_fn_outputs"):
        if number == 2:
            name, inner_kind, inner = read_entry(value, kind, "loss_fn_outputs")
            where = f"loss_fn_outputs[{name!r}]"
            batched = as_bytes(inner, 2 if inner_kind is None else inner_kind, where)
            columns[name] = _read_batched(batched, where, max_datums)
        elif number == 3:
            count = as_int(value, kind, "num_datums")
            if count < 0:
                raise WireError(f"num_datums: {count} is negative", field="num_datums")
    count = count or (len(next(iter(columns.values()))) if columns else 0)
    check_count(count, max_datums, "loss_fn_outputs")
    for name, tensors in columns.items():
        if len(tensors) != count:
            where = f"loss_fn_outputs[{name!r}]"
            raise WireError(f"{where}: has {len(tensors)} entries for {count} datums", field=where)
    names = list(columns)
    if not names:
        return [{} for _ in range(count)]
    return [dict(zip(names, row, strict=True)) for row in zip(*columns.values(), strict=True)]


def _read_batched(data: memoryview, where: str, max_datums: int) -> list[TensorData]:
    values, offsets, dtype_number, trailing = memoryview(b""), np.empty(0, np.int64), 0, []
    for number, kind, value in read_fields(data, where):
        if number == 1:
            values = as_bytes(value, kind, where)
        elif number == 2:
            offsets = as_array(value, kind, f"{where}.offsets", NUMPY_DTYPES["int64"])
        elif number == 3:
            dtype_number = as_int(value, kind, f"{where}.dtype", 32)
        elif number == 4:
            trailing += as_ints(value, kind, f"{where}.trailing_shape")
            check_count(len(trailing), MAX_DIMS, f"{where}.trailing_shape")
    if len(offsets) == 0:
        return []
    check_count(len(offsets) - 1, max_datums, where)
    dtype, array = widen(values, dtype_number, where)
    item_bytes = len(values) // array.size if array.size else 1
    row = math.prod(trailing) if trailing else 1
    if min(trailing, default=0) < 0 or max(trailing, default=0) > MAX_DENSE_CELLS or row > MAX_DENSE_CELLS:
        raise WireError(f"{where}.trailing_shape: {trailing} is not a possible shape", field=where)
    if row == 0 and array.size:
        raise WireError(f"{where}.trailing_shape: {trailing} does not fit the {array.size} values", field=where)
    _check_offsets(offsets, len(values), max(row, 1) * item_bytes, where)
    bounds = (offsets // item_bytes).tolist()
    views = [array[start:stop] for start, stop in itertools.pairwise(bounds)]
    if not trailing:
        return [TensorData.of_array(view, dtype, [view.size]) for view in views]
    shapes = [[view.size // row if row else 0, *trailing] for view in views]
    return [TensorData.of_array(view.reshape(shape), dtype, shape) for view, shape in zip(views, shapes, strict=True)]


def _check_offsets(offsets: Array, total: int, row_bytes: int, where: str) -> None:
    if offsets[0] < 0 or offsets[-1] > total or (np.diff(offsets) < 0).any():
        raise WireError(f"{where}.offsets: must not decrease, and stay within the {total} bytes of data", field=where)
    if (offsets % row_bytes).any():
        raise WireError(f"{where}.offsets: must be multiples of {row_bytes} bytes, the size of a row", field=where)

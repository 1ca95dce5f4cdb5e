"""Which forward and backward passes are valid: the one rule set that server and engine apply.

A request is checked against its loss's line in `wire/losses.py` and against the model's vocabulary and context. Every
error names the datum, the key, the value and what is allowed. Of an uploaded loss only the declared inputs are checked
here; its graph is checked by the engine (`engine/training/custom_loss/checks.py`).
"""

from __future__ import annotations

import bisect
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NoReturn, cast

import numpy as np

from tinsmith.errors import InvalidInputError
from tinsmith.wire.losses import CLIP_INPUTS, LOSSES, OFFERED, LossFnType, LossSpec
from tinsmith.wire.messages.training import (
    CustomLossInput,
    ForwardBackwardInput,
    ForwardBackwardRequest,
    ForwardRequest,
    LossFnConfig,
)
from tinsmith.wire.values.chunks import EncodedTextChunk
from tinsmith.wire.values.inputs import Datum
from tinsmith.wire.values.numbers import Array
from tinsmith.wire.values.tensors import TensorData

MAX_TARGET_CELLS = 2**26
"""The most cells of all [N, K] targets of a request together; a few bytes of CSR could name any number."""

_HINTS: Mapping[str, str] = {
    "mask": "; put the mask into weights, with 0 for tokens that do not count",
    "weights": "; send ones if every token counts, zeros if you only want logprobs",
    "sequence_ratio_mask": "; set it to 1 for sampled tokens and 0 for others",
}


def check_loss(
    request: ForwardBackwardRequest | ForwardRequest,
    *,
    vocab_size: int,
    max_context_length: int,
    custom_inputs: Sequence[CustomLossInput] | None = None,
) -> None:
    """Refuse a request whose loss cannot be computed; `custom_inputs` are the inputs that an uploaded loss declares."""
    work = request.forward_input if isinstance(request, ForwardRequest) else request.forward_backward_input
    if not work.data:
        _refuse("data", "is empty; send at least one datum")
    loss_options(work.loss_fn, work.loss_fn_config)
    spec = LOSSES[work.loss_fn]
    declared = {item.name: item.rank for item in custom_inputs or ()}
    for i, datum in enumerate(work.data):
        where = f"data[{i}]"
        length = _check_model_input(datum, where, vocab_size, max_context_length)
        _check_names(work.loss_fn, spec, datum, where, declared if custom_inputs is not None else None)
        _check_targets(work.loss_fn, spec, datum, where, length, vocab_size)
        if work.loss_fn == "custom":
            _check_custom(datum, where, declared)
        else:
            _check_inputs(datum, where)
    if 2 in spec.target_ranks:
        _check_cells(work)
    if spec.options:
        _check_thresholds(work)


def loss_options(loss_fn: str, config: LossFnConfig | None) -> dict[str, float]:
    """Return the options of a loss, defaults included; refuse unknown losses, unknown options and wrong values."""
    spec = LOSSES.get(cast(LossFnType, loss_fn))
    if spec is None:
        _refuse("loss_fn", f"{loss_fn!r} is not a loss (allowed: {', '.join(OFFERED)})")
    if spec.refusal:
        _refuse("loss_fn", f"{loss_fn} is not available on this server: {spec.refusal}")
    given = dict(config or {})
    if loss_fn == "custom":
        loss_id = given.pop("loss_id", None)
        if not isinstance(loss_id, str) or not loss_id:
            _refuse("loss_fn_config['loss_id']", f"custom needs the id of an uploaded loss, got {loss_id!r}")
    for key, value in given.items():
        _check_option(loss_fn, spec, key, value)
    options = {key: float(given.get(key, option.default)) for key, option in spec.options.items()}
    if not options.get(CLIP_INPUTS[0], 0.0) <= options.get(CLIP_INPUTS[1], math.inf):
        low, high = (options[name] for name in CLIP_INPUTS)
        _refuse("loss_fn_config", f"{CLIP_INPUTS[0]} {low:g} must not be above {CLIP_INPUTS[1]} {high:g}")
    return options


def _check_option(loss_fn: str, spec: LossSpec, key: str, value: float | str) -> None:
    where = f"loss_fn_config[{key!r}]"
    if key not in spec.options:
        known = f"its options are {', '.join(spec.options)}" if spec.options else "it has none"
        _refuse(where, f"{loss_fn} has no such option; {known}")
    if isinstance(value, str) or not math.isfinite(value) or value < spec.options[key].least:
        _refuse(
            where, f"{value!r} is not allowed; {key} must be a finite number of {spec.options[key].least:g} or more"
        )


def _check_model_input(datum: Datum, where: str, vocab_size: int, max_context_length: int) -> int:
    length = 0
    for i, chunk in enumerate(datum.model_input.chunks):
        inside = f"{where}.model_input.chunks[{i}]"
        if not isinstance(chunk, EncodedTextChunk):
            _refuse(inside, f"is of type {chunk.type}, which this model does not read; send encoded_text")
        tokens = chunk.tokens if isinstance(chunk.tokens, np.ndarray) else np.array(chunk.tokens, np.int64)
        _check_ids(tokens, f"{inside}.tokens", vocab_size)
        length += len(tokens)
    if length == 0:
        _refuse(f"{where}.model_input", "is empty; each datum needs at least one token")
    if length > max_context_length:
        _refuse(f"{where}.model_input", f"has {length} tokens; this model reads at most {max_context_length}")
    return length


def _check_names(loss_fn: str, spec: LossSpec, datum: Datum, where: str, declared: Mapping[str, int] | None) -> None:
    """Refuse a missing input, and one that the loss would ignore, which is usually a mistake."""
    inputs = datum.loss_fn_inputs
    required = ("target_tokens", *spec.required, *(name for name in declared or () if name != "logprobs"))
    for name in required:
        if name not in inputs:
            _refuse(_key(where, name), f"is missing; {loss_fn} needs it{_HINTS.get(name, '')}")
    if loss_fn == "custom":
        return  # an uploaded loss reads the inputs that it declares and ignores others
    if len(inputs) > len(required):
        for name in inputs:
            if name not in required and name not in spec.optional:
                known = ", ".join((*required, *spec.optional))
                _refuse(_key(where, name), f"{loss_fn} has no such input (its inputs: {known}){_HINTS.get(name, '')}")


def _check_targets(loss_fn: str, spec: LossSpec, datum: Datum, where: str, length: int, vocab_size: int) -> None:
    targets = datum.loss_fn_inputs["target_tokens"]
    key = _key(where, "target_tokens")
    shape = _shape(targets)
    if targets.dtype != "int64":
        _refuse(key, f"token ids must be int64, got {targets.dtype}")
    if len(shape) not in spec.target_ranks:
        allowed = " or ".join(("[N]", "[N, K]")[rank - 1] for rank in spec.target_ranks)
        _refuse(key, f"has shape {list(shape)}; {loss_fn} needs {allowed}")
    if shape[0] != length:
        _refuse(
            key, f"has {shape[0]} entries, but the model input has {length} tokens; there must be one target per token"
        )
    if len(shape) == 2 and not 1 <= shape[1] <= vocab_size:
        _refuse(key, f"has {shape[1]} targets per position; 1 to {vocab_size} (the size of the vocabulary) are allowed")
    _check_ids(targets.array, key, vocab_size, lambda index: _cell(targets, index))


def _check_inputs(datum: Datum, where: str) -> None:
    """Refuse inputs that do not have the shape of the targets, and numbers that are not finite."""
    shape = _shape(datum.loss_fn_inputs["target_tokens"])
    for name, tensor in datum.loss_fn_inputs.items():
        if name == "target_tokens":
            continue
        if _shape(tensor) != shape:
            text = f"has shape {list(_shape(tensor))}, target_tokens has {list(shape)}; they must be the same"
            _refuse(_key(where, name), text)
        _check_finite(tensor, _key(where, name))
    mask = datum.loss_fn_inputs.get("sequence_ratio_mask")
    if mask is not None and not mask.array.any():
        _refuse(
            _key(where, "sequence_ratio_mask"),
            "is 0 for all tokens, so the sequence has no ratio; set it to 1 for sampled tokens",
        )


def _check_custom(datum: Datum, where: str, declared: Mapping[str, int]) -> None:
    for name, tensor in datum.loss_fn_inputs.items():
        key, rank = _key(where, name), len(_shape(tensor))
        expected = declared.get("logprobs" if name == "target_tokens" else name)
        if expected is not None and rank != expected:
            _refuse(key, f"has {rank} dimensions; the uploaded loss declares rank {expected}")
        if tensor.is_sparse and math.prod(_shape(tensor)) > MAX_TARGET_CELLS:
            _refuse(key, f"shape {list(_shape(tensor))} has more than the {MAX_TARGET_CELLS} cells that are allowed")
        _check_finite(tensor, key)


def _check_cells(work: ForwardBackwardInput) -> None:
    shapes = [_shape(datum.loss_fn_inputs["target_tokens"]) for datum in work.data]
    cells = sum(shape[0] * shape[1] for shape in shapes if len(shape) == 2)
    if cells > MAX_TARGET_CELLS:
        _refuse("data", f"the targets have {cells} cells together; one request may have {MAX_TARGET_CELLS}")
    if work.loss_fn == "custom":  # its inputs may have any shape
        tensors = [tensor for datum in work.data for tensor in datum.loss_fn_inputs.values() if tensor.is_sparse]
        cells = sum(math.prod(_shape(tensor)) for tensor in tensors)
        if cells > MAX_TARGET_CELLS:
            text = f"the CSR inputs have {cells} cells together; one request may have {MAX_TARGET_CELLS}"
            _refuse("data", text)


def _check_thresholds(work: ForwardBackwardInput) -> None:
    """Refuse thresholds per token that are negative, or where the low one is above the high one."""
    options = loss_options(work.loss_fn, work.loss_fn_config)
    for i, datum in enumerate(work.data):
        given = [name for name in CLIP_INPUTS if name in datum.loss_fn_inputs]
        if not given:
            continue
        low_N, high_N = (
            datum.loss_fn_inputs[name].to_numpy() if name in given else np.float32(options[name])
            for name in CLIP_INPUTS
        )
        wrong_N = np.atleast_1d((low_N < 0) | (high_N < low_N))
        if wrong_N.any():
            position = int(np.argmax(wrong_N))
            low, high = (float(np.broadcast_to(side, wrong_N.shape)[position]) for side in (low_N, high_N))
            key = _key(f"data[{i}]", given[0])
            _refuse(
                f"{key}[{position}]", f"the thresholds are {low:g} and {high:g}; they must satisfy 0 <= low <= high"
            )


def _index(index: Array) -> str:
    return "".join(f"[{int(i)}]" for i in index)


def _cell(tensor: TensorData, index: Array) -> str:
    """Return the position of a value in the dense tensor."""
    if tensor.sparse_crow_indices is None or tensor.sparse_col_indices is None:
        return _index(index)
    listed = int(index[0])
    row = bisect.bisect_right(tensor.sparse_crow_indices, listed) - 1
    return f"[{row}][{tensor.sparse_col_indices[listed]}]"


def _check_ids(array: Array, where: str, vocab_size: int, cell: Callable[[Array], str] = _index) -> None:
    if array.size == 0:
        return
    # As an unsigned number a negative id is huge, so one maximum finds values that are too small or too large.
    unsigned = array.view(_UNSIGNED[array.dtype.itemsize]) if array.dtype.itemsize in _UNSIGNED else array
    if unsigned.max() >= vocab_size or (unsigned is array and array.min() < 0):
        index = np.argwhere((array < 0) | (array >= vocab_size))[0]
        value = int(array[tuple(index)])
        _refuse(f"{where}{cell(index)}", f"{value} is not a token of this model (allowed: 0 to {vocab_size - 1})")


def _check_finite(tensor: TensorData, where: str) -> None:
    if tensor.dtype == "float32" and not np.isfinite(tensor.array).all():
        index = np.argwhere(~np.isfinite(tensor.array))[0]
        _refuse(f"{where}{_cell(tensor, index)}", f"is {tensor.array[tuple(index)]}; only finite numbers are allowed")


_UNSIGNED: Mapping[int, np.dtype[Any]] = {4: np.dtype("<u4"), 8: np.dtype("<u8")}


def _shape(tensor: TensorData) -> tuple[int, ...]:
    return tuple(tensor.shape) if tensor.shape is not None else tensor.array.shape


def _key(where: str, name: str) -> str:
    return f"{where}.loss_fn_inputs[{name!r}]"


def _refuse(where: str, reason: str) -> NoReturn:
    raise InvalidInputError(f"{where}: {reason}", field=where)

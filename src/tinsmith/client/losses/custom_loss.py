"""Losses written in Python, for `forward_backward_custom`.

Any loss L over the logprobs p has the gradient of a weighted cross-entropy. The server's is sum(-w * p), so with
w = -dL/dp its gradient is that of L. Hence three steps: a forward pass for the logprobs (`forward_data`), the loss and
its gradient in this process (`gradients`), and a cross-entropy with those weights (`backward_data`).

torch is imported when a gradient is computed, not before.
(Compared with the official client in tests/contract/test_custom_loss_contract.py.)
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np

from tinsmith.errors import InvalidInputError, WireError
from tinsmith.text.optional_packages import import_torch
from tinsmith.wire.losses import LossFnType
from tinsmith.wire.messages.training import ForwardBackwardOutput, LossFnOutput
from tinsmith.wire.values.inputs import Datum
from tinsmith.wire.values.numbers import Array, is_torch_tensor
from tinsmith.wire.values.tensors import TensorData, sparse_if_smaller, tensor_of

if TYPE_CHECKING:
    import torch

    from tinsmith.client.losses.loss_graph import LossHandle

LossFn: TypeAlias = Callable[[list[Datum], "list[torch.Tensor]"], "tuple[torch.Tensor, Mapping[str, Any]]"]
"""Takes the datums and the logprobs of each; returns the loss, a scalar, and metrics by name."""

SURROGATE: LossFnType = "cross_entropy"
"""The server's loss in both passes."""


@dataclass(frozen=True, slots=True, eq=False)
class CustomLoss:
    """A loss computed here, and its gradient with respect to the logprobs of each datum."""

    loss: float
    metrics: dict[str, float]
    gradients: list[Array]


def forward_data(data: Sequence[Datum]) -> list[Datum]:
    """Return the datums of the forward pass: targets and weights, zero where the caller gave none."""
    if not data:
        raise InvalidInputError("No data provided: pass at least one datum", field="data")
    return [_surrogate(datum, datum.loss_fn_inputs.get("weights"), i) for i, datum in enumerate(data)]


def backward_data(data: Sequence[Datum], gradients: Sequence[Array]) -> list[Datum]:
    """Return the datums of the backward pass: targets, weighted with minus the gradient."""
    if len(gradients) != len(data):
        raise InvalidInputError(f"gradients: {len(gradients)} for {len(data)} datums", field="gradients")
    weights = [
        sparse_if_smaller(tensor_of(np.negative(gradient, dtype=np.float32), f"gradients[{i}]"))
        for i, gradient in enumerate(gradients)
    ]
    return [_surrogate(datum, weights[i], i) for i, datum in enumerate(data)]


def largest_backward_data(data: Sequence[Datum]) -> list[Datum]:
    """Return datums at least as large as those of any backward pass: every target has an explicit weight."""
    return [_surrogate(datum, _zeros(_targets(datum, i)), i) for i, datum in enumerate(data)]


def gradients(loss_fn: LossFn, data: Sequence[Datum], outputs: Sequence[LossFnOutput]) -> CustomLoss:
    """Call the loss on the logprobs that a forward pass returned, and differentiate it.

    A datum that the loss does not read gets a gradient of zeros. Other tensors that the loss depends on, say of a model
    that is trained here, have their gradients added to `.grad`, as by any call of `backward`.
    """
    torch = import_torch("forward_backward_custom")
    logprobs = [torch.from_numpy(array).requires_grad_() for array in _logprobs(data, outputs)]
    with torch.enable_grad():
        loss, metrics = _checked_return(loss_fn(list(data), logprobs))
        _check_loss(torch, loss, logprobs)
        loss.backward()
    if all(tensor.grad is None for tensor in logprobs):
        raise InvalidInputError(_INDEPENDENT, field="loss_fn")
    return CustomLoss(
        loss=float(loss.detach()),
        metrics={name: _number(value, name) for name, value in metrics.items()},
        gradients=[_gradient(tensor, i) for i, tensor in enumerate(logprobs)],
    )


def loss_of_handle(handle: LossHandle) -> LossFn:
    """Turn a traced loss into one that runs in this process: summed over the datums; metrics summed, or
    averaged, as their names say."""

    def loss_fn(data: list[Datum], logprobs: list[torch.Tensor]) -> tuple[torch.Tensor, dict[str, float]]:
        check_inputs(handle, data)
        losses: list[torch.Tensor] = []
        found: dict[str, list[float]] = {}
        for i, datum in enumerate(data):
            tensors = [datum.loss_fn_inputs[name].to_torch() for name in handle.input_names]
            loss, metrics = handle.graph(logprobs[i], *tensors)
            if loss.numel() != 1:
                shape = tuple(loss.shape)
                raise InvalidInputError(f"the loss {handle.name!r} of data[{i}] must be one number, got shape {shape}")
            losses.append(loss.reshape(()))
            for name, value in metrics.items():
                found.setdefault(name, []).append(_number(value, name))
        reduced = {name: sum(v) / (len(v) if name.endswith(":mean") else 1) for name, v in found.items()}
        return sum(losses[1:], losses[0]), reduced

    return loss_fn


def check_inputs(handle: LossHandle, data: Sequence[Datum]) -> None:
    """Reject data that lacks an input of a traced loss, or has it with other dimensions than declared."""
    for i, datum in enumerate(data):
        for item in handle.inputs:
            key = "target_tokens" if item.name == "logprobs" else item.name
            where = f"data[{i}].loss_fn_inputs[{key!r}]"
            tensor = datum.loss_fn_inputs.get(key)
            if tensor is None:
                raise InvalidInputError(f"{where}: is missing; the loss {handle.name!r} reads it", field=where)
            rank = 1 if tensor.shape is None else len(tensor.shape)
            if rank != item.rank:
                declared = f"{item.name} of the loss {handle.name!r} was declared with {item.rank}"
                raise InvalidInputError(f"{where}: has {rank} dimensions, but {declared}", field=where)


def result_metrics(server_output: ForwardBackwardOutput, custom: CustomLoss) -> ForwardBackwardOutput:
    """Return the backward pass's result with the custom loss as its `loss:sum`; the server's own becomes
    `surrogate_loss:sum`.

    The caller's metrics keep their names, with or without a reduction, and take precedence over the server's.
    """
    metrics = dict(server_output.metrics)
    surrogate = {"surrogate_loss:sum": metrics.pop("loss:sum")} if "loss:sum" in metrics else {}
    return ForwardBackwardOutput(
        loss_fn_output_type=server_output.loss_fn_output_type,
        loss_fn_outputs=server_output.loss_fn_outputs,
        metrics=metrics | custom.metrics | {"loss:sum": custom.loss} | surrogate,
    )


_INDEPENDENT = (
    "loss_fn: the loss does not depend on the logprobs, so there is nothing to train on; compute it from the tensors "
    "in the second argument, without .detach(), .item() or torch.no_grad()"
)


def _surrogate(datum: Datum, weights: TensorData | None, index: int) -> Datum:
    targets = _targets(datum, index)
    if weights is None:
        weights = sparse_if_smaller(_zeros(targets)) if targets.is_sparse else _zeros(targets)
    return datum.replace(loss_fn_inputs={"target_tokens": targets, "weights": weights})


def _zeros(targets: TensorData) -> TensorData:
    return tensor_of(np.zeros(targets.shape or [len(targets)], np.float32), "weights")


def _targets(datum: Datum, index: int) -> TensorData:
    targets = datum.loss_fn_inputs.get("target_tokens")
    if targets is None:
        where = f"data[{index}].loss_fn_inputs"
        text = f"{where} has no 'target_tokens'; a custom loss reads the logprobs of these tokens"
        raise InvalidInputError(text, field=where)
    return targets


def _logprobs(data: Sequence[Datum], outputs: Sequence[LossFnOutput]) -> list[Array]:
    """Return the logprobs of each datum as a separate array."""
    if len(outputs) != len(data):
        raise WireError(f"the forward pass returned {len(outputs)} outputs for {len(data)} datums")
    arrays = []
    for i, (datum, output) in enumerate(zip(data, outputs, strict=True)):
        where = f"loss_fn_outputs[{i}]"
        if "logprobs" not in output:
            raise WireError(f"{where}: the forward pass returned no 'logprobs', only {sorted(output)}", field=where)
        array = np.array(output["logprobs"].to_numpy(), np.float32)
        targets = _targets(datum, i)
        expected = tuple(targets.shape or [len(targets)])
        if array.shape != expected:
            raise WireError(f"{where}: logprobs of shape {array.shape} for targets of shape {expected}", field=where)
        arrays.append(array)
    return arrays


def _checked_return(returned: Any) -> tuple[Any, Mapping[str, Any]]:
    if not isinstance(returned, (tuple, list)) or len(returned) != 2:
        kind = f"{len(returned)} values" if isinstance(returned, (tuple, list)) else type(returned).__name__
        raise InvalidInputError(f"loss_fn: must return (loss, metrics), returned {kind}", field="loss_fn")
    loss, metrics = returned
    if not isinstance(metrics, Mapping) or not all(isinstance(name, str) for name in metrics):
        kind = "names that are not strings" if isinstance(metrics, Mapping) else type(metrics).__name__
        raise InvalidInputError(f"loss_fn: the metrics must be numbers by name, got {kind}", field="loss_fn")
    return loss, metrics


def _check_loss(torch: Any, loss: Any, logprobs: Sequence[Any]) -> None:
    """Reject a loss without a gradient, or with one that cannot be sent."""
    if not isinstance(loss, torch.Tensor):
        raise InvalidInputError(f"loss_fn: the loss must be a torch tensor, got {type(loss).__name__}", field="loss_fn")
    if loss.numel() != 1:
        shape = tuple(loss.shape)
        raise InvalidInputError(f"loss_fn: the loss must be one number, got shape {shape}; sum it", field="loss_fn")
    if not loss.is_floating_point():
        raise InvalidInputError(f"loss_fn: the loss must be a real number, got {loss.dtype}", field="loss_fn")
    if not torch.isfinite(loss).all():
        raise InvalidInputError(
            f"loss_fn: the loss is {float(loss.detach())}{_cause(torch, logprobs)}", field="loss_fn"
        )
    if not loss.requires_grad:
        raise InvalidInputError(_INDEPENDENT, field="loss_fn")
    if any(tensor.grad is not None for tensor in logprobs):
        raise InvalidInputError("loss_fn: must not call backward() itself; return the loss instead", field="loss_fn")


def _cause(torch: Any, logprobs: Sequence[Any]) -> str:
    """Describe the first logprob that is not finite, if there is one."""
    for i, tensor in enumerate(logprobs):
        if not torch.isfinite(tensor).all():
            array = tensor.detach().numpy()
            position = _first_not_finite(array)
            return f"; the logprob of data[{i}] at {list(position)} is {array[position]}"
    return "; the logprobs it was given are all finite"


def _gradient(tensor: Any, index: int) -> Array:
    if tensor.grad is None:
        return np.zeros(tuple(tensor.shape), np.float32)
    gradient: Array = tensor.grad.numpy()
    if not np.isfinite(gradient).all():
        position = _first_not_finite(gradient)
        value = gradient[position]
        raise InvalidInputError(
            f"loss_fn: the gradient for data[{index}] is {value} at {list(position)}, where the logprob is "
            f"{tensor.detach().numpy()[position]:g}; mask such positions before computing with them, with torch.where",
            field="loss_fn",
        )
    return gradient


def _first_not_finite(array: Array) -> tuple[int, ...]:
    return tuple(int(i) for i in np.argwhere(~np.isfinite(array))[0])


def _number(value: Any, name: str) -> float:
    if not isinstance(value, str):
        try:
            return float(value.detach() if is_torch_tensor(value) else value)
        except (TypeError, ValueError, RuntimeError):  # torch raises the last of a tensor with several elements
            pass
    raise InvalidInputError(
        f"loss_fn: metric {name!r} must be one number, got {type(value).__name__}", field="loss_fn"
    ) from None

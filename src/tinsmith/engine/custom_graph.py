"""Uploaded losses: a graph of tensor operations, checked once and then run datum by datum with its gradient.

Owns: the interpreter, and the limits on what it makes. `graph_checks.py` has seen the graph before; every operation is
looked up in the allow-list of `graph_operations.py`. Before it runs, `graph_sizes.py` says how large its result can be,
so that a few bytes cannot ask for much memory or time. All of it runs on the CPU: logprobs are few, and an
index that is out of range is an error there, not the end of a device.
Does not know: how losses are stored or found by their id.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NoReturn

import torch
from torch import Tensor

from tinsmith.engine import graph_operations as allowed
from tinsmith.engine.graph_checks import FLOATS, MAX_INTEGER, check_inputs, check_nodes
from tinsmith.engine.graph_sizes import leaves, most_cells
from tinsmith.engine.losses.base import Evaluation
from tinsmith.engine.losses.metrics import MetricTotals
from tinsmith.errors import InvalidInputError, NonFiniteError
from tinsmith.wire.training import CreateCustomLossRequest, CustomLossInput, CustomLossNode

MAX_CELLS = 2**24
"""Cells of one result: 4096 x 4096."""
MAX_RUN_CELLS = 2**27
"""Cells of all results for one datum: 512 MiB of float32."""
MAX_PRODUCTS = 2**32
"""Multiplications of one matrix product."""
_NUMBERS = (bool, int, float)
_OPERATION_ERRORS = (RuntimeError, TypeError, ValueError, LookupError, ArithmeticError, AttributeError, AssertionError)
"""What torch raises for arguments that do not fit."""


class CustomLoss:
    """A graph that passed all checks which need no data."""

    is_token_wise = False

    def __init__(self, request: CreateCustomLossRequest) -> None:
        self.name = request.name
        self.inputs: Sequence[CustomLossInput] = tuple(request.inputs)
        self._nodes: Sequence[CustomLossNode] = tuple(request.graph.nodes)
        check_inputs(self.inputs)
        check_nodes(self._nodes, self.inputs)

    @property
    def input_names(self) -> tuple[str, ...]:
        """The keys of `loss_fn_inputs` that the loss reads."""
        return tuple(item.name for item in self.inputs[1:])

    def evaluate(
        self, logprobs: Tensor, inputs: Mapping[str, Tensor], *, with_gradient: bool = True, where: str = "datum"
    ) -> Evaluation:
        """The loss of one datum, its gradient for the logprobs and its metrics; errors name `where`."""
        leaf = logprobs.detach().to("cpu", torch.float32, copy=True).requires_grad_(with_gradient)
        tensors = {"logprobs": leaf} | {name: inputs[name].detach().cpu() for name in self.input_names}
        for item in self.inputs:
            if tensors[item.name].ndim != item.rank:
                found = f"{item.name} has {tensors[item.name].ndim} dimensions, the loss declares {item.rank}"
                raise InvalidInputError(f"{where}: {found}", field=where)
        with torch.set_grad_enabled(with_gradient):
            loss, metrics = _Run(self._nodes, tensors, f"{where}: custom loss {self.name!r}").result()
            gradient = _gradient(loss, leaf, where) if with_gradient else None
        numbers = {"loss:sum": loss} | metrics
        return Evaluation(
            gradient.to(logprobs.device) if gradient is not None else None,
            {name: value.detach().reshape(()).double() for name, value in numbers.items()},
        )

    def evaluate_call(
        self, logprobs: Sequence[Tensor], data: Sequence[Mapping[str, Tensor]], *, with_gradient: bool = True
    ) -> tuple[list[Tensor | None], dict[str, float]]:
        """Gradients and joined metrics of a whole call: losses are summed, metrics as their names say."""
        totals, gradients = MetricTotals(), []
        for i, (tensor, inputs) in enumerate(zip(logprobs, data, strict=True)):
            result = self.evaluate(tensor, inputs, with_gradient=with_gradient, where=f"data[{i}]")
            totals.add(result.metrics)
            gradients.append(result.gradient_N)
        return gradients, totals.result()


def _gradient(loss: Tensor, leaf: Tensor, where: str) -> Tensor:
    if not loss.requires_grad:
        _refuse(
            where, "the loss does not depend on the logprobs any more, say by detach(); there is nothing to train on"
        )
    (gradient,) = torch.autograd.grad(loss, leaf)
    if not torch.isfinite(gradient).all():
        position = tuple(int(i) for i in (~torch.isfinite(gradient)).nonzero()[0])
        raise NonFiniteError(
            f"{where}: the custom loss's gradient is {float(gradient[position])} at {list(position)}, where the "
            f"logprob is {float(leaf.detach()[position]):g}; mask such positions with torch.where before computing"
        )
    return gradient


class _Run:
    """One walk over the nodes."""

    def __init__(self, nodes: Sequence[CustomLossNode], tensors: Mapping[str, Tensor], where: str) -> None:
        self._nodes = nodes
        self._tensors = tensors
        self._where = where
        self._values: dict[str, Any] = {}
        self._cells = 0

    def result(self) -> tuple[Tensor, dict[str, Tensor]]:
        for node in self._nodes:
            if node.op == "placeholder":
                self._values[node.name] = self._tensors[node.target]
            elif node.op == "output":
                return self._checked(decode(node.args[0], self._values))
            else:
                self._values[node.name] = self._call(node, f"{self._where}, node {node.name} ({node.target})")
        raise AssertionError("a checked graph has an output")

    def _call(self, node: CustomLossNode, where: str) -> Any:
        operation = (allowed.METHODS if node.op == "call_method" else allowed.FUNCTIONS)[node.target]
        args = decode(node.args, self._values)
        kwargs = {key: decode(value, self._values) for key, value in node.kwargs.items()}
        try:
            _check_values(node, args, where)
            cells = most_cells(operation, args, kwargs)
            self._count(cells, where)
            if operation.size is allowed.Size.PRODUCT:
                _check_product(args, kwargs, cells, where)
            value = operation.run(*args, **kwargs)
        except InvalidInputError:
            raise
        except _OPERATION_ERRORS as error:
            _refuse(where, f"{error}".partition("\n")[0], error)
        _check_result(value, where)
        return value

    def _count(self, cells: int, where: str) -> None:
        self._cells += cells
        if cells > MAX_CELLS or self._cells > MAX_RUN_CELLS:
            limits = f"one result may have {MAX_CELLS}, all of a datum's {MAX_RUN_CELLS}"
            _refuse(where, f"would make {cells} cells, {self._cells} with those before; {limits}")

    def _checked(self, output: Any) -> tuple[Tensor, dict[str, Tensor]]:
        loss, metrics = output
        if not isinstance(loss, Tensor) or loss.numel() != 1 or not loss.is_floating_point():
            _refuse(self._where, f"the loss must be one real number, got {_described(loss)}; sum it")
        if not torch.isfinite(loss).all():
            raise NonFiniteError(f"{self._where}: the loss is {float(loss.detach())}")
        for name, value in metrics.items():
            is_number = isinstance(value, _NUMBERS)
            if not is_number and not (isinstance(value, Tensor) and value.numel() == 1):
                _refuse(self._where, f"metric {name!r} must be one number, got {_described(value)}")
            metrics[name] = torch.tensor(float(value)) if is_number else value
        return loss, metrics


def decode(value: Any, values: Mapping[str, Any]) -> Any:
    """An argument from its encoded form; `values` gives what references stand for. Its form was checked before."""
    if isinstance(value, list):
        return [decode(item, values) for item in value]
    if not isinstance(value, Mapping):
        return value
    ((kind, content),) = value.items()
    if kind == "ref":
        return values[content]
    if kind in ("tuple", "slice"):
        items = [decode(item, values) for item in content]
        return tuple(items) if kind == "tuple" else slice(*items)
    if kind == "dict":
        return {key: decode(item, values) for key, item in content.items()}
    simple: dict[str, Callable[[], Any]] = {
        "ellipsis": lambda: ...,
        "float": lambda: FLOATS[content],
        "dtype": lambda: allowed.DTYPES[content],
        "device": lambda: torch.device("cpu"),
        "layout": lambda: torch.strided,
        "memory_format": lambda: torch.preserve_format,
    }
    return simple[kind]()


def _check_values(node: CustomLossNode, args: Sequence[Any], where: str) -> None:
    """What can be seen only when the arguments have values: of which kind they are."""
    if node.op == "call_method" or node.target.startswith("torch.Tensor."):
        if not args or not isinstance(args[0], Tensor):
            _refuse(where, f"is a method of tensors, got {_described(args[0]) if args else 'nothing'}")
    elif node.target == "getattr":
        readable = allowed.ATTRIBUTES if isinstance(args[0], Tensor) else allowed.RESULT_ATTRIBUTES
        is_result = isinstance(args[0], tuple) and type(args[0]).__module__ == "torch.return_types"
        if args[1] not in readable or not (isinstance(args[0], Tensor) or is_result):
            _refuse(where, f"reads {args[1]!r} of {_described(args[0])}; allowed is {', '.join(sorted(readable))}")
    elif node.target == "operator.getitem":
        if not isinstance(args[0], (Tensor, tuple)):
            _refuse(where, f"only tensors and tuples have items, got {_described(args[0])}")
    elif node.target.startswith(("operator.", "math.")):
        _check_numbers(node.target, args, where)


def _check_numbers(target: str, args: Sequence[Any], where: str) -> None:
    """Operators take tensors and numbers, `math` numbers alone: Python's own types would repeat, join and format."""
    kinds = _NUMBERS if target.startswith("math.") else (Tensor, *_NUMBERS)
    for value in args:
        if not isinstance(value, kinds):
            _refuse(where, f"takes {'numbers' if len(kinds) == 3 else 'tensors and numbers'}, got {_described(value)}")
    if target == "operator.pow" and all(isinstance(value, int) for value in args) and len(args) == 2:
        base, exponent = args
        if exponent > 0 and exponent * int(base).bit_length() > 64:
            _refuse(where, f"{base} to the power of {exponent} is too large for an integer; write a float")


def _check_product(args: Sequence[Any], kwargs: Mapping[str, Any], cells: int, where: str) -> None:
    if len(args) != 2 or not isinstance(args[0], Tensor) or kwargs:
        _refuse(where, "takes two tensors, without names")
    products = cells * (args[0].shape[-1] if args[0].ndim else 1)
    if products > MAX_PRODUCTS:
        _refuse(where, f"would take {products} multiplications; at most {MAX_PRODUCTS} are allowed")


def _check_result(value: Any, where: str) -> None:
    for item in leaves(value):
        if isinstance(item, int) and abs(item) > MAX_INTEGER:
            _refuse(where, "gives an integer that is too large")
        if isinstance(item, Tensor) and item.is_complex():
            _refuse(where, "gives complex numbers")


def _described(value: Any) -> str:
    return f"a tensor of shape {list(value.shape)}" if isinstance(value, Tensor) else type(value).__name__


def _refuse(where: str, reason: str, cause: BaseException | None = None) -> NoReturn:
    raise InvalidInputError(f"{where}: {reason}", field=where) from cause

"""Runs uploaded losses: a graph of tensor operations, validated once (`checks`), then run datum by datum with its
gradient.

Every operation is looked up in the allow list of `operations`. Before one runs, `operations.most_cells` computes how
large its result can be, so that a few bytes of graph cannot ask for much memory or time. The interpreter pauses after
it has computed for a while, so that nobody waits for an expensive loss, and fails when a request has used up its time.
All of this runs on the CPU: logprobs are small, and on a CPU an index out of range raises an error, while on a GPU it
makes the device unusable.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Mapping, Sequence
from typing import Any, NoReturn

import torch
from torch import Tensor

from tinsmith.engine.training.custom_loss import operations as allowed
from tinsmith.engine.training.custom_loss.checks import FLOATS, MAX_INTEGER, check_inputs, check_nodes
from tinsmith.engine.training.custom_loss.operations import leaves, most_cells
from tinsmith.engine.training.losses.base import Evaluation
from tinsmith.engine.training.pauses import finished
from tinsmith.errors import InvalidInputError, NonFiniteError
from tinsmith.wire.messages.training import CreateCustomLossRequest, CustomLossInput, CustomLossNode

MAX_CELLS = 2**24
"""Cells of one result, at most: 4096 x 4096."""
MAX_RUN_CELLS = 2**26
"""Cells of all results for one datum, at most: 256 MiB of float32. Their gradient is computed without a pause."""
MAX_PRODUCTS = 2**32
"""Multiplications of all matrix products for one datum, at most."""
PAUSE_S = 0.02
"""How long a loss computes before it pauses."""
_NUMBERS = (bool, int, float)
_OPERATION_ERRORS = (RuntimeError, TypeError, ValueError, LookupError, ArithmeticError, AttributeError, AssertionError)
"""What torch raises for invalid arguments."""


class LossProgram:
    """A validated graph, ready to run."""

    is_token_wise = False

    def __init__(
        self,
        request: CreateCustomLossRequest,
        max_device_s: float | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        """`max_device_s` limits the time of all evaluations together; None: no limit."""
        self.name = request.name
        self._watch = _Watch(max_device_s, clock)
        self.inputs: Sequence[CustomLossInput] = tuple(request.inputs)
        self._nodes: Sequence[CustomLossNode] = tuple(request.graph.nodes)
        check_inputs(self.inputs)
        check_nodes(self._nodes, self.inputs)

    @property
    def input_names(self) -> tuple[str, ...]:
        """Return the keys of `loss_fn_inputs` that the loss reads."""
        return tuple(item.name for item in self.inputs[1:])

    def evaluate(
        self, logprobs: Tensor, inputs: Mapping[str, Tensor], *, with_gradient: bool = True, where: str = "datum"
    ) -> Evaluation:
        """Return the gradient of one datum's loss for its logprobs, and the metrics. Errors name `where`."""
        return finished(self.evaluate_steps(logprobs, inputs, with_gradient=with_gradient, where=where))

    def evaluate_steps(
        self, logprobs: Tensor, inputs: Mapping[str, Tensor], *, with_gradient: bool = True, where: str = "datum"
    ) -> Generator[None, None, Evaluation]:
        """Run `evaluate` with pauses."""
        leaf = logprobs.detach().to("cpu", torch.float32, copy=True).requires_grad_(with_gradient)
        tensors = {"logprobs": leaf} | {name: inputs[name].detach().cpu() for name in self.input_names}
        for item in self.inputs:
            if tensors[item.name].ndim != item.rank:
                found = f"{item.name} has {tensors[item.name].ndim} dimensions, the loss declares {item.rank}"
                raise InvalidInputError(f"{where}: {found}", field=where)
        named = f"{where}: custom loss {self.name!r}"
        run = _Run(self._nodes, tensors, named, with_gradient)
        self._watch.start()
        loss, metrics = yield from run.result(self._watch)
        gradient = None
        if with_gradient:
            if self._watch.stop(named):
                yield
            self._watch.start()
            with torch.enable_grad():
                gradient = _gradient(loss, leaf, where)
        self._watch.stop(named)
        numbers = {"loss:sum": loss} | metrics
        return Evaluation(
            gradient.to(logprobs.device) if gradient is not None else None,
            {name: value.detach().reshape(()).double() for name, value in numbers.items()},
        )


def _gradient(loss: Tensor, leaf: Tensor, where: str) -> Tensor:
    if not loss.requires_grad:
        _refuse(
            where,
            "the loss no longer depends on the logprobs (because of detach(), perhaps), so there is nothing to train",
        )
    (gradient,) = torch.autograd.grad(loss, leaf)
    if not torch.isfinite(gradient).all():
        position = tuple(int(i) for i in (~torch.isfinite(gradient)).nonzero()[0])
        raise NonFiniteError(
            f"{where}: the custom loss's gradient is {float(gradient[position])} at {list(position)}, where the "
            f"logprob is {float(leaf.detach()[position]):g}; mask such positions with torch.where before computing"
        )
    return gradient


class _Watch:
    """A stopwatch for the time that a loss computes, without the pauses."""

    def __init__(self, max_s: float | None, clock: Callable[[], float]) -> None:
        self._max_s = max_s
        self._clock = clock
        self._spent_s = 0.0
        self._began_at = 0.0

    def start(self) -> None:
        self._began_at = self._clock()

    def is_over(self) -> bool:
        """Return whether the loss has computed long enough to pause."""
        return self._clock() - self._began_at > PAUSE_S

    def stop(self, where: str) -> bool:
        """Add the time since `start`, and return whether that was long enough to pause. Raises beyond the limit."""
        took_s = self._clock() - self._began_at
        self._spent_s += took_s
        if self._max_s is not None and self._spent_s > self._max_s:
            raise InvalidInputError(
                f"{where}: computed for {self._spent_s:.1f} s in this request, longer than the allowed "
                f"{self._max_s:g} s, and nothing was changed; send fewer datums at a time, or compute the loss in "
                "the client",
                field=where,
            )
        return took_s > PAUSE_S


class _Run:
    """One execution of the graph."""

    def __init__(
        self, nodes: Sequence[CustomLossNode], tensors: Mapping[str, Tensor], where: str, with_gradient: bool
    ) -> None:
        self._nodes = nodes
        self._tensors = tensors
        self._where = where
        self._with_gradient = with_gradient
        self._values: dict[str, Any] = {}
        self._cells = 0
        self._products = 0

    def result(self, watch: _Watch) -> Generator[None, None, tuple[Tensor, dict[str, Tensor]]]:
        """Return loss and metrics. The watch must be running, and is running again when this returns."""
        for node in self._nodes:
            if node.op == "placeholder":
                self._values[node.name] = self._tensors[node.target]
            elif node.op == "output":
                return self._checked(decode(node.args[0], self._values))
            else:
                with torch.set_grad_enabled(self._with_gradient):  # not around a pause, in which other jobs compute
                    self._values[node.name] = self._call(node, f"{self._where}, node {node.name} ({node.target})")
                if watch.is_over():
                    watch.stop(self._where)
                    yield
                    watch.start()
        raise AssertionError("a validated graph has an output")

    def _call(self, node: CustomLossNode, where: str) -> Any:
        operation = (allowed.METHODS if node.op == "call_method" else allowed.FUNCTIONS)[node.target]
        args = decode(node.args, self._values)
        kwargs = {key: decode(value, self._values) for key, value in node.kwargs.items()}
        try:
            _check_values(node, args, where)
            cells = most_cells(operation, args, kwargs)
            self._count(cells, where)
            if operation.size is allowed.Size.PRODUCT:
                self._count_products(args, kwargs, cells, where)
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
            limits = f"at most {MAX_CELLS} are allowed for one result and {MAX_RUN_CELLS} for a datum"
            _refuse(where, f"would make {cells} cells, {self._cells} with the earlier ones; {limits}")

    def _count_products(self, args: Sequence[Any], kwargs: Mapping[str, Any], cells: int, where: str) -> None:
        if len(args) != 2 or not isinstance(args[0], Tensor) or kwargs:
            _refuse(where, "takes two tensors as positional arguments")
        products = cells * (args[0].shape[-1] if args[0].ndim else 1)
        self._products += products
        if self._products > MAX_PRODUCTS:
            text = f"would take {products} multiplications, {self._products} with the earlier ones"
            _refuse(where, f"{text}; at most {MAX_PRODUCTS} are allowed for a datum")

    def _checked(self, output: Any) -> tuple[Tensor, dict[str, Tensor]]:
        loss, metrics = output
        if not isinstance(loss, Tensor) or loss.numel() != 1 or not loss.is_floating_point():
            _refuse(self._where, f"the loss must be a single real number, got {_described(loss)}; sum it")
        if not torch.isfinite(loss).all():
            raise NonFiniteError(f"{self._where}: the loss is {float(loss.detach())}")
        for name, value in metrics.items():
            is_number = isinstance(value, _NUMBERS)
            if not is_number and not (isinstance(value, Tensor) and value.numel() == 1):
                _refuse(self._where, f"metric {name!r} must be a single number, got {_described(value)}")
            metrics[name] = torch.tensor(float(value)) if is_number else value
        return loss, metrics


def decode(value: Any, values: Mapping[str, Any]) -> Any:
    """Decode an argument whose form has been validated; `values` resolves references."""
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
    """Validate what is known only at run time: the types of the arguments."""
    if node.op == "call_method" or node.target.startswith("torch.Tensor."):
        if not args or not isinstance(args[0], Tensor):
            _refuse(where, f"is a tensor method, called on {_described(args[0]) if args else 'nothing'}")
    elif node.target == "getattr":
        readable = allowed.ATTRIBUTES if isinstance(args[0], Tensor) else allowed.RESULT_ATTRIBUTES
        is_result = isinstance(args[0], tuple) and type(args[0]).__module__ == "torch.return_types"
        if args[1] not in readable or not (isinstance(args[0], Tensor) or is_result):
            _refuse(where, f"reads {args[1]!r} of {_described(args[0])}; allowed: {', '.join(sorted(readable))}")
    elif node.target == "operator.getitem":
        if not isinstance(args[0], (Tensor, tuple)):
            _refuse(where, f"only tensors and tuples have items, got {_described(args[0])}")
    elif node.target.startswith(("operator.", "math.")):
        _check_numbers(node.target, args, where)


def _check_numbers(target: str, args: Sequence[Any], where: str) -> None:
    """Operators take tensors and numbers, `math` only numbers: strings and lists use `*`, `+`, `%` differently."""
    kinds = _NUMBERS if target.startswith("math.") else (Tensor, *_NUMBERS)
    for value in args:
        if not isinstance(value, kinds):
            _refuse(where, f"takes {'numbers' if len(kinds) == 3 else 'tensors and numbers'}, got {_described(value)}")
    if target == "operator.pow" and all(isinstance(value, int) for value in args) and len(args) == 2:
        base, exponent = args
        if exponent > 0 and exponent * int(base).bit_length() > 64:
            _refuse(where, f"{base} to the power of {exponent} is too large for an integer; write a float")


def _check_result(value: Any, where: str) -> None:
    for item in leaves(value):
        if isinstance(item, int) and abs(item) > MAX_INTEGER:
            _refuse(where, "returns an integer that is too large")
        if isinstance(item, Tensor) and item.is_complex():
            _refuse(where, "returns complex numbers")


def _described(value: Any) -> str:
    return f"a tensor of shape {list(value.shape)}" if isinstance(value, Tensor) else type(value).__name__


def _refuse(where: str, reason: str, cause: BaseException | None = None) -> NoReturn:
    raise InvalidInputError(f"{where}: {reason}", field=where) from cause

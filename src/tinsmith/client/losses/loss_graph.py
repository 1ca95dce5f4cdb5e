"""Losses that the server runs: a Python function traced into a graph that can be sent, and the handle to it.

Traces a function, checks what the graph may contain, and encodes and decodes its arguments. torch is imported when a
function is traced, not before.
(Compared with the official client in tests/contract/test_custom_loss_contract.py.)
"""

from __future__ import annotations

import hashlib
import inspect
import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NoReturn, TypeAlias

import msgspec

from tinsmith.errors import InvalidInputError
from tinsmith.text.optional_packages import import_torch
from tinsmith.wire.messages.training import CustomLossGraph, CustomLossInput, CustomLossInputRank, CustomLossNode

if TYPE_CHECKING:
    import torch
    import torch.fx

PerDatumLossFn: TypeAlias = Callable[..., "tuple[torch.Tensor, Mapping[str, torch.Tensor]]"]
"""The loss of one datum: takes `logprobs`, then the loss inputs it names, all tensors; returns (loss, metrics)."""

MAX_INPUTS = 16
INPUT_NAME = re.compile(r"[a-z_][a-z0-9_]{0,63}")
METRIC_NAME = re.compile(r"custom/[a-z0-9_./-]{1,64}:(sum|mean)")
CALLABLE_MODULES = frozenset({"torch", "math", "operator"})
"""Where the functions of a graph may come from; `getattr` is the one builtin among them."""
HOST_METHODS = frozenset({"item", "tolist", "numpy", "backward"})
"""Tensor methods that leave the graph: they give Python values, or run it."""
TORCH_VALUES = ("dtype", "device", "layout", "memory_format")
FLOATS = frozenset({"inf", "-inf", "nan"})
"""The numbers that JSON lacks."""


@dataclass(frozen=True, slots=True)
class TracedLoss:
    """A loss as a graph: `graph` is what is sent, `module` runs in this process."""

    name: str
    inputs: list[CustomLossInput]
    graph: CustomLossGraph
    module: torch.fx.GraphModule = field(repr=False, compare=False)


@dataclass(frozen=True)
class LossHandle:
    """A traced loss of a session; `loss_id` is the server's name for it, None where the server does not run losses."""

    name: str
    inputs: tuple[CustomLossInput, ...]
    session_id: str
    graph: torch.fx.GraphModule = field(repr=False, compare=False)
    loss_id: str | None = None

    @property
    def key(self) -> str:
        """A digest of what the loss computes: equal for equal graphs over equal inputs, whatever the name."""
        nodes = encode_graph(self.graph, self.name)
        return hashlib.sha256(msgspec.json.encode([msgspec.to_builtins(self.inputs), nodes])).hexdigest()

    @property
    def input_names(self) -> tuple[str, ...]:
        """The keys of `loss_fn_inputs` that the loss reads."""
        return tuple(item.name for item in self.inputs[1:])


def trace(fn: PerDatumLossFn, input_ranks: Mapping[str, CustomLossInputRank]) -> TracedLoss:
    """Trace the loss of one datum; `input_ranks` gives the number of dimensions of each parameter.

    The function runs once, on stand-ins without values: what it does to them is recorded, all else (prints, random
    numbers, Python arithmetic) happens now and only now.
    """
    torch = import_torch("create_custom_loss")
    name = getattr(fn, "__name__", type(fn).__name__)
    inputs = _inputs(fn, name, input_ranks)
    module = _trace(torch, fn, name)
    return TracedLoss(name=name, inputs=inputs, graph=encode_graph(module, name), module=module)


def encode_graph(module: torch.fx.GraphModule, name: str = "loss") -> CustomLossGraph:
    """Encode a traced loss; reject operations that a server cannot run, naming them."""
    nodes = []
    for node in module.graph.nodes:
        target = _operation(node)
        _check_call(node.op, target, name)
        where = f"create_custom_loss: {name}: {target}"
        if node.op == "output":
            _check_output(node.args[0], name)
        args = [encode_argument(value, where) for value in node.args]
        kwargs = {key: encode_argument(value, where) for key, value in node.kwargs.items()}
        nodes.append(CustomLossNode(op=node.op, name=node.name, target=target, args=args, kwargs=kwargs))
    return CustomLossGraph(nodes=nodes)


def encode_argument(value: Any, where: str = "argument") -> Any:
    """Encode an argument of a node as JSON; `decode_argument` is the inverse."""
    if value is None or isinstance(value, (bool, str)):
        return value
    if isinstance(value, int):
        return int(value)
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else {"float": str(float(value))}
    if isinstance(value, list):
        return [encode_argument(item, where) for item in value]
    if isinstance(value, tuple):
        return {"tuple": [encode_argument(item, where) for item in value]}
    if isinstance(value, dict) and all(isinstance(key, str) for key in value):
        return {"dict": {key: encode_argument(item, where) for key, item in value.items()}}
    if isinstance(value, slice):
        return {"slice": [encode_argument(item, where) for item in (value.start, value.stop, value.step)]}
    if value is ...:
        return {"ellipsis": True}
    return _encode_torch(value, where)


def decode_argument(value: Any, nodes: Mapping[str, Any], where: str = "argument") -> Any:
    """Decode an argument from its JSON form; `nodes` has what each reference refers to."""
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, list):
        return [decode_argument(item, nodes, where) for item in value]
    if not isinstance(value, Mapping) or len(value) != 1:
        raise InvalidInputError(f"{where}: expected a plain value, a list or an object with one key, got {value!r}")
    ((kind, content),) = value.items()
    if kind == "ref" and isinstance(content, str) and content in nodes:
        return nodes[content]
    if kind == "tuple" and isinstance(content, list):
        return tuple(decode_argument(item, nodes, where) for item in content)
    if kind == "dict" and isinstance(content, Mapping):
        return {key: decode_argument(item, nodes, where) for key, item in content.items()}
    if kind == "slice" and isinstance(content, list) and len(content) == 3:
        return slice(*(decode_argument(item, nodes, where) for item in content))
    if kind == "ellipsis" and content is True:
        return ...
    if kind == "float" and content in FLOATS:
        return float(content)
    if kind in TORCH_VALUES and isinstance(content, str):
        return _decode_torch(kind, content, where)
    raise InvalidInputError(f"{where}: {{{kind!r}: {content!r}}} is not a valid graph argument")


def _inputs(fn: Any, name: str, input_ranks: Mapping[str, CustomLossInputRank]) -> list[CustomLossInput]:
    if not inspect.isfunction(fn):
        _refuse(name, f"must be a plain function, got {type(fn).__name__}; wrap it in one")
    parameters = inspect.signature(fn).parameters
    if next(iter(parameters), None) != "logprobs":
        _refuse(name, "its first parameter must be named logprobs, the others as the loss_fn_inputs that it reads")
    if len(parameters) > MAX_INPUTS:
        _refuse(name, f"has {len(parameters)} parameters; at most {MAX_INPUTS} are allowed, logprobs among them")
    for parameter in parameters.values():
        if parameter.kind not in (parameter.POSITIONAL_ONLY, parameter.POSITIONAL_OR_KEYWORD):
            _refuse(name, f"parameter {parameter} must be positional: each one is a tensor")
        if parameter.default is not parameter.empty:
            _refuse(name, f"parameter {parameter} has a default; every input has to be in the data")
        if not INPUT_NAME.fullmatch(parameter.name):
            _refuse(name, f"parameter {parameter.name!r} must consist of lower-case letters, digits and underscores")
    if set(input_ranks) != set(parameters):
        _refuse(name, f"input_ranks has {sorted(input_ranks)}, the parameters are {sorted(parameters)}")
    for parameter_name, rank in input_ranks.items():
        allowed = (1, 2) if parameter_name == "logprobs" else (0, 1, 2)
        if rank not in allowed:
            _refuse(name, f"input_ranks[{parameter_name!r}] is {rank!r}; allowed are {allowed}")
    return [CustomLossInput(name=key, rank=int(input_ranks[key])) for key in parameters]  # type: ignore[arg-type]


def _trace(torch: Any, fn: Any, name: str) -> Any:
    """Record what the function does to its parameters as a module; reject what cannot be recorded."""

    class Tracer(torch.fx.Tracer):  # type: ignore[misc]
        operation = "the result"

        def create_proxy(self, kind: str, target: Any, *args: Any, **kwargs: Any) -> Any:
            outer, self.operation = self.operation, target if isinstance(target, str) else _qualified_name(target)
            _check_call(kind, self.operation, name)
            if not torch.is_grad_enabled() or torch.is_autocast_enabled("cpu"):
                _refuse(name, f"{self.operation} runs under no_grad or autocast, which are not recorded; use .detach()")
            proxy = super().create_proxy(kind, target, *args, **kwargs)
            self.operation = outer
            return proxy

        def create_arg(self, value: Any) -> Any:
            if isinstance(value, torch.Tensor):
                _refuse(
                    name,
                    f"{self.operation} gets a tensor of shape {tuple(value.shape)} that is not a parameter, and only "
                    "parameters are sent: write numbers as Python numbers, or make the tensor an input",
                )
            try:
                return super().create_arg(value)
            except NotImplementedError:
                _refuse(name, f"{self.operation} gets a {type(value).__name__}, which cannot be sent")

        def call_module(self, module: Any, *args: Any, **kwargs: Any) -> NoReturn:
            _refuse(name, f"calls the module {type(module).__name__}; use functions of torch instead")

        def to_bool(self, proxy: Any) -> NoReturn:
            _refuse(name, f"branches on the value of {_operation(proxy.node)}, which has none yet; use torch.where")

        def iter(self, proxy: Any) -> NoReturn:
            _refuse(name, f"loops over {_operation(proxy.node)}, whose length is not known; use tensor operations")

    try:
        with torch.enable_grad(), torch.autocast("cpu", enabled=False):
            tracer = Tracer()
            graph = tracer.trace(fn)
            return torch.fx.GraphModule(tracer.root, graph)
    except InvalidInputError:
        raise
    except (AttributeError, NotImplementedError, RuntimeError, TypeError, ValueError) as error:
        _refuse(name, f"cannot be traced by torch.fx: {error}", error)


def _operation(node: torch.fx.Node) -> str:
    return node.target if isinstance(node.target, str) else _qualified_name(node.target)


def _qualified_name(function: Callable[..., Any]) -> str:
    from torch.fx.node import _get_qualified_name

    if function.__name__ == "<lambda>":
        return f"{function.__module__}.<lambda>"
    return _get_qualified_name(function).replace("_operator.", "operator.", 1)


def _check_call(op: str, target: str, name: str) -> None:
    """Reject operations that a server cannot run."""
    import torch

    if op in ("get_attr", "call_module"):
        _refuse(name, f"reads {target}, which is not a parameter; only parameters are sent")
    if op == "call_method":
        if target in HOST_METHODS:
            _refuse(name, f"calls {target}(), which leaves torch; keep everything as tensors, including the metrics")
        if not callable(getattr(torch.Tensor, target, None)):
            _refuse(name, f"calls {target}(), which is not a method of a tensor")
    if op == "call_function" and target != "getattr" and target.partition(".")[0] not in CALLABLE_MODULES:
        _refuse(name, f"calls {target}; only functions of torch and math can be sent")


def _check_output(output: Any, name: str) -> None:
    """Check that the graph ends in (loss, metrics), and that the loss depends on the logprobs."""
    from torch.fx import Node

    if not isinstance(output, (tuple, list)) or len(output) != 2:
        _refuse(name, "must return (loss, metrics)")
    loss, metrics = output
    if not isinstance(loss, Node):
        _refuse(name, f"the loss must be computed from the parameters, got {loss!r}")
    if not isinstance(metrics, dict):
        _refuse(name, f"the metrics must be a dict of tensors by name, got {type(metrics).__name__}")
    for key, value in metrics.items():
        if not isinstance(key, str) or not METRIC_NAME.fullmatch(key):
            _refuse(name, f"metric {key!r} must be named custom/<name>:sum or custom/<name>:mean, in lower case")
        if not isinstance(value, Node):
            _refuse(name, f"metric {key!r} must be a tensor, got {value!r}")
    reached, waiting = set(), [loss]
    while waiting:
        node = waiting.pop()
        if node not in reached:
            reached.add(node)
            waiting.extend(node.all_input_nodes)
    if not any(node.op == "placeholder" and node.target == "logprobs" for node in reached):
        _refuse(name, "the loss does not depend on the logprobs, so there is nothing to train on")


def _encode_torch(value: Any, where: str) -> Any:
    import torch
    import torch.fx

    if isinstance(value, torch.fx.Node):
        return {"ref": value.name}
    for kind in TORCH_VALUES:
        if isinstance(value, getattr(torch, kind)):
            return {kind: str(value).removeprefix("torch.")}
    raise InvalidInputError(f"{where} gets a {type(value).__name__}, which cannot be sent")


def _decode_torch(kind: str, content: str, where: str) -> Any:
    torch = import_torch("a custom loss")
    try:
        value = torch.device(content) if kind == "device" else getattr(torch, content, None)
    except RuntimeError:  # no such device
        value = None
    if not isinstance(value, getattr(torch, kind)):
        raise InvalidInputError(f"{where}: torch has no {kind} {content!r}")
    return value


def _refuse(name: str, reason: str, cause: Exception | None = None) -> NoReturn:
    raise InvalidInputError(f"create_custom_loss: {name}: {reason}", field="fn") from cause

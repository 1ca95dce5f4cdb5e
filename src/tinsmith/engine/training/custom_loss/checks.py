"""Validates an uploaded loss as far as that needs no data: names, operations, references, and the form of arguments.

A graph that passes may still fail when it runs, because of the sizes or types of its values (`interpreter`).
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NoReturn

from tinsmith.engine.training.custom_loss import operations as allowed
from tinsmith.errors import InvalidInputError
from tinsmith.wire.messages.training import CustomLossInput, CustomLossNode

MAX_INPUTS = 16
MAX_NODES = 2000
MAX_ITEMS = 256
"""Values in the arguments of one node."""
MAX_DEPTH = 6
"""Nesting of the arguments of one node."""
MAX_TEXT = 256
MAX_INTEGER = 2**53

INPUT_NAME = re.compile(r"[a-z_][a-z0-9_]{0,63}")
METRIC_NAME = re.compile(r"custom/[a-z0-9_./-]{1,64}:(sum|mean)")
FLOATS: Mapping[str, float] = {"inf": math.inf, "-inf": -math.inf, "nan": math.nan}
"""Numbers that JSON cannot express, by the string that stands for them."""


def check_inputs(inputs: Sequence[CustomLossInput]) -> None:
    names = [item.name for item in inputs]
    if not names or names[0] != "logprobs" or inputs[0].rank not in (1, 2):
        _refuse("inputs", "the first input must be logprobs, of rank 1 or 2")
    if len(names) > MAX_INPUTS or len(set(names)) != len(names):
        _refuse("inputs", f"at most {MAX_INPUTS} inputs with different names are allowed, got {len(names)}")
    for name in names:
        if not INPUT_NAME.fullmatch(name):
            _refuse("inputs", f"{name[:MAX_TEXT]!r} must consist of lower-case letters, digits and underscores")


def check_nodes(nodes: Sequence[CustomLossNode], inputs: Sequence[CustomLossInput]) -> None:
    """Validate names, operations, references and the form of arguments."""
    if not 0 < len(nodes) <= MAX_NODES:
        _refuse("graph", f"has {len(nodes)} nodes; 1 to {MAX_NODES} are allowed")
    seen: set[str] = set()
    depending: set[str] = set()
    for i, node in enumerate(nodes):
        where = f"graph.nodes[{i}] ({node.target[:MAX_TEXT]})"
        _check_operation(node, where)
        references = _References(seen, where)
        references.check(node.args)
        for key, value in node.kwargs.items():
            _check_keyword(key, value, where)
            references.check(value)
        if (node.op == "output") != (i == len(nodes) - 1):
            _refuse(where, "a graph must have exactly one output, its last node")
        if node.name in seen or len(node.name) > MAX_TEXT:
            _refuse(where, f"the name {node.name[:MAX_TEXT]!r} is already taken or too long")
        seen.add(node.name)
        if references.found & depending or (node.op == "placeholder" and node.target == "logprobs"):
            depending.add(node.name)
    if [node.target for node in nodes if node.op == "placeholder"] != [item.name for item in inputs]:
        _refuse("graph", "the placeholders must be the inputs, in the same order")
    _check_output(nodes[-1], depending)


def _check_operation(node: CustomLossNode, where: str) -> None:
    if node.op in ("get_attr", "call_module"):
        _refuse(where, "reads something that is not an input; a loss may only use inputs and operations")
    if node.op == "call_method" and node.target not in allowed.METHODS:
        _refuse(
            where,
            "is not a method that a loss may call; see engine/training/custom_loss/operations.py for those it may",
        )
    if node.op == "call_function" and node.target not in allowed.FUNCTIONS:
        _refuse(
            where,
            "is not a function that a loss may call; see engine/training/custom_loss/operations.py for those it may",
        )
    if node.op == "placeholder" and (node.args or node.kwargs):
        _refuse(where, "an input may not have a default")
    if node.target == "getattr" and node.op == "call_function":
        attribute = node.args[1] if len(node.args) == 2 else None
        readable = sorted(allowed.ATTRIBUTES | allowed.RESULT_ATTRIBUTES)
        if node.kwargs or attribute not in readable:
            known = ", ".join(readable)
            _refuse(where, f"reads an attribute other than {known}")


def _check_keyword(key: str, value: Any, where: str) -> None:
    if key not in allowed.KEYWORDS:
        _refuse(where, f"the argument {key[:MAX_TEXT]!r} is not allowed")
    if key in allowed.INERT and value not in allowed.INERT[key]:
        _refuse(where, f"the argument {key!r} may not be set")


class _References:
    """Checks the form of a node's arguments and collects the nodes they refer to."""

    def __init__(self, known: set[str], where: str) -> None:
        self.found: set[str] = set()
        self._known = known
        self._where = where
        self._items = 0

    def check(self, value: Any, depth: int = 0) -> None:
        self._items += 1
        if self._items > MAX_ITEMS or depth > MAX_DEPTH:
            _refuse(self._where, f"arguments may contain at most {MAX_ITEMS} values, nested at most {MAX_DEPTH} deep")
        if isinstance(value, list):
            for item in value:
                self.check(item, depth + 1)
        elif isinstance(value, Mapping):
            self._check_composed(value, depth)
        elif isinstance(value, str):
            if value not in allowed.TEXTS | allowed.ATTRIBUTES | allowed.RESULT_ATTRIBUTES:
                _refuse(self._where, f"the string {value[:MAX_TEXT]!r} is not an argument of any operation")
        elif isinstance(value, int) and abs(value) > MAX_INTEGER:
            _refuse(self._where, "has an integer that is too large")
        elif value is not None and not isinstance(value, (bool, int, float)):
            _refuse(self._where, f"has an argument of type {type(value).__name__}")

    def _check_composed(self, value: Mapping[Any, Any], depth: int) -> None:
        if len(value) != 1:
            _refuse(self._where, "an argument that is an object must have exactly one key, its kind")
        ((kind, content),) = value.items()
        if kind == "ref" and isinstance(content, str) and content in self._known:
            self.found.add(content)
        elif (kind == "tuple" and isinstance(content, list)) or (
            kind == "slice" and isinstance(content, list) and len(content) == 3
        ):
            for item in content:
                self.check(item, depth + 1)
        elif kind == "dict" and isinstance(content, Mapping):
            for key, item in content.items():
                if not METRIC_NAME.fullmatch(key):
                    _refuse(self._where, f"metric {key[:MAX_TEXT]!r} must be named custom/<name>:sum or :mean")
                self.check(item, depth + 1)
        elif not _is_simple(kind, content):
            _refuse(
                self._where, f"{{{str(kind)[:MAX_TEXT]!r}: ...}} is not a valid argument, or refers to a later node"
            )


def _is_simple(kind: Any, content: Any) -> bool:
    if kind == "ellipsis":
        return content is True
    if not isinstance(content, str):
        return False
    if kind == "device":
        return (
            re.fullmatch(r"[a-z]{1,16}(:\d{1,4})?", content) is not None
        )  # any device is accepted: the server decides where the loss runs
    choices: Mapping[Any, Iterable[str]] = {
        "float": FLOATS,
        "dtype": allowed.DTYPES,
        "layout": ("strided",),
        "memory_format": ("contiguous_format", "preserve_format"),
    }
    return content in choices.get(kind, ())


def _check_output(node: CustomLossNode, depending: set[str]) -> None:
    where = "graph output"
    match node.args:
        case [{"tuple": [{"ref": loss}, {"dict": dict(metrics)}]}] if not node.kwargs:
            if loss not in depending:
                _refuse(where, "the loss does not depend on the logprobs, so there is nothing to train")
            for name, value in metrics.items():
                if not isinstance(value, Mapping) or "ref" not in value:
                    _refuse(where, f"metric {name!r} must be the result of a node")
        case _:
            _refuse(where, "must be (loss, metrics): a tuple of a node and a dict of nodes by name")


def _refuse(where: str, reason: str) -> NoReturn:
    raise InvalidInputError(f"{where}: {reason}", field=where)

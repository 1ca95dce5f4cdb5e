"""A sandbox for chat templates, which come from a server or the hub and are not trusted.

Jinja's sandbox keeps it away from Python. What it leaves open is how much a template computes: `'a' * 10**9`,
`'x' | center(10**9)`, nested loops, a string doubled thirty times. Here everything that creates a value is metered:

- operators, calls and filters, by wrapping them; what would be too large is refused before it is made;
- loops, slices and `~`, which Jinja compiles to plain Python, by rewriting the template's tree.

The limits are far above what a conversation needs, and far below what would do harm. Jinja2 is imported when it is
needed.
"""

from __future__ import annotations

import contextvars
import functools
import importlib
import re
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

from tinsmith.text.optional_packages import library

MAX_TEMPLATE_CHARACTERS = 256 * 1024
MAX_CHAT_CHARACTERS = 16 * 2**20
"""The longest output, and the longest intermediate string; no model reads that much."""
MAX_MADE_BYTES = 256 * 2**20
"""All strings that a template creates together, including those it discards."""
MAX_STEPS = 2_000_000
"""Loop iterations and calls."""
MAX_CPU_S = 20.0
MAX_NUMBER = 2**63
_ELEMENT_BYTES = 64
"""What an element of a list is counted as."""
_LONG_NUMBER = re.compile(r"\d{5}|\{[^{}]*\{")
"""In a format: a width above 9999, or one that is filled in."""


class Meter:
    """The resources that one rendering has used."""

    def __init__(self, error: type[Exception], clock: Callable[[], float] = time.thread_time) -> None:
        self._error = error
        self._clock = clock
        self._began = clock()
        self._steps = 0
        self._bytes = 0

    def step(self, made_bytes: int = 0) -> None:
        """Count one iteration or call, and its output."""
        self._steps += 1
        self._bytes += made_bytes
        if self._steps > MAX_STEPS:
            raise self._error(f"it takes more than {MAX_STEPS} steps")
        if self._bytes > MAX_MADE_BYTES:
            raise self._error(f"it creates more than {MAX_MADE_BYTES} bytes of text")
        if self._steps % 64 == 0 and self._clock() - self._began > MAX_CPU_S:
            raise self._error(f"it takes more than {MAX_CPU_S:g} s")

    def room(self, size: int) -> None:
        """Reject a value larger than any chat can be."""
        if size > MAX_CHAT_CHARACTERS:
            raise self._error(f"a part of it is longer than {MAX_CHAT_CHARACTERS} characters")

    def made(self, value: Any) -> Any:
        """Count a value that was just created."""
        if isinstance(value, (str, bytes)):
            self.step(sys.getsizeof(value))
        elif isinstance(value, (list, tuple, dict)):
            self.step(_ELEMENT_BYTES * len(value))
        elif isinstance(value, int) and abs(value) > MAX_NUMBER:
            raise self._error("a number is larger than 64 bits")
        else:
            self.step()
        return value

    def whole(self, value: Any) -> int:
        """Return the length of a value when written out; reject one that is too long, however small it is in memory."""
        size, waiting = 0, [value]
        while waiting:
            item = waiting.pop()
            size += len(item) if isinstance(item, str) else 2
            self.room(size)
            if isinstance(item, Mapping):
                waiting += [*item.keys(), *item.values()]
            elif isinstance(item, (list, tuple, set, frozenset)):
                self.room(size + len(item))
                waiting += item
        return size


METER: contextvars.ContextVar[Meter] = contextvars.ContextVar("meter of the template that is rendered")


def metered(error: type[Exception]) -> Meter:
    """Start counting for the next rendering of this thread."""
    meter = Meter(error)
    METER.set(meter)
    return meter


# What can be longer than all that it is made from: name, and how long the result can be.


def _product(value: Any, *factors: Any) -> int:
    sizes = [factor if isinstance(factor, int) else len(str(factor)) for factor in factors]
    return METER.get().whole(value) * max([1, *(abs(size) for size in sizes)])


def _wide(value: Any, width: Any = 0, *_: Any, **named: Any) -> int:
    return METER.get().whole(value) + int(named.get("width", width) or 0)


def _replaced(value: Any, old: Any = "", new: Any = "", *_: Any, **named: Any) -> int:
    text, old, new = str(value), str(named.get("old", old)), str(named.get("new", new))
    return len(text) + text.count(old) * len(new)


def _joined(value: Any, separator: Any = "", *_: Any, **named: Any) -> int:
    items = value if isinstance(value, (list, tuple, str, Mapping)) else ()
    return METER.get().whole(items) + len(items) * len(str(named.get("d", separator)))


def _joined_by(separator: Any, items: Any = (), *_: Any) -> int:
    return _joined(items, separator)


def _format(value: Any, *arguments: Any, **named: Any) -> int:
    if _LONG_NUMBER.search(str(value)) or "*" in str(value):
        METER.get().room(sys.maxsize)
    return METER.get().whole([value, *arguments, *named.values()])


def _indented(value: Any, *arguments: Any, **named: Any) -> int:
    return _product(value, *(item for item in (*arguments, *named.values()) if not isinstance(item, bool)))


def _split(value: Any, separator: Any = None, *_: Any, **named: Any) -> int:
    """Count a list of pieces of a string: each piece is an object, so the list is far larger than the string."""
    separator = named.get("sep", separator)
    pieces = value.count(separator) if separator else len(value) // 2
    return len(value) + pieces * 16


def _listed(value: Any, *_: Any) -> int:
    return len(value) * 16 if isinstance(value, str) else 0


def _written(value: Any, *_: Any, **options: Any) -> int:
    """As JSON or as Python writes it, with an indent or separators for each element."""
    lengths = [item if isinstance(item, int) else len(str(item)) for item in options.values()]
    return METER.get().whole(value) * max([2, *lengths])


def _summed(value: Any, attribute: Any = None, start: Any = 0) -> int:
    return 0 if isinstance(start, (int, float)) else sys.maxsize


def _refused(*_: Any, **__: Any) -> int:
    return sys.maxsize


_Size = Callable[..., int]
METHODS: Mapping[str, _Size] = {
    "center": _wide, "ljust": _wide, "rjust": _wide, "zfill": _wide, "expandtabs": _product, "replace": _replaced,
    "join": _joined_by, "format": _format, "format_map": _format, "translate": _refused, "split": _split,
    "rsplit": _split, "splitlines": _split,
}  # fmt: skip
"""Of texts."""
FILTERS: Mapping[str, _Size] = {
    "batch": _product, "center": _wide, "format": _format, "indent": _indented, "join": _joined, "list": _listed,
    "pprint": _written, "replace": _replaced, "slice": _indented, "string": _written, "sum": _summed,
    "tojson": _written, "urlize": _refused, "wordwrap": _indented, "xmlattr": _written,
}  # fmt: skip


def bounded_filter(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap a filter so that its output is counted, and it does not run if that would be too large."""
    size = FILTERS.get(name)
    skipped = 1 if getattr(function, "jinja_pass_arg", None) is not None else 0

    @functools.wraps(function)
    def run(*arguments: Any, **named: Any) -> Any:
        meter = METER.get()
        if size is not None:
            meter.room(size(*arguments[skipped:], **named))
        return meter.made(function(*arguments, **named))

    return run


def _counted(items: Iterable[Any], written: int) -> Iterator[Any]:
    meter = METER.get()
    for item in items:
        meter.step(written)
        yield item


def _cut(value: Any, start: Any, stop: Any, step: Any) -> Any:
    return METER.get().made(value[start:stop:step])


def _concatenated(values: list[Any]) -> str:
    meter = METER.get()
    meter.room(meter.whole(values))
    text: str = meter.made("".join(map(str, values)))
    return text


@functools.lru_cache(maxsize=1)
def sandbox() -> Any:
    """Create the environment of templates, without their variables."""
    library("jinja2", "a chat template")
    nodes: Any = importlib.import_module("jinja2.nodes")
    visitor: Any = importlib.import_module("jinja2.visitor")
    jinja: Any = importlib.import_module("jinja2.sandbox")

    def filtered(node: Any, name: str, *arguments: Any) -> Any:
        return nodes.Filter(node, name, list(arguments), [], None, None, lineno=getattr(node, "lineno", 1))

    class Metering(visitor.NodeTransformer):  # type: ignore[misc]
        """Rewrites what would otherwise run without being counted."""

        def visit_For(self, node: Any) -> Any:
            written = sum(len(text.data) for text in node.find_all(nodes.TemplateData))
            node = self.generic_visit(node)
            node.iter = filtered(node.iter, "tinsmith_counted", nodes.Const(written))
            return node

        def visit_Concat(self, node: Any) -> Any:
            node = self.generic_visit(node)
            return filtered(nodes.List(node.nodes, lineno=node.lineno), "tinsmith_concatenated")

        def visit_Getitem(self, node: Any) -> Any:
            node = self.generic_visit(node)
            if not isinstance(node.arg, nodes.Slice):
                return node
            ends = [end or nodes.Const(None) for end in (node.arg.start, node.arg.stop, node.arg.step)]
            return filtered(node.node, "tinsmith_cut", *ends)

    class Sandbox(jinja.ImmutableSandboxedEnvironment):  # type: ignore[misc]
        intercepted_binops = frozenset({"+", "-", "*", "/", "//", "%", "**"})

        def _parse(self, source: str, name: Any, filename: Any) -> Any:
            return Metering().visit(super()._parse(source, name, filename))

        def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
            meter = METER.get()
            if operator == "*":
                for items, count in ((left, right), (right, left)):
                    if hasattr(items, "__len__") and isinstance(count, int):
                        meter.room(len(items) * count)
            elif operator == "**":
                meter.room(0 if abs(right) <= 64 and abs(left) <= MAX_NUMBER else sys.maxsize)
            elif operator == "%" and isinstance(left, str):
                meter.room(_format(left, right))
            elif operator == "+" and hasattr(left, "__len__") and hasattr(right, "__len__"):
                meter.room(len(left) + len(right))
            return meter.made(super().call_binop(context, operator, left, right))

        def call(__self, __context: Any, __obj: Any, *args: Any, **kwargs: Any) -> Any:  # noqa: N805
            meter = METER.get()
            owner = getattr(getattr(__obj, "__wrapped__", __obj), "__self__", None)  # Jinja wraps `format`
            size = METHODS.get(getattr(__obj, "__name__", "")) if isinstance(owner, (str, bytes)) else None
            if size is not None:
                meter.room(size(owner, *args, **kwargs))
            return meter.made(super().call(__context, __obj, *args, **kwargs))

    def finalize(value: Any) -> Any:
        if not isinstance(value, str):
            METER.get().whole(value)
        return value

    environment = Sandbox(trim_blocks=True, lstrip_blocks=True, finalize=finalize)
    for name, function in list(environment.filters.items()):
        environment.filters[name] = bounded_filter(name, function)
    environment.filters |= {
        "tinsmith_counted": _counted, "tinsmith_cut": _cut, "tinsmith_concatenated": _concatenated
    }  # fmt: skip
    del environment.globals["lipsum"]
    return environment

"""Chat templates: a conversation as the text that a model reads.

Owns: which template is meant, and running it: in a sandbox, with what transformers gives templates, within a bound.
Does not know: tokens, or where templates come from. Jinja2 is imported when it is needed.
(Compared with transformers in tests/contract/test_tokenizers_contract.py.)
"""

from __future__ import annotations

import functools
import importlib
import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any

from tinsmith.client.libraries import library
from tinsmith.errors import InvalidInputError

MAX_CHAT_CHARACTERS = 16 * 2**20
"""Where rendering a chat template stops; no model reads that much."""


def check_objects(name: str, items: Sequence[Any]) -> None:
    for i, item in enumerate(items):
        if not isinstance(item, Mapping):
            kind = type(item).__name__
            raise InvalidInputError(f"{name}[{i}]: expected an object, got {kind}", field=f"{name}[{i}]")


def chosen_template(templates: Mapping[str, str], wanted: str | None, *, has_tools: bool) -> str:
    if wanted is not None:
        return templates.get(wanted, wanted)
    name = "tool_use" if has_tools and "tool_use" in templates else "default"
    if name not in templates:
        raise InvalidInputError("this tokenizer has no chat template; pass one as chat_template", field="chat_template")
    return templates[name]


def render(template: str, variables: Mapping[str, Any]) -> str:
    jinja2 = library("jinja2", "a chat template")
    pieces, size = [], 0
    try:
        for piece in _environment().from_string(template).generate(**variables):
            pieces.append(piece)
            size += len(piece)
            if size > MAX_CHAT_CHARACTERS:
                raise jinja2.TemplateError(f"its output is longer than {MAX_CHAT_CHARACTERS} characters")
    except (jinja2.TemplateError, OverflowError, TypeError) as error:
        raise InvalidInputError(f"chat template: {error}", field="chat_template") from error
    return "".join(pieces)


@functools.lru_cache(maxsize=1)
def _environment() -> Any:
    """Where templates run: sandboxed, and with what transformers gives them. Output is bounded, running time is not."""
    jinja2 = library("jinja2", "a chat template")
    sandbox: Any = importlib.import_module("jinja2.sandbox")

    class GenerationTag(importlib.import_module("jinja2.ext").Extension):  # type: ignore[misc]
        """Marks what the assistant said, for masks that are not made here."""

        tags = frozenset({"generation"})

        def parse(self, parser: Any) -> Any:
            line = next(parser.stream).lineno
            return jinja2.nodes.Scope(parser.parse_statements(("name:endgeneration",), drop_needle=True), lineno=line)

    class Environment(sandbox.ImmutableSandboxedEnvironment):  # type: ignore[misc]
        intercepted_binops = frozenset({"*"})

        def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
            for items, count in ((left, right), (right, left)):
                if hasattr(items, "__len__") and isinstance(count, int) and len(items) * count > MAX_CHAT_CHARACTERS:
                    raise sandbox.SecurityError(f"a product is longer than {MAX_CHAT_CHARACTERS} characters")
            return left * right

    def raise_exception(message: str) -> None:
        raise jinja2.TemplateError(message)

    def to_json(value: Any, ensure_ascii: bool = False, **options: Any) -> str:
        return json.dumps(value, ensure_ascii=ensure_ascii, **options)

    environment = Environment(
        trim_blocks=True, lstrip_blocks=True, extensions=[GenerationTag, "jinja2.ext.loopcontrols"]
    )
    environment.filters["tojson"] = to_json
    environment.globals["raise_exception"] = raise_exception
    environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
    return environment

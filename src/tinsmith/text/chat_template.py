"""Chat templates: a conversation as the text that a model reads.

Picks the template and renders it in `template_sandbox`, with the variables that transformers gives templates. Jinja2 is
imported when it is needed.
(Compared with transformers in tests/contract/test_tokenizers_contract.py.)
"""

from __future__ import annotations

import functools
import gc
import importlib
import json
import re
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any

from tinsmith.errors import InvalidInputError
from tinsmith.text.optional_packages import library
from tinsmith.text.template_sandbox import MAX_TEMPLATE_CHARACTERS, bounded_filter, metered, sandbox

_PADDED = re.compile(r"%\D?\d")
"""A width in a date's format: the C library would fill it up."""


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
    pieces: list[str] = []
    size = 0
    try:
        meter = metered(jinja2.TemplateError)
        for piece in _compiled(template).generate(**variables):
            pieces.append(piece)
            size += len(piece)
            meter.room(size)
        return "".join(pieces)
    except InvalidInputError:
        raise
    except (jinja2.TemplateError, ArithmeticError, LookupError, RecursionError, TypeError, ValueError) as error:
        reason = "it recurses too deeply" if isinstance(error, RecursionError) else str(error)
    # Outside of the handler, since a chained error would keep all that the template has made. Its context refers to
    # itself, so its memory is only freed by garbage collection.
    del pieces
    gc.collect()
    raise InvalidInputError(f"chat template: {reason}", field="chat_template")


@functools.lru_cache(maxsize=16)
def _compiled(template: str) -> Any:
    if len(template) > MAX_TEMPLATE_CHARACTERS:
        raise InvalidInputError(
            f"chat template: it has {len(template)} characters; the limit is {MAX_TEMPLATE_CHARACTERS}",
            field="chat_template",
        )
    try:
        return _environment().from_string(template)
    except (SyntaxError, MemoryError, RecursionError) as error:  # Python's words for nesting that is too deep
        raise InvalidInputError("chat template: it is nested too deeply", field="chat_template") from error


@functools.lru_cache(maxsize=1)
def _environment() -> Any:
    """Create the sandbox, with the variables that transformers gives templates."""
    jinja2 = library("jinja2", "a chat template")

    class GenerationTag(importlib.import_module("jinja2.ext").Extension):  # type: ignore[misc]
        """Accepts the tag that marks the assistant's turns for masks, which we do not create."""

        tags = frozenset({"generation"})

        def parse(self, parser: Any) -> Any:
            line = next(parser.stream).lineno
            return jinja2.nodes.Scope(parser.parse_statements(("name:endgeneration",), drop_needle=True), lineno=line)

    def raise_exception(message: str) -> None:
        raise jinja2.TemplateError(message)

    def to_json(value: Any, ensure_ascii: bool = False, **options: Any) -> str:
        return json.dumps(value, ensure_ascii=ensure_ascii, **options)

    def strftime_now(form: str) -> str:
        if len(form) > 200 or _PADDED.search(form):
            raise jinja2.TemplateError(f"strftime_now: {form[:40]!r} is not a valid date format")
        return datetime.now().strftime(form)

    environment = sandbox()
    environment.add_extension(GenerationTag)
    environment.add_extension("jinja2.ext.loopcontrols")
    environment.filters["tojson"] = bounded_filter("tojson", to_json)
    environment.globals |= {"raise_exception": raise_exception, "strftime_now": strftime_now}
    return environment

"""A conversation as the text that a model reads, through its own chat template, and how to read the answer.

What a model does with tools and thinking is a matter of its template: which marks it writes around calls, whether it
thinks, and which token ends a turn. All of that is taken from the template itself, not from a table of model names.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NoReturn, TypeAlias

import msgspec

from tinsmith.errors import InvalidInputError
from tinsmith.text.template_sandbox import MAX_TEMPLATE_CHARACTERS
from tinsmith.text.tokenizer import Tokenizer
from tinsmith.wire.messages import openai as wire
from tinsmith.wire.messages.sampling import OutputFormat

ToolForm: TypeAlias = Literal["none", "hermes", "llama", "mistral", "forced"]
Thinking: TypeAlias = Literal["none", "marked", "begun"]

TOOL_FORMS: tuple[tuple[str, ToolForm], ...] = (
    ("[TOOL_CALLS]", "mistral"),
    ("<tool_call>", "hermes"),
    ("<|python_tag|>", "llama"),
    ('{"name": function name, "parameters"', "llama"),
)
"""What a template says about calls, and the form in which its model then writes them."""
CALL_ENDS: Mapping[ToolForm, str] = {"hermes": "</tool_call>"}
"""Where a call ends, in forms that mark it. Another call would follow."""
OWN_VARIABLES = frozenset({"messages", "tools", "add_generation_prompt", "chat_template", "tokenize", "return_dict"})
"""Variables of a template that a client cannot set by chat_template_kwargs."""
PROBE = "\u2063probe\u2063"
"""An assistant's answer whose end shows which token ends a turn."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatPrompt:
    """A rendered conversation."""

    text: str
    turn_end: int | None
    """The special token that the template writes after an answer."""
    thinking: Thinking = "none"
    tool_form: ToolForm = "none"
    output_format: OutputFormat | None = None
    """The form of the whole answer. A model whose answer has one does not think: there is no room for it."""
    call_end: str | None = None
    """What ends an answer that may have one call only."""


def chat_prompt(request: wire.ChatRequest, tokenizer: Tokenizer, template_file: str | None) -> ChatPrompt:
    """Render a conversation; raise InvalidInputError if the template cannot."""
    template = _read(template_file) if template_file is not None else None
    source = template if template is not None else _own_template(tokenizer, has_tools=bool(request.tools))
    tools = _tools(request, source)
    options = dict(request.chat_template_kwargs or {})
    for name in sorted(OWN_VARIABLES & options.keys()):
        _refuse("chat_template_kwargs", f"{name} cannot be set there; send it as a parameter of its own")
    messages = [_plain(message, index) for index, message in enumerate(request.messages)]
    text = _rendered(tokenizer, template, messages, tools, options)
    form: ToolForm = _tool_form(source) if tools else "none"
    is_forced = tools is not None and request.tool_choice not in (None, "auto")
    output = _call_format(request, tools) if is_forced and tools is not None else _output_format(request)
    return ChatPrompt(
        text=text,
        turn_end=_turn_end(tokenizer, template),
        thinking="none" if output is not None else _thinking(source, text, tokenizer),
        tool_form="forced" if is_forced else form,
        output_format=output,
        call_end=CALL_ENDS.get(form) if request.parallel_tool_calls is False else None,
    )


@functools.lru_cache(maxsize=16)
def _read(path: str) -> str:
    try:
        with Path(path).open(encoding="utf-8") as file:
            return file.read(MAX_TEMPLATE_CHARACTERS + 1)
    except (OSError, ValueError) as error:
        raise InvalidInputError(
            f"chat template: the operator's file cannot be read ({type(error).__name__})", field="chat_template"
        ) from None


def _own_template(tokenizer: Tokenizer, *, has_tools: bool) -> str:
    try:
        return tokenizer.template_for(has_tools=has_tools)
    except InvalidInputError:
        _refuse(
            "messages", "this model has no chat template; start the server with --chat-template, or use completions"
        )


def _rendered(
    tokenizer: Tokenizer,
    template: str | None,
    messages: list[dict[str, Any]],
    tools: list[dict[str, Any]] | None,
    options: dict[str, Any],
) -> str:
    text: str = tokenizer.apply_chat_template(
        messages, tokenize=False, add_generation_prompt=True, tools=tools, chat_template=template, **options
    )
    return text


def _plain(message: wire.ChatMessage, index: int) -> dict[str, Any]:
    """Return a message as templates read it: text in one piece, and the arguments of calls as objects."""
    where = f"messages[{index}]"
    role = "system" if message.role == "developer" else message.role
    plain: dict[str, Any] = {"role": role, "content": _text(message.content, where)}
    for name in ("name", "reasoning_content", "tool_call_id"):
        if getattr(message, name) is not None:
            plain[name] = getattr(message, name)
    if message.tool_calls:
        plain["tool_calls"] = [_call(call, f"{where}.tool_calls[{i}]") for i, call in enumerate(message.tool_calls)]
    return plain


def _text(content: str | list[wire.ContentPart] | None, where: str) -> str:
    if content is None or isinstance(content, str):
        return content or ""
    for index, part in enumerate(content):
        if part.type not in ("text", "refusal"):
            _refuse(f"{where}.content[{index}]", f"is of type {part.type[:40]!r}; the models here read text only")
    return "\n".join(part.text or part.refusal or "" for part in content)


def _call(call: wire.ToolCall, where: str) -> dict[str, Any]:
    try:
        arguments = msgspec.json.decode(call.function.arguments or "{}")
    except (msgspec.DecodeError, RecursionError):
        arguments = None
    if not isinstance(arguments, dict):
        _refuse(f"{where}.function.arguments", "is not the JSON of an object")
    function = {"name": call.function.name, "arguments": arguments}
    return {"type": "function", "function": function} | ({"id": call.id} if call.id is not None else {})


def _tools(request: wire.ChatRequest, template: str) -> list[dict[str, Any]] | None:
    """Return the tools that the template shows to the model; None if there are none, or they must not be called."""
    choice = request.tool_choice
    if not request.tools:
        if choice not in (None, "none", "auto"):
            _refuse("tool_choice", "names a tool, but there are no tools")
        return None
    for index, tool in enumerate(request.tools):
        _name_of(tool, f"tools[{index}]")
    if choice == "none":
        return None
    if "tools" not in template:
        _refuse("tools", "the chat template of this model does not take tools; start the server with --chat-template")
    return list(request.tools)


def _name_of(tool: Any, where: str) -> str:
    function = tool.get("function") if isinstance(tool, dict) else None
    name = function.get("name") if isinstance(function, dict) else None
    if not isinstance(tool, dict) or tool.get("type") != "function" or not isinstance(name, str) or not name:
        _refuse(where, 'is not of the form {"type": "function", "function": {"name": ..., "parameters": ...}}')
    return name


def _tool_form(template: str) -> ToolForm:
    for mark, form in TOOL_FORMS:
        if mark in template:
            return form
    _refuse("tools", "calls in the form that this model's chat template teaches cannot be read by this server")


def _output_format(request: wire.ChatRequest) -> OutputFormat | None:
    wanted = request.response_format
    if wanted is None or wanted.type == "text":
        return None
    if wanted.type == "json_object":
        return OutputFormat(type="json_object")
    if wanted.json_schema is None or wanted.json_schema.schema is None:
        _refuse("response_format.json_schema", "is missing; send the schema")
    return _schema_format(wanted.json_schema.schema, "response_format.json_schema")


def _call_format(request: wire.ChatRequest, tools: list[dict[str, Any]]) -> OutputFormat:
    """Return the format of an answer that must be a call: the JSON of one, with the tool's own parameters."""
    wanted = request.tool_choice.function.name if isinstance(request.tool_choice, wire.NamedTool) else None
    functions = [tool["function"] for tool in tools if wanted in (None, tool["function"]["name"])]
    if not functions:
        _refuse("tool_choice", f"{wanted!r} is not among the tools")
    calls = [
        {
            "type": "object",
            "properties": {
                "name": {"const": function["name"]},
                "arguments": function.get("parameters") or {"type": "object"},
            },
            "required": ["name", "arguments"],
            "additionalProperties": False,
        }
        for function in functions
    ]
    compact = {"whitespace_flexible": False}  # a model could write spaces for ever instead of a call
    return _schema_format({"anyOf": calls, "x-guidance": compact}, "tools")


def _schema_format(schema: dict[str, Any], where: str) -> OutputFormat:
    try:
        return OutputFormat(type="json_schema", schema=json.dumps(schema))
    except InvalidInputError as error:
        _refuse(where, f"is too large: {error.message}")


def _thinking(template: str, text: str, tokenizer: Tokenizer) -> Thinking:
    if text.rstrip().endswith("<think>"):
        return "begun"
    is_known = "<think>" in template or tokenizer.has_token("<think>")
    return "marked" if is_known else "none"


@functools.lru_cache(maxsize=16)
def _turn_end(tokenizer: Tokenizer, template: str | None) -> int | None:
    """Return the special token that follows an answer in the template: a tuned base model ends its turns with it,
    although its end-of-sequence token is another one."""
    turns = [{"role": "user", "content": "?"}, {"role": "assistant", "content": PROBE}]
    try:
        text: str = tokenizer.apply_chat_template(turns, tokenize=False, chat_template=template)
    except InvalidInputError:
        return None
    rest = text.rpartition(PROBE)[2].lstrip()
    found = [token for token in tokenizer.special_texts() if rest.startswith(token)]
    return tokenizer.special_id(max(found, key=len)) if found else None


def _refuse(field: str, reason: str) -> NoReturn:
    raise InvalidInputError(f"{field}: {reason}", field=field)

"""From a body of an Anthropic client to a sample of the protocol: a conversation of blocks becomes one of messages, and
is then rendered, tokenized and checked like that of an OpenAI client (`chat_prompt`, `read_openai`).

Runs in a reader process, as those do. What is wrong is reported in the names that the client used.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, NoReturn

import msgspec

from tinsmith.errors import InvalidInputError
from tinsmith.server.bodies.chat_prompt import ChatPrompt, chat_prompt
from tinsmith.server.bodies.questions import CountQuestion, CountReading, PromptQuestion, PromptReading
from tinsmith.server.bodies.read_openai import (
    chat_reading,
    check_parameters,
    decoded,
    prompt_tokens,
    tokenizer_of,
)
from tinsmith.text.tokenizer import Tokenizer
from tinsmith.wire.messages import anthropic as wire
from tinsmith.wire.messages import openai as chat

ERROR_MARK = "Error: "
"""Chat templates do not know failed calls, so the text of a failure says it."""
NAMES = (
    ("response_format.json_schema", "output_config.format"),
    ("prompt", "messages"),
    ("stop", "stop_sequences"),
)
"""Fields of a chat request, and what clients of Anthropic call them."""


def read_messages(question: PromptQuestion, body: bytes) -> PromptReading:
    """Read a request: the sample that it asks for, and the form of its answer."""
    check_parameters(body, wire.MessagesRequest, wire.IGNORED, wire.REFUSED)
    request = decoded(body, wire.MessagesRequest)
    _check_edits(request)
    _check_thinking(request)
    tokenizer = tokenizer_of(question.card)
    made = msgspec.structs.replace(
        _conversation(request),
        max_tokens=request.max_tokens,
        stop=request.stop_sequences,
        temperature=request.temperature,
        top_p=request.top_p,
        top_k=request.top_k,
        stream=request.stream,
    )
    try:
        prompt = _prompt(request, made, tokenizer, question.chat_template)
        return chat_reading(question, made, tokenizer, prompt)
    except InvalidInputError as error:
        raise _renamed(error) from None


def read_count(question: CountQuestion, body: bytes) -> CountReading:
    """Count the tokens of a conversation, which may be more than fit into the context."""
    check_parameters(body, wire.CountTokensRequest, wire.IGNORED, wire.REFUSED)
    request = decoded(body, wire.CountTokensRequest)
    _check_edits(request)
    tokenizer = tokenizer_of(question.card)
    try:
        prompt = _prompt(request, _conversation(request), tokenizer, question.chat_template)
        return CountReading(length=len(prompt_tokens(prompt.text, question.card, tokenizer, is_whole=True)))
    except InvalidInputError as error:
        raise _renamed(error) from None


def _prompt(
    request: wire.CountTokensRequest, made: chat.ChatRequest, tokenizer: Tokenizer, template_file: str | None
) -> ChatPrompt:
    """Render a conversation, and the beginning of the answer if its last message is the assistant's."""
    prefill = _prefill(request.messages)
    prompt = chat_prompt(made, tokenizer, template_file)
    thinking = request.thinking.type if request.thinking is not None else None
    if thinking == "enabled" and prompt.output_format is not None:
        _refuse("thinking", "cannot be enabled while tool_choice or output_config.format fixes the form of the answer")
    if thinking == "enabled" and prompt.thinking == "none":
        _refuse("thinking", "this model does not think; leave it out")
    if thinking == "disabled" and prompt.thinking == "begun":
        _refuse("thinking", "this model always thinks, and its chat template cannot turn that off; leave it out")
    if prefill and prompt.thinking == "begun":
        _refuse("messages", "the answer begins with thinking, so the last message cannot be the assistant's")
    if prefill and prompt.output_format is not None:
        _refuse("messages", "the form of the answer is fixed, so the last message cannot be the assistant's")
    return replace(prompt, text=prompt.text + prefill) if prefill else prompt


def _check_thinking(request: wire.MessagesRequest) -> None:
    budget = request.thinking.budget_tokens if request.thinking is not None else None
    if budget is not None and budget >= request.max_tokens:
        _refuse("thinking.budget_tokens", f"{budget} is not less than max_tokens, {request.max_tokens}")


def _check_edits(request: wire.CountTokensRequest) -> None:
    """Refuse to edit the conversation. Agents ask to keep all thoughts, which is what happens here."""
    asked = request.context_management
    for index, edit in enumerate((asked.edits if asked is not None else None) or ()):
        kept = edit.keep.type if isinstance(edit.keep, wire.KeptThoughts) else edit.keep
        if (edit.type, kept) != (wire.KEEPS_THOUGHTS, "all"):
            _refuse(
                f"context_management.edits[{index}]",
                f"{edit.type[:40]!r} would remove parts of the conversation, which this server does not; leave out of "
                "messages what the model shall not read",
            )


def _renamed(error: InvalidInputError) -> InvalidInputError:
    """Return an error about a chat request in the names that Anthropic's clients use."""
    if error.field is None:
        return error
    for ours, theirs in NAMES:
        if error.field.startswith(ours) and error.message.startswith(ours):
            names = (theirs + text.removeprefix(ours) for text in (error.message, error.field))
            return InvalidInputError(next(names), field=next(names))
    return error


# The conversation


@dataclass(slots=True)
class _Turn:
    """A message that is put together from blocks."""

    role: Literal["system", "user", "assistant", "tool"]
    texts: list[str] = field(default_factory=list)
    thoughts: list[str] = field(default_factory=list)
    calls: list[chat.ToolCall] = field(default_factory=list)
    call_id: str | None = None
    name: str | None = None
    """Of the tool that was called."""

    def message(self) -> chat.ChatMessage:
        return chat.ChatMessage(
            role=self.role,
            content=[chat.ContentPart(type="text", text=text) for text in self.texts],
            reasoning_content="\n".join(self.thoughts) or None,
            tool_calls=self.calls or None,
            tool_call_id=self.call_id,
            name=self.name,
        )


class _Turns:
    """Takes the messages of a conversation, and combines consecutive ones of one role."""

    def __init__(self) -> None:
        self.turns: list[_Turn] = []
        self._tools: dict[str, str] = {}
        """The names of the tools that were called, by the ids of the calls."""

    def add(self, role: Literal["system", "user", "assistant"], content: wire.Content, where: str) -> None:
        for block, place in _blocks(content, where):
            kinds = {"system": ("text",), "user": USER_BLOCKS, "assistant": ASSISTANT_BLOCKS}[role]
            if block.type not in kinds:
                _refuse(place, _unsupported(block.type, f"in a message of the {role}"))
            if block.type == "text":
                self._turn(role).texts.append(_given(block.text, f"{place}.text"))
            elif block.type == "thinking":
                self._turn(role).thoughts.append(_given(block.thinking, f"{place}.thinking"))
            elif block.type == "tool_use":
                self._turn(role).calls.append(self._call(block, place))
            else:
                self._result(block, place)

    def _turn(self, role: Literal["system", "user", "assistant"]) -> _Turn:
        if not self.turns or self.turns[-1].role != role:
            self.turns.append(_Turn(role))
        return self.turns[-1]

    def _call(self, block: wire.ContentBlock, place: str) -> chat.ToolCall:
        name = _given(block.name, f"{place}.name")
        call_id = _given(block.id, f"{place}.id")
        self._tools[call_id] = name
        arguments = msgspec.json.encode(block.input or {}).decode()
        return chat.ToolCall(id=call_id, function=chat.CalledFunction(name=name, arguments=arguments))

    def _result(self, block: wire.ContentBlock, place: str) -> None:
        call_id = _given(block.tool_use_id, f"{place}.tool_use_id")
        if call_id not in self._tools:
            _refuse(f"{place}.tool_use_id", f"{call_id[:80]!r} is not the id of a tool_use before it")
        texts = [block.content] if isinstance(block.content, str) else []
        for index, part in enumerate(() if isinstance(block.content, str) else block.content or ()):
            where = f"{place}.content[{index}]"
            if part.type != "text":
                _refuse(where, _unsupported(part.type, "in a result"))
            texts.append(_given(part.text, f"{where}.text"))
        text = ERROR_MARK * bool(block.is_error) + "\n".join(texts)
        self.turns.append(_Turn("tool", texts=[text], call_id=call_id, name=self._tools[call_id]))


USER_BLOCKS = ("text", "tool_result")
ASSISTANT_BLOCKS = ("text", "thinking", "tool_use")
TEXT_ONLY = "because the models here read text only"
WHY = {
    "document": TEXT_ONLY,
    "image": TEXT_ONLY,
    "redacted_thinking": "because only Anthropic can read it; leave it out",
    "search_result": "here; send it as text",
}
"""Why blocks are refused, if not because of their place."""


def _unsupported(kind: str, place: str) -> str:
    return f"a block of type {kind[:40]!r} is not supported {WHY.get(kind, place)}"


def _blocks(content: wire.Content, where: str) -> Iterator[tuple[wire.ContentBlock, str]]:
    """Yield blocks, and what to call them in errors."""
    if isinstance(content, str):
        yield wire.ContentBlock(type="text", text=content), where
        return
    if not content:
        _refuse(where, "is empty; send a string, or blocks")
    for index, block in enumerate(content):
        yield block, f"{where}[{index}]"


def _conversation(request: wire.CountTokensRequest) -> chat.ChatRequest:
    """Return a conversation as an OpenAI client would send it, without the beginning of the answer."""
    turns = _Turns()
    if request.system is not None:
        turns.add("system", request.system, "system")
    for index, message in enumerate(request.messages[: _finished(request.messages)]):
        turns.add(message.role, message.content, f"messages[{index}].content")
    choice, wanted = request.tool_choice, request.output_config
    if wanted is not None and wanted.effort is not None:
        _refuse("output_config.effort", "this model has no levels of effort; leave it out")
    output = wanted.format if wanted is not None else None
    return chat.ChatRequest(
        model=request.model,
        messages=[turn.message() for turn in turns.turns],
        tools=_tools(request) or None,
        tool_choice=_tool_choice(choice) if choice is not None else None,
        parallel_tool_calls=False if choice is not None and choice.disable_parallel_tool_use else None,
        response_format=None
        if output is None
        else chat.ResponseFormat(type="json_schema", json_schema=chat.JsonSchema(schema=output.schema)),
        chat_template_kwargs=None
        if request.thinking is None
        else {"enable_thinking": request.thinking.type != "disabled"},
    )


def _finished(messages: Sequence[wire.MessageParam]) -> int:
    """Return how many messages come before the beginning of the answer."""
    count = len(messages)
    while count and messages[count - 1].role == "assistant":
        count -= 1
    return count


def _prefill(messages: Sequence[wire.MessageParam]) -> str:
    """Return the beginning of the answer, which the last message may be."""
    texts, where = [], ""
    for index in range(_finished(messages), len(messages)):
        where = f"messages[{index}].content"
        for block, place in _blocks(messages[index].content, where):
            if block.type != "text":
                _refuse(place, f"a {block.type[:40]!r} block cannot be continued; end with a message of the user")
            texts.append(_given(block.text, f"{place}.text"))
    text = "\n".join(texts)
    if text != text.rstrip():
        _refuse(where, "ends with white space, after which a model continues badly; remove it")
    return text


def _tools(request: wire.CountTokensRequest) -> list[dict[str, Any]]:
    is_forced = request.tool_choice is not None and request.tool_choice.type in ("any", "tool")
    tools = []
    for index, tool in enumerate(request.tools or ()):
        where = f"tools[{index}]"
        if tool.type not in (None, "custom"):
            _refuse(where, f"{tool.type[:40]!r} is Anthropic's own tool; define one with an input_schema, and run it")
        if tool.input_schema is None:
            _refuse(f"{where}.input_schema", "is missing; send the JSON schema of the tool's input")
        if tool.strict and not is_forced:
            _refuse(f"{where}.strict", "can only be enforced with a tool_choice of type any or tool")
        function: dict[str, Any] = {"name": tool.name, "parameters": tool.input_schema}
        if tool.description is not None:
            function["description"] = tool.description
        tools.append({"type": "function", "function": function})
    return tools


def _tool_choice(choice: wire.ToolChoice) -> Literal["none", "auto", "required"] | chat.NamedTool:
    if choice.type == "tool":
        return chat.NamedTool(function=chat.NamedFunction(name=_given(choice.name, "tool_choice.name")))
    names: dict[str, Literal["none", "auto", "required"]] = {"none": "none", "auto": "auto", "any": "required"}
    return names[choice.type]


def _given(value: str | None, where: str) -> str:
    if value is None:
        _refuse(where, "is missing")
    return value


def _refuse(field: str, reason: str) -> NoReturn:
    raise InvalidInputError(f"{field}: {reason}", field=field)

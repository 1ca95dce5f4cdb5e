"""The bodies of the Anthropic-compatible endpoints, as far as we honour them.

Every string, list and map has a bound, as in the protocol's own messages. A parameter that is not a field here is
ignored if `IGNORED` lists it, because it changes nothing about the answer, and refused otherwise; `REFUSED` says what
to do instead of those that people are likely to send.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Literal, TypeAlias

import msgspec

from tinsmith.wire.limits import MAX_STOPS, Int64, JsonObject, Name, ShortText, StopText
from tinsmith.wire.message import Count
from tinsmith.wire.messages.openai import MAX_MESSAGES, MAX_PARTS, Text

MAX_TOOLS = 1024
MAX_EDITS = 16
KEEPS_THOUGHTS = "clear_thinking_20251015"
"""The edit that removes thoughts, and with `keep: "all"` none."""

IGNORED = frozenset(
    {
        "cache_control",
        "diagnostics",
        "metadata",
        "service_tier",
        "speed",
        "user_profile_id",
    }
)
"""Parameters that concern Anthropic's own service, not the answer. Prompts are cached without being asked to."""
REFUSED: Mapping[str, str] = {
    "container": "this server runs no code",
    "fallbacks": "send the request again with another model",
    "inference_geo": "the model runs where this server runs",
    "mcp_servers": "call them in your program, and send what they offer as tools",
    "output_format": "send output_config with a format",
    "prompt": "send messages; this server has no /v1/complete",
}
"""What to do instead of sending a parameter."""


class ContentBlock(msgspec.Struct, frozen=True, kw_only=True):
    """A part of a message or of a tool's result. Which fields it has depends on its type."""

    type: ShortText
    text: Text | None = None
    thinking: Text | None = None
    id: ShortText | None = None
    """Of a tool_use."""
    name: Name | None = None
    input: JsonObject | None = None
    tool_use_id: ShortText | None = None
    """The call that a tool_result answers."""
    content: Text | Annotated[list[ResultBlock], msgspec.Meta(max_length=MAX_PARTS)] | None = None
    is_error: bool | None = None


class ResultBlock(msgspec.Struct, frozen=True, kw_only=True):
    """A part of a tool's result; only text is read."""

    type: ShortText
    text: Text | None = None


Content: TypeAlias = Text | Annotated[list[ContentBlock], msgspec.Meta(max_length=MAX_PARTS)]


class MessageParam(msgspec.Struct, frozen=True, kw_only=True):
    """A turn of the conversation."""

    role: Literal["user", "assistant", "system"]
    content: Content


class ToolParam(msgspec.Struct, frozen=True, kw_only=True):
    """A tool that the model may call."""

    name: Name
    type: ShortText | None = None
    """`custom`; others are tools that Anthropic runs or knows."""
    description: Text | None = None
    input_schema: JsonObject | None = None
    strict: bool | None = None


class ToolChoice(msgspec.Struct, frozen=True, kw_only=True):
    type: Literal["auto", "any", "tool", "none"]
    name: Name | None = None
    disable_parallel_tool_use: bool | None = None


class ThinkingConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Whether the model thinks before it answers."""

    type: Literal["enabled", "disabled", "adaptive"]
    budget_tokens: Count | None = None
    display: Literal["summarized"] | None = None


class ContextEdit(msgspec.Struct, frozen=True, kw_only=True):
    """What shall be removed from the conversation before the model reads it; honoured if that is nothing."""

    type: ShortText
    keep: ShortText | KeptThoughts | None = None


class KeptThoughts(msgspec.Struct, frozen=True, kw_only=True):
    """How many turns keep their thoughts, if it is not said as a string."""

    type: ShortText


class ContextManagement(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    edits: Annotated[list[ContextEdit], msgspec.Meta(max_length=MAX_EDITS)] | None = None


class JsonOutput(msgspec.Struct, frozen=True, kw_only=True):
    type: Literal["json_schema"]
    schema: JsonObject


class OutputConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What the answer must be."""

    format: JsonOutput | None = None
    effort: ShortText | None = None
    """Refused: the models here have no levels of effort."""


class CountTokensRequest(msgspec.Struct, frozen=True, kw_only=True):
    """POST /v1/messages/count_tokens: how many tokens a conversation has."""

    model: Name
    messages: Annotated[list[MessageParam], msgspec.Meta(min_length=1, max_length=MAX_MESSAGES)]
    system: Content | None = None
    tools: Annotated[list[ToolParam], msgspec.Meta(max_length=MAX_TOOLS)] | None = None
    tool_choice: ToolChoice | None = None
    thinking: ThinkingConfig | None = None
    output_config: OutputConfig | None = None
    context_management: ContextManagement | None = None


class MessagesRequest(CountTokensRequest, frozen=True, kw_only=True):
    """POST /v1/messages: the next turn of a conversation."""

    max_tokens: Annotated[int, msgspec.Meta(ge=1, le=2**31 - 1)]
    stop_sequences: Annotated[list[StopText], msgspec.Meta(max_length=MAX_STOPS)] | None = None
    temperature: Annotated[float, msgspec.Meta(ge=0, le=1)] | None = None
    top_p: float | None = None
    top_k: Int64 | None = None
    stream: bool | None = None


class TokenCount(msgspec.Struct, frozen=True, kw_only=True):
    """The tokens that the model would read."""

    input_tokens: int

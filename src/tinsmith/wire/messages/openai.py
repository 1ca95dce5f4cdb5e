"""The bodies of the OpenAI-compatible endpoints, as far as we honour them.

Every string, list and map has a bound, as in the protocol's own messages. A parameter that is not a field here is
ignored if `IGNORED` lists it, because it changes nothing about the answer, and refused otherwise; `REFUSED` says what
to do instead of those that people are likely to send.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Literal, TypeAlias

import msgspec

from tinsmith.wire.limits import MAX_STOPS, Int64, JsonList, JsonObject, Name, ShortText, StopText
from tinsmith.wire.message import Count

MAX_PROMPTS = 256
"""Prompts of one request for completions."""
MAX_MESSAGES = 8192
MAX_PARTS = 1024
MAX_TEXT = 16 * 2**20
MAX_TOKENS = 4 * 2**20
MAX_TOOL_CALLS = 128
MAX_BIASES = 1024
MAX_TOP_LOGPROBS = 20
MAX_CHOICES = 1024
"""Choices of one request, over all of its prompts."""
MAX_ECHOED = 2**20
"""Tokens of prompts in one answer, each as often as it has choices."""
MAX_SCORES = 2**18
"""Logprobs in one answer, with those of the likely tokens: each is an object in JSON, which takes hundreds of bytes."""

Text: TypeAlias = Annotated[str, msgspec.Meta(max_length=MAX_TEXT)]
Tokens: TypeAlias = Annotated[list[Count], msgspec.Meta(max_length=MAX_TOKENS)]
Prompt: TypeAlias = Text | Annotated[list[Text | Count | Tokens], msgspec.Meta(max_length=MAX_TOKENS)]
"""A text, token ids, or a list of either."""
Stop: TypeAlias = StopText | Annotated[list[StopText], msgspec.Meta(max_length=MAX_STOPS)] | None
TopLogprobs: TypeAlias = Annotated[int, msgspec.Meta(ge=0, le=MAX_TOP_LOGPROBS)]
Logits: TypeAlias = Annotated[dict[ShortText, float], msgspec.Meta(max_length=MAX_BIASES)]

IGNORED = frozenset(
    {
        "metadata",
        "prompt_cache_key",
        "prompt_cache_options",
        "prompt_cache_retention",
        "safety_identifier",
        "service_tier",
        "store",
        "user",
    }
)
"""Parameters that concern OpenAI's own service, not the answer."""
REFUSED: Mapping[str, str] = {
    "audio": "the models here read and write text",
    "best_of": "sample n completions with logprobs, and choose among them",
    "function_call": "send tool_choice",
    "functions": "send tools",
    "guided_choice": "send response_format with a json_schema",
    "guided_grammar": "send response_format with a json_schema",
    "guided_json": "send response_format with a json_schema",
    "guided_regex": "send response_format with a json_schema",
    "moderation": "moderate the text before you send it",
    "prediction": "leave it out; the answer is the same without it",
    "reasoning_effort": "send chat_template_kwargs with what the model's template reads, such as enable_thinking",
    "suffix": "put what follows into the prompt, in the form that the model was trained on",
    "verbosity": "say in a message how long the answer shall be",
    "web_search_options": "this server does not search the web",
}
"""What to do instead of sending a parameter."""


class StreamOptions(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    include_usage: bool | None = None
    """Whether the last chunk has the usage of the whole request."""
    include_obfuscation: bool | None = None
    """OpenAI pads chunks so that their size tells less; there is no padding here."""


class Sampled(msgspec.Struct, frozen=True, kw_only=True):
    """What both kinds of request can ask of the sampler."""

    model: Name
    max_tokens: Count | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: Int64 | None = None
    min_p: float | None = None
    frequency_penalty: float | None = None
    presence_penalty: float | None = None
    repetition_penalty: float | None = None
    logit_bias: Logits | None = None
    n: Count | None = None
    seed: Int64 | None = None
    stop: Stop = None
    stop_token_ids: Annotated[list[Count], msgspec.Meta(max_length=MAX_STOPS)] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None


class CompletionRequest(Sampled, frozen=True, kw_only=True):
    """POST /completions: continue a text."""

    prompt: Prompt
    echo: bool | None = None
    logprobs: TopLogprobs | None = None


class ContentPart(msgspec.Struct, frozen=True, kw_only=True):
    """A part of a message; only text is read."""

    type: ShortText
    text: Text | None = None
    refusal: Text | None = None


class CalledFunction(msgspec.Struct, frozen=True, kw_only=True):
    name: Name
    arguments: Text
    """JSON."""


class ToolCall(msgspec.Struct, frozen=True, kw_only=True):
    """A call that the model made in an earlier turn."""

    function: CalledFunction
    id: ShortText | None = None
    type: Literal["function"] = "function"


class ChatMessage(msgspec.Struct, frozen=True, kw_only=True):
    """A turn of the conversation."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: Text | Annotated[list[ContentPart], msgspec.Meta(max_length=MAX_PARTS)] | None = None
    name: ShortText | None = None
    refusal: Text | None = None
    reasoning_content: Text | None = None
    tool_calls: Annotated[list[ToolCall], msgspec.Meta(max_length=MAX_TOOL_CALLS)] | None = None
    tool_call_id: ShortText | None = None


class NamedFunction(msgspec.Struct, frozen=True, kw_only=True):
    name: Name


class NamedTool(msgspec.Struct, frozen=True, kw_only=True):
    """`tool_choice`: the tool that must be called."""

    function: NamedFunction
    type: Literal["function"] = "function"


class JsonSchema(msgspec.Struct, frozen=True, kw_only=True):
    name: ShortText = ""
    description: Text | None = None
    schema: JsonObject | None = None
    strict: bool | None = None


class ResponseFormat(msgspec.Struct, frozen=True, kw_only=True):
    """What the answer must be."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None


class ChatRequest(Sampled, frozen=True, kw_only=True):
    """POST /chat/completions: the next turn of a conversation."""

    messages: Annotated[list[ChatMessage], msgspec.Meta(min_length=1, max_length=MAX_MESSAGES)]
    max_completion_tokens: Count | None = None
    logprobs: bool | None = None
    top_logprobs: TopLogprobs | None = None
    tools: JsonList | None = None
    tool_choice: Literal["none", "auto", "required"] | NamedTool | None = None
    parallel_tool_calls: bool | None = None
    response_format: ResponseFormat | None = None
    modalities: Annotated[list[ShortText], msgspec.Meta(max_length=8)] | None = None
    chat_template_kwargs: JsonObject | None = None
    """Further variables of the chat template, such as enable_thinking."""


class EmbeddingRequest(msgspec.Struct, frozen=True, kw_only=True):
    """POST /embeddings, which is refused."""

    model: Name = ""


class ListedModel(msgspec.Struct, frozen=True, kw_only=True):
    """A model that the caller can sample: a base model, or a checkpoint."""

    id: str
    created: int
    owned_by: str
    object: Literal["model"] = "model"
    root: str | msgspec.UnsetType = msgspec.UNSET
    """What OpenAI does not have: the base model of a checkpoint, or what an alias stands for."""


class ModelList(msgspec.Struct, frozen=True, kw_only=True):
    data: list[ListedModel]
    object: Literal["list"] = "list"

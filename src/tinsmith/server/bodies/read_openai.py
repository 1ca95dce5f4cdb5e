"""From a body of an OpenAI client to samples of the protocol: decoded, checked, rendered and tokenized.

Runs in a reader process, because rendering a conversation and tokenizing it take as long as a tenant wants. What comes
out are bodies of the protocol's own samples; everything after this is the same for all clients.
"""

from __future__ import annotations

import functools
from array import array
from collections.abc import Mapping, Set
from pathlib import Path
from typing import Any, NoReturn, TypeVar

import msgspec
import numpy as np

from tinsmith.engine.protocol import ModelCard
from tinsmith.errors import InvalidInputError, LimitExceededError, WireError
from tinsmith.server.bodies.chat_prompt import ChatPrompt, chat_prompt
from tinsmith.server.bodies.questions import (
    HeadReading,
    PromptQuestion,
    PromptReading,
    PromptSample,
    SampleReading,
    VocabularyReading,
)
from tinsmith.text.token_bytes import read_token_bytes
from tinsmith.text.tokenizer import Tokenizer, load_tokenizer
from tinsmith.wire.codecs import json_codec
from tinsmith.wire.limits import Name
from tinsmith.wire.message import NOT_GIVEN
from tinsmith.wire.messages import openai as wire
from tinsmith.wire.messages.sampling import OutputFormat, SampleRequest, SamplingParams
from tinsmith.wire.rules.grammar_rules import check_grammar
from tinsmith.wire.rules.sample_rules import check_sample
from tinsmith.wire.values.inputs import ModelInput

DEFAULT_COMPLETION_TOKENS = 16
"""OpenAI's default for completions. A chat's answer may be as long as the context."""
MAX_TEXT_BYTES = 2**20
"""Text of one prompt. Tokenizing the worst of that takes three seconds and hundreds of megabytes in a process that
others wait for; a longer prompt can be sent as token ids."""
NAMES = (
    ("topk_sample_logprobs", "logprobs"),
    ("topk_prompt_logprobs", "logprobs"),
    ("prompt.chunks[0].tokens", "prompt"),
    ("sampling_params.output_format", "response_format"),
    ("sampling_params.", ""),
    ("num_samples", "n"),
)
"""Fields of the protocol, and what clients of OpenAI call them."""

T = TypeVar("T")


class _Head(msgspec.Struct):
    model: Name


def read_head(body: bytes) -> HeadReading:
    """Read which model a request names."""
    return HeadReading(model=decoded(body, _Head).model)


def read_prompts(question: PromptQuestion, body: bytes) -> PromptReading:
    """Read a request: the samples that it asks for, and the form of its answer."""
    kind: type[wire.CompletionRequest | wire.ChatRequest] = (
        wire.CompletionRequest if question.kind == "completions" else wire.ChatRequest
    )
    check_parameters(body, kind, wire.IGNORED, wire.REFUSED)
    request = decoded(body, kind)
    tokenizer = tokenizer_of(question.card)
    if isinstance(request, wire.CompletionRequest):
        return _completions(question, request, tokenizer)
    prompt = chat_prompt(request, tokenizer, question.chat_template)
    return chat_reading(question, request, tokenizer, prompt)


def _completions(question: PromptQuestion, request: wire.CompletionRequest, tokenizer: Tokenizer) -> PromptReading:
    if request.echo and request.stream and request.logprobs is not None:
        _refuse("logprobs", "a stream cannot echo the prompt's logprobs; leave out stream, echo or logprobs")
    prompts = [prompt_tokens(prompt, question.card, tokenizer) for prompt in _prompts(request.prompt)]
    most = request.max_tokens if request.max_tokens is not None else DEFAULT_COMPLETION_TOKENS
    scores = request.echo and request.logprobs is not None
    draws = {
        "topk_sample_logprobs": request.logprobs or 0,
        "topk_prompt_logprobs": (request.logprobs or 0) if scores else 0,
        "prompt_logprobs": True if scores else NOT_GIVEN,
    }
    params = _params(request, most, tokenizer, None)
    scored = sum(most + (len(tokens) if scores else 0) for tokens in prompts) * _count(request)
    _check_size(request, len(prompts), request.logprobs, scored)
    if request.echo:
        _check_echo(sum(map(len, prompts)), _count(request))
    return PromptReading(
        samples=[
            _sample(question, request, tokens, params, draws, f"prompt[{index}]" if len(prompts) > 1 else "")
            for index, tokens in enumerate(prompts)
        ],
        n=_count(request),
        is_stream=bool(request.stream),
        has_usage=_has_usage(request),
        echo=bool(request.echo),
        logprobs=request.logprobs,
        stops=_stops(request),
    )


def chat_reading(
    question: PromptQuestion, request: wire.ChatRequest, tokenizer: Tokenizer, prompt: ChatPrompt
) -> PromptReading:
    """Read a conversation that was rendered: the sample that continues it."""
    if request.max_tokens is not None and request.max_completion_tokens is not None:
        _refuse("max_completion_tokens", "is the same as max_tokens; send one of them")
    if request.modalities is not None and request.modalities != ["text"]:
        _refuse("modalities", f"{request.modalities} is not allowed; the models here write text")
    if request.top_logprobs is not None and not request.logprobs:
        _refuse("top_logprobs", "is set but logprobs is not; set logprobs to true")
    most = request.max_tokens if request.max_tokens is not None else request.max_completion_tokens
    draws = {"topk_sample_logprobs": request.top_logprobs or 0}
    params = _params(request, most, tokenizer, prompt)
    tokens = prompt_tokens(prompt.text, question.card, tokenizer, is_whole=True)
    likely = (request.top_logprobs or 0) if request.logprobs else None
    room = max(question.card.max_context_length - len(tokens), 0)
    _check_size(request, 1, likely, (room if most is None else most) * _count(request))
    return PromptReading(
        samples=[_sample(question, request, tokens, params, draws, "")],
        n=_count(request),
        is_stream=bool(request.stream),
        has_usage=_has_usage(request),
        logprobs=likely,
        stops=_stops(request),
        thinking=prompt.thinking,
        tool_form=prompt.tool_form,
        is_one_call=request.parallel_tool_calls is False,
    )


def _prompts(prompt: Any) -> list[str | list[int]]:
    """Return the prompts of a request; a list of numbers is one prompt."""
    if isinstance(prompt, str):
        return [prompt]
    kinds = {type(item) for item in prompt}
    if len(kinds) > 1:
        _refuse("prompt", "a list must hold either texts, token ids, or lists of token ids")
    if not kinds:
        _refuse("prompt", "is empty; send a text, or token ids")
    if kinds == {int}:
        return [prompt]
    if len(prompt) > wire.MAX_PROMPTS:
        _refuse("prompt", f"has {len(prompt)} prompts; at most {wire.MAX_PROMPTS} are allowed")
    listed: list[str | list[int]] = prompt
    return listed


def prompt_tokens(prompt: str | list[int], card: ModelCard, tokenizer: Tokenizer, is_whole: bool = False) -> list[int]:
    """Return the tokens of a prompt; `is_whole` if it has its special tokens already, as chat templates write them."""
    if not isinstance(prompt, str):
        return prompt
    text = prompt.encode(errors="replace")
    assert card.tokenizer_directory is not None
    most = min(card.max_context_length * _longest(card.tokenizer_directory), MAX_TEXT_BYTES)
    if len(text) > most:  # before tokenizing, which takes its time
        advice = "shorten the conversation" if is_whole else "send token ids"
        _refuse("prompt", f"has {len(text)} bytes; at most {most} are tokenized for this model, so {advice}")
    return tokenizer.encode(text.decode(), add_special_tokens=not is_whole)


def _params(
    request: wire.Sampled, max_tokens: int | None, tokenizer: Tokenizer, prompt: ChatPrompt | None
) -> SamplingParams:
    stops = _stops(request) + ([prompt.call_end] if prompt is not None and prompt.call_end is not None else [])
    texts = [stop for stop in stops if tokenizer.special_id(stop) is None]
    ends = [found for stop in stops if (found := tokenizer.special_id(stop)) is not None]
    ends += request.stop_token_ids or []
    output: OutputFormat | None = None
    if prompt is not None:
        ends += [prompt.turn_end] if prompt.turn_end is not None else []
        output = prompt.output_format
    ends = list(dict.fromkeys(ends))
    given: dict[str, Any] = {
        "max_tokens": max_tokens,
        "seed": request.seed,
        "stop": texts or ends or None,
        "temperature": request.temperature,
        "top_p": request.top_p,
        "top_k": None if request.top_k == 0 else request.top_k,
        "min_p": request.min_p,
        "frequency_penalty": request.frequency_penalty,
        "presence_penalty": request.presence_penalty,
        "repetition_penalty": request.repetition_penalty,
        "logit_bias": _biases(request.logit_bias),
        "stop_token_ids": ends if texts and ends else None,
        "output_format": output,
    }
    return SamplingParams(**{name: value for name, value in given.items() if value is not None})


def _biases(biases: dict[str, float] | None) -> dict[int, float] | None:
    for token in biases or ():
        if not (token.isascii() and token.isdigit() and len(token) < 10):
            _refuse("logit_bias", f"{token!r} is not a token id")
    return {int(token): bias for token, bias in biases.items()} if biases else None


def _check_size(request: wire.Sampled, prompts: int, likely: int | None, tokens: int) -> None:
    """Refuse an answer that is too large; `likely` tokens are listed for each of the tokens, None if none is scored."""
    count, most = _count(request), wire.MAX_CHOICES
    if count * prompts > most:
        _refuse("n", f"{count} for each of {prompts} prompts is too many; {most} in all are allowed")
    if likely is not None and tokens * (1 + likely) > wire.MAX_SCORES:
        _refuse(
            "logprobs",
            f"{1 + likely} for each of up to {tokens} tokens is too many; {wire.MAX_SCORES} in all are allowed, "
            "so send a smaller max_tokens, n or number of logprobs",
        )


def _check_echo(tokens: int, count: int) -> None:
    if tokens * count > wire.MAX_ECHOED:
        _refuse(
            "echo",
            f"{count} choices that each repeat their prompt ({tokens} tokens) are too much; {wire.MAX_ECHOED} tokens "
            "in all are allowed, so send a smaller n or shorter prompts",
        )


def _sample(
    question: PromptQuestion,
    request: wire.Sampled,
    tokens: list[int],
    params: SamplingParams,
    draws: dict[str, Any],
    where: str,
) -> PromptSample:
    """Make the protocol's request, and check it as that is checked."""
    card, count = question.card, _count(request)
    if not 1 <= count <= question.max_samples:
        _refuse("n", f"{count} is not between 1 and {question.max_samples}")
    made = SampleRequest(prompt=ModelInput.from_ints(tokens), sampling_params=params, num_samples=count, **draws)
    try:
        check_sample(made, vocab_size=card.vocab_size, max_context_length=card.max_context_length)
        if params.output_format is not None:
            check_grammar(params.output_format, card.vocab_size)
    except InvalidInputError as error:
        raise renamed(error, where) from None
    reading = SampleReading(
        sampling_session_id=None,
        seq_id=None,
        num_samples=count,
        max_tokens=params.max_tokens,
        seed=params.seed,
        length=len(tokens),
    )
    is_echoed = isinstance(request, wire.CompletionRequest) and bool(request.echo)
    return PromptSample(
        body=json_codec.encode(made), reading=reading, packed=array("q", tokens if is_echoed else ()).tobytes()
    )


def renamed(error: InvalidInputError, where: str = "") -> InvalidInputError:
    """Return an error of the protocol's rules in the names that OpenAI's clients use."""
    message, field = error.message, error.field
    for ours, theirs in NAMES:
        message = message.replace(ours, theirs)
        field = field.replace(ours, theirs) if field is not None else None
    return type(error)(f"{where}: {message}" if where else message, field=field)


def _count(request: wire.Sampled) -> int:
    return 1 if request.n is None else request.n


def _has_usage(request: wire.Sampled) -> bool:
    return request.stream_options is not None and bool(request.stream_options.include_usage)


def _stops(request: wire.Sampled) -> list[str]:
    return [request.stop] if isinstance(request.stop, str) else list(request.stop or ())


def check_parameters(body: bytes, kind: type[msgspec.Struct], ignored: Set[str], refused: Mapping[str, str]) -> None:
    """Refuse parameters that are neither honoured nor harmless."""
    known = kind.__struct_encode_fields__
    for name, value in decoded(body, dict[str, msgspec.Raw]).items():
        if name in known or name in ignored or bytes(value) == b"null":
            continue
        shown = name[:100]
        advice = refused.get(name)
        _refuse(shown, f"is not supported; {advice}" if advice else "is not a parameter that this server knows")


def decoded(body: bytes, kind: type[T]) -> T:
    """Decode a body; what is wrong with it is a 400 for clients of OpenAI."""
    try:
        return json_codec.decode(body or b"{}", kind)
    except LimitExceededError:
        raise
    except WireError as error:
        raise InvalidInputError(error.message.partition(": ")[2], field=error.field) from None


def _refuse(field: str, reason: str) -> NoReturn:
    raise InvalidInputError(f"{field}: {reason}", field=field)


# Tokenizers of base models, which the operator chose


def tokenizer_of(card: ModelCard) -> Tokenizer:
    """Return a base model's tokenizer."""
    if card.tokenizer_directory is None:
        _refuse("model", f"this server has no tokenizer for {card.name}; use the Tinker API, which takes token ids")
    return _loaded(card.tokenizer_directory)


@functools.lru_cache(maxsize=8)
def _loaded(directory: str) -> Tokenizer:
    tokenizer: Tokenizer = load_tokenizer(directory)
    return tokenizer


@functools.lru_cache(maxsize=8)
def _table(directory: str) -> tuple[bytes, ...]:
    return read_token_bytes(Path(directory) / "tokenizer.json")


@functools.lru_cache(maxsize=8)
def _longest(directory: str) -> int:
    """Return the bytes of the longest token."""
    return max(map(len, _table(directory)), default=1)


def read_vocabulary(directory: str) -> VocabularyReading:
    """Return the bytes of a tokenizer's tokens."""
    table = _table(directory)
    ends = np.cumsum([len(piece) for piece in table], dtype="<u4")
    special = sorted(_loaded(directory).special_ids())
    return VocabularyReading(pieces=b"".join(table), ends=ends.tobytes(), special=special)

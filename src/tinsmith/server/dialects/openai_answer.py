"""Samples as OpenAI's objects: completions and chat completions, whole or in chunks.

Logprobs are the protocol's own: one for each sampled token, also for the one that ended the sample, equal to the last
bit to those of the Tinker routes. The text has neither stop strings nor special tokens.
"""

from __future__ import annotations

import codecs
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal

import msgspec

from tinsmith.server.bodies.questions import PromptReading
from tinsmith.server.dialects.chat_parts import ChatParts, Delta, MadeCall
from tinsmith.server.dialects.text_stream import TextStream
from tinsmith.server.dialects.vocabulary import Vocabulary
from tinsmith.wire.messages.sampling import SampledSequence, SampleResponse, TopkRow

Kind = Literal["completions", "chat"]
Rows = Sequence[TopkRow]
"""The likely tokens at each position, likeliest first."""
_encoder = msgspec.json.Encoder()
OBJECTS = {"completions": "text_completion", "chat": "chat.completion"}
IDS = {"completions": "cmpl", "chat": "chatcmpl"}


@dataclass(frozen=True, slots=True, kw_only=True)
class AnswerForm:
    """What all parts of an answer share."""

    kind: Kind
    reading: PromptReading
    vocabulary: Vocabulary
    request_id: str
    created: int
    model: str

    def head(self, suffix: str = "") -> dict[str, Any]:
        """Return the fields with which every object begins."""
        return {
            "id": f"{IDS[self.kind]}-{self.request_id}",
            "object": OBJECTS[self.kind] + suffix,
            "created": self.created,
            "model": self.model,
        }

    def text_stream(self) -> TextStream:
        hidden = self.vocabulary.special if self.kind == "completions" else self.vocabulary.unmarked
        return TextStream(self.vocabulary, self.reading.stops, hidden)

    def echoes(self) -> list[str]:
        """Return what each prompt's choices begin with: its text, if it is to be echoed. Long ones take a while: call
        it in a thread."""
        hidden = self.vocabulary.special
        prompts = (sample.tokens if self.reading.echo else () for sample in self.reading.samples)
        return [self.vocabulary.text_bytes(tokens, hidden).decode(errors="replace") for tokens in prompts]

    def usage(self, responses: Sequence[SampleResponse]) -> dict[str, Any]:
        """Return the tokens of all prompts and samples; the samples of one prompt share it."""
        prompt = sum(sample.reading.length for sample in self.reading.samples)
        drawn = sum(_size(sequence) for response in responses for sequence in response.sequences)
        cached = sum(response.prompt_cache_hit_tokens for response in responses)
        return {
            "prompt_tokens": prompt,
            "completion_tokens": drawn,
            "total_tokens": prompt + drawn,
            "prompt_tokens_details": {"cached_tokens": cached},
        }


def _size(sequence: SampledSequence) -> int:
    return 0 if sequence.tokens_np is None else int(sequence.tokens_np.size)


def whole_answer(form: AnswerForm, responses: Sequence[SampleResponse]) -> bytes:
    """Return the answer to a request that is not streamed. Long ones take a while: call it in a thread."""
    make = partial(_completion_choice, echoes=form.echoes()) if form.kind == "completions" else _chat_choice
    choices = [
        msgspec.Raw(msgspec.json.encode(make(form, number, number * form.reading.n + index, response, sequence)))
        for number, response in enumerate(responses)
        for index, sequence in enumerate(response.sequences)
    ]
    return msgspec.json.encode({**form.head(), "choices": choices, "usage": form.usage(responses)})


def _completion_choice(
    form: AnswerForm,
    number: int,
    index: int,
    response: SampleResponse,
    sequence: SampledSequence,
    *,
    echoes: Sequence[str],
) -> dict[str, Any]:
    stream = form.text_stream()
    text = echoes[number] + stream.push(sequence.tokens) + stream.finish()
    scores = CompletionScores(form.vocabulary) if form.reading.logprobs is not None else None
    if scores is not None:
        if form.reading.echo:
            prompt = form.reading.samples[number].tokens
            scores.add(prompt, response.prompt_logprobs or [None] * len(prompt), response.topk_prompt_logprobs)
            scores.end_prompt()
        scores.add(sequence.tokens, sequence.logprobs or (), sequence.topk_logprobs)
    return {
        "index": index,
        "text": text,
        "logprobs": scores.taken() if scores is not None else None,
        "finish_reason": sequence.stop_reason,
    }


def _chat_choice(
    form: AnswerForm, _: int, index: int, response: SampleResponse, sequence: SampledSequence
) -> dict[str, Any]:
    stream, parts = form.text_stream(), ChatParts(form.reading)
    first = parts.push(stream.push(sequence.tokens) + stream.finish())
    last = parts.finish()
    message: dict[str, Any] = {"role": "assistant", "content": first.content + last.content, "refusal": None}
    if reasoning := first.reasoning + last.reasoning:
        message["reasoning_content"] = reasoning
    if last.calls:
        message["content"] = message["content"] or None
        message["tool_calls"] = [call.to_dict() for call in last.calls]
    logprobs = None
    if form.reading.logprobs is not None:
        content = chat_scores(form.vocabulary, sequence.tokens, sequence.logprobs or (), sequence.topk_logprobs)
        logprobs = {"content": content, "refusal": None}
    return {
        "index": index,
        "message": message,
        "logprobs": logprobs,
        "finish_reason": "tool_calls" if last.calls else sequence.stop_reason,
    }


@dataclass(slots=True)
class CompletionScores:
    """The logprobs of a completion, as parallel lists."""

    vocabulary: Vocabulary
    tokens: list[str] = field(default_factory=list)
    token_logprobs: list[float | None] = field(default_factory=list)
    top_logprobs: list[dict[str, float] | None] = field(default_factory=list)
    text_offset: list[int] = field(default_factory=list)
    characters: int = 0
    """Of the text so far."""
    decoder: codecs.IncrementalDecoder = field(default_factory=lambda: codecs.getincrementaldecoder("utf-8")("replace"))

    def add(self, tokens: Sequence[int], logprobs: Iterable[float | None], rows: Rows | None = None) -> None:
        for place, (token, logprob) in enumerate(zip(tokens, logprobs, strict=True)):
            shown = self.vocabulary.shown(token)
            self.tokens.append(shown)
            self.token_logprobs.append(logprob)
            self.top_logprobs.append(self._top(rows[place] if rows is not None else None, shown, logprob))
            self.text_offset.append(self.characters)
            if token not in self.vocabulary.special:
                self.characters += len(self.decoder.decode(self.vocabulary.raw(token)))

    def end_prompt(self) -> None:
        """Count what the prompt leaves of an unfinished character, which its text shows as a replacement."""
        self.characters += len(self.decoder.decode(b"", final=True))

    def _top(self, row: TopkRow, shown: str, logprob: float | None) -> dict[str, float] | None:
        """Return the likely tokens, the likeliest first, and the token itself; None for a first token."""
        if logprob is None:
            return None
        top: dict[str, float] = {}
        for token, value in row or ():
            top.setdefault(self.vocabulary.shown(token), value)
        top.setdefault(shown, logprob)
        return top

    def taken(self) -> dict[str, Any]:
        """Return what was added since the last time."""
        taken = {
            "tokens": self.tokens,
            "token_logprobs": self.token_logprobs,
            "top_logprobs": self.top_logprobs,
            "text_offset": self.text_offset,
        }
        self.tokens, self.token_logprobs, self.top_logprobs, self.text_offset = [], [], [], []
        return taken


def chat_scores(
    vocabulary: Vocabulary, tokens: Sequence[int], logprobs: Iterable[float], rows: Rows | None = None
) -> list[dict[str, Any]]:
    """Return the logprobs of a message, an object for each token."""
    return [
        {
            **_score(vocabulary, token, logprob),
            "top_logprobs": [
                _score(vocabulary, *likely) for likely in (rows[place] if rows is not None else None) or ()
            ],
        }
        for place, (token, logprob) in enumerate(zip(tokens, logprobs, strict=True))
    ]


def _score(vocabulary: Vocabulary, token: int, logprob: float) -> dict[str, Any]:
    raw = vocabulary.raw(token)
    return {"token": raw.decode(errors="replace"), "logprob": logprob, "bytes": list(raw)}


class ChunkedChoice:
    """One choice of a streamed answer."""

    def __init__(self, form: AnswerForm, index: int, echo: str) -> None:
        self._form = form
        self._vocabulary = form.vocabulary
        self._stream = form.text_stream()
        self._parts = ChatParts(form.reading) if form.kind == "chat" else None
        self._is_plain = form.reading.logprobs is None
        self._scores = CompletionScores(form.vocabulary)
        self._entries: list[dict[str, Any]] = []
        self._calls = 0
        head = msgspec.json.encode(form.head(".chunk" if form.kind == "chat" else ""))[:-1]
        name = b"text" if form.kind == "completions" else b"delta"
        self._head = b'data: %s,"choices":[{"index":%d,"%s":' % (head, index, name)
        self._tail = b'],"usage":null}\n\n' if form.reading.has_usage else b"]}\n\n"
        self._plain_tail = b',"logprobs":null,"finish_reason":null}' + self._tail
        self._echo = echo
        self._scores.characters = len(echo)

    def begin(self) -> bytes:
        """Return the first chunk: the role, or the echoed prompt."""
        if self._parts is not None:
            return self._chunk({"role": "assistant", "content": "", "refusal": None})
        return self._chunk(self._echo) if self._echo else b""

    def push(self, tokens: Sequence[int], logprobs: Sequence[float], rows: Rows | None = None) -> bytes:
        """Return the chunk for new tokens; none while their text is held back."""
        if not self._is_plain:
            self._score(tokens, logprobs, rows)
        text = self._stream.push(tokens)
        return self._given(text, self._parts.push(text) if self._parts is not None else None)

    def finish(self, stop_reason: str) -> bytes:
        """Return the last chunks: the rest of the text, and why it ended."""
        text = self._stream.finish()
        reason, chunks = stop_reason, b""
        if self._parts is None:
            chunks = self._given(text, None)
        else:
            chunks = self._given("", self._parts.push(text))
            last = self._parts.finish()
            chunks += self._given("", last)
            reason = "tool_calls" if self._calls else stop_reason
        return chunks + self._chunk({} if self._parts is not None else "", reason)

    def _given(self, text: str, delta: Delta | None) -> bytes:
        if delta is None:
            return self._chunk(text) if text else b""
        if not delta:
            return b""
        fields: dict[str, Any] = {"content": delta.content} if delta.content else {}
        if delta.reasoning:
            fields["reasoning_content"] = delta.reasoning
        if delta.calls:
            fields["tool_calls"] = [self._numbered(call) for call in delta.calls]
        return self._chunk(fields)

    def _numbered(self, call: MadeCall) -> dict[str, Any]:
        number, self._calls = self._calls, self._calls + 1
        return {"index": number, **call.to_dict()}

    def _score(self, tokens: Sequence[int], logprobs: Sequence[float], rows: Rows | None) -> None:
        if self._parts is None:
            self._scores.add(tokens, logprobs, rows)
        else:
            self._entries += chat_scores(self._vocabulary, tokens, logprobs, rows)

    def _chunk(self, content: str | dict[str, Any], reason: str | None = None) -> bytes:
        given = _encoder.encode(content)
        if reason is None and self._is_plain:
            return self._head + given + self._plain_tail
        end = b"null" if reason is None else b'"%s"' % reason.encode()
        return b'%s%s,"logprobs":%s,"finish_reason":%s}%s' % (self._head, given, self._taken(), end, self._tail)

    def _taken(self) -> bytes:
        """Return the logprobs of the tokens since the last chunk."""
        if self._is_plain:
            return b"null"
        if self._parts is None:
            return msgspec.json.encode(self._scores.taken())
        entries, self._entries = self._entries, []
        return msgspec.json.encode({"content": entries, "refusal": None})


def usage_chunk(form: AnswerForm, responses: Sequence[SampleResponse]) -> bytes:
    """Return the chunk with the usage, which has no choices."""
    head = form.head(".chunk" if form.kind == "chat" else "")
    return b"data: %s\n\n" % msgspec.json.encode({**head, "choices": [], "usage": form.usage(responses)})


DONE = b"data: [DONE]\n\n"

"""A sample as Anthropic's message: whole, or as the events of its stream.

A message is a list of blocks: what the model thought, what it says, and the tools it calls. The text has neither stop
strings nor special tokens. Thinking has an empty signature, since whoever sends it back is not checked.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import msgspec

from tinsmith.server.bodies.questions import PromptReading
from tinsmith.server.dialects.chat_parts import ChatParts, Delta, MadeCall
from tinsmith.server.dialects.text_stream import TextStream
from tinsmith.server.dialects.vocabulary import Vocabulary
from tinsmith.wire.messages.sampling import SampledSequence, SampleResponse

Block = dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class MessageForm:
    """What all parts of an answer share."""

    reading: PromptReading
    vocabulary: Vocabulary
    request_id: str
    model: str

    def message(self, content: list[Any], ending: dict[str, Any], usage: dict[str, int]) -> dict[str, Any]:
        return {
            "id": f"msg_{self.request_id}",
            "type": "message",
            "role": "assistant",
            "model": self.model,
            "content": content,
            **ending,
            "usage": usage,
        }

    def text_stream(self) -> TextStream:
        return TextStream(self.vocabulary, self.reading.stops, self.vocabulary.unmarked)

    def usage(self, drawn: int, cached: int = 0) -> dict[str, int]:
        """Return the tokens of a message. Input tokens are those that were not cached; a prompt's last one never is."""
        length = self.reading.samples[0].reading.length
        cached = min(cached, length - 1)
        return {
            "input_tokens": length - cached,
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": cached,
            "output_tokens": drawn,
        }

    def ending(self, sequence: SampledSequence, stopped_by: str | None, has_calls: bool) -> dict[str, Any]:
        """Return why a message ends."""
        stop = stopped_by or self._special_stop(sequence.tokens)
        if has_calls:
            return {"stop_reason": "tool_use", "stop_sequence": None}
        if sequence.stop_reason == "length":
            return {"stop_reason": "max_tokens", "stop_sequence": None}
        return {"stop_reason": "stop_sequence" if stop is not None else "end_turn", "stop_sequence": stop}

    def _special_stop(self, tokens: Sequence[int]) -> str | None:
        """Return the stop sequence that is a special token, if the last token is one."""
        last = self.vocabulary.raw(tokens[-1]).decode(errors="replace") if tokens else ""
        return last if last in self.reading.stops and tokens[-1] in self.vocabulary.special else None


UNFINISHED: dict[str, Any] = {"stop_reason": None, "stop_sequence": None}


def whole_message(form: MessageForm, response: SampleResponse) -> bytes:
    """Return the answer to a request that is not streamed. Long ones take a while: call it in a thread."""
    sequence = response.sequences[0]
    stream, parts = form.text_stream(), ChatParts(form.reading)
    first = parts.push(stream.push(sequence.tokens) + stream.finish())
    last = readable(parts.finish())
    content: list[Block] = []
    if thought := first.reasoning + last.reasoning:
        content.append({**BLOCKS["thinking"], "thinking": thought})
    if text := first.content + last.content:
        content.append({**BLOCKS["text"], "text": text})
    content += [_call_block(call, call.arguments) for call in last.calls]
    ending = form.ending(sequence, stream.stopped_by, bool(last.calls))
    usage = form.usage(len(sequence.tokens), response.prompt_cache_hit_tokens)
    return msgspec.json.encode(form.message(content, ending, usage))


BLOCKS: dict[str, Block] = {
    "thinking": {"type": "thinking", "thinking": "", "signature": ""},
    "text": {"type": "text", "text": "", "citations": None},
}
"""Blocks as they begin."""


def _call_block(call: MadeCall, arguments: str) -> Block:
    name = f"toolu_{call.id.removeprefix('call_')}"
    return {"type": "tool_use", "id": name, "name": call.name, "input": msgspec.Raw(arguments.encode())}


def readable(delta: Delta) -> Delta:
    """Return the end of an answer with calls whose arguments are objects, as the blocks demand; the model's text of
    others is content."""
    calls = [call for call in delta.calls if _is_object(call.arguments)]
    others = [msgspec.json.encode(call.to_dict()["function"]).decode() for call in delta.calls if call not in calls]
    return Delta(
        content="\n".join([delta.content, *others]) if others else delta.content, reasoning=delta.reasoning, calls=calls
    )


def _is_object(arguments: str) -> bool:
    try:
        return isinstance(msgspec.json.decode(arguments), dict)
    except (msgspec.DecodeError, RecursionError):
        return False


class MessageEvents:
    """The events of one streamed message."""

    def __init__(self, form: MessageForm) -> None:
        self._form = form
        self._stream = form.text_stream()
        self._parts = ChatParts(form.reading)
        self._open: Literal["thinking", "text"] | None = None
        """The block that is being written."""
        self._index = -1
        self._has_calls = False
        self._head = b""
        """With which events of the open block begin."""

    def begin(self) -> bytes:
        """Return the first events."""
        message = self._form.message([], UNFINISHED, self._form.usage(0))
        return event("message_start", message=message) + PING

    def push(self, tokens: Sequence[int]) -> bytes:
        """Return the events for new tokens; none while their text is held back."""
        return self._given(self._parts.push(self._stream.push(tokens)))

    def finish(self, sequence: SampledSequence, response: SampleResponse) -> bytes:
        """Return the last events: the rest of the content, why it ended, and what it used."""
        rest = self._given(self._parts.push(self._stream.finish())) + self._given(readable(self._parts.finish()))
        usage = self._form.usage(len(sequence.tokens), response.prompt_cache_hit_tokens)
        ending = self._form.ending(sequence, self._stream.stopped_by, self._has_calls)
        return rest + self._close() + event("message_delta", delta=ending, usage=usage) + event("message_stop")

    def _given(self, delta: Delta) -> bytes:
        if not delta:
            return b""
        pieces = []
        if delta.reasoning:
            pieces += self._more("thinking", delta.reasoning)
        if delta.content:
            pieces += self._more("text", delta.content)
        for call in delta.calls:
            pieces.append(self._call(call))
        return b"".join(pieces)

    def _more(self, kind: Literal["thinking", "text"], text: str) -> list[bytes]:
        pieces = []
        if self._open != kind:
            pieces.append(self._close() + self._start(BLOCKS[kind]))
            self._open = kind
            self._head = (
                b'event: content_block_delta\ndata: {"type":"content_block_delta","index":%d,'
                b'"delta":{"type":"%s_delta","%s":' % (self._index, kind.encode(), kind.encode())
            )
        return [*pieces, self._head, msgspec.json.encode(text), b"}}\n\n"]

    def _call(self, call: MadeCall) -> bytes:
        self._has_calls = True
        begin = self._close() + self._start(_call_block(call, "{}"))
        delta = {"type": "input_json_delta", "partial_json": call.arguments}
        return begin + event("content_block_delta", index=self._index, delta=delta) + self._stop()

    def _start(self, block: Block) -> bytes:
        self._index += 1
        return event("content_block_start", index=self._index, content_block=block)

    def _close(self) -> bytes:
        if self._open is None:
            return b""
        self._open = None
        return self._stop()

    def _stop(self) -> bytes:
        return event("content_block_stop", index=self._index)


def event(kind: str, **fields: Any) -> bytes:
    """Return a server-sent event, which has its type twice."""
    return b"event: %s\ndata: %s\n\n" % (kind.encode(), msgspec.json.encode({"type": kind, **fields}))


PING = event("ping")
"""Also sent while nothing else happens; clients skip it."""

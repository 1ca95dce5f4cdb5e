"""The events of a streamed message: in order, as soon as their text is certain, and in sum the whole message."""

from __future__ import annotations

import itertools
import json
from typing import Any

import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from support.anthropic_server import answered, events
from support.in_process import Answer

from tinsmith.server.bodies.questions import PromptReading, PromptSample, SampleReading, VocabularyReading
from tinsmith.server.dialects.anthropic_answer import MessageEvents, MessageForm, whole_message
from tinsmith.server.dialects.vocabulary import Vocabulary
from tinsmith.wire.messages.sampling import SampledSequence, SampleResponse

BYTES = Vocabulary(
    VocabularyReading(pieces=bytes(range(256)), ends=np.arange(1, 257, dtype="<u4").tobytes(), special=[0])
)
READING = SampleReading(sampling_session_id=None, seq_id=None, num_samples=1, max_tokens=99, seed=None, length=7)


def form(**how: Any) -> MessageForm:
    reading = PromptReading(samples=[PromptSample(body=b"", reading=READING)], n=1, **how)
    return MessageForm(reading=reading, vocabulary=BYTES, request_id="1", model="m")


def response(text: str, reason: str = "stop") -> SampleResponse:
    tokens = np.frombuffer(text.encode(), np.uint8).astype(np.int32)
    return SampleResponse([SampledSequence(reason, "", tokens, np.zeros(tokens.size, np.float32))])


def streamed(made: MessageForm, drawn: SampleResponse, places: list[int]) -> Answer:
    message = MessageEvents(made)
    tokens = drawn.sequences[0].tokens
    pieces = [message.begin()]
    pieces += [message.push(tokens[begin:end]) for begin, end in itertools.pairwise(places)]
    pieces.append(message.finish(drawn.sequences[0], drawn))
    return Answer(200, {"content-type": "text/event-stream"}, b"".join(pieces))


PARTS = (
    "<think>",
    "</think>",
    "<tool_call>",
    "</tool_call>",
    '{"name": "f", "arguments": {"a": "é"}}',
    "END",
    "x y",
    "\n",
)


@given(st.lists(st.sampled_from(PARTS), max_size=8), st.lists(st.integers(0, 200), max_size=8), st.booleans())
def test_a_stream_adds_up_to_the_whole_message(parts: list[str], cuts: list[int], has_stop: bool) -> None:
    made = form(thinking="marked", tool_form="hermes", stops=["END"] if has_stop else [])
    drawn = response("".join(parts))
    size = len(drawn.sequences[0].tokens)
    places = sorted({0, size, *(cut % (size + 1) for cut in cuts)})
    whole = Answer(200, {"content-type": "application/json"}, whole_message(made, drawn))
    assert answered(streamed(made, drawn, places)) == answered(whole)


def test_text_is_given_away_as_it_comes() -> None:
    text = "<think>one</think>two END"
    drawn = response(text)
    answer = streamed(form(thinking="marked", stops=["END"]), drawn, list(range(len(text) + 1)))
    found = events(answer)
    pieces = [event["delta"] for event in found if event["type"] == "content_block_delta"]
    assert [json.dumps(piece) for piece in pieces] == [
        json.dumps({"type": f"{kind}_delta", kind: letter})
        for kind, letter in [*(("thinking", letter) for letter in "one"), *(("text", letter) for letter in "two ")]
    ]
    assert [event["type"] for event in found if event["type"] != "content_block_delta"] == [
        "message_start",
        "content_block_start",
        "content_block_stop",
        "content_block_start",
        "content_block_stop",
        "message_delta",
        "message_stop",
    ]
    assert found[-2]["delta"] == {"stop_reason": "stop_sequence", "stop_sequence": "END"}
    assert b'event: ping\ndata: {"type":"ping"}\n\n' in answer.body


def test_an_answer_that_ended_for_its_length_stops_for_max_tokens() -> None:
    whole = json.loads(whole_message(form(stops=["END"]), response("EN", "length")))
    assert (whole["stop_reason"], whole["stop_sequence"]) == ("max_tokens", None)
    assert whole["content"][0]["text"] == "EN"

"""Thinking, content and calls of tools in a model's answer, whole and cut anywhere."""

from __future__ import annotations

import itertools
import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tinsmith.server.bodies.questions import PromptReading
from tinsmith.server.dialects.chat_parts import ChatParts, Delta


def parsed(text: str, cuts: list[int], **how: Any) -> Delta:
    parts = ChatParts(PromptReading(samples=[], n=1, **how))
    whole = Delta()
    places = sorted({0, len(text), *(cut % (len(text) + 1) for cut in cuts)})
    for begin, end in itertools.pairwise(places):
        _add(whole, parts.push(text[begin:end]))
    _add(whole, parts.finish())
    return whole


def _add(whole: Delta, delta: Delta) -> None:
    whole.content += delta.content
    whole.reasoning += delta.reasoning
    whole.calls += delta.calls


CALL = {"name": "look", "arguments": {"at": "x"}}
ANSWERS = [
    ("none", "none", "plain <think>text</think>", "plain <think>text</think>", "", []),
    ("marked", "none", "<think>\nhm <thin\n</think>\n\nYes.", "Yes.", "hm <thin", []),
    ("marked", "none", "No thought.", "No thought.", "", []),
    ("marked", "none", "<thi", "<thi", "", []),
    ("marked", "none", "<think>never ends ", "", "never ends", []),
    ("begun", "none", "so\n</think>\nYes", "Yes", "so", []),
    ("none", "hermes", f"Let me. \n<tool_call>\n{json.dumps(CALL)}\n</tool_call>", "Let me.", "", [CALL]),
    ("none", "hermes", f"<tool_call>{json.dumps(CALL)}</tool_call>\n<tool_call>{json.dumps(CALL)}", "", "", [CALL] * 2),
    ("none", "hermes", f"<tool_call>[{json.dumps(CALL)}]</tool_call>", "", "", [CALL]),
    ("none", "hermes", "<tool_call>{not json}</tool_call>", "<tool_call>{not json}</tool_call>", "", []),
    ("none", "hermes", "no call here", "no call here", "", []),
    ("marked", "hermes", f"<think>a</think><tool_call>{json.dumps(CALL)}</tool_call>", "", "a", [CALL]),
    ("none", "mistral", f"[TOOL_CALLS][{json.dumps(CALL)}]", "", "", [CALL]),
    ("none", "mistral", "text [TOOL", "text [TOOL", "", []),
    ("none", "llama", '{"name": "look", "parameters": {"at": "x"}}', "", "", [CALL]),
    ("none", "llama", '<|python_tag|>{"name": "look", "parameters": {"at": "x"}}', "", "", [CALL]),
    ("none", "llama", '{"no": "call"}', '{"no": "call"}', "", []),
    ("none", "llama", "words {", "words {", "", []),
    ("none", "forced", json.dumps(CALL), "", "", [CALL]),
]


@pytest.mark.parametrize(("thinking", "form", "text", "content", "reasoning", "calls"), ANSWERS)
@given(cuts=st.lists(st.integers(0, 200), max_size=12))
def test_an_answer_has_its_parts_wherever_it_is_cut(
    thinking: str, form: str, text: str, content: str, reasoning: str, calls: list[Any], cuts: list[int]
) -> None:
    found = parsed(text, cuts, thinking=thinking, tool_form=form)
    assert (found.content, found.reasoning) == (content, reasoning)
    assert [{"name": call.name, "arguments": json.loads(call.arguments)} for call in found.calls] == calls


def test_calls_have_ids_of_their_own() -> None:
    text = f"<tool_call>{json.dumps(CALL)}</tool_call>" * 2
    first, second = parsed(text, [], tool_form="hermes").calls
    assert first.id != second.id
    assert first.to_dict()["function"]["name"] == "look"


@pytest.mark.parametrize("text", ['{"name": 1}', "[1]", '"x"', "{" * 10_000, '{"name": "x", "arguments": 3}'])
def test_what_cannot_be_a_call_is_content(text: str) -> None:
    assert parsed(f"<tool_call>{text}", [], tool_form="hermes").calls == []
    assert parsed(text, [], tool_form="forced").content == text

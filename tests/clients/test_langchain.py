"""LangChain's ChatOpenAI and OpenAI against a server."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from support.clients import Program, Served


@pytest.fixture(scope="module")
def said(place: Path, server: Served, tuned: str) -> dict[str, Any]:
    """What the program printed."""
    answers: dict[str, Any] = Program("langchain", place, server).script("langchain_program.py", server.model, tuned)
    return answers


def test_invoking(said: dict[str, Any]) -> None:
    answer = said["invoked"]
    assert (answer["content"], answer["finish"]) == ("Hello there", "stop")
    assert answer["usage"].items() >= {"input_tokens": 20, "output_tokens": 9, "total_tokens": 29}.items()
    assert len(answer["logprobs"]) == 9


def test_streaming_and_batches(said: dict[str, Any]) -> None:
    assert said["streamed"] == ["Hello there", 29]
    assert said["together"] == ["Hello there", "See you"]


def test_an_agent_calls_a_tool_and_reads_its_result(said: dict[str, Any]) -> None:
    assert said["tools"] == [[{"a": 2, "b": 3}], "It is 5"]


def test_structured_output(said: dict[str, Any]) -> None:
    parsed, finish = said["structured"]
    assert finish in ("stop", "length")
    assert set(parsed or {}) == ({"city", "size"} if finish == "stop" else set())


def test_a_prompt_that_does_not_fit_is_its_own_error(said: dict[str, Any]) -> None:
    assert said["refused"] == "OpenAIContextOverflowError"


def test_text(said: dict[str, Any]) -> None:
    assert said["text"] == "See you"

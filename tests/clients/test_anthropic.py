"""The anthropic package against a server."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from support.clients import Program, Served


@pytest.fixture(scope="module")
def said(place: Path, server: Served, tuned: str) -> dict[str, Any]:
    """What the program printed."""
    answers: dict[str, Any] = Program("anthropic", place, server).script("anthropic_program.py", server.model, tuned)
    return answers


def test_messages(said: dict[str, Any]) -> None:
    answer = said["messages"]
    assert answer["content"] == [{"type": "text", "text": "Hello there"}]
    assert (answer["role"], answer["stop"], answer["usage"], answer["counted"]) == (
        "assistant",
        "end_turn",
        [20, 9],
        20,
    )
    assert answer["stopped"] == ["Hel", "stop_sequence", "lo th"]
    assert answer["short"] == ["Hel", "max_tokens"]


def test_streams(said: dict[str, Any]) -> None:
    answer = said["streamed"]
    assert (answer["text"], answer["stop"], answer["usage"]) == ("Hello there", "end_turn", 9)
    assert answer["events"][0] == "message_start"
    assert answer["events"][-1] == "message_stop"


def test_tools(said: dict[str, Any]) -> None:
    answer = said["tools"]
    assert (answer["stop"], answer["call"]) == ("tool_use", ["add", {"a": 2, "b": 3}])
    assert answer["answer"] == "It is 5"
    assert answer["streamed"] == ["tool_use", {"a": 2, "b": 3}]


def test_several_at_once(said: dict[str, Any]) -> None:
    assert said["together"] == ["Hello there", "See you", "Hello there"]


@pytest.mark.parametrize(
    ("attempt", "kind", "status", "type_"),
    [
        ("gone", "NotFoundError", 404, "not_found_error"),
        ("key", "AuthenticationError", 401, "authentication_error"),
        ("temperature", "BadRequestError", 400, "invalid_request_error"),
        ("long", "BadRequestError", 400, "invalid_request_error"),
    ],
)
def test_refusals_are_its_own_errors(said: dict[str, Any], attempt: str, kind: str, status: int, type_: str) -> None:
    assert said["refused"][attempt][:3] == [kind, status, type_]


def test_a_prompt_that_is_too_long_is_said_in_words_that_agents_know(said: dict[str, Any]) -> None:
    assert "prompt is too long" in said["refused"]["long"][-1]

"""litellm's OpenAI provider against a server."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from support.clients import Program, Served


@pytest.fixture(scope="module")
def said(place: Path, server: Served, tuned: str) -> dict[str, Any]:
    """What the program printed."""
    answers: dict[str, Any] = Program("litellm", place, server).script("litellm_program.py", server.model, tuned)
    return answers


def test_chats_whole_streamed_and_at_once(said: dict[str, Any]) -> None:
    assert said["chat"]["content"] == "Hello there"
    assert said["chat"]["finish"] == "stop"
    assert said["chat"]["usage"] == [20, 9]
    assert len(said["chat"]["logprobs"]) == 9
    assert all(logprob < 0 for logprob in said["chat"]["logprobs"])
    assert said["streamed"] == "Hello there"
    assert said["together"] == ["Hello there", "See you"]


def test_text(said: dict[str, Any]) -> None:
    assert said["text"] == "See you"


def test_tools(said: dict[str, Any]) -> None:
    assert said["tools"] == ["add", {"a": 2, "b": 3}, "It is 5"]


@pytest.mark.parametrize(
    ("attempt", "kind"),
    [("gone", "NotFoundError"), ("key", "AuthenticationError"), ("long", "ContextWindowExceededError")],
)
def test_refusals_are_its_own_errors(said: dict[str, Any], attempt: str, kind: str) -> None:
    assert said["refused"][attempt][0] == kind, said["refused"][attempt][1]

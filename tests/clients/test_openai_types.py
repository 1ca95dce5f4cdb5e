"""The openai package's own types read every answer of ours, strictly, and streams add up."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from support.clients import Program, serve_arithmetic, shown_program
from support.in_process import BASE


@pytest.fixture(scope="module")
def found(place: Path) -> Any:
    """What the program printed."""
    with serve_arithmetic(place, "support.openai_server:served") as server:
        program = Program("openai", place, server)
        program.run("python", "-c", shown_program("howto/openai.md"))
        return program.script("openai_types_program.py", BASE)


def test_models_are_listed(found: Any) -> None:
    assert found["models"] == [BASE]
    assert found["model"] == BASE


def test_a_stream_is_the_whole_in_parts(found: Any) -> None:
    whole, parts = found["completion"]["choices"][0], [part["choices"][0] for part in found["completion_parts"]]
    assert "".join(part["text"] for part in parts) == whole["text"]
    for name in ("tokens", "token_logprobs", "top_logprobs", "text_offset"):
        assert [value for part in parts for value in part["logprobs"][name]] == whole["logprobs"][name]
    assert parts[-1]["finish_reason"] == whole["finish_reason"]


def test_a_chats_stream_is_the_whole_in_parts(found: Any) -> None:
    whole = found["chat"]
    parts = [part["choices"][0] for part in found["chat_parts"] if part["choices"]]
    assert parts[0]["delta"]["role"] == "assistant"
    assert "".join(part["delta"]["content"] or "" for part in parts) == whole["choices"][0]["message"]["content"]
    scores = [entry for part in parts if part["logprobs"] for entry in part["logprobs"]["content"]]
    assert scores == whole["choices"][0]["logprobs"]["content"]
    assert all(len(entry["top_logprobs"]) == 2 for entry in scores)
    assert found["chat_parts"][-1]["usage"] == whole["usage"]
    assert whole["usage"]["prompt_tokens"] > 10
    assert whole["usage"]["completion_tokens"] == len(scores) == 6


def test_all_ways_to_ask_give_the_same_answer(found: Any) -> None:
    text = found["chat"]["choices"][0]["message"]["content"]
    assert found["together"] == [text] * 5
    assert found["async_stream"] == text
    assert found["helper"]["choices"][0]["message"]["content"] == text
    assert found["tools"]["usage"]["prompt_tokens"] > found["chat"]["usage"]["prompt_tokens"]


def test_errors_are_the_clients_own(found: Any) -> None:
    assert found["errors"] == {
        "NotFoundError": ["NotFoundError", "model_not_found", None, 404],
        "BadRequestError": ["BadRequestError", "invalid_input", "best_of", 400],
        "AuthenticationError": ["AuthenticationError", "invalid_api_key", None, 401],
    }

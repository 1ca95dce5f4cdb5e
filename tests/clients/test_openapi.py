"""Our answers fit OpenAI's published OpenAPI schemas: every field, every type, nothing missing and nothing more."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from support.clients import Program, serve_arithmetic
from support.in_process import BASE


@pytest.fixture(scope="module", params=[False, True], ids=["random", "calling"])
def found(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """What the program found: of a model that draws at random, and of one that thinks, speaks and calls."""
    place: Path = tmp_path_factory.mktemp("client")
    backend, options = ("anthropic_server", ["once"]) if request.param else ("openai_server", [])
    with serve_arithmetic(place, f"support.{backend}:served") as server:
        answers = Program("openapiopenai", place, server).script("openapi_program.py", BASE, *options)
        return answers | {"calls": request.param}


def test_all_kinds_of_answers_fit_the_schemas(found: Any) -> None:
    counts = {name: len(answers) for name, answers in found["answers"].items()}
    assert counts["completions"] == (2 if found["calls"] else 4)
    assert counts["chats"] == (3 if found["calls"] else 4)
    assert counts["models"] == counts["model"] == 1
    assert counts["errors"] == 8
    assert counts["completion_chunks"] > 5
    assert counts["chat_chunks"] > 10


def test_what_openai_does_not_have_is_known(found: Any) -> None:
    extensions = {name: set(where) for name, where in found["extensions"].items()}
    assert extensions == ({"reasoning_content": {"chats", "chat_chunks"}} if found["calls"] else {})


def test_calls_and_reasons_are_among_those_that_were_checked(found: Any) -> None:
    choices = [choice for chat in found["answers"]["chats"] for choice in chat["choices"]]
    chunks = [choice for chunk in found["answers"]["chat_chunks"] for choice in chunk["choices"]]
    has_calls = any(choice["message"].get("tool_calls") for choice in choices)
    assert has_calls == any(choice["delta"].get("tool_calls") for choice in chunks) == found["calls"]
    reasons = {choice["finish_reason"] for choice in choices}
    assert reasons >= ({"tool_calls"} if found["calls"] else {"length"})

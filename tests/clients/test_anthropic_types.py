"""The anthropic package's own types read every answer of ours, strictly, and streams add up."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from support.clients import Program, serve_arithmetic, shown_program
from support.in_process import BASE


@pytest.fixture(scope="module", params=["", "/anthropic/api"])
def found(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """What the program printed, at each of the two paths."""
    place = tmp_path_factory.mktemp("client")
    with serve_arithmetic(place, "support.anthropic_server:served") as server:
        program = Program("anthropic", place, replace(server, url=server.url + request.param))
        shown = program.run("python", "-c", shown_program("howto/anthropic.md").replace("BASE", BASE))
        assert "Wait a bit." in shown
        return program.script("anthropic_types_program.py", BASE)


def blocks(message: Any) -> list[tuple[str, Any]]:
    """The kinds and contents of a message's blocks; calls have ids of their own."""
    names = {"thinking": "thinking", "text": "text", "tool_use": "input"}
    return [(block["type"], block[names[block["type"]]]) for block in message["content"]]


def test_all_ways_to_ask_give_the_same_answer(found: Any) -> None:
    expected = [("thinking", "hm, why"), ("text", "Wait a bit."), ("tool_use", {"at": "é"})]
    for name in ("whole", "helper", "next", "thinking"):
        assert blocks(found[name]) == expected
        assert found[name]["stop_reason"] == "tool_use"
        assert found[name]["model"] == BASE
    assert found["whole"]["id"] == f"msg_{found['request_id']}"
    assert "".join(found["text_stream"]) == found["async_stream"] == "Wait a bit."
    assert found["together"] == ["Wait a bit."] * 4


def test_a_stream_has_the_events_that_the_client_knows(found: Any) -> None:
    kinds = [event["type"] for event in found["parts"]]
    assert kinds[0] == "message_start"
    assert kinds[-2:] == ["message_delta", "message_stop"]
    assert kinds.count("content_block_start") == kinds.count("content_block_stop") == 3
    assert found["parts"][0]["message"]["usage"]["input_tokens"] > 0


def test_usage_is_counted(found: Any) -> None:
    assert found["whole"]["usage"] == found["helper"]["usage"]
    assert found["whole"]["usage"]["input_tokens"] > found["count"]["input_tokens"] > 10
    assert found["next"]["usage"]["input_tokens"] > found["whole"]["usage"]["input_tokens"]


def test_errors_are_the_clients_own(found: Any) -> None:
    assert found["errors"] == {
        "NotFoundError": ["NotFoundError", "not_found_error", 404],
        "BadRequestError": ["BadRequestError", "invalid_request_error", 400],
        "AuthenticationError": ["AuthenticationError", "authentication_error", 401],
        "a path that is not there": ["NotFoundError", "not_found_error", 404],
    }

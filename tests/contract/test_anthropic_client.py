"""Anthropic's own Python client against our server: its types read every answer, and streams add up."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest
from support.in_process import BASE
from support.server_process import ROOT, ServerProcess

PYTHON = ROOT / ".clients/anthropic/bin/python"
PROGRAM = ROOT / "tests/contract/clients/anthropic_program.py"


@pytest.fixture(scope="module", params=["", "/anthropic/api"])
def found(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """What the program printed, at each of the two paths."""
    assert PYTHON.exists(), "run tools/clients, which make test does"
    data = tmp_path_factory.mktemp("server") / "data"
    with ServerProcess(data, backend="support.anthropic_server:served") as server:
        command = [PYTHON, "-I", PROGRAM, server.url + request.param, server.key, BASE]
        ended = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
        assert ended.returncode == 0, ended.stderr[-3000:] + server.log[-2000:]
        shown = (ROOT / "docs/howto/anthropic.md").read_text().partition("```py\n")[2].partition("```")[0]
        settings = {"ANTHROPIC_BASE_URL": server.url + request.param, "ANTHROPIC_API_KEY": server.key}
        program = [PYTHON, "-c", shown.replace("BASE", BASE)]
        documented = subprocess.run(
            program, capture_output=True, text=True, timeout=60, check=False, env=os.environ | settings
        )
        assert documented.returncode == 0, documented.stderr[-3000:]
        assert "Wait a bit." in documented.stdout
        assert "Traceback" not in server.log
    return json.loads(ended.stdout)


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


def test_the_environment_has_what_the_file_says() -> None:
    lines = Path(ROOT / "tests/clients/requirements/anthropic.txt").read_text().splitlines()
    listed = subprocess.run([PYTHON, "-m", "pip", "freeze"], capture_output=True, text=True, timeout=60, check=True)
    assert listed.stdout.splitlines() == [line for line in lines if not line.startswith("#")]

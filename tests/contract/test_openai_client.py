"""OpenAI's own Python client against our server: its types read every answer, and the numbers are right."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest
from support.in_process import BASE
from support.server_process import ROOT, ServerProcess

PYTHON = ROOT / ".clients/openai/bin/python"
PROGRAM = ROOT / "tests/contract/clients/openai_program.py"


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """What the program printed."""
    assert PYTHON.exists(), "run tools/clients, which make test does"
    with ServerProcess(tmp_path_factory.mktemp("server") / "data", backend="support.openai_server:served") as server:
        command = [PYTHON, "-I", PROGRAM, f"{server.url}/v1", server.key, BASE]
        ended = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
        assert ended.returncode == 0, ended.stderr[-3000:] + server.log[-2000:]
        page = (ROOT / "docs/howto/openai.md").read_text()
        shown = page.partition("```py\n")[2].partition("```")[0]
        settings = {"OPENAI_BASE_URL": f"{server.url}/v1", "OPENAI_API_KEY": server.key}
        documented = subprocess.run(
            [PYTHON, "-c", shown], capture_output=True, text=True, timeout=60, check=False, env=os.environ | settings
        )
        assert documented.returncode == 0, documented.stderr[-3000:]
        assert "Traceback" not in server.log
    return json.loads(ended.stdout)


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


def test_the_environment_has_what_the_file_says() -> None:
    lines = Path(ROOT / "tests/clients/requirements/openai.txt").read_text().splitlines()
    listed = subprocess.run([PYTHON, "-m", "pip", "freeze"], capture_output=True, text=True, timeout=60, check=True)
    assert listed.stdout.splitlines() == [line for line in lines if not line.startswith("#")]

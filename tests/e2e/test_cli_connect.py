"""`tinsmith connect`: the lines that it prints work in a shell, and show no key."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.cli_run import Cli
from support.in_process import BASE
from support.server_process import ServerProcess


@pytest.fixture(scope="module")
def cli(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cli]:
    place = tmp_path_factory.mktemp("connect")
    with ServerProcess(place / "data", backend="support.openai_server:served") as server:
        yield Cli(server.url, server.key, place / "home")


def test_the_lines_set_up_clients_and_the_examples_run(cli: Cli) -> None:
    lines = cli("connect")
    assert cli.key is not None
    assert cli.key not in lines
    examples = [line.removeprefix("# ") for line in lines.splitlines() if line.startswith("# curl")]
    script = "\n".join(["set -eu", 'eval "$(tinsmith connect)"', *(f"{example} -sf; echo" for example in examples)])
    environ = {name: value for name, value in cli.environment.items() if value is not None}
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    ended = subprocess.run(
        ["bash", "-c", script], capture_output=True, text=True, timeout=120, env={**environ, "PATH": path}, check=False
    )
    assert ended.returncode == 0, ended.stderr
    chat, message, capabilities = [json.loads(line) for line in ended.stdout.splitlines()]
    assert chat["choices"][0]["message"]["role"] == "assistant"
    assert message["type"] == "message"
    assert chat["model"] == message["model"] == capabilities["supported_models"][0]["model_name"] == BASE


def test_one_kind_of_client_may_be_asked_for(cli: Cli) -> None:
    assert cli("connect", "anthropic").splitlines()[:3] == [
        "# Anthropic clients",
        'export ANTHROPIC_API_KEY="$(tinsmith connect --key)"',
        f"export ANTHROPIC_BASE_URL={cli.url}/anthropic/api",
    ]
    assert cli("connect", "--key") == f"{cli.key}\n"
    assert cli.json("connect", "openai") == {
        "openai": {
            "base_url": f"{cli.url}/oai/api/v1",
            "url_variable": "OPENAI_BASE_URL",
            "key_variable": "OPENAI_API_KEY",
        }
    }
    assert "'claude' is not one of 'openai', 'anthropic', 'tinker'" in cli.fails("connect", "claude", code=2)


def test_a_server_of_the_command_line_is_named_again_for_its_key(cli: Cli) -> None:
    assert cli.url is not None
    elsewhere = Cli("http://127.0.0.1:9", cli.key, cli.home)
    assert f"tinsmith connect --key --base-url {cli.url}" in elsewhere("connect", "tinker", "--base-url", cli.url)


def test_a_server_that_is_not_there_and_a_key_that_is_none_are_told(cli: Cli) -> None:
    assert "connection refused" in Cli("http://127.0.0.1:9", cli.key, cli.home).fails("connect")
    command = Cli(cli.url, None, cli.home, {"TINKER_CREDENTIAL_CMD": f"echo {cli.key}"})
    assert "Create one with: tinsmith key create" in command.fails("connect", "--key")

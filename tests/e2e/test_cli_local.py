"""`stop`, `status` and `clean`: the local engine on this machine, and what it leaves there.

A server on the arithmetic backend stands in for the engine's model; `embedded.json` makes it the local engine.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.cli_run import Cli
from support.server_process import HELD_BACKEND, ServerEndedError, ServerProcess
from support.terminal import Terminal
from support.tiny_server import TINSMITH

from tinsmith import ServiceClient
from tinsmith.client.connection.local_engine import server_process

pytestmark = pytest.mark.usefixtures("clean_environment")


@pytest.fixture
def place(tmp_path: Path) -> Path:
    """The data directory of the local engine of the user whose home is `tmp_path`."""
    found = tmp_path / ".local" / "share" / "tinsmith"
    found.parent.mkdir(parents=True)
    return found


@pytest.fixture
def server(place: Path) -> Iterator[ServerProcess]:
    with ServerProcess(place, backend=HELD_BACKEND) as process:
        yield process


@pytest.fixture
def cli(tmp_path: Path) -> Cli:
    return Cli(None, None, tmp_path)


def make_local(server: ServerProcess, **more: object) -> None:
    """Leave the note that a client leaves when it has started an engine."""
    known = {"url": server.url, "key": server.key, "pid": server.process_id, **more}
    (server.data_dir / "embedded.json").write_text(json.dumps(known))


# stop


def test_the_local_engine_is_stopped(cli: Cli, server: ServerProcess) -> None:
    make_local(server, started_at=time.time() - 7200, keep_s=120.0)
    result = cli.run("stop")
    assert result.exit_code == 0, result.output
    assert result.stdout == f"stopped the local engine (process {server.process_id}, which ran for 2 hours)\n"
    assert f"stopping the local engine (process {server.process_id})" in result.stderr
    assert server_process(server.data_dir) is None
    assert not (server.data_dir / "embedded.json").exists()
    assert "SIGTERM: accepting no new work" in server.log
    assert f"the local engine is not running (data directory {server.data_dir})" in cli("stop")
    assert cli.json("stop") == {"stopped": False, "pid": None, "data_dir": str(server.data_dir)}


def test_programs_that_use_the_engine_are_asked_about(cli: Cli, server: ServerProcess) -> None:
    make_local(server)
    with ServiceClient(base_url=server.url, api_key=server.key) as client:
        client.create_lora_training_client("tinsmith/arithmetic", rank=2)
        env = {**os.environ, **{name: value for name, value in cli.environment.items() if value is not None}}
        for name in ("TINKER_BASE_URL", "TINKER_API_KEY", "XDG_DATA_HOME"):
            env.pop(name, None)
        with Terminal([*TINSMITH, "stop"], env) as terminal:
            terminal.wait_for(r"1 program on this machine may be using the local engine. Stop it\? \[y/N\]: ")
            terminal.type("n\n")
            assert terminal.end() == 0
        assert server_process(server.data_dir) == server.process_id
        assert "pass --yes" in cli.fails("stop", given="")
        assert cli.json("stop", "--yes")["stopped"] is True
        assert server_process(server.data_dir) is None


def test_a_server_that_somebody_started_is_not_stopped(cli: Cli, server: ServerProcess) -> None:
    (server.data_dir / "embedded.json").write_text(json.dumps({"url": server.url, "key": "x", "pid": 1}))
    problem = cli.fails("stop")
    assert f"process {server.process_id} uses {server.data_dir}, but is not a local engine" in problem
    assert f"kill {server.process_id}" in problem
    assert server_process(server.data_dir) == server.process_id


def test_serve_says_that_the_local_engine_has_the_directory(server: ServerProcess) -> None:
    second = ServerProcess(server.data_dir)
    with pytest.raises(ServerEndedError, match="in use by another server, process"):
        second.start()
    make_local(server)
    with pytest.raises(ServerEndedError) as refused:
        second.start()
    told = f"in use by your own local engine, process {server.process_id}, which a client started; stop it with: "
    assert told + f"tinsmith stop --data-dir {server.data_dir}" in refused.value.log

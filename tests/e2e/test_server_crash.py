"""kill -9 at random moments under load: nothing that was acknowledged is lost, and nothing runs that need not.

`KILLS` in the environment says how often; the processes are forked, so that a start takes a tenth of a second.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import sqlite3
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psycopg
from support.fork_server import ForkServer
from support.postgres import PostgresServer
from support.releases import NEWEST, OFFICIAL
from support.server_process import ROOT, ServerProcess, environment

KILLS = int(os.environ.get("KILLS", "50"))
STEADY = ROOT / "tests" / "support" / "steady_program.py"
SEED = 20_26
LONGEST_RUN_S = 0.4
"""Most that a process lives, from when it listens, before it is killed."""
LONGEST_START_S = 0.2
"""The same of one that is killed in its start, or shortly behind it."""
FOREVER = 10**9
TIMEOUT_S = 240.0


class Load:
    """The steady program in a process of its own, by our client or the official one."""

    def __init__(self, module: str, server: ServerProcess, stop_file: Path, count: int = FOREVER) -> None:
        python = sys.executable if module == "tinsmith" else OFFICIAL / "venv" / "bin" / "python"
        path = ROOT / "src" if module == "tinsmith" else OFFICIAL / NEWEST
        self._process = subprocess.Popen(
            [python, "-W", "ignore", STEADY, module, str(stop_file), str(count)],
            env=environment(TINKER_BASE_URL=server.url, TINKER_API_KEY=server.key) | {"PYTHONPATH": str(path)},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def wait_until_ready(self) -> None:
        assert self._process.stdout is not None
        assert self._process.stdout.readline() == "ready\n", self._process.stderr and self._process.stderr.read()

    def result(self) -> dict[str, Any]:
        output, errors = self._process.communicate(timeout=TIMEOUT_S)
        assert self._process.returncode == 0, errors[-4000:]
        told: dict[str, Any] = json.loads(output.splitlines()[-1])
        return told

    def close(self) -> None:
        self._process.kill()
        self._process.communicate()


@contextlib.contextmanager
def loads(*made: Load) -> Iterator[None]:
    try:
        yield
    finally:
        for load in made:
            load.close()


def finished_requests(server: ServerProcess, database: str | None) -> set[str]:
    """The ids of requests that have a result in the store."""
    query = "SELECT request_id FROM results"
    if database is not None:
        with psycopg.connect(database) as connection:
            return {request_id for (request_id,) in connection.execute(query)}
    with contextlib.closing(sqlite3.connect(server.data_dir / "tinsmith.sqlite")) as file:
        return {request_id for (request_id,) in file.execute(query)}


def kill_again_and_again(server: ServerProcess, kills: int, database: str | None) -> None:
    """Kill and restart; every fifth process dies before it listens. What had a result may not begin again."""
    moments = random.Random(SEED)
    for number in range(kills):
        time.sleep(moments.uniform(0, LONGEST_RUN_S))
        server.kill()
        finished = finished_requests(server, database)
        seen = len(server.executions)
        if number % 5 == 4:
            server.begin()
            time.sleep(moments.uniform(0, LONGEST_START_S))
            server.kill()
        server.start()
        repeated = {execution.job_id for execution in server.executions[seen:]} & finished
        assert repeated == set(), "ran again although the result was stored"


def check_executions(server: ServerProcess, least: int) -> None:
    executed = Counter((line.process, line.epoch, line.job_id) for line in server.executions)
    assert len(executed) >= least
    assert [name for name, times in executed.items() if times > 1] == []


def crash_rounds(folder: Path, modules: list[str], kills: int, database: str | None, again: str | None) -> None:
    """Load a server, kill it, and compare what the clients got with undisturbed runs."""
    stop_file = folder / "stop"
    options = ["--database", database] if database is not None else []
    with ForkServer() as forks, ServerProcess(folder / "killed", *options, forks=forks) as server:
        running = [Load(module, server, stop_file) for module in modules]
        with loads(*running):
            for load in running:
                load.wait_until_ready()
            kill_again_and_again(server, kills, database)
            stop_file.touch()
            killed = [load.result() for load in running]
        check_executions(server, sum(result["count"] for result in killed))
    stop_file.unlink()
    options = ["--database", again] if again is not None else []
    with ServerProcess(folder / "quiet", *options) as server:
        undisturbed = [
            Load(module, server, stop_file, result["count"]) for module, result in zip(modules, killed, strict=True)
        ]
        with loads(*undisturbed):
            assert [load.result() for load in undisturbed] == killed


def test_clients_survive_kill_9_of_the_server(tmp_path: Path) -> None:
    crash_rounds(tmp_path, ["tinsmith", "tinker"], KILLS, None, None)


def test_clients_survive_kill_9_on_postgresql(tmp_path: Path, postgres: PostgresServer) -> None:
    crash_rounds(tmp_path, ["tinsmith"], max(KILLS // 5, 2), postgres.database(), postgres.database())

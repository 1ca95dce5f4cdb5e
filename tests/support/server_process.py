"""`tinsmith serve` as a child process, with the arithmetic backend unless told otherwise.

    with ServerProcess(tmp_path) as server:
        client = Client(base_url=server.url, api_key=server.key)
        server.kill()      # kill -9
        server.start()     # the same port and data directory
        server.terminate() # SIGTERM, and wait

No process outlives the `with` block.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any, Self

from support.fork_server import Forked, ForkServer
from tinsmith.testing.backend import Execution, read_log

ROOT = Path(__file__).resolve().parents[2]
BACKEND = "tinsmith.testing.backend:memory_backend"
HELD_BACKEND = "support.held_backend:held_backend"
"""The same, with gates; see there."""
START_S = 60.0
"""What a start may take on a busy machine."""


class ServerEndedError(Exception):
    """The process ended instead of listening; its exit code and the end of its log."""

    def __init__(self, code: int, log: str) -> None:
        super().__init__(f"tinsmith serve ended with {code}:\n{log}")
        self.code = code
        self.log = log


class ServerProcess:
    """One data directory and one port; the process on them can come and go."""

    def __init__(
        self, data_dir: Path, *options: str, backend: str = BACKEND, forks: ForkServer | None = None, **settings: Any
    ) -> None:
        """`settings` are those of ServerConfig, as the environment gives them; `forks` makes starts cheap."""
        self.data_dir = data_dir
        self.url = ""
        self.key = ""
        """What pasting the server's lines into a shell sets; empty if they say none."""
        self.announced = ""
        """The lines that the server printed when it listened."""
        self.starts = 0
        self._port = 0
        self._options = ["--backend", backend, *options]
        self._settings = {f"TINSMITH_{name.upper()}": str(value) for name, value in settings.items()}
        self._forks = forks
        self._process: subprocess.Popen[str] | Forked | None = None
        self._log_path = data_dir.parent / f"{data_dir.name}.log"

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()

    @property
    def process_id(self) -> int:
        assert self._process is not None, "the server does not run"
        return self._process.pid

    @property
    def log(self) -> str:
        """What the server wrote to stderr, over all its starts."""
        return self._log_path.read_text(errors="replace")

    @property
    def log_size(self) -> int:
        return self._log_path.stat().st_size

    def log_after(self, offset: int) -> bytes:
        """What was written behind a size."""
        with self._log_path.open("rb") as file:
            file.seek(offset)
            return file.read()

    @property
    def executions(self) -> list[Execution]:
        """What the arithmetic backend ran, over all starts."""
        return read_log(self.data_dir / "executions.jsonl")

    @property
    def environment(self) -> dict[str, str]:
        """For a client process, or a command on the same data directory."""
        return environment(TINKER_BASE_URL=self.url, TINKER_API_KEY=self.key)

    def start(self) -> None:
        """Start and wait until it listens; again on the port of the first time."""
        process = self.begin()
        timer = threading.Timer(START_S, process.kill)
        timer.start()
        try:
            self._read_address(process)
        finally:
            timer.cancel()

    def begin(self) -> subprocess.Popen[str] | Forked:
        """Start without waiting for anything."""
        assert self._process is None, "the server runs already"
        self._process = self._spawn()
        self.starts += 1
        return self._process

    def kill(self) -> None:
        """End it without warning."""
        self._end(signal.SIGKILL)

    def terminate(self, timeout_s: float = 30.0) -> int:
        """SIGTERM; waits and gives the exit code."""
        self.signal(signal.SIGTERM)
        return self.wait(timeout_s)

    def signal(self, number: signal.Signals) -> None:
        assert self._process is not None, "the server does not run"
        self._process.send_signal(number)

    def wait(self, timeout_s: float = 30.0) -> int:
        """Wait for its end, and give its exit code."""
        assert self._process is not None, "the server does not run"
        try:
            code = self._process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            self.kill()
            raise
        self._forget()
        return code

    def hold(self, gate: str = "hold") -> None:
        """Close a gate of the held backend."""
        (self.data_dir / gate).touch()

    def release(self, gate: str = "hold") -> None:
        (self.data_dir / gate).unlink()

    def run(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        """`tinsmith ARGUMENTS --data-dir DIR` while the server runs."""
        command = [sys.executable, "-m", "tinsmith", *arguments, "--data-dir", str(self.data_dir)]
        return subprocess.run(command, env=self.environment, capture_output=True, text=True, timeout=START_S)

    def _spawn(self) -> subprocess.Popen[str] | Forked:
        arguments = ["serve", "--port", str(self._port), "--data-dir", str(self.data_dir), *self._options]
        with self._log_path.open("ab") as log:
            if self._forks is not None:
                return self._forks.spawn(arguments, environment(**self._settings), log)
            return subprocess.Popen(
                [sys.executable, "-m", "tinsmith", *arguments],
                env=environment(**self._settings),
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
            )

    def _read_address(self, process: subprocess.Popen[str] | Forked) -> None:
        assert process.stdout is not None
        lines: list[str] = []
        while not lines or "TINKER_API_KEY" not in lines[-1]:
            line = process.stdout.readline()
            if not line:
                code = process.wait()
                self._forget()
                raise ServerEndedError(code, self.log[-4000:])
            lines.append(line.strip())
        assert lines[0].startswith("listening on http"), lines
        self.announced = "\n".join(lines)
        self.url = lines[1].removeprefix("export TINKER_BASE_URL=")
        shell = subprocess.run(
            ["sh", "-c", f"{lines[2]}\nprintenv TINKER_API_KEY"], capture_output=True, text=True, env={}
        )
        self.key = shell.stdout.strip()
        self._port = int(self.url.rpartition(":")[2])

    def _end(self, number: signal.Signals) -> None:
        if self._process is not None:
            self._process.send_signal(number)
            self._process.wait()
            self._forget()

    def _forget(self) -> None:
        process, self._process = self._process, None
        if process is not None and process.stdout is not None:
            process.stdout.close()


def environment(**extra: str) -> dict[str, str]:
    """This process's, without settings of ours or of an official client."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("TINKER_", "TINSMITH_"))}
    return {**kept, "PYTHONPATH": f"{ROOT / 'src'}{os.pathsep}{ROOT / 'tests'}", **extra}

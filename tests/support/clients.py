"""Programs that others wrote, run as their users run them: unmodified, in an environment of their own, as a process.

    with serve(place) as server:
        output = Program("litellm", place, server).python("script.py")

`tools/clients` installs what `tests/clients/programs.txt` lists into `.official/clients`.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from tinsmith.client.connection.local_engine import start_server
from tinsmith.engine.models.tiny import make_tiny

ROOT = Path(__file__).resolve().parents[2]
CLIENTS = ROOT / ".official" / "clients"
SCRIPTS = ROOT / "tests" / "clients" / "programs"
TIMEOUT_S = 300.0
"""What one run of a program may take on a busy machine."""
FOREIGN = ("ANTHROPIC", "AXOLOTL", "HF_", "OPENAI", "PYTHON", "TINKER", "TINSMITH")
"""What settings of the machine begin with that would reach a program."""
OFFLINE = {
    "HF_HUB_OFFLINE": "1",
    "HF_DATASETS_OFFLINE": "1",
    "DO_NOT_TRACK": "1",
    "AXOLOTL_DO_NOT_TRACK": "1",
    "TINKER_TELEMETRY": "0",
}


@dataclass(frozen=True)
class Served:
    """A started server with a tiny random model."""

    url: str
    key: str
    model: str
    """Its name is its directory, where programs that read a tokenizer find one without a hub."""

    @property
    def environment(self) -> dict[str, str]:
        """What a client of the Tinker protocol reads."""
        return {"TINKER_BASE_URL": self.url, "TINKER_API_KEY": self.key}


@contextlib.contextmanager
def serve(place: Path, *options: str, context: int = 512) -> Iterator[Served]:
    """Run `tinsmith serve` with a tiny model until the block ends."""
    model = make_tiny(place / "model", max_position_embeddings=context)
    arguments = ["--data-dir", str(place / "data"), "--model", f"{model}={model}", *options]
    address, process = start_server(arguments, {"TINSMITH_DTYPE": "float32"}, place / "server.log")
    try:
        yield Served(address.url, address.key, str(model))
    finally:
        process.terminate()
        process.wait(60)
        assert process.stdout is not None
        process.stdout.close()


class Program:
    """One installed program, with a home directory and a server of its own."""

    def __init__(self, name: str, home: Path, server: Served) -> None:
        self._folder = CLIENTS / name / "bin"
        self._home = home
        self._server = server
        if not (CLIENTS / name / "current").exists():
            pytest.fail(f"{name} is not installed: run tools/clients {name} (make clients installs all)")

    def script(self, *arguments: str | Path, **environment: str) -> str:
        """Run a file of tests/clients/programs, and return what it prints."""
        name, *others = arguments
        return self.run("python", SCRIPTS / name, *others, **environment)

    def run(self, command: str, *arguments: str | Path, cwd: Path | None = None, **environment: str) -> str:
        """Run one of its commands to its end, and return what it prints."""
        with self.start(command, *arguments, cwd=cwd, **environment) as process:
            try:
                output, errors = process.communicate(timeout=TIMEOUT_S)
            except BaseException:
                process.kill()
                raise
        assert process.returncode == 0, f"{command} ended with {process.returncode}:\n{output}\n{errors}"[-6000:]
        return output

    def start(
        self, command: str, *arguments: str | Path, cwd: Path | None = None, **environment: str
    ) -> subprocess.Popen[str]:
        """Start one of its commands; the caller ends it."""
        kept = {name: value for name, value in os.environ.items() if not name.startswith(FOREIGN)}
        own = {"HOME": str(self._home), "PATH": f"{self._folder}{os.pathsep}{os.environ['PATH']}"}
        return subprocess.Popen(
            [self._folder / command, *arguments],
            cwd=cwd or self._home,
            env=kept | OFFLINE | own | self._server.environment | environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

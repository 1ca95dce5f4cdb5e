"""The command line as its users call it, against a running server.

cli = Cli(server.url, server.key, tmp_path)
runs = cli.json("run", "list")["runs"]          # our command, in this process
theirs = cli.official([["run", "list"]])        # the official one, 0.36.0; many commands in one process
assert "does not exist" in cli.fails("run", "info", "nope")
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from click.testing import CliRunner, Result

from support.program_run import OFFICIAL, ROOT
from tinsmith.cli.main import main

RELEASE = "0.36.0"
TIMEOUT_S = 120.0
OFFICIAL_COMMANDS = """
import json, os, sys
from click.testing import CliRunner
from tinker.cli.__main__ import main_cli
results = [CliRunner().invoke(main_cli, command) for command in json.load(sys.stdin)]
print(json.dumps([[result.exit_code, result.stdout, repr(result.exception)] for result in results]), flush=True)
os._exit(0)  # its clients are never closed, and may keep the process from ending
"""


@dataclass
class Cli:
    """Commands with one server, key and home directory."""

    url: str | None
    key: str | None = field(repr=False)
    home: Path
    extra: dict[str, str] = field(default_factory=dict)

    @property
    def environment(self) -> dict[str, str | None]:
        known = {"TINKER_BASE_URL": self.url, "TINKER_API_KEY": self.key, "HOME": str(self.home), **self.extra}
        return {"XDG_DATA_HOME": None, "XDG_CONFIG_HOME": None, "TINSMITH_CONFIG": None, **known}

    def run(self, *arguments: str, given: str | None = None) -> Result:
        """What a command printed and its exit code, whatever it is; a crash is an error of the test."""
        result = CliRunner(env=self.environment).invoke(main, arguments, input=given, prog_name="tinsmith")
        if result.exception is not None and not isinstance(result.exception, SystemExit):
            raise result.exception
        return result

    def __call__(self, *arguments: str, given: str | None = None) -> str:
        """The output of a command that must succeed."""
        result = self.run(*arguments, given=given)
        assert result.exit_code == 0, result.output
        return result.stdout

    def json(self, *arguments: str) -> Any:
        return json.loads(self(*arguments, "--format", "json"))

    def fails(self, *arguments: str, given: str | None = None, code: int = 1) -> str:
        """What a command that must fail says on stderr."""
        result = self.run(*arguments, given=given)
        assert result.exit_code == code, result.output
        return result.stderr

    def start(self, *arguments: str) -> subprocess.Popen[str]:
        """The command as a process of its own."""
        return subprocess.Popen(
            [sys.executable, "-m", "tinsmith", *arguments],
            env=self._of_process({"PYTHONPATH": str(ROOT / "src")}),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def official(self, commands: list[list[str]]) -> list[str]:
        """What the official commands print, one after another."""
        done = subprocess.run(
            [OFFICIAL / "venv" / "bin" / "python", "-W", "ignore", "-c", OFFICIAL_COMMANDS],
            env=self._of_process({"PYTHONPATH": str(OFFICIAL / RELEASE)}),
            input=json.dumps(commands),
            capture_output=True,
            text=True,
            timeout=TIMEOUT_S,
        )
        assert done.returncode == 0, done.stderr
        answers = json.loads(done.stdout)
        for command, (code, _, problem) in zip(commands, answers, strict=True):
            assert code == 0, (command, problem)
        return [printed for _, printed, _ in answers]

    def _of_process(self, extra: dict[str, str]) -> dict[str, str]:
        kept = {name: value for name, value in os.environ.items() if not name.startswith(("TINKER", "TINSMITH"))}
        merged = {**kept, **self.environment, **extra}
        return {name: value for name, value in merged.items() if value is not None}

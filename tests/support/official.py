"""Releases of the official SDK, each behind a process that answers questions about it."""

from __future__ import annotations

import base64
import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest

from support.releases import NEWEST as NEWEST
from support.releases import OFFICIAL

SCRIPTS = Path(__file__).parents[1] / "contract" / "official"


class RefusedError(Exception):
    """The release does not accept what it was asked to read or build."""


class Official:
    """One release. `ask` puts a question to its process; see official/oracle.py for the commands."""

    def __init__(self, release: str) -> None:
        if not (OFFICIAL / release).is_dir():
            pytest.fail(f"tinker {release} is not installed: run tools/official (make test does)")
        environment = {key: value for key, value in os.environ.items() if not key.startswith(("TINKER", "PYTHON"))}
        self.release = release
        self._process = subprocess.Popen(
            [OFFICIAL / "venv" / "bin" / "python", "-W", "ignore", SCRIPTS / "oracle.py"],
            env=environment | {"PYTHONPATH": str(OFFICIAL / release)},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self.description = self.ask("describe")

    @property
    def line(self) -> tuple[int, int]:
        major, minor, _ = self.release.split(".")
        return int(major), int(minor)

    def has_type(self, name: str) -> bool:
        return name in self.description["types"]

    def fields(self, name: str) -> dict[str, dict[str, Any]]:
        fields: dict[str, dict[str, Any]] = self.description["types"][name]
        return fields

    def ask(self, command: str, **question: Any) -> Any:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        encoded = {k: base64.b64encode(v).decode() if isinstance(v, bytes) else v for k, v in question.items()}
        self._process.stdin.write(json.dumps({"command": command, **encoded}) + "\n")
        self._process.stdin.flush()
        line = self._process.stdout.readline()
        assert line, f"the process for tinker {self.release} ended"
        answer = json.loads(line)
        if "error" in answer:
            raise RefusedError(answer["error"])
        return answer["ok"]

    def close(self) -> None:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.close()
        self._process.stdout.close()
        self._process.wait(10)


class Oracle(Official):
    """The process of official/trace_oracle.py."""

    def __init__(self) -> None:
        self.release = NEWEST
        environment = {key: value for key, value in os.environ.items() if not key.startswith(("TINKER", "PYTHON"))}
        script = SCRIPTS / "trace_oracle.py"
        self._process = subprocess.Popen(
            [OFFICIAL / "venv" / "bin" / "python", "-W", "ignore", script],
            env=environment | {"PYTHONPATH": str(OFFICIAL / NEWEST), "HF_HUB_OFFLINE": "1"},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )


running: dict[str, Official] = {}


def official_release(release: str) -> Official:
    if release not in running:
        running[release] = Official(release)
    return running[release]

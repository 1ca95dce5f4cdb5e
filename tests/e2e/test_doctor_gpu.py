"""`tinsmith doctor --gpu`: the report, on a device that works, is not there, or ends the process."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tinsmith.cli.server import device_report
from tinsmith.engine.models.tiny import make_tiny


def doctor(*options: str) -> tuple[int, Any]:
    command = [sys.executable, "-m", "tinsmith", "-f", "json", "doctor", "--gpu", *options]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    return done.returncode, json.loads(done.stdout)


def test_a_device_that_works(tmp_path: Path) -> None:
    code, report = doctor("--device", "cpu", "--model", str(make_tiny(tmp_path / "tiny")))
    results = {check["check"]: check["result"] for check in report["checks"]}
    assert (code, report["ok"]) == (0, True), report
    for dtype in device_report.FORMATS:
        for check in ("logprobs", "training", "determinism", "on-policy gap", "replay"):
            assert results[f"{dtype}: {check}"] == "ok"
    assert {"python", "extra [server]", "float32: training speed"} <= results.keys()


def test_a_device_that_is_not_there() -> None:
    code, report = doctor()
    last = report["checks"][-1]
    assert (code, last["check"], last["result"]) == (1, "float32: device", "broken")
    assert "https://pytorch.org" in last["step"]


def test_a_device_that_ends_the_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program = 'import os, signal; print(\'{"check": "start", "outcome": "number", "detail": ""}\', flush=True)\n'
    (tmp_path / "dying_trial.py").write_text(program + "os.write(2, b'illegal'); os.kill(os.getpid(), signal.SIGILL)\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setattr(device_report, "MODULE", "dying_trial")
    assert [tuple(found) for found in device_report.tried("cuda", "", tmp_path)] == [
        ("float32: start", "number", ""),
        ("float32: process", "wrong", "ended with SIGILL: illegal"),
    ]

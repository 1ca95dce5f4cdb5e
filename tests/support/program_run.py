"""Runs of tests/contract/official/program.py: the same program, by an official release or by a module in its place."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol, TypeAlias

ROOT = Path(__file__).resolve().parents[2]
OFFICIAL = ROOT / ".official"
PROGRAM = ROOT / "tests" / "contract" / "official" / "program.py"
TIMEOUT_S = 120.0

class Address(Protocol):
    """A server that a program can be pointed at."""

    @property
    def url(self) -> str: ...

    @property
    def key(self) -> str: ...


Steps: TypeAlias = list[tuple[str, Any]]
"""Name and value of each step; see the program."""

ALL_FLAGS = dict.fromkeys(
    (
        *("pjwt_auth_enabled", "proto_compress_fwdbwd", "create_model_via_load_weights", "custom_loss_server_side"),
        *("sample_use_retrieve_futures", "sample_join_sampling_session", "proto_write_fwdbwd", "fwd_via_fwdbwd"),
    ),
    True,
)
ALL_DYNAMIC_FLAGS = {"sample_cancel_enabled": True}


def run_official(server: Address, release: str, *options: str) -> Steps:
    """The program under an official release."""
    python = OFFICIAL / "venv" / "bin" / "python"
    return _run(server, [python, PROGRAM, "tinker", *options], {"PYTHONPATH": str(OFFICIAL / release)})


def run_module(server: Address, module: str, *options: str) -> Steps:
    """The program under a module of this environment."""
    return _run(server, [sys.executable, PROGRAM, module, *options], {"PYTHONPATH": str(ROOT / "src")})


def _run(server: Address, command: Sequence[str | Path], extra: dict[str, str]) -> Steps:
    kept = {key: value for key, value in os.environ.items() if not key.startswith(("TINKER", "PYTHON"))}
    finished = subprocess.run(
        command,
        env=kept | {"TINKER_BASE_URL": server.url, "TINKER_API_KEY": server.key} | extra,
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
    )
    if finished.returncode != 0:
        raise RuntimeError(f"the program ended with {finished.returncode}:\n{finished.stderr[-4000:]}")
    return [(name, value) for name, value in json.loads(finished.stdout.splitlines()[-1])]


def raised(steps: Steps) -> dict[str, str]:
    """The steps that raised, and the class of what they raised."""
    return {name: value["raises"] for name, value in steps if isinstance(value, dict) and "raises" in value}

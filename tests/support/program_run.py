"""Runs of a program in tests/contract/official, by an official release or by a module in its place."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any, Protocol, TypeAlias

ROOT = Path(__file__).resolve().parents[2]
OFFICIAL = ROOT / ".official"
PROGRAM = ROOT / "tests" / "contract" / "official" / "program.py"
"""Uses the whole public API."""
BUDGET_PROGRAM = PROGRAM.with_name("budget.py")
"""Asks for more tokens than its key has."""
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


def run_official(server: Address, release: str, *options: str, program: Path = PROGRAM) -> Steps:
    """The program under an official release."""
    python = OFFICIAL / "venv" / "bin" / "python"
    return _run(server, [python, program, "tinker", *options], {"PYTHONPATH": str(OFFICIAL / release)})


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


KINDS = {"InvalidInputError": "ValueError", "MissingArgumentError": "TypeError"}
"""Our exceptions that are also the official client's."""


def as_official(steps: Steps) -> Steps:
    """The steps with our own exception classes under the name that the official client's have."""

    def renamed(value: Any) -> Any:
        if isinstance(value, dict) and value.get("raises") in KINDS:
            return {"raises": KINDS[value["raises"]], "bases": []}
        return value

    return [(name, renamed(value)) for name, value in steps]


def comparable(steps: Steps, drawn: Collection[str] = ()) -> Steps:
    """Steps without what differs from run to run: ids, times, and the content of steps that draw at random.

    Ids that are the same stay the same: each becomes its number in the order of appearance.
    """
    ids: dict[str, str] = {}

    def settled(value: Any) -> Any:
        if isinstance(value, dict):
            return {name: settled(item) for name, item in value.items()}
        if isinstance(value, list):
            return [settled(item) for item in value]
        if isinstance(value, str):
            value = _TIME.sub("<time>", value)
            return _ID.sub(lambda found: ids.setdefault(found[0], f"<id {len(ids)}>"), value)
        return value

    return [(name, settled(_shape(value) if name in drawn else value)) for name, value in steps]


_TIME = re.compile(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d[.\d]*(Z|\+00:00)")
_ID = re.compile(r"[0-9a-f]{8}-[0-9a-f-]{27}|[0-9a-f]{32}|[0-9a-f-]*<clone>(?:[0-9a-f-]|<clone>)*")


def _shape(value: Any) -> Any:
    """A value with numbers left out and lists of them as one word."""
    if isinstance(value, dict):
        return {name: _shape(item) for name, item in value.items() if name != "stop_reason"}
    if isinstance(value, list):
        if all(isinstance(item, (int, float)) or item is None for item in value):
            return "numbers"
        return [_shape(item) for item in value]
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        return "number"
    return value

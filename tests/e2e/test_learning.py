"""Learning end to end: a real server and engine, driven by the official client and by ours."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from tinsmith.client.connection.local_engine import start_server
from tinsmith.config import EmbeddedConfig
from tinsmith.engine.models.sources import NAME as DEFAULT_NAME
from tinsmith.engine.models.tiny import make_tiny

ROOT = Path(__file__).resolve().parents[2]
OFFICIAL = ROOT / ".official"
NEWEST = "0.36.0"
PROGRAM = Path(__file__).parent / "programs" / "learning.py"
TIMEOUT_S = 600.0


@pytest.fixture(scope="module")
def tiny_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    """A server with a tiny random model."""
    place = tmp_path_factory.mktemp("tiny")
    make_tiny(place / "model")
    yield from _server(place, ["--model", f"tiny={place / 'model'}"])


def _server(place: Path, models: list[str], settings: Mapping[str, str] = {}) -> Iterator[dict[str, str]]:
    address, process = start_server(["--data-dir", str(place / "data"), *models], settings, place / "log")
    yield {"TINKER_BASE_URL": address.url, "TINKER_API_KEY": address.key}
    process.terminate()
    process.wait(60)
    assert process.stdout is not None
    process.stdout.close()


def learn(package: str, model: str, server: dict[str, str], *options: str) -> dict[str, Any]:
    kept = {key: value for key, value in os.environ.items() if not key.startswith(("TINKER", "PYTHON"))}
    python = sys.executable
    if package == "tinker":
        python = str(OFFICIAL / "venv" / "bin" / "python")
        kept["PYTHONPATH"] = str(OFFICIAL / NEWEST)
    finished = subprocess.run(
        [python, PROGRAM, package, model, *options],
        env=kept | server,
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
    )
    assert finished.returncode == 0, finished.stderr[-3000:]
    found: dict[str, Any] = json.loads(finished.stdout.splitlines()[-1])
    return found


@pytest.fixture(scope="module")
def real_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    """A server with the default model, fetched once for this user."""
    place = tmp_path_factory.mktemp("real")
    models = {"TINSMITH_MODELS_DIR": str(EmbeddedConfig.from_env(os.environ).models_dir)}
    yield from _server(place, [], models)


@pytest.mark.parametrize("package", ["tinsmith", "tinker"])
def test_a_tiny_model_learns(package: str, tiny_server: dict[str, str]) -> None:
    found = learn(package, "tiny", tiny_server, "--quick")
    assert len(found) == 6
    check(found)


REAL_PARTS = {
    "tinsmith": ("on_policy", "importance_sampling", "dpo"),
    "tinker": ("memorise", "resume"),
}
"""The default model takes its time, so each client has some of the parts; with TINSMITH_LONG_TESTS, all."""


@pytest.mark.parametrize("package", REAL_PARTS)
def test_the_default_model_learns(package: str, real_server: dict[str, str]) -> None:
    parts = () if os.environ.get("TINSMITH_LONG_TESTS") else REAL_PARTS[package]
    check(learn(package, DEFAULT_NAME, real_server, *parts))


def check(found: dict[str, Any]) -> None:
    """What every model must have learned."""
    if "memorise" in found:
        assert found["memorise"]["losses"][1] < found["memorise"]["losses"][0] / 4
        assert found["memorise"]["recalled"] == [True, True, True]
        assert found["memorise"]["frozen"]
    if "on_policy" in found:
        assert found["on_policy"]["largest_gap"] <= 1e-4
    for loss in {"importance_sampling", "ppo"} & found.keys():
        rewards = found[loss]["rewards"]
        assert sum(rewards[-2:]) > sum(rewards[:2]) + 0.2
    if "dpo" in found:
        assert found["dpo"]["losses"][0] == pytest.approx(math.log(2), abs=1e-5)
        assert found["dpo"]["losses"][-1] < found["dpo"]["losses"][0]
    if "resume" in found:
        assert found["resume"]["equal"]

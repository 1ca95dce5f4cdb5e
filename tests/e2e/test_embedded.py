"""The local engine, which starts by itself, with the real default model: what new users see first."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tinsmith.client.connection.local_engine import embedded_address
from tinsmith.client.service import local
from tinsmith.config import EmbeddedConfig
from tinsmith.errors import TinkerError

ROOT = Path(__file__).resolve().parents[2]
MODELS = Path.home() / ".cache" / "tinsmith"
"""The default model is fetched and converted once for all tests."""
RUN = """
import sys
sys.path.insert(0, {unit!r})
from test_documents import run_blocks
from pathlib import Path
run_blocks(Path({path!r}).read_text(), {path!r}, with_engine=True)
"""
WHERE = "import tinsmith; c = tinsmith.ServiceClient(); print(c.holder.connection.config.base_url); c.close().result()"


@pytest.fixture
def surroundings(tmp_path: Path) -> dict[str, str]:
    """An environment without address and key, with an engine of its own that ends soon."""
    MODELS.mkdir(parents=True, exist_ok=True)
    return {
        "HOME": str(tmp_path),
        "PATH": os.environ["PATH"],
        "TINSMITH_DATA_DIR": str(tmp_path / "data"),
        "TINSMITH_MODELS_DIR": str(MODELS),
        "TINSMITH_KEEP": "3",
    }


def run(surroundings: dict[str, str], *command: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, env=surroundings, capture_output=True, text=True, timeout=600)


def test_the_readmes_loop_runs(surroundings: dict[str, str]) -> None:
    program = RUN.format(unit=str(ROOT / "tests" / "unit"), path=str(ROOT / "README.md"))
    done = run(surroundings, sys.executable, "-c", program)
    assert done.returncode == 0, done.stderr[-3000:]


def test_processes_share_an_engine_and_replace_a_dead_one(surroundings: dict[str, str]) -> None:
    surroundings["TINSMITH_KEEP"] = "60"  # a busy machine may take a while from one process to the next
    first = run(surroundings, sys.executable, "-c", WHERE)
    assert first.returncode == 0, first.stderr[-3000:]
    second = run(surroundings, sys.executable, "-c", WHERE)
    assert second.stdout == first.stdout
    kill_engine(surroundings)
    third = run(surroundings, sys.executable, "-c", WHERE)
    assert third.returncode == 0, third.stderr[-3000:]
    assert third.stdout != first.stdout
    kill_engine(surroundings)


def kill_engine(surroundings: dict[str, str]) -> None:
    running = json.loads((Path(surroundings["TINSMITH_DATA_DIR"]) / "embedded.json").read_text())
    os.kill(running["pid"], signal.SIGKILL)


def test_an_unused_engine_ends(surroundings: dict[str, str]) -> None:
    address = embedded_address(EmbeddedConfig.from_env(surroundings))
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline:
        try:
            finished, _ = os.waitpid(address.pid, os.WNOHANG)
        except ChildProcessError:
            break
        if finished:
            break
        time.sleep(0.1)
    else:
        pytest.fail("the engine still runs")


def test_an_engine_that_cannot_start_says_why(tmp_path: Path) -> None:
    with (
        pytest.raises(
            TinkerError, match=r"^the local engine could not start: model x: 'nowhere' is neither a directory"
        ),
        local({"x": "nowhere"}, data_dir=tmp_path / "data"),
    ):
        pass


def test_a_data_directory_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    place = tmp_path / "file"
    place.touch()
    says = rf"could not start: {place}/data: Not a directory; .* choose another data directory \(TINSMITH_DATA_DIR\)"
    with pytest.raises(TinkerError, match=says):
        embedded_address(EmbeddedConfig(data_dir=place / "data", models_dir=MODELS))
    with pytest.raises(TinkerError, match=says), local(data_dir=place / "data"):
        pass


def test_the_demo(surroundings: dict[str, str], tmp_path: Path) -> None:
    """On the real model, with the first chats of the data: every part of it happens."""
    out, data = tmp_path / "demo", tmp_path / "chats.jsonl"
    shipped = ROOT / "src" / "tinsmith" / "cli" / "train" / "data" / "workshop.jsonl"
    data.write_text("\n".join(shipped.read_text().splitlines()[:8]))
    options = ("--epochs", "1", "--out", str(out), "--data", str(data))
    done = run(surroundings, sys.executable, "-m", "tinsmith", "demo", *options)
    assert done.returncode == 0, done.stderr[-3000:]
    page = (out / "report.html").read_text()
    assert "<svg" in page
    assert "What is the capital of Italy?" in page
    assert (out / "adapter" / "adapter_model.safetensors").stat().st_size > 0
    assert json.loads((out / "adapter" / "adapter_config.json").read_text())["r"] == 16
    assert "Try next" in done.stdout

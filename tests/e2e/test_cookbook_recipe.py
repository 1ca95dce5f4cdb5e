"""A recipe of the official cookbook, unmodified, with the official client, against our server and engine."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tinsmith.client.connection.local_engine import Address, start_server
from tinsmith.engine.models.tiny import make_tiny

COOKBOOK = Path(__file__).resolve().parents[2] / ".official" / "cookbook" / "venv" / "bin" / "python"
RECIPE = "tinker_cookbook.recipes.chat_sl.train"
BATCH = 4
STEPS = 6
"""Of one epoch."""
LEARNING_RATE = 0.02
TIMEOUT_S = 300


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """The model's name is its directory, so that the recipe finds the tokenizer without a hub."""
    make_tiny(tmp_path / "model")
    return tmp_path / "model"


@pytest.fixture
def address(tmp_path: Path, model: Path) -> Iterator[Address]:
    arguments = ["--data-dir", str(tmp_path / "data"), "--model", f"{model}={model}"]
    address, server = start_server(arguments, {}, tmp_path / "server.log")
    try:
        yield address
    finally:
        server.terminate()
        server.wait(60)
        assert server.stdout is not None
        server.stdout.close()


def train(address: Address, model: Path, folder: Path, epochs: int) -> None:
    """Run the recipe, from its last checkpoint where there is one."""
    chat = {"messages": [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello there"}]}
    (folder / "chats.jsonl").write_text((json.dumps(chat) + "\n") * BATCH * STEPS)
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("TINKER", "PYTHON"))}
    done = subprocess.run(
        [
            *(COOKBOOK, "-m", RECIPE),
            f"model_name={model}",
            f"dataset={folder / 'chats.jsonl'}",
            f"base_url={address.url}",
            f"log_path={folder / 'log'}",
            "renderer_name=role_colon",
            "lora_rank=8",
            f"learning_rate={LEARNING_RATE}",
            f"batch_size={BATCH}",
            "max_length=200",
            f"num_epochs={epochs}",
            "save_every=3",
            "behavior_if_log_dir_exists=resume",
        ],
        env={**environment, "TINKER_API_KEY": address.key, "HF_HUB_OFFLINE": "1"},
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
    )
    assert done.returncode == 0, done.stderr[-3000:]


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_supervised_learning_from_a_file_of_chats_with_a_resume(address: Address, model: Path, tmp_path: Path) -> None:
    train(address, model, tmp_path, epochs=1)
    rows = lines(tmp_path / "log" / "metrics.jsonl")
    losses = [row["train_mean_nll"] for row in rows if "train_mean_nll" in row]
    assert len(losses) == STEPS
    assert losses[-1] < losses[0] / 2
    saved = lines(tmp_path / "log" / "checkpoints.jsonl")
    assert [Path(row["state_path"]).name for row in saved][-1] == "final"

    train(address, model, tmp_path, epochs=2)
    rows = lines(tmp_path / "log" / "metrics.jsonl")
    # The recipe merges the optimizer's metrics into its own: its step (from 0) and its learning rate must survive that.
    assert [row["step"] for row in rows] == list(range(2 * STEPS))
    rates = [LEARNING_RATE * (1 - i / STEPS) for i in range(STEPS)]
    assert [row["learning_rate"] for row in rows[:STEPS]] == pytest.approx(rates)
    assert [row["optim/step"] for row in rows] == list(range(1, 2 * STEPS + 1)), "the optimizer's state was resumed"
    assert [row["optim/learning_rate"] for row in rows] == [row["learning_rate"] for row in rows]

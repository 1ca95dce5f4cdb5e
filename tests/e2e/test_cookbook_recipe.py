"""A recipe of the official cookbook, unmodified, with the official client, against our server and engine."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

from tinsmith.client.embedded import start_server
from tinsmith.engine.models.tiny import make_tiny

COOKBOOK = Path(__file__).resolve().parents[2] / ".official" / "cookbook" / "venv" / "bin" / "python"
RECIPE = "tinker_cookbook.recipes.chat_sl.train"
STEPS = 6
TIMEOUT_S = 300


def test_supervised_learning_from_a_file_of_chats(tmp_path: Path) -> None:
    """The model's name is its directory, so that the recipe finds the tokenizer without a hub."""
    model = tmp_path / "model"
    make_tiny(model)
    chats = tmp_path / "chats.jsonl"
    chat = {"messages": [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello there"}]}
    chats.write_text((json.dumps(chat) + "\n") * 32)
    arguments = ["--data-dir", str(tmp_path / "data"), "--model", f"{model}={model}"]
    address, server = start_server(arguments, {}, tmp_path / "server.log")
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("TINKER", "PYTHON"))}
    try:
        done = subprocess.run(
            [
                *(COOKBOOK, "-m", RECIPE),
                f"model_name={model}",
                f"dataset={chats}",
                f"base_url={address.url}",
                f"log_path={tmp_path / 'log'}",
                "renderer_name=role_colon",
                "lora_rank=8",
                "learning_rate=0.02",
                "batch_size=4",
                "max_length=200",
                f"max_steps={STEPS}",
                "save_every=3",
                "behavior_if_log_dir_exists=delete",
            ],
            env={**environment, "TINKER_API_KEY": address.key, "HF_HUB_OFFLINE": "1"},
            capture_output=True,
            text=True,
            timeout=TIMEOUT_S,
        )
    finally:
        server.terminate()
        server.wait(60)
        assert server.stdout is not None
        server.stdout.close()
    assert done.returncode == 0, done.stderr[-3000:]
    rows = [json.loads(line) for line in (tmp_path / "log" / "metrics.jsonl").read_text().splitlines()]
    losses = [row["train_mean_nll"] for row in rows if "train_mean_nll" in row]
    assert len(losses) == STEPS
    assert losses[-1] < losses[0] / 2
    saved = [json.loads(line) for line in (tmp_path / "log" / "checkpoints.jsonl").read_text().splitlines()]
    assert [Path(row["state_path"]).name for row in saved][-1] == "final"

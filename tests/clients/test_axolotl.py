"""axolotl trains through its Tinker plugin (axolotl.integrations.hatchery), from a YAML file, with its own command."""

from __future__ import annotations

import ast
import json
from pathlib import Path
from typing import Any

import pytest
from support.clients import SCRIPTS, Program, Served

from tinsmith import Datum, ModelInput, ServiceClient

STEPS = 6
CHAT = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello there"}]
RENDERED = "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\nHello there<|im_end|>"
TRAINED = 9
"""Tokens of the answer with its end, which alone are trained on."""


@pytest.fixture(scope="module")
def axolotl(place: Path, server: Served) -> Program:
    return Program("axolotl", place, server)


def configured(place: Path, server: Served, rows: list[dict[str, Any]], **changes: Any) -> Path:
    """A configuration file; YAML reads JSON."""
    (place / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    values = {
        "base_model": server.model,
        "plugins": ["axolotl.integrations.hatchery.HatcheryPlugin"],
        "datasets": [{"path": str(place / "rows.jsonl"), "ds_type": "json", "type": "chat_template"}],
        "chat_template": "tokenizer_default",
        "sequence_len": 256,
        "optimizer": "adamw_torch",
        "num_epochs": 1,
        "gradient_accumulation_steps": 1,
        "logging_steps": 1,
        "dataset_prepared_path": str(place / "prepared"),
        "output_dir": str(place / "output"),
    }
    file = place / "config.yaml"
    file.write_text(json.dumps(values | changes))
    return file


def logged(output: str, name: str) -> list[float]:
    """A number of each line that the trainer has logged."""
    rows = [ast.literal_eval(line) for line in output.splitlines() if line.startswith("{'loss'")]
    return [float(row[name]) for row in rows]


def checkpoints(service: ServiceClient) -> dict[str, str]:
    """The training checkpoints of the newest run, by name."""
    listed = service.create_rest_client().list_user_checkpoints().result().checkpoints
    newest = max(listed, key=lambda checkpoint: checkpoint.time).tinker_path.split("/")[2]
    paths = [checkpoint.tinker_path for checkpoint in listed if checkpoint.checkpoint_type == "training"]
    return {path.rsplit("/")[-1]: path for path in paths if newest in path}


def loss_of(service: ServiceClient, path: str | None, server: Served) -> float:
    """The mean loss of the chat's answer, under a checkpoint or the base model."""
    training = (
        service.create_training_client_from_state(path)
        if path is not None
        else service.create_lora_training_client(server.model, rank=8)
    )
    tokens = training.get_tokenizer().encode(RENDERED, add_special_tokens=False)
    weights = [0.0] * (len(tokens) - 1 - TRAINED) + [1.0] * TRAINED
    datum = Datum(ModelInput.from_ints(tokens[:-1]), {"target_tokens": tokens[1:], "weights": weights})
    return training.forward([datum], "cross_entropy").result().metrics["loss:sum"] / TRAINED


def test_fine_tuning_on_chats(axolotl: Program, place: Path, server: Served, service: ServiceClient) -> None:
    plugin = {"backend": "tinker", "lora_rank": 8, "loss_fn": "cross_entropy", "save_steps": 3}
    options = {"hatchery": plugin, "learning_rate": 0.01, "max_steps": STEPS, "micro_batch_size": 2}
    output = axolotl.run("axolotl", "train", configured(place, server, [{"messages": CHAT}] * 2 * STEPS, **options))
    losses = logged(output, "loss")
    assert len(losses) == STEPS
    assert losses[-1] < losses[0] / 2
    saved = checkpoints(service)
    assert set(saved) == {"checkpoint-000003", "checkpoint-000006", "final"}
    # All batches are the same, so the fourth step has the loss of the checkpoint after the third. Printed: 4 digits.
    assert losses[0] == pytest.approx(loss_of(service, None, server), rel=1e-3)
    assert losses[3] == pytest.approx(loss_of(service, saved["checkpoint-000003"], server), rel=1e-3)
    assert loss_of(service, saved["final"], server) < losses[-1]


def test_reinforcement_learning(axolotl: Program, place: Path, server: Served, service: ServiceClient) -> None:
    plugin = {
        "backend": "tinker",
        "lora_rank": 8,
        "loss_fn": "importance_sampling",
        "num_samples": 8,
        "max_sample_tokens": 16,
        "reward_funcs": ["axolotl_reward.letters"],
    }
    datasets = [{"path": str(place / "rows.jsonl"), "ds_type": "json", "type": "completion"}]
    options = {"hatchery": plugin, "datasets": datasets, "learning_rate": 0.02, "max_steps": 10, "micro_batch_size": 1}
    file = configured(place, server, [{"text": "Say something: "}] * 10, **options)
    rewards = logged(axolotl.run("axolotl", "train", file, PYTHONPATH=str(SCRIPTS)), "reward")
    assert len(rewards) == 10
    assert sum(rewards[-3:]) > 1.5 * sum(rewards[:3]), rewards
    assert set(checkpoints(service)) == {"final"}

"""tinkerscope browses a cookbook recipe's runs and samples their checkpoints, with the probability of every token."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support.clients import Program, Served

from tinsmith import ModelInput, ServiceClient

RECIPE = "tinker_cookbook.recipes.chat_sl.train"
STEPS = 6
ALTERNATIVES = 5
"""What tinkerscope asks for at each position."""


@pytest.fixture(scope="module")
def tinkerscope(place: Path, server: Served) -> Program:
    return Program("tinkerscope", place, server)


@pytest.fixture(scope="module")
def checkpoints(place: Path, server: Served, tinkerscope: Program) -> dict[str, str]:
    """The sampler paths that the recipe has saved, by name."""
    chat = {"messages": [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello there"}]}
    (place / "chats.jsonl").write_text((json.dumps(chat) + "\n") * 4 * STEPS)
    tinkerscope.run(
        "python",
        *("-m", RECIPE),
        f"model_name={server.model}",
        f"dataset={place / 'chats.jsonl'}",
        f"base_url={server.url}",
        f"log_path={place / 'runs' / 'greeting'}",
        *("renderer_name=role_colon", "lora_rank=8", "learning_rate=0.02", "batch_size=4", "max_length=200"),
        *("num_epochs=1", "save_every=2", "behavior_if_log_dir_exists=raise"),
    )
    rows = (place / "runs" / "greeting" / "checkpoints.jsonl").read_text().splitlines()
    return {row["name"]: row["sampler_path"] for row in map(json.loads, rows)}


@pytest.fixture(scope="module")
def scope(place: Path, checkpoints: dict[str, str], tinkerscope: Program) -> Iterator[Program]:
    """The program while its server runs on the folder of runs; its commands find it there."""
    with tinkerscope.start("tinkerscope", "serve", place / "runs") as process:
        try:
            assert process.stderr is not None
            said = iter(process.stderr.readline, "")
            assert any("Uvicorn running" in line for line in said), "tinkerscope ended"
            yield tinkerscope
        finally:
            process.kill()


def samples(scope: Program, place: Path, *arguments: str) -> list[dict[str, Any]]:
    """What `tinkerscope chat` prints as JSON."""
    output = scope.run("tinkerscope", "chat", *arguments, "--json", cwd=place / "runs")
    lines = [json.loads(line) for line in output.splitlines() if line.startswith("{")]
    return [line for line in lines if line["event"] == "sample"]


def test_it_lists_the_run_and_its_checkpoints(scope: Program, place: Path, server: Served) -> None:
    listed = scope.run("tinkerscope", "ls", "--sampleable-only", cwd=place / "runs")
    assert server.model in listed, listed
    assert "1 run(s)" in listed
    shown = scope.run("tinkerscope", "checkpoints", "greeting", cwd=place / "runs")
    rows = [line.split() for line in shown.splitlines()]
    assert [row[0] for row in rows if row[-1:] == ["yes"]] == ["000002", "000004", "final"]


@pytest.mark.parametrize("name", ["000002", "final"])
def test_the_probabilities_are_those_of_the_checkpoint(
    name: str, scope: Program, place: Path, checkpoints: dict[str, str], server: Served, service: ServiceClient
) -> None:
    (sample,) = samples(scope, place, f"greeting@{name}", "Hi", "--temperature", "0", "--max-tokens", "8")
    rows = sample["token_logprobs"]
    tokens = [row["tid"] for row in rows]
    assert len(tokens) == 8
    ours = service.create_sampling_client(model_path=checkpoints[name])
    prompt = ours.get_tokenizer().encode("<|im_start|>User: Hi\n\nAssistant:", add_special_tokens=False)
    logprobs = ours.compute_logprobs(ModelInput.from_ints([*prompt, *tokens])).result()[len(prompt) :]
    other = service.create_sampling_client(base_model=server.model)
    untrained = other.compute_logprobs(ModelInput.from_ints([*prompt, *tokens])).result()[len(prompt) :]
    assert [row["lp"] for row in rows] == logprobs
    assert logprobs != untrained
    for row in rows:
        alternatives = [(text, logprob) for text, _, logprob in row["top"]]
        assert len(alternatives) == ALTERNATIVES
        assert alternatives[0] == (row["t"], row["lp"]), "greedy: the most probable token was drawn"
        assert alternatives == sorted(alternatives, key=lambda pair: -pair[1])


def test_several_samples_at_once(scope: Program, place: Path) -> None:
    drawn = samples(scope, place, "greeting@final", "Hi", "--n", "3", "--max-tokens", "8")
    assert sorted(sample["sample_index"] for sample in drawn) == [0, 1, 2]
    assert all(sample["finish_reason"] in ("stop", "length") and sample["token_logprobs"] for sample in drawn)


def test_a_deleted_checkpoint_is_an_error(
    scope: Program, place: Path, checkpoints: dict[str, str], service: ServiceClient
) -> None:
    service.create_rest_client().delete_checkpoint_from_tinker_path(checkpoints["000004"]).result()
    with pytest.raises(AssertionError, match="404"):
        samples(scope, place, "greeting@000004", "Hi", "--max-tokens", "8")

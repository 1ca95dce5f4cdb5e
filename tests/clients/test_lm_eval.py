"""EleutherAI's lm-eval: log-likelihoods and generations of local tasks, with its own command."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from support.clients import Program, Served

from tinsmith import ModelInput, SamplingClient, ServiceClient

PROMPT = "<|im_start|>user\n{}<|im_end|>\n<|im_start|>assistant\n"
ENDS = [" there", " you", " is 5"]
ROWS: list[dict[str, Any]] = [
    {"words": "Hi", "prompt": PROMPT.format("Hi"), "start": "Hello", "ends": ENDS, "end": 0},
    {"words": "Bye", "prompt": PROMPT.format("Bye"), "start": "See", "ends": ENDS, "end": 1},
]
COMMON = {
    "dataset_path": "json",
    "test_split": "test",
    "doc_to_text": "{{prompt}}",
    "doc_to_target": "{{start + ends[end]}}",
    "target_delimiter": "",
    "metadata": {"version": 1},
}
GENERATED = {
    "output_type": "generate_until",
    "generation_kwargs": {"until": ["<|im_end|>"], "max_gen_toks": 24, "temperature": 0},
    "metric_list": [{"metric": "exact_match", "aggregation": "mean", "higher_is_better": True}],
}
TASKS: dict[str, dict[str, Any]] = {
    "greeting_choice": {
        "output_type": "multiple_choice",
        "doc_to_text": "{{prompt + start}}",
        "doc_to_choice": "ends",
        "doc_to_target": "end",
    },
    "greeting_text": GENERATED,
    "greeting_chat": GENERATED | {"doc_to_text": "{{words}}"},
}


@pytest.fixture(scope="module")
def lm_eval(place: Path, server: Served) -> Program:
    return Program("lm-eval", place, server)


@pytest.fixture(scope="module")
def tasks(place: Path) -> Path:
    """Task files, which say where their rows are; YAML reads JSON."""
    rows = place / "rows.jsonl"
    rows.write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    folder = place / "tasks"
    folder.mkdir()
    data = {"dataset_kwargs": {"data_files": {"test": str(rows)}}}
    for name, settings in TASKS.items():
        (folder / f"{name}.yaml").write_text(json.dumps({"task": name} | COMMON | data | settings))
    return folder


def evaluate(
    lm_eval: Program, server: Served, tasks: Path, kind: str, model: str, task: str, *options: str
) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """The task's results, and its samples in the order of the rows."""
    path = "chat/completions" if kind == "local-chat-completions" else "completions"
    arguments = (
        f"model={model},base_url={server.url}/v1/{path},tokenizer={server.model},num_concurrent=2,max_length=512"
    )
    output = tasks.parent / "output" / task
    lm_eval.run(
        "lm_eval",
        *("run", "--model", kind, "--model_args", arguments, "--tasks", task, "--include_path", str(tasks)),
        *("--output_path", str(output), "--log_samples", *options),
    )
    (results,) = output.rglob("results_*.json")
    (samples,) = output.rglob("samples_*.jsonl")
    lines = [json.loads(line) for line in samples.read_text().splitlines()]
    return json.loads(results.read_text())["results"][task], sorted(lines, key=lambda line: line["doc_id"])


def logprob(sampler: SamplingClient, prompt: str, text: str) -> float:
    """Of a text after a prompt, by our own client."""
    encode = sampler.get_tokenizer().encode
    before, tokens = encode(prompt, add_special_tokens=False), encode(text, add_special_tokens=False)
    logprobs = sampler.compute_logprobs(ModelInput.from_ints([*before, *tokens])).result()
    return sum(value or 0.0 for value in logprobs[len(before) :])


def test_log_likelihoods_are_ours(
    lm_eval: Program, server: Served, tasks: Path, tuned: str, service: ServiceClient
) -> None:
    results, samples = evaluate(lm_eval, server, tasks, "local-completions", tuned, "greeting_choice")
    assert results["acc,none"] == 1.0
    sampler = service.create_sampling_client(model_path=tuned)
    for row, sample in zip(ROWS, samples, strict=True):
        expected = [logprob(sampler, row["prompt"] + row["start"], end) for end in ENDS]
        assert [float(response[0][0]) for response in sample["resps"]] == pytest.approx(expected, abs=1e-4)
        greedy = [str(response[0][1]) == "True" for response in sample["resps"]]
        assert greedy == [index == row["end"] for index in range(3)]


def test_generations(lm_eval: Program, server: Served, tasks: Path, tuned: str) -> None:
    results, samples = evaluate(lm_eval, server, tasks, "local-completions", tuned, "greeting_text")
    assert [sample["resps"][0][0] for sample in samples] == ["Hello there", "See you"]
    assert results["exact_match,none"] == 1.0


def test_chats(lm_eval: Program, server: Served, tasks: Path, tuned: str) -> None:
    options = ("--apply_chat_template",)
    results, _ = evaluate(lm_eval, server, tasks, "local-chat-completions", tuned, "greeting_chat", *options)
    assert results["exact_match,none"] == 1.0

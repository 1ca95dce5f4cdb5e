"""inspect-ai: through its openai-api provider, and through the official cookbook's evaluators, which speak Tinker."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from support.clients import SCRIPTS, Program, Served

from tinsmith import ModelInput, ServiceClient

TASKS = SCRIPTS / "inspect_task.py"
PROMPT = "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"


def evaluate(server: Served, place: Path, model: str, task: str, *options: str) -> dict[str, Any]:
    """The log of an evaluation with inspect-ai's own command."""
    Program("inspect-ai", place, server).run(
        "inspect",
        *("eval", f"{TASKS}@{task}", "--model", f"openai-api/tinsmith/{model}", "--temperature", "0"),
        *("--max-tokens", "80", "--log-format", "json", "--log-dir", str(place / task), "--display", "plain", *options),
        TINSMITH_BASE_URL=f"{server.url}/v1",
        TINSMITH_API_KEY=server.key,
    )
    (file,) = (place / task).glob("*.json")
    log: dict[str, Any] = json.loads(file.read_text())
    assert log["status"] == "success", log.get("error")
    return log


def score(log: dict[str, Any], metric: str) -> float:
    value: float = log["results"]["scores"][0]["metrics"][metric]["value"]
    return value


def test_a_task_with_logprobs(server: Served, place: Path, tuned: str, service: ServiceClient) -> None:
    log = evaluate(server, place, tuned, "greetings", "--logprobs", "--top-logprobs", "2")
    assert score(log, "mean") == 1.0
    (hello,) = (sample["output"]["choices"][0] for sample in log["samples"] if sample["input"] == "Hi")
    sampler = service.create_sampling_client(model_path=tuned)
    encode = sampler.get_tokenizer().encode
    prompt, tokens = encode(PROMPT, add_special_tokens=False), encode("Hello there", add_special_tokens=False)
    expected = sampler.compute_logprobs(ModelInput.from_ints([*prompt, *tokens])).result()[len(prompt) :]
    listed = hello["logprobs"]["content"][: len(tokens)]
    assert [token["logprob"] for token in listed] == pytest.approx(expected, abs=1e-5)


def test_a_task_with_tools(server: Served, place: Path, tuned: str) -> None:
    log = evaluate(server, place, tuned, "sums")
    assert score(log, "accuracy") == 1.0
    roles = [message["role"] for message in log["samples"][0]["messages"]]
    assert roles == ["user", "assistant", "tool", "assistant"]


def test_a_prompt_that_does_not_fit_ends_the_sample(server: Served, place: Path, tuned: str) -> None:
    log = evaluate(server, place, tuned, "novels")
    assert log["samples"][0]["output"]["choices"][0]["stop_reason"] == "model_length"


@pytest.mark.parametrize(("is_tuned", "mean"), [(True, 1.0), (False, 0.0)])
def test_the_cookbooks_evaluators(is_tuned: bool, mean: float, server: Served, place: Path, tuned: str) -> None:
    output = Program("cookbook", place, server).run(
        "python",
        *("-m", "tinker_cookbook.eval.run_inspect_evals", f"model_name={server.model}", f"tasks={TASKS}@greetings"),
        *("renderer_name=qwen3_instruct", "temperature=0", "max_tokens=40", f"log_dir={place / 'cookbook'}"),
        *([f"model_path={tuned}"] if is_tuned else []),
    )
    assert f"Metrics: {{'greetings/mean': {mean}," in " ".join(output.split()), output[-3000:]

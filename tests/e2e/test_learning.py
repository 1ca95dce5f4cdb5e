"""Learning end to end: a real engine behind a real server, driven by the official client and by ours."""

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

from tinsmith import AdamParams, Datum, ModelInput, SamplingParams, ServiceClient
from tinsmith.client.embedded import start_server
from tinsmith.config import EmbeddedConfig
from tinsmith.engine.models.default import NAME as DEFAULT_NAME
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
    check(learn(package, "tiny", tiny_server, "--quick"))


@pytest.mark.parametrize("package", ["tinsmith", "tinker"])
def test_the_default_model_learns(package: str, real_server: dict[str, str]) -> None:
    check(learn(package, DEFAULT_NAME, real_server))


def check(found: dict[str, Any]) -> None:
    """What every model must have learned."""
    assert found["memorise"]["losses"][1] < found["memorise"]["losses"][0] / 4
    assert found["memorise"]["recalled"] == [True, True, True]
    assert found["memorise"]["frozen"]
    assert found["on_policy"]["largest_gap"] <= 1e-4
    for loss in ("importance_sampling", "ppo"):
        rewards = found[loss]["rewards"]
        assert sum(rewards[-2:]) > sum(rewards[:2]) + 0.2
    assert found["dpo"]["losses"][0] == pytest.approx(math.log(2), abs=1e-5)
    assert found["dpo"]["losses"][-1] < found["dpo"]["losses"][0]
    assert found["resume"]["equal"]


def test_an_uploaded_loss_trains_as_the_same_loss_computed_here(tiny_server: dict[str, str]) -> None:
    def squares(logprobs: Any, weights: Any) -> Any:
        return (weights * logprobs**2).sum(), {"custom/seen:sum": weights.sum()}

    def squares_here(data: list[Datum], logprobs: list[Any]) -> Any:
        weights = [datum.loss_fn_inputs["weights"].to_torch() for datum in data]
        return sum((w * p**2).sum() for w, p in zip(weights, logprobs, strict=True)), {}

    data = [
        Datum(ModelInput.from_ints([1, 2, 3]), {"target_tokens": [2, 3, 4], "weights": [0.5, 0.0, 1.0]}),
        Datum(ModelInput.from_ints([5, 6]), {"target_tokens": [6, 7], "weights": [1.0, 2.0]}),
    ]
    address = {"base_url": tiny_server["TINKER_BASE_URL"], "api_key": tiny_server["TINKER_API_KEY"]}
    with ServiceClient(**address) as service:  # type: ignore[arg-type]
        handle = service.create_custom_loss(squares, {"logprobs": 1, "weights": 1}).result(TIMEOUT_S)
        assert handle.loss_id is not None
        after = []
        for loss in (handle, squares_here):
            trainer = service.create_lora_training_client("tiny", rank=4, seed=3)
            passed = trainer.forward_backward_custom(data, loss).result(TIMEOUT_S)
            trainer.optim_step(AdamParams(learning_rate=1e-2)).result(TIMEOUT_S)
            seen = trainer.forward(data, "cross_entropy").result(TIMEOUT_S).metrics["loss:sum"]
            after.append((passed.metrics["loss:sum"], seen))
            if loss is handle:
                assert passed.metrics["custom/seen:sum"] == pytest.approx(4.5)
        assert after[0] == pytest.approx(after[1], rel=1e-5)


def test_the_tokenizer_comes_from_the_server(tiny_server: dict[str, str]) -> None:
    address = {"base_url": tiny_server["TINKER_BASE_URL"], "api_key": tiny_server["TINKER_API_KEY"]}
    with ServiceClient(**address) as service:  # type: ignore[arg-type]
        sampler = service.create_sampling_client(base_model="tiny")
        tokenizer = sampler.get_tokenizer()
        tokens = tokenizer.encode("hello", add_special_tokens=False)
        assert tokenizer.decode(tokens) == "hello"
        prompt, params = ModelInput.from_ints(tokens), SamplingParams(max_tokens=2, stop=[])
        drawn = sampler.sample(prompt, 1, params).result(TIMEOUT_S).sequences[0].tokens
        assert isinstance(tokenizer.decode(drawn), str)

"""Faults that were found in other servers of this protocol, one test each, through a real server and engine."""

from __future__ import annotations

import math
import os
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import tinsmith
from tinsmith import AdamParams, BadRequestError, Datum, ModelInput, SamplingParams, TinkerError
from tinsmith.engine.models.tiny import make_tiny

WAIT_S = 60.0
MODEL = "tiny"
PROMPT = ModelInput.from_ints([5, 9, 2, 33, 7])
GREEDY = SamplingParams(max_tokens=6, temperature=0.0, stop=[])


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("faults")
    make_tiny(place / "model")
    return place


@pytest.fixture(scope="module")
def service(home: Path) -> Iterator[tinsmith.ServiceClient]:
    with tinsmith.local({MODEL: str(home / "model")}, data_dir=home / "data") as client:
        yield client


def run(service: tinsmith.ServiceClient, **options: Any) -> tinsmith.TrainingClient:
    return service.create_lora_training_client(MODEL, rank=options.pop("rank", 4), seed=1, **options)


def datum(weight: float = 1.0) -> Datum:
    tokens = [5, 9, 2, 33, 7, 11]
    inputs = {"target_tokens": tokens[1:], "weights": [weight] * 5}
    return Datum(model_input=ModelInput.from_ints(tokens[:-1]), loss_fn_inputs=inputs)


def learn(training: tinsmith.TrainingClient, steps: int = 3, rate: float = 0.05) -> None:
    for _ in range(steps):
        training.forward_backward([datum()], "cross_entropy")
        training.optim_step(AdamParams(learning_rate=rate)).result(WAIT_S)


def logprobs(training: tinsmith.TrainingClient) -> list[float]:
    outputs = training.forward([datum()], "cross_entropy").result(WAIT_S).loss_fn_outputs
    found: list[float] = outputs[0]["logprobs"].to_numpy().tolist()
    return found


def scores(sampler: tinsmith.SamplingClient) -> list[float | None]:
    return sampler.compute_logprobs(PROMPT).result(WAIT_S)


def step_norm(training: tinsmith.TrainingClient, *data: Datum) -> float:
    """The norm of the gradient of one pass; the weights stay."""
    training.forward_backward(list(data), "cross_entropy")
    metrics = training.optim_step(AdamParams(learning_rate=0.0)).result(WAIT_S).metrics
    assert metrics is not None
    return next(value for name, value in metrics.items() if "grad_norm" in name)


def test_a_saved_sampler_keeps_its_weights_and_sampling_it_leaves_the_live_ones_alone(
    service: tinsmith.ServiceClient,
) -> None:
    training = run(service)
    learn(training)
    sampler = training.save_weights_and_get_sampling_client()
    saved = scores(sampler)
    learn(training)
    live = logprobs(training)
    assert scores(sampler) == saved
    assert logprobs(training) == live
    assert scores(training.save_weights_and_get_sampling_client()) != saved


def test_gradients_are_sums_over_datums_and_weights(service: tinsmith.ServiceClient) -> None:
    training = run(service)
    learn(training, 1)
    one = step_norm(training, datum())
    assert step_norm(training, *[datum()] * 4) == pytest.approx(4 * one, rel=1e-5)
    assert step_norm(training, datum(0.5)) == pytest.approx(one / 2, rel=1e-5)


def test_prompt_logprobs_have_an_entry_per_token_and_the_first_is_none(service: tinsmith.ServiceClient) -> None:
    found = scores(service.create_sampling_client(base_model=MODEL))
    assert len(found) == PROMPT.length
    assert found[0] is None
    assert all(value is not None and value < 0 for value in found[1:])


def test_max_tokens_may_be_left_out_and_means_the_rest_of_the_context(service: tinsmith.ServiceClient) -> None:
    sampler = service.create_sampling_client(base_model=MODEL)
    [sequence] = sampler.sample(PROMPT, 1, SamplingParams(stop=[], seed=1)).result(WAIT_S).sequences
    assert len(sequence.tokens) == 256 - PROMPT.length
    assert sequence.stop_reason == "length"


@pytest.mark.parametrize("name", ["nobody/nothing", "", "tiny2"])
def test_unknown_base_models_are_refused_by_name(service: tinsmith.ServiceClient, name: str) -> None:
    with pytest.raises(TinkerError, match="tiny" if name else "base_model"):
        service.create_lora_training_client(name, rank=4)


def refused(service: tinsmith.ServiceClient, inputs: dict[str, Any], tokens: list[int], says: str) -> None:
    training = run(service)

    def send() -> None:
        data = [Datum(model_input=ModelInput.from_ints(tokens), loss_fn_inputs=inputs)]
        training.forward_backward(data, "cross_entropy").result(WAIT_S)

    with pytest.raises(TinkerError, match=says):
        send()
    assert all(math.isfinite(value) for value in logprobs(training))


def test_token_ids_beyond_the_vocabulary_are_refused(service: tinsmith.ServiceClient) -> None:
    refused(service, {"target_tokens": [1, 2], "weights": [1.0, 1.0]}, [1, 10**6], "1000000")
    refused(service, {"target_tokens": [1, 10**6], "weights": [1.0, 1.0]}, [1, 2], "1000000")


def test_missing_targets_and_wrong_lengths_are_refused_at_once(service: tinsmith.ServiceClient) -> None:
    refused(service, {"weights": [1.0, 1.0]}, [1, 2], "target_tokens")
    refused(service, {"target_tokens": [1, 2, 3], "weights": [1.0, 1.0, 1.0]}, [1, 2], "target_tokens")
    refused(service, {"target_tokens": [1, 2], "weights": [1.0]}, [1, 2], "weights")


def test_grad_clip_norm_is_obeyed(service: tinsmith.ServiceClient) -> None:
    def update(clip: float) -> float:
        training = run(service)
        for scale in (1.0, 100.0):  # Adam forgets the size of a lone gradient; of the second it does not
            training.forward_backward([datum(scale)], "cross_entropy")
            training.optim_step(AdamParams(learning_rate=0.01, grad_clip_norm=clip)).result(WAIT_S)
        return sum(logprobs(training))

    assert update(0.0) != update(1e-3)


def test_ttl_is_kept_and_obeyed(service: tinsmith.ServiceClient) -> None:
    training = run(service)
    path = training.save_weights_for_sampler("short", ttl_seconds=3600).result(WAIT_S).path
    rest = service.create_rest_client()
    [kept] = [row for row in rest.list_user_checkpoints().result(WAIT_S).checkpoints if row.tinker_path == path]
    assert kept.expires_at is not None
    assert 3000 < (kept.expires_at - kept.time).total_seconds() <= 3600


def test_the_three_switches_choose_what_is_trained(service: tinsmith.ServiceClient) -> None:
    def learned(**switches: bool) -> list[float]:
        training = run(service, **switches)
        learn(training, 2)
        return logprobs(training)

    every = {"train_attn": False, "train_mlp": False, "train_unembed": False}
    results = [learned(**{**every, name: True}) for name in every]
    assert len({tuple(found) for found in results}) == 3


def test_the_seed_decides_the_first_weights(service: tinsmith.ServiceClient) -> None:
    def learned(seed: int) -> list[float]:
        training = service.create_lora_training_client(MODEL, rank=4, seed=seed)
        learn(training, 2)
        return logprobs(training)

    assert learned(3) == learned(3) != learned(4)


def test_a_killed_engine_stops_neither_the_server_nor_the_run(service: tinsmith.ServiceClient, home: Path) -> None:
    training = run(service)
    learn(training)
    before = logprobs(training)
    asked = ["pgrep", "-f", f"tinsmith.engine.worker.main.*{home.name}"]
    engines = subprocess.run(asked, capture_output=True, text=True, check=False).stdout.split()
    assert engines
    for engine in engines:
        os.kill(int(engine), signal.SIGKILL)
    assert logprobs(training) == before


def test_temperature_zero_is_greedy_and_a_seed_is_obeyed(service: tinsmith.ServiceClient) -> None:
    sampler = service.create_sampling_client(base_model=MODEL)

    def drawn(params: SamplingParams) -> list[int]:
        return sampler.sample(PROMPT, 1, params).result(WAIT_S).sequences[0].tokens

    assert len({tuple(drawn(GREEDY)) for _ in range(3)}) == 1
    first = drawn(GREEDY)[0]
    row = sampler.sample(PROMPT, 1, GREEDY, topk_sample_logprobs=1).result(WAIT_S).sequences[0]
    assert row.topk_logprobs_np is not None
    assert int(np.asarray(row.topk_logprobs_np.token_ids)[0][0]) == first
    warm = SamplingParams(max_tokens=12, seed=5, stop=[])
    assert drawn(warm) == drawn(warm) != drawn(SamplingParams(max_tokens=12, seed=6, stop=[]))


def test_unknown_losses_are_refused(service: tinsmith.ServiceClient) -> None:
    training = run(service)
    for loss in ("crossentropy", "stable_reinforce"):
        with pytest.raises(TinkerError, match=loss):
            training.forward_backward([datum()], loss).result(WAIT_S)  # type: ignore[arg-type]


def test_ppo_is_not_importance_sampling(service: tinsmith.ServiceClient) -> None:
    training = run(service)
    tokens = [5, 9, 2, 33, 7]
    now = logprobs(training)
    inputs = {
        "target_tokens": [*tokens[1:], 11],
        "logprobs": [value - 1.0 for value in now],  # ratios of e: beyond any clip
        "advantages": [1.0] * 5,
    }
    data = [Datum(model_input=ModelInput.from_ints(tokens), loss_fn_inputs=inputs)]

    def loss(name: Any) -> float:
        return training.forward(data, name).result(WAIT_S).metrics["loss:sum"]

    assert loss("importance_sampling") == pytest.approx(-5 * math.e, rel=1e-4)
    assert loss("ppo") == pytest.approx(-5 * 1.2, rel=1e-4)


def test_training_is_the_same_every_time_so_there_is_no_dropout(service: tinsmith.ServiceClient) -> None:
    training = run(service)
    learn(training)
    assert logprobs(training) == logprobs(training)


def test_only_the_adapter_is_trained(service: tinsmith.ServiceClient) -> None:
    base = service.create_sampling_client(base_model=MODEL)
    before = scores(base)
    training = run(service)
    learn(training, 5, rate=0.5)
    assert scores(base) == before
    fresh = run(service)
    assert logprobs(fresh) == logprobs(run(service))


def test_loading_with_and_without_the_optimizer_differ(service: tinsmith.ServiceClient) -> None:
    training = run(service)
    learn(training)
    path = training.save_state("both").result(WAIT_S).path
    learn(training, 1)
    with_it = service.create_training_client_from_state_with_optimizer(path)
    without = service.create_training_client_from_state(path)
    assert logprobs(with_it) == logprobs(without)
    for each in (with_it, without):
        learn(each, 1)
    assert logprobs(with_it) == logprobs(training)
    assert logprobs(without) != logprobs(training)


def test_a_stranger_s_key_opens_nothing(service: tinsmith.ServiceClient) -> None:
    url = service.holder.connection.config.base_url
    with pytest.raises(TinkerError, match="key"), tinsmith.ServiceClient(base_url=url, api_key="tml-wrong") as other:
        other.get_server_capabilities()


def test_a_bad_request_is_told_once_and_quickly(service: tinsmith.ServiceClient) -> None:
    sampler = service.create_sampling_client(base_model=MODEL)
    with pytest.raises(BadRequestError, match="max_tokens"):
        sampler.sample(PROMPT, 1, SamplingParams(max_tokens=10**6)).result(WAIT_S)

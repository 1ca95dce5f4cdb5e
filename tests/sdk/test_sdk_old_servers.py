"""Older and other servers: the core loop works on each, with what the server has."""

from __future__ import annotations

import asyncio
import logging
from typing import Any

import pytest
from support.server_arithmetic import logprob
from support.tinker_server import Status, TinkerServer

from tinsmith import AdamParams, ModelInput, PromptProvenanceSpan, SamplingParams, TinkerError

pytestmark = pytest.mark.usefixtures("hard_limit", "clean_environment")

VINTAGES = ["0.3", "0.15", "0.19", "0.24", "0.25", "0.36", "skyrl", "skyrl-422"]
JSON_ONLY = ["0.3", "0.15", "skyrl-422"]
WITHOUT_SEQUENCE_IDS = ["0.3", "0.15", "0.19", "0.24", "0.25", "skyrl", "skyrl-422"]
STEP = AdamParams(learning_rate=1e-3)
LOSS = "cross_entropy"
PROMPT = ModelInput.from_ints([1, 2, 3])
PARAMS = SamplingParams(max_tokens=2)


@pytest.fixture(params=VINTAGES)
def vintage(request: pytest.FixtureRequest, make_server: Any) -> TinkerServer:
    server: TinkerServer = make_server(vintage=request.param)
    return server


def test_the_core_loop(
    vintage: TinkerServer,
    connect: Any,
    datum: Any,
    loss_of: Any,
    logprobs_of: Any,
    caplog: pytest.LogCaptureFixture,
) -> None:
    data = [datum(1, 2, 3), datum(40, 50)]
    with connect(vintage) as client:
        assert {model.model_name for model in client.get_server_capabilities().supported_models} >= {"stub/model"}
        trainer = client.create_lora_training_client("stub/model", rank=4)
        assert trainer.get_info().model_data.model_name == "stub/model"
        seen = trainer.forward(data, LOSS).result(10)
        passed = trainer.forward_backward(data, LOSS)
        stepped = trainer.optim_step(STEP)
        for result in (seen, passed.result(10)):
            assert result.metrics["loss:sum"] == pytest.approx(loss_of(*data), rel=1e-5)
            for output, item in zip(result.loss_fn_outputs, data, strict=True):
                assert output["logprobs"].tolist() == pytest.approx(logprobs_of(item), rel=1e-5)
        assert stepped.result(10).metrics == {"step": 1.0}
        assert vintage.state.models[trainer.model_id].passes == 1, "a forward pass leaves no gradient"
        saved = trainer.save_state("one").result(10).path
        for_sampling = trainer.save_weights_for_sampler("two").result(10).path
        samplers = [
            client.create_sampling_client(base_model="stub/model"),
            client.create_sampling_client(model_path=for_sampling),
        ]
        for sampler in samplers:
            answer = sampler.sample(PROMPT, 2, PARAMS).result(10)
            assert [sequence.tokens for sequence in answer.sequences] == [[6, 7], [13, 14]]
            assert answer.sequences[0].logprobs == pytest.approx([-0.5, -0.51])
            scored = sampler.compute_logprobs(PROMPT).result(10)
            assert scored[0] is None
            assert scored[1:] == pytest.approx([logprob(2, 1), logprob(3, 2)])
        assert saved.startswith("tinker://")

    assert vintage.violations == []
    assert vintage.stuck == {}
    assert [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING] == []


def test_sampling_from_the_current_weights(vintage: TinkerServer, connect: Any) -> None:
    trainer = connect(vintage).create_lora_training_client("stub/model", rank=4)
    sampler = trainer.save_weights_and_get_sampling_client()
    assert sampler.sample(PROMPT, 1, PARAMS).result(10).sequences[0].tokens == [6, 7]
    assert vintage.violations == []


def test_a_server_that_answers_with_saved_weights_gives_a_sampler_of_them(make_server: Any, connect: Any) -> None:
    server: TinkerServer = make_server(vintage="0.3")
    trainer = connect(server).create_lora_training_client("stub/model", rank=4)
    path = trainer.save_weights_for_sampler("one").result(10).path
    server.script("retrieve_future", [Status(200, {}, {"path": path, "type": "save_weights_for_sampler"})])
    sampler = trainer.save_weights_and_get_sampling_client(record_stability_info=True)
    sampler.sample(PROMPT, 1, PARAMS).result(10)
    assert [request.body["model_path"] for request in server.find("create_sampling_session")] == [path]
    assert server.find("asample")[-1].body["record_stability_info"] is True


def test_going_on_from_a_checkpoint(vintage: TinkerServer, connect: Any, datum: Any) -> None:
    client = connect(vintage)
    trainer = client.create_lora_training_client("stub/model", rank=4)
    for _ in range(3):
        trainer.forward_backward([datum(1)], LOSS)
        trainer.optim_step(STEP).result(10)
    path = trainer.save_state("three").result(10).path
    if not vintage.state.vintage.has_plain_ids and vintage.state.vintage.line < (0, 6):
        with pytest.raises(TinkerError, match="weights_info"):  # what a checkpoint is cannot be asked there
            client.create_training_client_from_state(path)
        return
    resumed = client.create_training_client_from_state_with_optimizer(path)

    assert resumed.optim_step(STEP).result(10).metrics == {"step": 4.0}
    assert vintage.state.models[resumed.model_id].lora_config.rank == 4
    assert vintage.violations == []


def test_two_hundred_operations_in_order(vintage: TinkerServer, connect: Any, datum: Any) -> None:
    trainer = connect(vintage).create_lora_training_client("stub/model", rank=4)

    async def run() -> list[Any]:
        futures: list[Any] = []
        for i in range(100):
            futures += [trainer.forward_backward([datum(i)], LOSS), trainer.optim_step(STEP)]
        return await asyncio.gather(*futures)

    results = asyncio.run(run())
    assert [result.metrics["step"] for result in results[1::2]] == [float(i) for i in range(1, 101)]
    assert [number for _, number, _ in vintage.executed] == list(range(1, 201))
    assert vintage.violations == []


def test_samples_have_ids_where_the_server_gives_them(vintage: TinkerServer, connect: Any) -> None:
    sampler = connect(vintage).create_sampling_client(base_model="stub/model")
    ids = [sequence.sequence_id for sequence in sampler.sample(PROMPT, 2, PARAMS).result(10).sequences]
    if vintage.state.vintage.name in WITHOUT_SEQUENCE_IDS:
        assert ids == ["", ""]
    else:
        assert ids == [f"{sampler.sampling_session_id}:0:{i}" for i in range(2)]


@pytest.mark.parametrize("name", JSON_ONLY)
def test_a_server_that_reads_json_only_gets_json(make_server: Any, connect: Any, datum: Any, name: str) -> None:
    server = make_server(vintage=name)
    trainer = connect(server).create_lora_training_client("stub/model", rank=4)
    for i in range(3):
        trainer.forward_backward([datum(i)], LOSS).result(10)
    trainer.forward([datum(1)], LOSS).result(10)

    protobuf = [request for request in server.requests if request.is_protobuf]
    assert len(protobuf) <= 1, "it is asked once at most"
    assert [number for _, number, _ in server.executed] == [1, 2, 3, 4]
    assert len(server.find("forward")) == 1


@pytest.mark.parametrize("name", JSON_ONLY)
def test_chunks_of_the_first_call_fall_back_together(make_server: Any, connect: Any, datum: Any, name: str) -> None:
    server = make_server(vintage=name)
    trainer = connect(server).create_lora_training_client("stub/model", rank=4)
    data = [datum(*range(200)) for _ in range(1500)]  # more than a thousand datums are more than one request
    result = trainer.forward_backward(data, LOSS).result(18)

    assert len(result.loss_fn_outputs) == 1500
    numbers = [number for _, number, _ in server.executed]
    assert len(numbers) > 1
    assert numbers == list(range(1, len(numbers) + 1))
    assert trainer.optim_step(STEP).result(10).metrics == {"step": 1.0}
    assert server.violations == []


def test_a_server_from_before_forward_only_gets_forward_passes_by_their_own_route(
    make_server: Any, connect: Any, datum: Any
) -> None:
    # forward_only came with 0.23: to an older server it would be a forward_backward, gradients and all.
    server = make_server(vintage="0.19")
    trainer = connect(server).create_lora_training_client("stub/model", rank=4)
    trainer.forward([datum(1)], LOSS).result(10)
    assert len(server.find("forward")) == 1
    assert server.find("forward_backward") == []


def test_what_json_cannot_carry_is_refused_and_strands_nothing(make_server: Any, connect: Any, datum: Any) -> None:
    server = make_server(vintage="skyrl-422")
    trainer = connect(server).create_lora_training_client("stub/model", rank=4)
    spans = [PromptProvenanceSpan(sequence_id="a", length=2)]
    refused = trainer.forward_backward([datum(1, 2).with_provenance(spans, spans)], LOSS)
    stepped = trainer.optim_step(STEP)

    assert isinstance(refused.exception(10), TinkerError)
    assert stepped.result(5).metrics == {"step": 1.0}


def test_failures_reach_the_caller_whatever_their_form(vintage: TinkerServer, connect: Any, datum: Any) -> None:
    trainer = connect(vintage).create_lora_training_client("stub/model", rank=4)
    vintage.fail_next("forward_backward", "token 7 is not in the vocabulary")
    failed, stepped = trainer.forward_backward([datum(6)], LOSS), trainer.optim_step(STEP)
    error = failed.exception(10)
    assert isinstance(error, TinkerError)
    assert "token 7 is not in the vocabulary" in str(error)
    assert stepped.result(10).metrics == {"step": 1.0}


def test_custom_losses_work_everywhere(vintage: TinkerServer, connect: Any, datum: Any) -> None:
    pytest.importorskip("torch")
    trainer = connect(vintage).create_lora_training_client("stub/model", rank=4)
    custom = trainer.forward_backward_custom([datum(1, 2)], lambda data, logprobs: (-logprobs[0].sum(), {}))
    stepped = trainer.optim_step(STEP)
    assert custom.result(10).metrics["loss:sum"] > 0
    assert stepped.result(10).metrics == {"step": 1.0}
    assert vintage.state.models[trainer.model_id].passes == 1
    assert vintage.violations == []


def test_a_whole_checkpoint_is_loaded_in_one_request_where_offered(make_server: Any, connect: Any) -> None:
    server = make_server(flags={"create_model_via_load_weights": True})
    client = connect(server)
    trainer = client.create_lora_training_client("stub/model", rank=4)
    trainer.optim_step(STEP).result(10)
    path = trainer.save_state("one").result(10).path
    server.clear_requests()
    resumed = client.create_training_client_from_state_with_optimizer(path)

    assert resumed.model_id == "session-0001:train:1"
    assert [request.name for request in server.requests] == ["load_weights", "retrieve_future"]
    assert resumed.optim_step(STEP).result(10).metrics == {"step": 2.0}
    assert server.violations == []

"""Sampling: requests reach the wire as they were given, and the results are those of the server."""

from __future__ import annotations

import asyncio
import math
from typing import Any

import numpy as np
import pytest
from support import server_arithmetic
from support.tinker_server import Drop, Hold, Replace, Status, TinkerServer

from tinsmith import (
    APIConnectionError,
    EncodedTextChunk,
    InvalidInputError,
    ModelInput,
    NotFoundError,
    RetryConfig,
    SamplingClient,
    SamplingParams,
    ServiceClient,
    TensorData,
    TinkerError,
    TrainingClient,
    UnprocessableEntityError,
)

pytestmark = pytest.mark.usefixtures("hard_limit", "clean_environment")

PROMPT = ModelInput.from_ints([1, 2, 3])
PARAMS = SamplingParams(max_tokens=2)


def sent_by(server: TinkerServer) -> dict[str, Any]:
    body: dict[str, Any] = server.find("asample")[-1].body
    return body


def test_every_parameter_reaches_the_wire_as_given(client: ServiceClient, server: TinkerServer) -> None:
    sampler = client.create_sampling_client(base_model="stub/model", record_stability_info=True)
    target = TensorData.from_numpy(np.array([[5, 6], [7, -1]], np.int64))
    params = SamplingParams(max_tokens=4, seed=11, stop=[99, 98], temperature=0.0, top_k=5, top_p=0.25)
    sampler.sample(
        PROMPT,
        3,
        params,
        include_prompt_logprobs=True,
        topk_prompt_logprobs=2,
        topk_sample_logprobs=4,
        target_prompt_logprobs=target,
        prompt_alt_tokens_k=2,
        prompt_logprobs_last_n=1,
    ).result(10)

    assert sent_by(server) == {
        "type": "sample",
        "num_samples": 3,
        "prompt": {"chunks": [{"type": "encoded_text", "tokens": [1, 2, 3]}]},
        "sampling_params": {
            "max_tokens": 4,
            "seed": 11,
            "stop": [99, 98],
            "temperature": 0.0,
            "top_k": 5,
            "top_p": 0.25,
        },
        "sampling_session_id": sampler.sampling_session_id,
        "seq_id": 0,
        "prompt_logprobs": True,
        "topk_prompt_logprobs": 2,
        "topk_sample_logprobs": 4,
        "target_prompt_logprobs": {"data": [5, 6, 7, -1], "dtype": "int64", "shape": [2, 2]},
        "prompt_alt_tokens_k": 2,
        "prompt_logprobs_last_n": 1,
        "record_stability_info": True,
    }
    assert server.violations == []


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({}, {"temperature": 1.0, "top_k": -1, "top_p": 1.0}),
        ({"stop": []}, {"stop": []}),
        ({"stop": "\n\n"}, {"stop": "\n\n"}),
        ({"stop": ["a", "b"]}, {"stop": ["a", "b"]}),
        ({"seed": 0, "max_tokens": 0}, {"seed": 0, "max_tokens": 0}),
    ],
)
def test_what_is_not_given_is_not_sent(
    sampler: SamplingClient, server: TinkerServer, given: dict[str, Any], expected: dict[str, Any]
) -> None:
    sampler.sample(PROMPT, 1, SamplingParams(**given)).result(10)

    assert sent_by(server)["sampling_params"] == {"temperature": 1.0, "top_k": -1, "top_p": 1.0} | expected
    assert "target_prompt_logprobs" not in sent_by(server)
    assert "prompt_logprobs_last_n" not in sent_by(server)


def test_all_that_was_asked_comes_back(sampler: SamplingClient) -> None:
    target = TensorData.from_numpy(np.array([[5, 6], [7, -1]], np.int64))
    answer = sampler.sample(
        PROMPT,
        2,
        SamplingParams(max_tokens=3, stop=[8]),
        include_prompt_logprobs=True,
        topk_prompt_logprobs=2,
        topk_sample_logprobs=2,
        target_prompt_logprobs=target,
        prompt_alt_tokens_k=2,
    ).result(10)

    assert [sequence.tokens for sequence in answer.sequences] == [[6, 7, 8], [13, 14, 15]]
    assert [sequence.stop_reason for sequence in answer.sequences] == ["stop", "length"]
    assert answer.sequences[0].logprobs == pytest.approx([-0.5, -0.51, -0.52])
    topk = answer.sequences[0].topk_logprobs
    assert topk is not None
    assert topk[0] is not None
    assert [token for token, _ in topk[0]] == [6, 7]
    logprobs = answer.prompt_logprobs
    assert logprobs is not None
    assert logprobs[0] is None
    assert logprobs[1:] == pytest.approx([server_arithmetic.logprob(2, 1), server_arithmetic.logprob(3, 2)])
    assert answer.topk_prompt_logprobs is not None
    assert answer.topk_prompt_logprobs[0] is None
    assert answer.target_prompt_logprobs is not None
    scored = answer.target_prompt_logprobs.to_numpy()
    assert scored[0].tolist() == pytest.approx([server_arithmetic.logprob(5, 1), server_arithmetic.logprob(6, 1)])
    assert math.isnan(scored[1][1])
    assert answer.prompt_alt_tokens is not None
    assert answer.prompt_alt_tokens.tokens.to_numpy().shape == (2, 2)


def test_sequences_carry_the_ids_of_the_promise_in_order(sampler: SamplingClient) -> None:
    first, second = (sampler.sample(PROMPT, 3, PARAMS).result(10) for _ in range(2))

    name = sampler.sampling_session_id
    assert [sequence.sequence_id for sequence in first.sequences] == [f"{name}:0:{i}" for i in range(3)]
    assert [sequence.sequence_id for sequence in second.sequences] == [f"{name}:1:{i}" for i in range(3)]


def test_a_promise_of_fewer_samples_than_come_is_refused(sampler: SamplingClient, server: TinkerServer) -> None:
    server.script("asample", [Replace(lambda _: {"request_id": "held", "sample_sequence_ids": ["a"]})])
    server.script(
        "retrieve_future",
        [
            Status(
                200,
                body={
                    "type": "sample",
                    "sequences": [{"stop_reason": "stop", "tokens": [1]}, {"stop_reason": "stop", "tokens": [2]}],
                },
            )
        ],
    )
    error = sampler.sample(PROMPT, 2, PARAMS).exception(10)

    assert isinstance(error, TinkerError)
    assert "1" in str(error)
    assert "2" in str(error)


def test_prompt_logprobs_of_a_prompt(sampler: SamplingClient, server: TinkerServer) -> None:
    logprobs = sampler.compute_logprobs(ModelInput.from_ints([4, 5, 6, 7])).result(10)

    assert logprobs[0] is None
    expected = [server_arithmetic.logprob(token, i) for i, token in enumerate([4, 5, 6, 7]) if i]
    assert logprobs[1:] == pytest.approx(expected)
    assert sent_by(server)["sampling_params"]["max_tokens"] == 1
    assert sent_by(server)["prompt_logprobs"] is True
    assert sent_by(server)["num_samples"] == 1


def test_prompt_logprobs_of_the_last_tokens(sampler: SamplingClient, server: TinkerServer) -> None:
    logprobs = sampler.compute_logprobs(ModelInput.from_ints([4, 5, 6, 7]), prompt_logprobs_last_n=1).result(10)

    assert sent_by(server)["prompt_logprobs_last_n"] == 1
    assert [value is None for value in logprobs] == [True, True, True, False]


def test_a_prompt_of_several_chunks_keeps_them(sampler: SamplingClient, server: TinkerServer) -> None:
    prompt = ModelInput(chunks=[EncodedTextChunk(tokens=[1]), EncodedTextChunk(tokens=[2, 3])])
    sampler.sample(prompt, 1, PARAMS).result(10)

    assert [chunk["tokens"] for chunk in sent_by(server)["prompt"]["chunks"]] == [[1], [2, 3]]


def test_requests_are_numbered_from_zero_each_once(sampler: SamplingClient, server: TinkerServer) -> None:
    async def run() -> list[Any]:
        return await asyncio.gather(*(sampler.sample_async(ModelInput.from_ints([i]), 1, PARAMS) for i in range(200)))

    answers = asyncio.run(run())
    assert [answer.sequences[0].tokens for answer in answers] == [[i, i + 1] for i in range(200)]
    assert sorted(request.body["seq_id"] for request in server.find("asample")) == list(range(200))
    assert server.violations == []


def test_samplers_come_from_a_model_a_path_or_a_training_client(
    client: ServiceClient, trainer: TrainingClient, server: TinkerServer
) -> None:
    path = trainer.save_weights_for_sampler("step-1").result(10).path
    samplers = [
        client.create_sampling_client(base_model="stub/other"),
        client.create_sampling_client(model_path=path),
        trainer.create_sampling_client(path),
        trainer.save_weights_and_get_sampling_client(),
    ]
    for sampler in samplers:
        assert sampler.sample(PROMPT, 1, PARAMS).result(10).sequences[0].tokens == [6, 7]
    assert samplers[0].get_base_model() == "stub/other"
    assert samplers[3].get_base_model() == "stub/model"
    assert len({sampler.sampling_session_id for sampler in samplers}) == 4
    assert len(server.find("create_sampling_session")) == 3
    assert server.violations == []


def test_a_path_may_come_with_its_base_model(
    client: ServiceClient, trainer: TrainingClient, server: TinkerServer
) -> None:
    path = trainer.save_weights_for_sampler("step-1").result(10).path
    sampler = client.create_sampling_client(model_path=path, base_model="stub/model")
    other = asyncio.run(client.create_sampling_client_async(path, "stub/model"))

    for made in (sampler, other):
        assert made.sample(PROMPT, 1, PARAMS).result(10).sequences[0].tokens == [6, 7]
        assert made.get_base_model() == "stub/model"
    assert [request.body["model_path"] for request in server.find("create_sampling_session")] == [path] * 2
    assert server.violations == []


def test_a_path_with_another_base_model_is_refused_and_both_are_named(
    client: ServiceClient, trainer: TrainingClient, server: TinkerServer
) -> None:
    path = trainer.save_weights_for_sampler("step-1").result(10).path
    with pytest.raises(InvalidInputError, match=r"base_model: 'stub/other' is not.*'stub/model'"):
        client.create_sampling_client(model_path=path, base_model="stub/other")
    with pytest.raises(InvalidInputError, match=r"base_model: 'stub/other' is not.*'stub/model'"):
        asyncio.run(client.create_sampling_client_async(path, "stub/other"))
    assert server.find("create_sampling_session") == []


def test_a_missing_checkpoint_with_a_base_model_is_reported_as_missing(
    client: ServiceClient, server: TinkerServer
) -> None:
    with pytest.raises(NotFoundError):
        client.create_sampling_client(model_path="tinker://none/sampler_weights/a", base_model="stub/model")


@pytest.mark.parametrize("arguments", [{}, {"model_path": "weights/step-1"}])
def test_a_sampler_of_nothing_is_refused_at_once(
    client: ServiceClient, server: TinkerServer, arguments: dict[str, str]
) -> None:
    with pytest.raises(InvalidInputError, match="model_path"):
        client.create_sampling_client(**arguments)
    assert server.requests == []


@pytest.mark.parametrize(
    ("call", "named"),
    [
        (lambda s: s.sample(PROMPT, 0, PARAMS), "num_samples"),
        (lambda s: s.sample(PROMPT, 1, PARAMS, topk_prompt_logprobs=-1), "topk_prompt_logprobs"),
        (lambda s: s.sample(PROMPT, 1, PARAMS, prompt_logprobs_last_n=1), "prompt_logprobs_last_n"),
        (lambda s: s.sample([1, 2], 1, PARAMS), "prompt"),
    ],
)
def test_a_wrong_argument_is_refused_at_once_by_name(
    sampler: SamplingClient, server: TinkerServer, call: Any, named: str
) -> None:
    with pytest.raises(InvalidInputError, match=named):
        call(sampler)
    assert server.find("asample") == []


def test_a_refused_sample_is_not_tried_again(sampler: SamplingClient, server: TinkerServer) -> None:
    server.script("asample", [Status(422, body={"detail": "max_tokens: 1e9 is too many"})])
    error = sampler.sample(PROMPT, 1, PARAMS).exception(10)

    assert isinstance(error, UnprocessableEntityError)
    assert f"{server.url}/api/v1/asample" in str(error)
    assert len(server.find("asample")) == 1
    assert sampler.sample(PROMPT, 1, PARAMS).result(10)


def test_lost_connections_of_a_submit_are_made_good(sampler: SamplingClient, server: TinkerServer) -> None:
    server.script("asample", [Drop(), Drop(after_work=True), Status(500)])
    assert sampler.sample(PROMPT, 1, PARAMS).result(15).sequences[0].tokens == [6, 7]
    assert server.violations == []


def test_a_sampler_without_progress_is_given_up(client: ServiceClient, server: TinkerServer) -> None:
    retry = RetryConfig(progress_timeout=1.0)
    sampler = client.create_sampling_client(base_model="stub/model", retry_config=retry)
    server.pause_work()
    error = sampler.sample(PROMPT, 1, PARAMS).exception(5)

    assert isinstance(error, APIConnectionError)
    assert "progress" in str(error)


def test_a_sampler_that_cannot_submit_is_given_up(client: ServiceClient, server: TinkerServer) -> None:
    retry = RetryConfig(progress_timeout=1.0, retry_delay_base=0.1, retry_delay_max=0.3)
    sampler = client.create_sampling_client(base_model="stub/model", retry_config=retry)
    server.script("asample", [Status(503)] * 1000)
    error = sampler.sample(PROMPT, 1, PARAMS).exception(8)

    assert isinstance(error, APIConnectionError)
    assert "progress" in str(error)


def test_progress_of_one_sample_keeps_the_others_waiting(client: ServiceClient, server: TinkerServer) -> None:
    retry = RetryConfig(progress_timeout=1.5)
    sampler = client.create_sampling_client(base_model="stub/model", retry_config=retry)
    server.script("asample", [Hold()])
    slow = sampler.sample(PROMPT, 1, PARAMS)
    server.wait_for("asample", timeout_s=10)
    for _ in range(5):  # for longer than the limit, samples of the same client finish
        assert sampler.sample(PROMPT, 1, PARAMS).result(10)
        with pytest.raises(TimeoutError):
            slow.result(0.5)
    server.release()

    assert slow.result(10).sequences[0].tokens == [6, 7]


@pytest.mark.parametrize("where", ["client", "server"])
def test_stuck_detection_can_be_switched_off(connect: Any, make_server: Any, where: str) -> None:
    server = make_server(flags={"sample_enable_stuck_detection": where != "server"})
    retry = RetryConfig(progress_timeout=0.3, enable_stuck_detection=where != "client")
    sampler = connect(server).create_sampling_client(base_model="stub/model", retry_config=retry)
    server.pause_work()
    future = sampler.sample(PROMPT, 1, PARAMS)
    with pytest.raises(TimeoutError):
        future.result(1.5)
    server.resume_work()

    assert future.result(10).sequences[0].tokens == [6, 7]

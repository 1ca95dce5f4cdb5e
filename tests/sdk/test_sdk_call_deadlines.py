"""Deadlines of calls: for a client or for a block, counted from the call; the error says where they were set."""

from __future__ import annotations

import asyncio
import threading
import time
from typing import Any

import pytest
from support.tinker_server import Hold, Status, TinkerServer

from tinsmith import (
    AdamParams,
    APITimeoutError,
    ModelInput,
    SamplingParams,
    ServiceClient,
    TrainingClient,
    deadline,
)

pytestmark = pytest.mark.usefixtures("hard_limit", "clean_environment")

STEP = AdamParams(learning_rate=1e-3)
LOSS = "cross_entropy"
PROMPT = ModelInput.from_ints([1, 2, 3])
PARAMS = SamplingParams(max_tokens=2)


def _loss(data: Any, logprobs: Any) -> Any:
    return sum(row.sum() for row in logprobs), {}


def test_the_deadline_of_a_sample_is_not_begun_again_when_it_is_submitted_again(
    connect: Any, server: TinkerServer
) -> None:
    sampler = connect(server, result_deadline_s=2.0).create_sampling_client(base_model="stub/model")
    server.lose_promises(10_000)  # each submission is accepted and then forgotten
    started = time.monotonic()
    error = sampler.sample(PROMPT, 1, PARAMS).exception(15)

    assert len(server.find("asample")) >= 2, "it was submitted again"
    assert isinstance(error, APITimeoutError)
    assert "sample of" in str(error)
    assert "result_deadline_s" in str(error)
    assert time.monotonic() - started < 8


def test_a_sample_that_is_told_to_wait_has_the_deadline_too(connect: Any, server: TinkerServer) -> None:
    sampler = connect(server, result_deadline_s=1.0).create_sampling_client(base_model="stub/model")
    server.script("asample", [Status(429, {"retry-after-ms": "50"})] * 10_000)
    assert "result_deadline_s" in str(sampler.sample(PROMPT, 1, PARAMS).exception(10))


def test_a_block_has_its_own_deadline_for_calls_of_every_kind(connect: Any, server: TinkerServer, datum: Any) -> None:
    client = connect(server, result_deadline_s=300.0)
    trainer = client.create_lora_training_client("stub/model", rank=4)
    sampler = client.create_sampling_client(base_model="stub/model")
    server.pause_work()
    server.script("sessions", [Hold()])
    with deadline(0.5):
        late = {
            "forward_backward": trainer.forward_backward([datum(1)], LOSS),
            "optim_step": trainer.optim_step(STEP),
            "save_state": trainer.save_state("a"),
            "sample": sampler.sample(PROMPT, 1, PARAMS),
            "compute_logprobs": sampler.compute_logprobs(PROMPT),
            "list_sessions": client.create_rest_client().list_sessions(),
        }
    in_time = trainer.optim_step(STEP)
    for name, future in late.items():
        error = future.exception(10)
        assert isinstance(error, APITimeoutError), name
        assert str(error).startswith(name), error
        assert f"tinsmith.deadline(0.5) at {__file__}:" in str(error)
    with pytest.raises(APITimeoutError, match="create_model of stub/model"), deadline(0.3):
        client.create_lora_training_client("stub/model", rank=4)
    assert not in_time.done()
    server.release()
    server.resume_work()
    assert in_time.result(10).metrics == {"step": 2.0}, "what was accepted was carried out, late or not"
    assert server.violations == []


def test_awaited_calls_have_the_deadline_of_their_block(client: ServiceClient, server: TinkerServer) -> None:
    sampler = client.create_sampling_client(base_model="stub/model")
    server.pause_work()

    async def run() -> list[Any]:
        async def limited(seconds: float | None) -> Any:
            with deadline(seconds):
                return await sampler.sample_async(PROMPT, 1, PARAMS)

        unlimited = asyncio.ensure_future(limited(None))
        errors = await asyncio.gather(*(limited(0.3) for _ in range(3)), return_exceptions=True)
        assert not unlimited.done()
        server.resume_work()
        return [*errors, await unlimited]

    *errors, result = asyncio.run(run())
    assert [type(error) for error in errors] == [APITimeoutError] * 3
    assert result.sequences[0].tokens == [6, 7]


def test_a_stream_has_the_deadline_of_the_block_that_it_is_called_in(connect: Any, make_server: Any) -> None:
    server = make_server(flags={"tinsmith": {"sample_stream": True}})
    sampler = connect(server).create_sampling_client(base_model="stub/model")
    server.script("/tinsmith/v1/sample_stream", [Hold()])

    async def run() -> None:
        with deadline(0.5):
            stream = sampler.sample_stream(PROMPT, PARAMS)
        async for _ in stream:
            pass

    with pytest.raises(APITimeoutError, match="sample_stream of"):
        asyncio.run(run())
    server.release()


def test_operations_that_are_late_before_they_are_sent_strand_nothing(
    connect: Any, make_server: Any, datum: Any
) -> None:
    """The order of a model has no holes: what was not sent in time is closed before the next operation."""
    server = make_server(flags={"fwdbwd_max_chunk_len": 1})
    trainer = connect(server).create_lora_training_client("stub/model", rank=4)
    trainer.optim_step(STEP).result(10)
    server.script("optim_step", [Hold()])
    held = trainer.optim_step(STEP)  # those after it wait for their turn
    server.wait_for("optim_step", 2, timeout_s=10)
    with deadline(0.3):
        late = [
            trainer.forward_backward([datum(1), datum(2)], LOSS),
            trainer.optim_step(STEP),
            trainer.forward_backward_custom([datum(3)], _loss),
        ]
    after = trainer.optim_step(STEP)
    assert [type(future.exception(10)) for future in late] == [APITimeoutError] * 3
    server.release()

    assert held.result(10).metrics == {"step": 2.0}
    assert after.result(10).metrics == {"step": 3.0}
    assert trainer.optim_step(STEP).result(10).metrics == {"step": 4.0}
    assert server.stuck == {}
    assert server.violations == []


def test_a_pass_that_is_late_while_it_is_sent_strands_nothing(connect: Any, make_server: Any, datum: Any) -> None:
    server = make_server(flags={"fwdbwd_max_chunk_len": 1, "parallel_fwdbwd_chunks": True})
    trainer = connect(server).create_lora_training_client("stub/model", rank=4)
    trainer.optim_step(STEP).result(10)
    server.script("forward_backward", [Hold()])
    with deadline(0.4):
        late = trainer.forward_backward([datum(i) for i in range(4)], LOSS)
    after = trainer.optim_step(STEP)
    assert isinstance(late.exception(10), APITimeoutError)
    server.release()

    assert after.result(10).metrics == {"step": 2.0}
    assert server.stuck == {}
    # A request that the server took while its answer was on the way is closed again, which the server refuses.
    assert all("came twice with different content" in text for text in server.violations)


def test_a_loss_of_ones_own_that_takes_too_long_strands_nothing(
    trainer: TrainingClient, server: TinkerServer, datum: Any
) -> None:
    done = threading.Event()

    def slow(data: Any, logprobs: Any) -> Any:
        done.wait(10)
        return _loss(data, logprobs)

    with deadline(1.0):
        late = trainer.forward_backward_custom([datum(1)], slow)
    after = trainer.optim_step(STEP)
    error = late.exception(10)
    done.set()

    assert isinstance(error, APITimeoutError)
    assert after.result(10).metrics == {"step": 1.0}
    assert server.stuck == {}


def test_what_is_late_is_counted_as_failed(client: ServiceClient, server: TinkerServer) -> None:
    sampler = client.create_sampling_client(base_model="stub/model")
    server.pause_work()
    with deadline(0.2):
        assert sampler.sample(PROMPT, 1, PARAMS).exception(10)
    client.get_server_capabilities()
    assert client.metrics()["sample"].errors == 1


def test_the_log_tells_of_the_patience_that_there_is(
    connect: Any, server: TinkerServer, caplog: pytest.LogCaptureFixture
) -> None:
    client = connect(server, retry_deadline_s=100.0)
    client.get_server_capabilities()
    server.script("get_server_capabilities", [Status(503)] * 100)
    with pytest.raises(APITimeoutError), deadline(2):
        client.get_server_capabilities()
    assert [record for record in caplog.messages if "trying again for up to 2 s" in record]

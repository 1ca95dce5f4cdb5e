"""Training when something goes wrong: one failure never blocks the operations after it."""

from __future__ import annotations

import asyncio
import concurrent.futures
from typing import Any

import pytest
from support.tinker_server import Status, TinkerServer

from tinsmith import (
    AdamParams,
    APIConnectionError,
    BadRequestError,
    ModelInput,
    RequestFailedError,
    SamplingClient,
    SamplingParams,
    ServiceClient,
    TinkerError,
    TrainingClient,
    UnprocessableEntityError,
)
from tinsmith.errors import RetryableException

pytestmark = pytest.mark.usefixtures("hard_limit", "clean_environment")

STEP = AdamParams(learning_rate=1e-3)
LOSS = "cross_entropy"
PROMPT = ModelInput.from_ints([1, 2, 3])
PARAMS = SamplingParams(max_tokens=2)


@pytest.mark.parametrize(("status", "error_type"), [(422, UnprocessableEntityError), (400, BadRequestError)])
def test_a_refused_submit_fails_alone(
    trainer: TrainingClient, server: TinkerServer, datum: Any, status: int, error_type: type[Exception]
) -> None:
    trainer.forward_backward([datum(1)], LOSS).result(10)
    server.script("optim_step", [Status(status, body={"detail": "learning_rate: too high"})])
    refused = trainer.optim_step(STEP)
    passed, stepped = trainer.forward_backward([datum(2)], LOSS), trainer.optim_step(STEP)

    error = refused.exception(10)
    assert type(error) is error_type
    assert f"POST {server.url}/api/v1/optim_step" in str(error)
    assert "learning_rate: too high" in str(error)
    assert passed.result(10).metrics["loss:sum"] > 0
    assert stepped.result(10).metrics == {"step": 1.0}
    assert [number for _, number, _ in server.executed] == [1, 3, 4]


def test_a_refused_pass_fails_alone(trainer: TrainingClient, server: TinkerServer, datum: Any) -> None:
    trainer.forward_backward([datum(1)], LOSS).result(10)
    server.script("forward_backward", [Status(422)])
    refused, stepped = trainer.forward_backward([datum(2)], LOSS), trainer.optim_step(STEP)

    assert f"{server.url}/api/v1/forward_backward" in str(refused.exception(10))
    assert stepped.result(10).metrics == {"step": 1.0}


def test_the_very_first_pass_is_refused_with_the_servers_reason(
    trainer: TrainingClient, server: TinkerServer, datum: Any
) -> None:
    server.script("forward_backward", [Status(422, body={"detail": "data[0]: token 5 is not in the vocabulary"})] * 2)
    refused, stepped = trainer.forward_backward([datum(4)], LOSS), trainer.optim_step(STEP)

    error = refused.exception(10)
    assert isinstance(error, UnprocessableEntityError)
    assert "token 5 is not in the vocabulary" in str(error)
    assert stepped.result(10).metrics == {"step": 1.0}


def test_a_refused_chunk_fails_its_call_and_no_other(make_server: Any, connect: Any, datum: Any) -> None:
    server = make_server(flags={"fwdbwd_max_chunk_len": 1})
    trainer = connect(server).create_lora_training_client("stub/model", rank=4)
    trainer.forward_backward([datum(1)], LOSS).result(10)
    server.script("forward_backward", [Status(422)])
    refused, stepped = trainer.forward_backward([datum(i) for i in range(3)], LOSS), trainer.optim_step(STEP)

    assert isinstance(refused.exception(10), UnprocessableEntityError)
    assert stepped.result(10).metrics == {"step": 1.0}
    assert server.stuck == {}


def test_an_operation_that_fails_on_the_server_fails_alone(
    trainer: TrainingClient, server: TinkerServer, datum: Any
) -> None:
    server.fail_next("forward_backward", "token 999999 is not in the vocabulary", "user")
    failed, stepped = trainer.forward_backward([datum(1)], LOSS), trainer.optim_step(STEP)

    error = failed.exception(10)
    assert isinstance(error, RequestFailedError)
    assert error.category == "user"
    assert "token 999999" in str(error)
    assert stepped.result(10).metrics == {"step": 1.0}


def test_a_lost_promise_of_a_step_reaches_the_caller_and_the_next_step_runs(
    trainer: TrainingClient, server: TinkerServer
) -> None:
    server.lose_promises(1)
    lost = trainer.optim_step(STEP)
    assert isinstance(lost.exception(10), RetryableException)
    assert len(server.find("optim_step")) == 1

    assert trainer.optim_step(STEP).result(10).metrics == {"step": 2.0}


def assert_names_server_and_cause(error: BaseException | None, server: TinkerServer) -> None:
    assert isinstance(error, APIConnectionError), error
    assert server.url in str(error)
    assert "connection" in str(error), "the message says what is wrong"


def test_every_accepted_operation_fails_when_the_server_dies(connect: Any, server: TinkerServer, datum: Any) -> None:
    client = connect(server, retry_deadline_s=1.0)
    trainer = client.create_lora_training_client("stub/model", rank=4)
    sampler = client.create_sampling_client(base_model="stub/model")
    server.pause_work()
    futures: list[Any] = []
    for i in range(5):
        futures += [trainer.forward_backward([datum(i)], LOSS), trainer.optim_step(STEP)]
    futures += [trainer.save_state("one"), sampler.sample(PROMPT, 1, PARAMS), sampler.compute_logprobs(PROMPT)]
    server.wait_for("retrieve_future", 1 + len(futures), timeout_s=10)  # one was for the model
    server.stop()

    for future in futures:
        assert_names_server_and_cause(future.exception(8), server)


def test_operations_that_were_not_sent_yet_share_one_wait_for_a_dead_server(
    connect: Any, server: TinkerServer, datum: Any
) -> None:
    trainer = connect(server, retry_deadline_s=1.0).create_lora_training_client("stub/model", rank=4)
    server.stop()
    futures = [trainer.optim_step(STEP) for _ in range(20)]

    # If each waited out a deadline of its own after the one before, the last would be told after minutes.
    done, waiting = concurrent.futures.wait(futures, timeout=6)
    assert len(waiting) == 0, f"{len(done)} of 20 were told so far"
    for future in futures:
        assert_names_server_and_cause(future.exception(), server)


def test_a_server_that_comes_back_in_time_costs_nothing(
    trainer: TrainingClient, sampler: SamplingClient, server: TinkerServer, datum: Any
) -> None:
    server.pause_work()
    futures: list[Any] = [trainer.forward_backward([datum(1)], LOSS), trainer.optim_step(STEP)]
    futures.append(sampler.sample(PROMPT, 1, PARAMS))
    server.wait_for("retrieve_future", 1 + len(futures), timeout_s=10)  # one was for the model
    server.restart()
    futures.append(trainer.optim_step(STEP))
    server.resume_work()

    for future in futures:
        future.result(10)
    assert [number for _, number, _ in server.executed] == [1, 2, 3]


def test_an_operation_given_up_during_an_outage_does_not_hang_those_after_it(
    connect: Any, server: TinkerServer
) -> None:
    trainer = connect(server, retry_deadline_s=0.5).create_lora_training_client("stub/model", rank=4)
    server.stop()
    assert isinstance(trainer.optim_step(STEP).exception(10), APIConnectionError)
    server.start()
    after = trainer.optim_step(STEP)

    # The server never saw the first number. The next operation may run, or fail and say why; it must not wait for ever.
    assert after.exception(6) is None or isinstance(after.exception(), TinkerError)


def test_cancelling_a_training_operation_is_refused_and_it_completes(
    trainer: TrainingClient, server: TinkerServer, datum: Any
) -> None:
    server.pause_work()
    futures: list[Any] = [trainer.forward_backward([datum(1)], LOSS), trainer.optim_step(STEP), trainer.save_state("s")]
    assert [future.cancel() for future in futures] == [False, False, False]
    assert not any(future.cancelled() for future in futures)
    server.resume_work()

    assert futures[1].result(10).metrics == {"step": 1.0}
    assert futures[2].result(10).path.endswith("/weights/s")
    assert futures[1].cancel() is False


def test_giving_up_the_wait_for_a_training_operation_leaves_it_running(
    trainer: TrainingClient, server: TinkerServer
) -> None:
    async def run() -> Any:
        server.pause_work()
        stepped = trainer.optim_step(STEP)
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(stepped, 0.2)
        assert not stepped.done()
        server.resume_work()
        return await stepped

    assert asyncio.run(run()).metrics == {"step": 1.0}


@pytest.fixture
def cancelling(make_server: Any) -> TinkerServer:
    server: TinkerServer = make_server(dynamic_flags={"sample_cancel_enabled": True})
    return server


def test_cancelling_a_sample_cancels_it_on_the_server(connect: Any, cancelling: TinkerServer) -> None:
    sampler = connect(cancelling).create_sampling_client(base_model="stub/model")
    cancelling.pause_work()
    future = sampler.sample(PROMPT, 1, PARAMS)
    cancelling.wait_for("retrieve_future", timeout_s=10)
    assert future.cancel()
    assert future.cancelled()

    cancelled = cancelling.wait_for("cancel_future", timeout_s=10)
    assert [request.body for request in cancelled] == [{"request_id": f"{sampler.sampling_session_id}:0"}]
    cancelling.resume_work()
    assert sampler.sample(PROMPT, 1, PARAMS).result(10).sequences[0].tokens == [6, 7]
    assert cancelling.violations == []


def test_a_sample_awaited_with_a_limit_is_cancelled_on_the_server(connect: Any, cancelling: TinkerServer) -> None:
    sampler = connect(cancelling).create_sampling_client(base_model="stub/model")
    cancelling.pause_work()

    async def run() -> None:
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(sampler.sample_async(PROMPT, 1, PARAMS), 0.3)

    asyncio.run(run())
    assert len(cancelling.wait_for("cancel_future", timeout_s=10)) == 1


def test_cancelling_a_sample_sends_nothing_where_the_server_does_not_offer_it(
    sampler: SamplingClient, server: TinkerServer, eventually: Any
) -> None:
    server.pause_work()
    future = sampler.sample(PROMPT, 1, PARAMS)
    poll = server.wait_for("retrieve_future", timeout_s=10)[0]
    assert future.cancel()

    eventually(lambda: poll.is_aborted)
    server.resume_work()
    sampler.sample(PROMPT, 1, PARAMS).result(10)
    assert server.find("cancel_future") == []


def test_closing_the_client_resolves_every_future(connect: Any, server: TinkerServer, datum: Any) -> None:
    client: ServiceClient = connect(server)
    trainer = client.create_lora_training_client("stub/model", rank=4)
    sampler = client.create_sampling_client(base_model="stub/model")
    server.pause_work()
    futures: list[Any] = [trainer.forward_backward([datum(1)], LOSS), trainer.optim_step(STEP)]
    futures += [sampler.sample(PROMPT, 1, PARAMS) for _ in range(3)]
    server.wait_for("asample", 3, timeout_s=10)
    client.close()

    for future in futures:
        error = future.exception(3)
        assert isinstance(error, TinkerError)
        assert "closed" in str(error)

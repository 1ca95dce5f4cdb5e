"""Outages: every operation keeps waiting until its deadline, and none blocks those after it."""

from __future__ import annotations

import concurrent.futures
import logging
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from support.tinker_server import Drop, Status, TinkerServer

from tinsmith import (
    AdamParams,
    APIConnectionError,
    APIStatusError,
    ModelInput,
    SamplingParams,
    ServiceClient,
    TinkerError,
)

pytestmark = pytest.mark.usefixtures("hard_limit", "clean_environment")

STEP = AdamParams(learning_rate=1e-3)
LOSS = "cross_entropy"
PROMPT = ModelInput.from_ints([1, 2, 3])
PARAMS = SamplingParams(max_tokens=2)


@pytest.fixture
def back_after(server: TinkerServer) -> Iterator[Callable[[float], None]]:
    """Stops the server now and starts it again in so many seconds."""
    timers: list[threading.Timer] = []

    def stop(seconds: float) -> None:
        server.stop()
        timers.append(threading.Timer(seconds, server.start))
        timers[-1].start()

    yield stop
    for timer in timers:
        timer.join()


def test_many_calls_under_way_survive_a_short_outage(connect: Any, server: TinkerServer, back_after: Any) -> None:
    client: ServiceClient = connect(server)
    rest = client.create_rest_client()
    rest.list_sessions().result(10)
    back_after(1.5)
    calls = [rest.list_training_runs(limit=i + 1) for i in range(40)]

    assert [call.result(12).training_runs for call in calls] == [[]] * 40


def test_many_models_survive_a_short_outage(connect: Any, server: TinkerServer, back_after: Any, datum: Any) -> None:
    client = connect(server)
    trainers = [client.create_lora_training_client("stub/model", rank=1) for _ in range(30)]
    back_after(1.5)
    futures = [(t.forward_backward([datum(1)], LOSS), t.optim_step(STEP)) for t in trainers]

    for passed, stepped in futures:
        assert passed.result(12).metrics["loss:sum"] > 0
        assert stepped.result(12).metrics == {"step": 1.0}
    assert server.violations == []


def test_an_outage_is_told_once_however_many_operations_wait(
    connect: Any, server: TinkerServer, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING, "tinsmith")
    client: ServiceClient = connect(server)
    trainers = [client.create_lora_training_client("stub/model", rank=1) for _ in range(5)]
    sampler = client.create_sampling_client(base_model="stub/model")
    server.pause_work()
    futures: list[Any] = [trainer.optim_step(STEP) for trainer in trainers]
    futures += [sampler.sample(PROMPT, 1, PARAMS) for _ in range(40)]
    server.wait_for("retrieve_future", 45, timeout_s=10)
    caplog.clear()
    polls = len(server.find("retrieve_future"))
    server.stop()
    server.start()
    server.wait_for("retrieve_future", polls + 45, timeout_s=15)
    server.resume_work()

    for future in futures:
        future.result(10)
    assert len([record for record in caplog.records if "polling again" in record.getMessage()]) == 1
    assert len(caplog.records) == 1


def test_samples_that_cannot_be_submitted_are_told_of_once(
    connect: Any, server: TinkerServer, back_after: Any, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING, "tinsmith")
    sampler = connect(server).create_sampling_client(base_model="stub/model")
    sampler.sample(PROMPT, 1, PARAMS).result(10)
    caplog.clear()
    back_after(1.0)
    futures = [sampler.sample(PROMPT, 1, PARAMS) for _ in range(60)]

    for future in futures:
        future.result(12)
    assert len(caplog.records) == 1


def test_calls_and_submits_that_wait_for_a_server_are_told_of_once(
    connect: Any, server: TinkerServer, back_after: Any, caplog: pytest.LogCaptureFixture, datum: Any
) -> None:
    caplog.set_level(logging.WARNING, "tinsmith")
    client: ServiceClient = connect(server)
    rest = client.create_rest_client()
    trainers = [client.create_lora_training_client("stub/model", rank=1) for _ in range(5)]
    caplog.clear()
    back_after(1.0)
    futures: list[Any] = [rest.list_training_runs(limit=i + 1) for i in range(20)]
    futures += [trainer.forward_backward([datum(1)], LOSS) for trainer in trainers]
    futures += [trainer.optim_step(STEP) for trainer in trainers]

    for future in futures:
        future.result(12)
    assert len(caplog.records) == 1, [record.getMessage() for record in caplog.records]
    assert server.url in caplog.records[0].getMessage()


def test_one_call_is_tried_until_its_deadline_however_often_that_is(connect: Any, server: TinkerServer) -> None:
    trainer = connect(server, retry_deadline_s=15.0).create_lora_training_client("stub/model", rank=4)
    server.script("optim_step", [Status(503, {"retry-after-ms": "20"})] * 60)

    assert trainer.optim_step(STEP).result(15).metrics == {"step": 1.0}
    assert len(server.find("optim_step")) == 61


def test_a_call_made_late_in_an_outage_has_its_own_patience(
    connect: Any, server: TinkerServer, back_after: Any
) -> None:
    client = connect(server, retry_deadline_s=3.0, heartbeat_s=0.1)
    sampler = client.create_sampling_client(base_model="stub/model")
    server.wait_for("session_heartbeat", timeout_s=5)
    back_after(4.0)
    time.sleep(3.3)  # idle but for heartbeats, for longer than the deadline of a call

    assert client.create_rest_client().list_sessions().result(8).sessions == ["session-0001"]
    assert sampler.sample(PROMPT, 1, PARAMS).result(8).sequences[0].tokens == [6, 7]


def test_a_wait_for_a_result_lasts_as_long_as_the_deadline_says(
    connect: Any, server: TinkerServer, back_after: Any
) -> None:
    trainer = connect(server, retry_deadline_s=12.0).create_lora_training_client("stub/model", rank=4)
    server.pause_work()
    stepped = trainer.optim_step(STEP)
    server.wait_for("retrieve_future", 2, timeout_s=10)
    polls = len(server.find("retrieve_future"))
    back_after(6.7)  # more than half of the deadline; the poll after it comes within five seconds
    server.wait_for("retrieve_future", polls + 1, timeout_s=12)
    server.resume_work()

    assert stepped.result(5).metrics == {"step": 1.0}


GIVEN_UP = [
    Status(503, {"Retry-After": "30"}),
    Status(500, {"x-should-retry": "false"}),
    Status(429, {"Retry-After": "30"}),
    Status(409, {"x-should-retry": "false"}),
    Status(408, {"Retry-After": "30"}),
]


@pytest.mark.parametrize("answer", GIVEN_UP, ids=lambda answer: str(answer.status))
def test_a_step_that_the_server_did_not_take_strands_nothing(connect: Any, server: TinkerServer, answer: Any) -> None:
    trainer = connect(server, retry_deadline_s=1.0).create_lora_training_client("stub/model", rank=4)
    server.script("optim_step", [answer])
    given_up, after = trainer.optim_step(STEP), trainer.optim_step(STEP)

    assert isinstance(given_up.exception(5), APIStatusError)
    assert after.exception(5) is None or isinstance(after.exception(), TinkerError)


@pytest.mark.parametrize("answer", GIVEN_UP, ids=lambda answer: str(answer.status))
def test_a_pass_that_the_server_did_not_take_strands_nothing(
    make_server: Any, connect: Any, datum: Any, answer: Any
) -> None:
    server = make_server(flags={"fwdbwd_max_chunk_len": 1})
    trainer = connect(server, retry_deadline_s=1.0).create_lora_training_client("stub/model", rank=4)
    server.script("forward_backward", [answer])
    given_up = trainer.forward_backward([datum(i) for i in range(3)], LOSS)
    after = trainer.optim_step(STEP)

    assert isinstance(given_up.exception(5), APIStatusError)
    assert after.exception(5) is None or isinstance(after.exception(), TinkerError)


def test_trouble_while_a_gap_is_closed_strands_nothing(connect: Any, server: TinkerServer, datum: Any) -> None:
    trainer = connect(server, retry_deadline_s=0.5).create_lora_training_client("stub/model", rank=4)
    server.stop()
    assert isinstance(trainer.optim_step(STEP).exception(5), APIConnectionError)
    server.start()
    server.script("forward_backward|forward|optim_step", [Status(503, {"Retry-After": "30"})])
    futures: list[Any] = [trainer.forward_backward([datum(1)], LOSS), trainer.optim_step(STEP)]
    futures += [trainer.forward_backward([datum(1)], LOSS), trainer.optim_step(STEP)]

    done, waiting = concurrent.futures.wait(futures, 6)
    assert len(waiting) == 0, f"{len(done)} of 4 were told"
    assert futures[-1].exception() is None, "in the end all goes on"


def test_an_answer_lost_for_good_runs_its_operation_once(connect: Any, server: TinkerServer) -> None:
    trainer = connect(server, retry_deadline_s=0.5).create_lora_training_client("stub/model", rank=4)
    server.script("optim_step", [Drop(after_work=True)] * 40)
    lost = trainer.optim_step(STEP)
    assert isinstance(lost.exception(5), APIConnectionError)
    assert [number for _, number, _ in server.executed] == [1], "the server had taken it, and took it once"


@pytest.mark.parametrize("chunk_len", [1024, 1])
def test_a_custom_loss_in_an_outage_strands_nothing(make_server: Any, connect: Any, datum: Any, chunk_len: int) -> None:
    pytest.importorskip("torch")
    server = make_server(flags={"fwdbwd_max_chunk_len": chunk_len})
    trainer = connect(server, retry_deadline_s=0.5).create_lora_training_client("stub/model", rank=4)
    server.stop()
    data = [datum(i) for i in range(3)]
    futures = [trainer.forward_backward_custom(data, lambda _, p: (p[0].sum(), {})), trainer.optim_step(STEP)]

    done, waiting = concurrent.futures.wait(futures, 8)
    assert len(waiting) == 0, f"{len(done)} of 2 were told"
    server.start()
    after = trainer.optim_step(STEP)
    assert after.exception(6) is None or isinstance(after.exception(), TinkerError)


def test_a_custom_loss_that_raises_in_an_outage_still_shows_its_own_error(
    connect: Any, server: TinkerServer, datum: Any
) -> None:
    pytest.importorskip("torch")
    trainer = connect(server, retry_deadline_s=0.5).create_lora_training_client("stub/model", rank=4)

    def broken(data: Any, logprobs: Any) -> Any:
        server.stop()
        raise ZeroDivisionError("of mine")

    assert type(trainer.forward_backward_custom([datum(1)], broken).exception(8)) is ZeroDivisionError

"""Deadlines of a client, and the breaker that stops sending to a server that fails."""

from __future__ import annotations

import socket
import time
from collections.abc import Iterator
from typing import Any

import pytest
from support.tinker_server import Hold, Status, TinkerServer

from tinsmith import (
    AdamParams,
    APIConnectionError,
    APITimeoutError,
    ModelInput,
    NotFoundError,
    SamplingParams,
    ServiceClient,
    TinkerError,
)

pytestmark = pytest.mark.usefixtures("hard_limit", "clean_environment")

STEP = AdamParams(learning_rate=1e-3)
PROMPT = ModelInput.from_ints([1, 2, 3])
PARAMS = SamplingParams(max_tokens=2)


@pytest.fixture
def silent_port() -> Iterator[str]:
    """A port that accepts connections and never says a word."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"


@pytest.fixture
def full_port() -> Iterator[str]:
    """A port whose queue is full, so that connecting to it takes for ever."""
    with socket.create_server(("127.0.0.1", 0), backlog=0) as listener:
        waiting = [socket.socket() for _ in range(4)]
        for connection in waiting:
            connection.setblocking(False)
            connection.connect_ex(listener.getsockname())
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
        for connection in waiting:
            connection.close()


def test_a_request_that_is_not_answered_ends_at_its_limit(connect: Any, server: TinkerServer) -> None:
    client = connect(server, request_timeout_s=0.3, retry_deadline_s=1.0)
    client.get_server_capabilities()
    server.script("get_server_capabilities", [Hold()] * 50)
    started = time.monotonic()
    with pytest.raises(APITimeoutError) as told:
        client.get_server_capabilities()

    assert time.monotonic() - started < 5
    assert f"{server.url}/api/v1/get_server_capabilities" in str(told.value)
    assert len(server.find("get_server_capabilities")) >= 3, "it was tried again within the deadline"


def test_a_server_that_never_answers_is_given_up(connect: Any, silent_port: str) -> None:
    client = connect(silent_port, request_timeout_s=0.2, first_contact_s=1.0, retry_deadline_s=60)
    started = time.monotonic()
    with pytest.raises(APITimeoutError, match=silent_port):
        client.get_server_capabilities()
    assert time.monotonic() - started < 5


def test_connecting_has_a_limit_of_its_own(connect: Any, full_port: str) -> None:
    client = connect(full_port, connect_timeout_s=0.3, first_contact_s=1.0)
    started = time.monotonic()
    with pytest.raises(APITimeoutError, match="no connection"):
        client.get_server_capabilities()
    assert time.monotonic() - started < 6


def test_first_contact_and_later_calls_have_different_patience(connect: Any, server: TinkerServer) -> None:
    client = connect(server, first_contact_s=30, retry_deadline_s=0.5)
    client.get_server_capabilities()
    server.stop()
    started = time.monotonic()
    with pytest.raises(APIConnectionError):
        client.get_server_capabilities()
    assert time.monotonic() - started < 5


def test_a_result_has_a_deadline_even_while_the_server_holds_the_poll(connect: Any, server: TinkerServer) -> None:
    client = connect(server, result_deadline_s=1.0)
    trainer = client.create_lora_training_client("stub/model", rank=4)
    server.pause_work()  # polls are held for thirty seconds
    error = trainer.optim_step(STEP).exception(6)

    assert isinstance(error, APITimeoutError)
    assert "result_deadline_s" in str(error)
    assert "optim_step" in str(error)


def test_the_deadline_of_a_result_counts_from_the_first_poll_to_the_last(connect: Any, server: TinkerServer) -> None:
    client = connect(server, result_deadline_s=0.8)
    trainer = client.create_lora_training_client("stub/model", rank=4)
    server.pending_first(10_000)
    started = time.monotonic()
    error = trainer.optim_step(STEP).exception(8)

    assert isinstance(error, APITimeoutError)
    assert time.monotonic() - started < 4


def test_samples_that_are_polled_together_have_the_deadline_too(connect: Any, make_server: Any) -> None:
    server = make_server(flags={"sample_use_retrieve_futures": True})
    sampler = connect(server, result_deadline_s=0.5).create_sampling_client(base_model="stub/model")
    server.pause_work()
    error = sampler.sample(PROMPT, 1, PARAMS).exception(6)

    assert isinstance(error, APITimeoutError)
    assert "result_deadline_s" in str(error)


def test_a_poll_that_is_never_answered_is_sent_again(connect: Any, server: TinkerServer) -> None:
    client = connect(server, poll_timeout_s=0.3)
    trainer = client.create_lora_training_client("stub/model", rank=4)
    server.script("retrieve_future", [Hold()])
    assert trainer.optim_step(STEP).result(10).metrics == {"step": 1.0}
    server.release()


def test_a_limit_of_one_call_is_the_limit_of_its_wait(client: ServiceClient, server: TinkerServer) -> None:
    sampler = client.create_sampling_client(base_model="stub/model")
    server.pause_work()
    started = time.monotonic()
    future = sampler.sample(PROMPT, 1, PARAMS)
    with pytest.raises(TimeoutError):
        future.result(timeout=0.2)
    assert time.monotonic() - started < 3
    server.resume_work()
    future.result(10)


@pytest.mark.parametrize(
    "name", ["connect_timeout_s", "request_timeout_s", "first_contact_s", "retry_deadline_s", "heartbeat_s"]
)
@pytest.mark.parametrize("value", [0, -1, "soon"])
def test_a_limit_that_is_none_is_refused_by_name(connect: Any, server: TinkerServer, name: str, value: Any) -> None:
    with pytest.raises(TinkerError, match=name):
        connect(server, **{name: value})


def test_a_server_that_fails_again_and_again_is_not_asked_for_a_while(connect: Any, server: TinkerServer) -> None:
    client = connect(server, retry_deadline_s=60)
    failure = Status(500, {"x-should-retry": "false"}, {"detail": "disk full"})
    server.script("get_server_capabilities", [failure] * 500)
    for _ in range(200):
        asked, started = len(server.find("get_server_capabilities")), time.monotonic()
        with pytest.raises(TinkerError) as told:
            client.get_server_capabilities()
        assert time.monotonic() - started < 0.8, "a call that is not sent fails at once"
        if len(server.find("get_server_capabilities")) == asked:
            break
    else:
        pytest.fail("after many failures in a row each call is still sent")

    assert isinstance(told.value, APIConnectionError)
    assert "disk full" in str(told.value), "it says what went wrong"
    assert f"{server.url}/api/v1/get_server_capabilities" in str(told.value)
    assert client.create_rest_client().list_sessions().result(5).sessions == [], "other routes are not affected"


def test_refusals_of_the_caller_do_not_trip_the_breaker(client: ServiceClient, server: TinkerServer) -> None:
    rest = client.create_rest_client()
    for _ in range(25):
        assert isinstance(rest.get_training_run("nothing").exception(10), NotFoundError)
    assert len(server.find("training_runs/nothing")) == 25


def test_a_burst_of_requests_lost_at_once_is_one_failure_not_many(connect: Any, server: TinkerServer) -> None:
    client = connect(server)
    sampler = client.create_sampling_client(base_model="stub/model")
    server.pause_work()
    futures = [sampler.sample(ModelInput.from_ints([i]), 1, PARAMS) for i in range(120)]
    server.wait_for("retrieve_future", 120, timeout_s=10)
    server.restart()  # back at once: all polls are cut, nothing else
    server.resume_work()

    assert [future.result(8).sequences[0].tokens for future in futures] == [[i, i + 1] for i in range(120)]

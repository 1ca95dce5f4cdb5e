"""The circuit breaker guards every request to the server, and shortens no operation's deadline."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from support.tinker_server import Status, TinkerServer

from tinsmith import AdamParams, APIConnectionError, InternalServerError, ModelInput, SamplingParams, ServiceClient
from tinsmith.client.connection.own_endpoints import Extensions
from tinsmith.transport.gate import CircuitBreaker
from tinsmith.wire.rules.faults import status_error

pytestmark = pytest.mark.usefixtures("hard_limit", "clean_environment")

STEP = AdamParams(learning_rate=1e-3)
PROMPT = ModelInput.from_ints([1, 2, 3])
PARAMS = SamplingParams(max_tokens=2)
ALL = {"sample_use_retrieve_futures": True, "tinsmith": {"sample_stream": True}}


class World:
    """A client with a run, a sampler and an export, made while all was well."""

    def __init__(self, client: ServiceClient, server: TinkerServer, folder: Path) -> None:
        self.client = client
        self.server = server
        self.folder = folder
        self.trainer = client.create_lora_training_client("stub/model", rank=4)
        self.sampler = client.create_sampling_client(base_model="stub/model")
        self.exported = self.trainer.save_weights_external("final").result(10).path

    def open(self, endpoint: str, *, retryable: bool) -> None:
        """Let the endpoint have failed so often that nothing is sent to it for a minute."""
        connection = self.client.holder.connection
        connection.breaker = CircuitBreaker(threshold=1, cool_down_s=60.0)
        error = status_error(500, b"disk full", {"x-should-retry": str(retryable).lower()})
        connection.breaker.failed(endpoint, error)
        self.server.clear_requests()

    async def stream(self) -> list[Any]:
        return [piece async for piece in self.sampler.sample_stream(PROMPT, PARAMS)]


@pytest.fixture
def world(make_server: Any, connect: Any, tmp_path: Path) -> World:
    server: TinkerServer = make_server(flags=ALL)
    return World(connect(server, heartbeat_s=0.05), server, tmp_path)


PATHS: dict[str, tuple[Callable[[World], str], str, Callable[[World], Any]]] = {
    "call": (lambda _: "get_info", "get_info", lambda w: w.trainer.get_info()),
    "submit": (lambda _: "optim_step", "optim_step", lambda w: w.trainer.optim_step(STEP).result(10)),
    "poll": (lambda _: "retrieve_future", "retrieve_future", lambda w: w.trainer.optim_step(STEP).result(10)),
    "sample": (lambda _: "asample", "asample", lambda w: w.sampler.sample(PROMPT, 1, PARAMS).result(10)),
    "stream": (lambda _: "sample_stream", "/tinsmith/v1/sample_stream", lambda w: asyncio.run(w.stream())),
    "download": (
        lambda w: w.server.url,
        "/files/.*",
        lambda w: w.client.create_rest_client().download_external_weights(w.exported, w.folder).result(10),
    ),
    "page": (lambda _: "/healthz", "/healthz", lambda w: Extensions(w.client.holder).open_page("/healthz")),
}


@pytest.mark.parametrize("name", PATHS)
def test_an_open_breaker_stops_every_kind_of_request(world: World, name: str) -> None:
    endpoint, path, act = PATHS[name]
    world.open(endpoint(world), retryable=False)
    with pytest.raises(APIConnectionError, match=r"not sent, because the last 1 requests failed.*disk full"):
        act(world)
    assert world.server.find(path) == []


def test_samples_poll_by_themselves_while_the_shared_poll_is_held_back(world: World) -> None:
    world.open("retrieve_futures", retryable=False)
    assert world.sampler.sample(PROMPT, 1, PARAMS).result(10).sequences[0].tokens == [6, 7]
    assert world.server.find("retrieve_futures") == []


def test_heartbeats_are_held_back_and_go_on(world: World) -> None:
    world.open("session_heartbeat", retryable=True)
    time.sleep(0.3)
    assert world.server.find("session_heartbeat") == []
    world.client.holder.connection.breaker.succeeded("session_heartbeat")
    world.server.wait_for("session_heartbeat", timeout_s=5)


@pytest.mark.parametrize("name", [name for name in PATHS if name != "page"])
def test_an_operation_that_would_wait_for_the_server_waits_for_the_breaker(world: World, name: str) -> None:
    endpoint, path, act = PATHS[name]
    world.open(endpoint(world), retryable=True)
    closing = threading.Timer(0.5, world.client.holder.connection.breaker.succeeded, [endpoint(world)])
    closing.start()
    act(world)
    closing.join()
    assert world.server.find(path) != []


def test_a_failing_server_is_asked_less_often_and_the_samples_still_come(connect: Any, server: TinkerServer) -> None:
    sampler = connect(server).create_sampling_client(base_model="stub/model")
    sampler.sample(PROMPT, 1, PARAMS).result(10)
    server.script("asample", [Status(500)] * 100_000)
    server.clear_requests()
    futures = [sampler.sample(PROMPT, 1, PARAMS) for _ in range(60)]
    time.sleep(3.0)
    asked = len(server.find("asample"))
    server.clear_script()

    assert 60 <= asked < 120, "each once, then twenty in a row with what was in flight, then one a second"
    for future in futures:
        assert future.result(12).sequences[0].tokens == [6, 7]


def test_the_last_error_of_a_server_that_keeps_failing_is_kept(connect: Any, server: TinkerServer) -> None:
    client = connect(server, retry_deadline_s=3.0)
    rest = client.create_rest_client()
    server.script("sessions", [Status(500, body={"detail": "disk full"})] * 1000)
    errors = [future.exception(10) for future in [rest.list_sessions() for _ in range(30)]]

    assert all(isinstance(error, (InternalServerError, APIConnectionError)) for error in errors)
    assert all("disk full" in str(error) for error in errors)

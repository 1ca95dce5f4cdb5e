"""What clients of one server and key share, what others do not share, and that nothing outlives the clients."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import pytest
from support.tinker_server import Hold, Status, TinkerServer

from tinsmith import ClientConfig, ModelInput, SamplingParams, ServiceClient

pytestmark = pytest.mark.usefixtures("hard_limit", "clean_environment")

PROMPT = ModelInput.from_ints([1, 2, 3])
PARAMS = SamplingParams(max_tokens=2)
PAUSE = Status(429, {"retry-after-ms": "1500"})


def sampler_of(client: Any) -> Any:
    return client.create_sampling_client(base_model="stub/model")


def test_clients_of_one_server_and_key_share_the_pause_and_others_do_not(
    connect: Any, server: TinkerServer, eventually: Any
) -> None:
    mine, also_mine = sampler_of(connect(server)), sampler_of(connect(server))
    foreign = sampler_of(connect(server, api_key=server.foreign_key))
    server.script("asample", [PAUSE])
    futures = [mine.sample(PROMPT, 1, PARAMS)]
    refused = server.wait_for("asample", timeout_s=10)[0]
    eventually(lambda: refused.status == 429)
    futures += [foreign.sample(PROMPT, 1, PARAMS)]
    futures[1].result(10)
    futures += [also_mine.sample(PROMPT, 1, PARAMS)]
    for future in futures:
        future.result(10)

    times = {
        (request.body["sampling_session_id"], request.body["seq_id"]): request.time
        for request in server.find("asample")
        if request is not refused
    }
    assert times[foreign.sampling_session_id, 0] - refused.time < 1.2
    assert times[also_mine.sampling_session_id, 0] - refused.time > 1.4
    assert times[mine.sampling_session_id, 0] - refused.time > 1.4


def test_the_same_key_on_two_servers_is_two_tenants(connect: Any, make_server: Any) -> None:
    full, free = make_server(), make_server()
    waiting, going = sampler_of(connect(full)), sampler_of(connect(free))
    full.script("asample", [Status(429, {"retry-after-ms": "2000"})])
    held = waiting.sample(PROMPT, 1, PARAMS)
    full.wait_for("asample", timeout_s=10)

    assert going.sample(PROMPT, 1, PARAMS).result(1.5).sequences[0].tokens == [6, 7]
    held.result(10)


def test_a_refused_sample_goes_again_under_its_number(connect: Any, server: TinkerServer) -> None:
    sampler = sampler_of(connect(server))
    server.script("asample", [Status(429, {"retry-after-ms": "20"})] * 3)
    sampler.sample(PROMPT, 1, PARAMS).result(10)

    sent = server.find("asample")
    assert [request.body["seq_id"] for request in sent] == [0, 0, 0, 0]
    assert {request.headers["x-tinker-sampling-backpressure"] for request in sent} == {"1"}


def test_a_pause_of_sampling_does_not_hold_back_training(connect: Any, server: TinkerServer, datum: Any) -> None:
    client = connect(server)
    sampler, trainer = sampler_of(client), client.create_lora_training_client("stub/model", rank=4)
    server.script("asample", [Status(429, {"retry-after-ms": "3000"})])
    sampled = sampler.sample(PROMPT, 1, PARAMS)
    server.wait_for("asample", timeout_s=10)
    trainer.forward_backward([datum(1)], "cross_entropy").result(2)
    assert not sampled.done()
    sampled.result(10)


def test_held_samples_starve_neither_training_nor_rest_nor_polls(
    connect: Any, server: TinkerServer, datum: Any
) -> None:
    client = connect(server)
    sampler, trainer = sampler_of(client), client.create_lora_training_client("stub/model", rank=4)
    server.script("asample", [Hold()] * 200)
    samples = [sampler.sample(PROMPT, 1, PARAMS) for _ in range(200)]
    server.wait_for("asample", 10, timeout_s=10)
    trainer.forward_backward([datum(1)], "cross_entropy").result(5)
    client.create_rest_client().list_sessions().result(5)
    while not all(sample.done() for sample in samples):
        server.release()
    assert {tuple(sample.result().sequences[0].tokens) for sample in samples} == {(6, 7)}


def test_five_hundred_samples_at_once_stay_within_a_hundred_connections(connect: Any, server: TinkerServer) -> None:
    sampler = sampler_of(connect(server))
    samples = [sampler.sample(ModelInput.from_ints([i]), 1, PARAMS) for i in range(500)]
    assert [sample.result(15).sequences[0].tokens[0] for sample in samples] == list(range(500))
    assert server.max_connections <= 100
    assert server.violations == []


@pytest.mark.parametrize("closes", [True, False], ids=["closed", "dropped"])
def test_the_shared_state_of_dead_clients_is_collected(connect: Any, make_server: Any, closes: bool) -> None:
    server = make_server()
    config = ClientConfig(base_url=server.url, api_key=server.key)
    one, other = ServiceClient(config=config), ServiceClient(config=config)
    for client in (one, other):
        sampler_of(client).sample(PROMPT, 1, PARAMS).result(10)
    limits = weakref.ref(one.holder.connection.limits)
    assert limits() is other.holder.connection.limits
    if closes:
        one.close()
    del one, client
    gc.collect()
    assert limits() is not None, "the other client still needs it"
    if closes:
        other.close()
    del other
    gc.collect()

    assert limits() is None


def test_samples_of_a_closed_client_give_their_share_back(connect: Any, server: TinkerServer) -> None:
    first, second = connect(server), connect(server)
    sampler = sampler_of(first)
    server.script("asample", [Hold()] * 16)
    for _ in range(450):  # more than may be submitted at once
        sampler.sample(PROMPT, 1, PARAMS)
    server.wait_for("asample", 10, timeout_s=10)
    first.close()

    assert sampler_of(second).sample(PROMPT, 1, PARAMS).result(5).sequences[0].tokens == [6, 7]

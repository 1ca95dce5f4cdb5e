"""A sampler in other processes: pickled or as a handle, without the key, numbered apart, alive and gone in time."""

from __future__ import annotations

import base64
import concurrent.futures
import gc
import json
import multiprocessing
import pickle
import threading
from pathlib import Path
from typing import Any

import pytest
from support.tinker_server import TinkerServer

from tinsmith import InvalidInputError, ModelInput, RetryConfig, SamplingClient, SamplingParams, ServiceClient
from tinsmith.errors import RetryableException

pytestmark = pytest.mark.usefixtures("hard_limit", "clean_environment")

PROMPT = ModelInput.from_ints([1, 2, 3])
PARAMS = SamplingParams(max_tokens=2)
BLOCK = 10**9

SAMPLE_FROM_PICKLE = """
    import pickle, sys
    from tinsmith import ModelInput, SamplingParams
    with open(sys.argv[1], "rb") as file:
        sampler = pickle.load(file)
    answer = sampler.sample(ModelInput.from_ints([1, 2, 3]), 2, SamplingParams(max_tokens=2)).result(10)
    print([sequence.tokens for sequence in answer.sequences], sampler.get_base_model())
"""
SAMPLE_FROM_HANDLE = """
    import sys
    from tinsmith import ModelInput, SamplingClient, SamplingParams
    sampler = SamplingClient.from_sampler_handle(sys.argv[1])
    answer = sampler.sample(ModelInput.from_ints([1, 2, 3]), 2, SamplingParams(max_tokens=2)).result(10)
    print([sequence.tokens for sequence in answer.sequences], sampler.get_base_model())
"""


def numbers(server: TinkerServer) -> list[int]:
    return [request.body["seq_id"] for request in server.find("asample")]


@pytest.fixture
def key_in_environment(monkeypatch: pytest.MonkeyPatch, server: TinkerServer, clean_environment: None) -> None:
    monkeypatch.setenv("TINKER_API_KEY", server.key)


def test_a_pickled_sampler_works_in_another_process(
    sampler: SamplingClient, server: TinkerServer, children: Any, tmp_path: Path
) -> None:
    pickled = tmp_path / "sampler.pickle"
    pickled.write_bytes(pickle.dumps(sampler))
    code, output, errors = children.run(SAMPLE_FROM_PICKLE, server, str(pickled), TINKER_BASE_URL="http://wrong:1")

    assert (code, output, errors) == (0, "[[6, 7], [13, 14]] stub/model\n", "")
    assert numbers(server)[0] >= BLOCK
    assert server.violations == []


def test_a_handle_works_in_another_process(sampler: SamplingClient, server: TinkerServer, children: Any) -> None:
    handle = sampler.get_sampler_handle()
    code, output, errors = children.run(SAMPLE_FROM_HANDLE, server, handle, TINKER_BASE_URL="http://wrong:1")

    assert (code, output, errors) == (0, "[[6, 7], [13, 14]] stub/model\n", "")
    assert numbers(server)[0] >= BLOCK


def test_neither_pickle_nor_handle_holds_the_key(sampler: SamplingClient, server: TinkerServer) -> None:
    sampler.sample(PROMPT, 1, PARAMS).result(10)
    for protocol in range(pickle.HIGHEST_PROTOCOL + 1):
        assert server.key.encode() not in pickle.dumps(sampler, protocol)
    decoded = base64.urlsafe_b64decode(sampler.get_sampler_handle())
    assert server.key.encode() not in decoded
    assert "tml-" not in json.dumps(json.loads(decoded))


def test_a_handle_takes_another_key(sampler: SamplingClient, server: TinkerServer) -> None:
    clone = SamplingClient.from_sampler_handle(sampler.get_sampler_handle(), api_key=server.key)
    clone.sample(PROMPT, 1, PARAMS).result(10)
    assert server.find("asample")[0].key == server.key


@pytest.mark.parametrize("handle", ["", "no handle", base64.urlsafe_b64encode(b"[1]").decode(), "e30="])
def test_a_wrong_handle_is_refused_by_name(handle: str, key_in_environment: None) -> None:
    with pytest.raises(InvalidInputError, match="handle"):
        SamplingClient.from_sampler_handle(handle)


@pytest.mark.usefixtures("key_in_environment")
def test_clones_number_in_blocks_of_their_own(sampler: SamplingClient, server: TinkerServer) -> None:
    clones = [pickle.loads(pickle.dumps(sampler)) for _ in range(3)]
    for client in (sampler, *clones, sampler, *clones):
        client.sample(PROMPT, 1, PARAMS).result(10)

    sent = numbers(server)
    assert [sent[0], sent[4]] == [0, 1]
    for i in range(1, 4):
        assert sent[i] >= BLOCK
        assert sent[i] % BLOCK == 0
        assert sent[i + 4] == sent[i] + 1
    assert len(set(sent)) == 8
    assert server.violations == []


def test_clones_ask_for_their_number_where_the_server_gives_one(
    make_server: Any, connect: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    server = make_server(flags={"sample_join_sampling_session": True, "sample_use_retrieve_futures": True})
    monkeypatch.setenv("TINKER_API_KEY", server.key)
    sampler = connect(server).create_sampling_client(base_model="stub/model")
    clones = [pickle.loads(pickle.dumps(sampler)) for _ in range(2)]
    for clone in clones:
        for future in [clone.sample(PROMPT, 1, PARAMS) for _ in range(3)]:
            future.result(10)

    assert sorted(numbers(server)) == [k * BLOCK + i for k in (1, 2) for i in range(3)]
    assert len(server.find("join_sampling_session")) == 2
    polled = {request.body["target"]["cloned_sampler_id"] for request in server.find("retrieve_futures")}
    assert polled == {1, 2}
    assert server.violations == []


@pytest.mark.usefixtures("key_in_environment")
def test_a_clone_keeps_the_settings_of_its_sampler(client: ServiceClient, server: TinkerServer) -> None:
    sampler = client.create_sampling_client(
        base_model="stub/model", retry_config=RetryConfig(enable_retry_logic=False), record_stability_info=True
    )
    clone = pickle.loads(pickle.dumps(sampler))
    server.lose_promises(1)
    error = clone.sample(PROMPT, 1, PARAMS).exception(10)

    assert server.find("asample")[0].body["record_stability_info"] is True
    assert isinstance(error, RetryableException), "retries were switched off"


def test_a_clone_keeps_the_session_alive(
    sampler: SamplingClient, server: TinkerServer, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    settings = tmp_path / "tinsmith.toml"
    settings.write_text("[client]\nheartbeat_s = 0.1\n")
    monkeypatch.setenv("TINSMITH_CONFIG", str(settings))
    monkeypatch.setenv("TINKER_API_KEY", server.key)
    clone = pickle.loads(pickle.dumps(sampler))  # the original's heartbeat is ten seconds
    clone.sample(PROMPT, 1, PARAMS).result(10)

    beats = server.wait_for("session_heartbeat", 2, timeout_s=4)
    assert beats[0].body["session_id"] == sampler.sampling_session_id.partition(":")[0]


@pytest.mark.usefixtures("key_in_environment")
def test_a_dropped_clone_leaves_no_thread_and_no_connection(
    sampler: SamplingClient, server: TinkerServer, eventually: Any
) -> None:
    threads = set(threading.enumerate())
    for _ in range(5):
        clone = pickle.loads(pickle.dumps(sampler))
        clone.sample(PROMPT, 1, PARAMS).result(10)
        del clone
    gc.collect()

    eventually(lambda: set(threading.enumerate()) <= threads, 3)


def sample_in_a_worker(sampler: SamplingClient) -> list[int]:
    return list(sampler.sample(PROMPT, 1, PARAMS).result(10).sequences[0].tokens)


@pytest.mark.usefixtures("key_in_environment")
def test_a_pool_of_spawned_processes_samples(sampler: SamplingClient, server: TinkerServer) -> None:
    context = multiprocessing.get_context("spawn")
    with concurrent.futures.ProcessPoolExecutor(2, mp_context=context) as pool:
        assert list(pool.map(sample_in_a_worker, [sampler] * 4)) == [[6, 7]] * 4
    assert server.violations == []

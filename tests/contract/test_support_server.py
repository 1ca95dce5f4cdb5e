"""The server that tests of clients run against, proven by the official releases themselves and by raw requests."""

from __future__ import annotations

import asyncio
import concurrent.futures
import functools
import http.client
import json
import socket
import time
from collections.abc import Iterator
from contextlib import suppress
from typing import Any, NamedTuple
from urllib.parse import urlsplit

import pytest
from support.fault_proxy import Clean, DropAfter, Duplicate, Fault, FaultProxy, Refuse, Reset, Stall, Trickle
from support.normalize import Normal, differences, normalize
from support.program_run import ALL_DYNAMIC_FLAGS, ALL_FLAGS, Steps, raised, run_official
from support.raw_client import new_model, new_sampler, optim_step, retrieve, send
from support.releases import NEWEST, RELEASES
from support.server_arithmetic import logprob
from support.tinker_server import (
    HANDLERS,
    Delay,
    Drop,
    DropMidBody,
    Hold,
    Pass,
    Redirect,
    Replace,
    SlowBytes,
    Status,
    TinkerServer,
)

from tinsmith.wire.codecs import proto_outputs
from tinsmith.wire.routes.table import PREFIX, ROUTES

REFUSED_ON_PURPOSE = {
    "no data": "ValueError",
    "optim_step without parameters": "TypeError",
    "save_state refused": "RequestFailedError",
    "save_state bad name": "BadRequestError",
    "load_state unknown": "RequestFailedError",
    "sampler unknown": "NotFoundError",
    "rest get_training_run": "NotFoundError",
    "async get_training_run": "NotFoundError",
}
VINTAGE_OF = {"0.3.0": "0.3", "0.15.0": "0.15", "0.24.0": "0.24", "0.25.0": "0.25"}


class Run(NamedTuple):
    steps: Steps
    requests: list[Normal]


@functools.cache
def whole_program(has_all_flags: bool) -> Run:
    flags, dynamic = (ALL_FLAGS, ALL_DYNAMIC_FLAGS) if has_all_flags else ({}, {})
    with TinkerServer(flags=flags, dynamic_flags=dynamic) as server:
        if has_all_flags:
            server.pending_first(1, queue_state="paused_capacity", reason="a test")
            server.settings.metadata_above_bytes = 200
        steps = run_official(server, NEWEST)
        assert server.violations == []
        assert server.stuck == {}
        return Run(steps, normalize(server.requests))


def test_every_route_has_a_handler() -> None:
    assert set(HANDLERS) == {route.name for route in ROUTES}


@pytest.mark.parametrize("has_all_flags", [False, True])
def test_the_newest_release_runs_the_whole_program(has_all_flags: bool) -> None:
    steps = whole_program(has_all_flags).steps
    expected = REFUSED_ON_PURPOSE if has_all_flags else REFUSED_ON_PURPOSE | {"rest whoami": "RuntimeError"}
    assert raised(steps) == expected
    values = dict(steps)
    assert values["forward"]["metrics"]["loss:sum"] == pytest.approx(4.96907)
    assert values["forward"]["loss_fn_outputs"][0]["logprobs"]["data"][0] == round(logprob(2, 0), 5)
    assert values["many datums"]["loss:sum"] == pytest.approx(2132.29905)
    assert values["optim_step Adam"]["metrics"] == {"step": 1.0}
    assert values["base: sample"]["sequences"][1]["tokens"] == [72, 73, 74]
    assert values["base: stop tokens"]["sequences"][0]["stop_reason"] == "stop"
    assert len(values["base: default length"]["sequences"][0]["tokens"]) == 16
    assert values["base: compute_logprobs"] == [None, *(round(logprob(11 + i, i), 5) for i in range(1, 5))]
    everything = values["sample everything, dense targets"]
    assert everything["prompt_logprobs"][:3] == [None, None, None]
    assert everything["target_prompt_logprobs"]["data"][2] == round(logprob(5, 2), 5)
    assert everything["prompt_alt_tokens"]["tokens"]["shape"] == [4, 2]
    assert values["resumed"]["metrics"] == {"step": 5.0}


def test_two_runs_of_one_program_are_the_same() -> None:
    with TinkerServer() as server:
        steps = run_official(server, NEWEST)
        again = normalize(server.requests)
    assert steps == whole_program(False).steps
    assert differences(whole_program(False).requests, again) == []


def test_differences_are_found() -> None:
    plain, flagged = whole_program(False).requests, whole_program(True).requests
    found = differences(plain, flagged)
    assert "training <session 1>:train:0 (2,): headers.content-encoding: <missing> != zstd" in found
    assert any(text.startswith("only in the second: POST join_sampling_session") for text in found)
    assert any(text.startswith("only in the first: POST weights_info") for text in found)
    assert not any("retrieve_future " in text for text in found)


@pytest.mark.parametrize("release", [RELEASES[0], NEWEST])
def test_each_release_runs_the_core_loop(release: str) -> None:
    with TinkerServer() as server:
        steps = run_official(server, release, "--old")
        assert server.violations == []
        assert server.stuck == {}
    assert raised(steps).keys() <= {"no data"}
    assert dict(steps)["many datums"]["loss:sum"] == pytest.approx(2132.29905)


@pytest.mark.parametrize(("release", "vintage"), VINTAGE_OF.items())
def test_a_release_runs_against_a_server_of_its_time(release: str, vintage: str) -> None:
    with TinkerServer(vintage=vintage, flags={"proto_write_fwdbwd": True} if vintage == "0.24" else {}) as server:
        steps = run_official(server, release, "--old")
        assert server.violations == []
    assert raised(steps).keys() <= {"no data"}


def test_skyrl_serves_the_newest_release_as_the_real_one_does() -> None:
    with TinkerServer(vintage="skyrl") as server:
        steps = run_official(server, NEWEST, "--old")
        assert server.violations == []
    failures = raised(steps)
    assert failures["base: sample"] == "AssertionError"  # no sample_sequence_ids
    assert failures["load_state"] == "ValueError"  # 400 on retrieve_future
    assert failures["list_sessions"] == "NotFoundError"
    assert "forward_backward lists" not in failures


# Raw requests


@pytest.fixture
def server() -> Iterator[TinkerServer]:
    with TinkerServer() as server:
        yield server


def test_jobs_run_in_order_and_once(server: TinkerServer) -> None:
    model = new_model(server)
    late = [optim_step(server, model, seq_id).json["request_id"] for seq_id in (3, 2, 2)]
    assert late[1] == late[2]
    assert server.stuck == {model: [2, 3]}
    optim_step(server, model, 1)
    assert [seq_id for _, seq_id, _ in server.executed] == [1, 2, 3]
    assert retrieve(server, late[0]).json == {"metrics": {"step": 3.0}}
    assert server.violations == []
    assert optim_step(server, model, 2, rate=0.5).status == 400
    assert "seq_id 2 came twice with different content" in server.violations[0]


def test_a_refused_number_is_passed_over(server: TinkerServer) -> None:
    model = new_model(server)
    server.script("optim_step", [Status(400), Status(503)])
    assert optim_step(server, model, 1).status == 400
    assert optim_step(server, model, 2).status == 503
    optim_step(server, model, 3)
    assert server.stuck == {model: [3]}
    optim_step(server, model, 2)
    assert [seq_id for _, seq_id, _ in server.executed] == [2, 3]
    assert optim_step(server, model, 1).status == 400
    assert "seq_id 1 came after 3 had run" in server.violations[0]


def test_scripted_answers(server: TinkerServer) -> None:
    model = new_model(server)
    server.script("get_.*", [Status(429, {"retry-after-ms": "5"}), Drop(), DropMidBody(), SlowBytes(0), Delay(0)])
    server.script(
        f"{PREFIX}get_info", [Redirect("/elsewhere"), Replace(lambda r: {"seen": r.body["model_id"]}), Pass()]
    )
    info = {"model_id": model}
    busy = send(server.url, "get_info", info)
    assert (busy.status, busy.headers["retry-after-ms"]) == (429, "5")
    with pytest.raises(http.client.RemoteDisconnected):
        send(server.url, "get_info", info)
    with pytest.raises(http.client.IncompleteRead):
        send(server.url, "get_info", info)
    slow, delayed = send(server.url, "get_info", info), send(server.url, "get_info", info)
    assert slow.json == delayed.json
    assert send(server.url, "get_info", info).headers["location"] == "/elsewhere"
    assert send(server.url, "get_info", info).json == {"seen": model}
    assert server.script_left("get_info") == 1
    assert [r.status for r in server.find("get_info")] == [429, None, 200, 200, 200, 307, 200]


def test_an_answer_can_be_lost_after_the_work(server: TinkerServer) -> None:
    model = new_model(server)
    server.script("optim_step", [Drop(after_work=True)])
    with pytest.raises(http.client.RemoteDisconnected):
        optim_step(server, model, 1)
    assert len(server.executed) == 1
    assert retrieve(server, optim_step(server, model, 1).json["request_id"]).json == {"metrics": {"step": 1.0}}
    assert len(server.executed) == 1


def test_held_requests_wait_for_release(server: TinkerServer) -> None:
    server.script("healthz", [Hold()])
    with concurrent.futures.ThreadPoolExecutor() as pool:
        held = pool.submit(send, server.url, "healthz", None, "GET")
        server.wait_for("healthz")
        assert send(server.url, "get_server_capabilities", method="GET").status == 200
        assert server.find("healthz")[0].status is None
        server.release()
        assert held.result().status == 200
    assert server.max_connections == 2


def test_pending_metadata_loss_and_failure(server: TinkerServer) -> None:
    model = new_model(server)
    server.pending_first(2, form="try_again", queue_state="paused_rate_limit", reason="slow down")
    promise = optim_step(server, model, 1).json["request_id"]
    pending = retrieve(server, promise)
    assert (pending.status, pending.json["type"], pending.json["queue_state_reason"]) == (200, "try_again", "slow down")
    server.pending_first(2)
    assert retrieve(server, promise).status == 408
    server.lose_promises(1)
    assert [retrieve(server, promise).status for _ in range(2)] == [410, 410]
    assert optim_step(server, model, 1).json["request_id"] == promise
    assert retrieve(server, promise).status == 200
    server.settings.metadata_above_bytes = 0
    asked = send(server.url, "retrieve_future", {"request_id": promise, "allow_metadata_only": True})
    assert asked.json == {"status": "complete_metadata", "response_payload_size": len(retrieve(server, promise).body)}
    server.pending_first(0)
    server.fail_next("optim_step", "no more room", "server")
    failed = retrieve(server, optim_step(server, model, 2).json["request_id"])
    assert failed.json == {"error": "no more room", "category": "server"}


def test_work_can_be_paused_and_cancelled(server: TinkerServer) -> None:
    server.settings.dynamic_flags["sample_cancel_enabled"] = True
    model = new_model(server)
    server.pause_work()
    promise = optim_step(server, model, 1).json["request_id"]
    server.settings.poll_s = 0.01
    assert retrieve(server, promise).status == 408
    assert send(server.url, "cancel_future", {"request_id": promise}).status == 204
    assert retrieve(server, promise).json["error"] == "cancelled by the client"
    server.resume_work()
    assert server.executed == []


def test_stop_start_and_restart(server: TinkerServer) -> None:
    promise = optim_step(server, new_model(server), 1).json["request_id"]
    url = server.url
    server.stop()
    with pytest.raises(ConnectionRefusedError):
        send(url, "healthz", method="GET")
    server.start()
    assert server.url == url
    assert retrieve(server, promise).status == 200
    server.restart(forget_promises=True)
    assert retrieve(server, promise).status == 410


@pytest.mark.parametrize("rounds", range(5))
def test_a_connection_that_is_accepted_as_the_port_closes_is_closed(server: TinkerServer, rounds: int) -> None:
    """In each round of the loop between the arrival of a connection and its handler."""
    parts = urlsplit(server.url)

    async def arrive_and_stop() -> socket.socket:
        arrived = socket.create_connection((parts.hostname, parts.port), timeout=5)
        for _ in range(rounds):
            await asyncio.sleep(0)
        await server._close_port()
        return arrived

    assert server._thread is not None
    with server._thread.run(arrive_and_stop()) as arrived, suppress(ConnectionResetError):
        assert arrived.recv(1) == b""


def test_protobuf_only_where_the_vintage_has_it() -> None:
    for vintage, status in (("0.3", 415), ("0.15", 415), ("skyrl-422", 422), ("0.19", 404), ("skyrl", 404)):
        with TinkerServer(vintage=vintage) as server:
            headers = {"content-type": "application/x-protobuf"}
            body = b"\x0a\x01m\x22\x0dcross_entropy"
            assert send(server.url, "forward_backward", body, headers=headers).status == status
            assert server.requests[0].body["model_id"] == "m"
            has_config = send(server.url, "client/config", {}).status == 200
            assert has_config == (vintage not in ("0.3", "0.15"))
            assert send(server.url, "client/dynamic_config", {}).status == 404


def test_results_follow_the_accept_header(server: TinkerServer) -> None:
    model = new_model(server)
    inputs = {"target_tokens": {"data": [2], "dtype": "int64"}}
    datum = {"model_input": {"chunks": [{"tokens": [1]}]}, "loss_fn_inputs": inputs}
    body = {"forward_input": {"data": [datum], "loss_fn": "cross_entropy"}, "model_id": model, "seq_id": 1}
    promise = send(server.url, "forward", body).json["request_id"]
    binary = retrieve(server, promise, accept="application/x-protobuf, application/json")
    plain = retrieve(server, promise, accept="application/json").json
    assert proto_outputs.decode_output(binary.body).metrics["loss:sum"] == plain["metrics"]["loss:sum"]
    assert plain["metrics"]["loss:sum"] == pytest.approx(-logprob(2, 0))


def test_keys_and_unknown_paths(server: TinkerServer) -> None:
    assert send(server.url, "get_server_capabilities", method="GET", headers={"x-api-key": "tml-no"}).status == 401
    assert send(server.url, "no/such/path", {}).status == 404
    assert server.violations == [f"POST {PREFIX}no/such/path is not a path of the protocol"]
    model = new_model(server)
    assert send(server.url, "get_info", {"model_id": model}, headers={"x-api-key": server.foreign_key}).status == 404


def test_exported_files_are_served_whole_and_in_part(server: TinkerServer) -> None:
    model = new_model(server)
    send(server.url, "save_weights_external", {"model_id": model, "seq_id": 1, "path": "e"})
    listed = send(
        server.url, f"training_runs/{model}/checkpoints/external_weights/e/external_weights_urls", method="GET"
    )
    path = urlsplit(listed.json["urls"]["adapter_model.safetensors"]).path
    whole = send(server.url, path, method="GET").body
    part = send(server.url, path, method="GET", headers={"range": "bytes=8-15"})
    assert (part.status, part.body) == (206, whole[8:16])
    assert part.headers["content-range"] == f"bytes 8-15/{len(whole)}"
    assert send(server.url, path, method="GET", headers={"range": "bytes=-4"}).body == whole[-4:]
    assert send(server.url, path, method="GET", headers={"range": "bytes=99999-"}).status == 416
    assert send(server.url, path, method="HEAD").headers["content-length"] == str(len(whole))


def test_extensions() -> None:
    flags = {"tinsmith": {"sample_stream": True, "tokenizer": True}}
    with TinkerServer(flags=flags) as server:
        sampler = new_sampler(server)
        server.settings.stream_split_bytes = 7
        sample = {"prompt": {"chunks": [{"tokens": [1, 2]}]}, "sampling_params": {"max_tokens": 2}, "num_samples": 2}
        sample |= {"sampling_session_id": sampler, "seq_id": 0}
        streamed = send(server.url, "/tinsmith/v1/sample_stream", sample)
        events = [block.split("\n") for block in streamed.body.decode().strip().split("\n\n")]
        assert [name for name, _ in events] == ["event: token"] * 4 + ["event: done"]
        assert json.loads(events[1][1].removeprefix("data: ")) == {
            "index": 1,
            "position": 0,
            "tokens": [10],
            "logprobs": [-0.5],
        }
        server.settings.stream_pause_after = 1
        with concurrent.futures.ThreadPoolExecutor() as pool:
            paused = pool.submit(send, server.url, "/tinsmith/v1/sample_stream", sample)
            server.wait_for("/tinsmith/v1/sample_stream", 2)
            assert send(server.url, "get_server_capabilities", method="GET").status == 200
            assert not paused.done()
            server.release()
            assert paused.result().body == streamed.body
        server.settings.stream_pause_after = None
        server.settings.stream_error_after = 1
        assert b"event: error" in send(server.url, "/tinsmith/v1/sample_stream", sample).body
        assert send(server.url, "/tinsmith/v1/tokenizer?model=stub/model", method="GET").status == 404
        server.settings.tokenizers["stub/model"] = {
            "tokenizer_json": "{}",
            "tokenizer_config": {},
            "chat_template": None,
        }
        files = send(server.url, "/tinsmith/v1/tokenizer?model=stub/model", method="GET").json
        assert files["chat_template"] is None


@pytest.mark.parametrize(
    ("fault", "outcome"),
    [
        (Clean(), 200),
        (Refuse(), ConnectionResetError),
        (Reset(20), ConnectionResetError),
        (DropAfter(0), http.client.RemoteDisconnected),
        (DropAfter(10, "to_server"), http.client.RemoteDisconnected),
        (Trickle(3, 0.0), 200),
        (Stall(0.01, "to_server"), 200),
    ],
)
def test_the_proxy_does_what_networks_do(server: TinkerServer, fault: Fault, outcome: Any) -> None:
    with FaultProxy(server.url, [fault]) as proxy:
        if outcome == 200:
            assert send(proxy.url, "healthz", method="GET").status == 200
        else:
            with pytest.raises(outcome):
                send(proxy.url, "healthz", method="GET")
        assert send(proxy.url, "healthz", method="GET").status == 200
        assert proxy.history == [fault, Clean()]


def test_the_proxy_repeats_refuses_and_draws(server: TinkerServer) -> None:
    with FaultProxy(server.url, [Duplicate()]) as proxy:
        with socket.create_connection(("127.0.0.1", urlsplit(proxy.url).port or 0)) as raw:
            raw.sendall(b"GET /api/v1/healthz HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n")
            received = b"".join(iter(lambda: raw.recv(65536), b""))
        assert received.count(b"HTTP/1.1 200") == 2
        proxy.refuse()
        with pytest.raises(ConnectionRefusedError):
            send(proxy.url, "healthz", method="GET")
        proxy.listen()
        assert send(proxy.url, "healthz", method="GET").status == 200
    drawn = []
    for _ in range(2):
        with FaultProxy(server.url, seed=5, rate=0.7) as proxy:
            for _ in range(12):
                with suppress(OSError, http.client.HTTPException):
                    send(proxy.url, "healthz", method="GET")
            drawn.append(proxy.history)
    assert drawn[0] == drawn[1]
    assert len(set(map(type, drawn[0]))) > 3


def test_records_say_when_and_over_which_connection(server: TinkerServer) -> None:
    before = time.monotonic()
    send(server.url, "healthz", method="GET")
    send(server.url, "healthz?x=1", method="GET")
    first, second = server.find("healthz")
    assert before <= first.time <= second.time
    assert (first.connection_id, second.connection_id) == (1, 2)
    assert (second.query, second.headers["x-api-key"]) == ({"x": "1"}, server.key)

"""What a program sends besides its work: events that can be turned off, metrics, and never a key."""

from __future__ import annotations

import logging
import pickle
import time
from typing import Any

import pytest
from support.tinker_server import Hold, Status, TinkerServer

from tinsmith import (
    AdamParams,
    ClientConfig,
    ModelInput,
    NotFoundError,
    RestClient,
    SamplingParams,
    ServiceClient,
    TinkerError,
)

pytestmark = pytest.mark.usefixtures("hard_limit", "clean_environment")

STEP = AdamParams(learning_rate=1e-3)
PROMPT = ModelInput.from_ints([1, 2, 3])
PARAMS = SamplingParams(max_tokens=2)


def fail(client: ServiceClient, server: TinkerServer) -> None:
    """Errors of several kinds, with the key in what the server says."""
    trainer = client.create_lora_training_client("stub/model", rank=4)
    said = {"detail": f"the key {server.key} is not welcome"}
    server.script("optim_step", [Status(400, body=said), Status(503, {"retry-after-ms": "10"}, said)])
    server.fail_next("asample", f"worker of {server.key} crashed", "server")
    assert isinstance(trainer.optim_step(STEP).exception(10), TinkerError)
    trainer.optim_step(STEP).result(10)
    sampler = client.create_sampling_client(base_model="stub/model")
    assert isinstance(sampler.sample(PROMPT, 1, PARAMS).exception(10), TinkerError)
    server.script("training_runs/nothing", [Status(404, body=said)])
    assert isinstance(client.create_rest_client().get_training_run("nothing").exception(10), NotFoundError)


def test_events_tell_of_the_session_and_of_errors(client: ServiceClient, server: TinkerServer) -> None:
    fail(client, server)
    client.close()

    bodies = [request.body for request in server.find("telemetry")]
    assert bodies
    assert {body["session_id"] for body in bodies} == {"session-0001"}
    events = [event for body in bodies for event in body["events"]]
    kinds = [event["event"] for event in events]
    assert kinds.count("SESSION_START") == 1
    assert kinds.count("GENERIC_EVENT") + kinds.count("UNHANDLED_EXCEPTION") >= 3
    assert len({event["event_session_index"] for event in events}) == len(events)
    assert server.violations == []


def test_it_is_off_by_the_switch(server: TinkerServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TINKER_TELEMETRY", "0")
    with ServiceClient(base_url=server.url, api_key=server.key) as client:
        fail(client, server)
        client.get_telemetry()
    assert server.find("telemetry") == []


def test_a_server_without_telemetry_changes_nothing(
    client: ServiceClient, server: TinkerServer, caplog: pytest.LogCaptureFixture
) -> None:
    server.script("telemetry", [Status(404)] * 100)
    trainer = client.create_lora_training_client("stub/model", rank=4)
    started = time.monotonic()
    for _ in range(20):
        server.script("optim_step", [Status(400)])
        assert isinstance(trainer.optim_step(STEP).exception(10), TinkerError)
    assert time.monotonic() - started < 5, "an error does not wait for telemetry"
    started = time.monotonic()
    client.close()
    assert time.monotonic() - started < 3
    assert [record for record in caplog.records if record.levelno >= logging.WARNING] == []


@pytest.mark.parametrize("answer", [Hold(), Status(500), Status(200, body=b"<html>")], ids=str)
def test_a_server_that_chokes_on_telemetry_changes_nothing(
    connect: Any, server: TinkerServer, answer: Any, caplog: pytest.LogCaptureFixture
) -> None:
    client = connect(server)
    server.script("telemetry", [answer] * 100)
    fail(client, server)
    caplog.clear()
    started = time.monotonic()
    client.close()
    assert time.monotonic() - started < 3
    assert [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING] == []


def test_no_key_in_telemetry(client: ServiceClient, server: TinkerServer) -> None:
    fail(client, server)
    client.get_telemetry().event("custom", {"header": {"x-api-key": server.key}, server.key: [server.key]})
    client.get_telemetry().exception(ValueError(f"bad key {server.key}"))
    client.close()

    sent = b"".join(request.raw_body for request in server.find("telemetry"))
    assert b"custom" in sent
    assert server.key.encode() not in sent
    assert server.state.telemetry_leaks == []


def test_no_key_in_the_log(connect: Any, server: TinkerServer, caplog: pytest.LogCaptureFixture, datum: Any) -> None:
    caplog.set_level(logging.DEBUG)
    client = connect(server)
    fail(client, server)
    trainer = client.create_lora_training_client("stub/model", rank=4)
    trainer.forward_backward([datum(1)], "cross_entropy").result(10)
    said = {"detail": f"{server.key}: busy"}
    server.script("retrieve_future", [Status(500, body=said), Status(503, body=said)])
    trainer.optim_step(STEP).result(15)
    server.script("sessions/.*/finish", [Status(500, body=said)])
    client.close()

    text = "\n".join(f"{record.getMessage()} {record.args} {record.__dict__}" for record in caplog.records)
    assert server.key not in text


def test_no_token_in_log_or_telemetry(make_server: Any, connect: Any, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    server = make_server(flags={"pjwt_auth_enabled": True})
    client = connect(server)
    trainer = client.create_lora_training_client("stub/model", rank=4)
    token = server.find("create_model")[0].key
    assert token.startswith("eyJ")
    server.script("optim_step", [Status(503, {"retry-after-ms": "10"}, {"detail": f"token {token} is bad"})])
    trainer.optim_step(STEP).result(10)
    server.script("optim_step", [Status(401, {}, {"detail": f"token {token} is bad"})])
    trainer.optim_step(STEP).exception(10)
    client.close()

    assert token not in "\n".join(record.getMessage() for record in caplog.records)
    assert token.encode() not in b"".join(request.raw_body for request in server.find("telemetry"))


def test_no_key_in_any_repr_or_pickle(client: ServiceClient, server: TinkerServer) -> None:
    trainer = client.create_lora_training_client("stub/model", rank=4)
    sampler = client.create_sampling_client(base_model="stub/model")
    config = client.holder.connection.config
    rest = client.create_rest_client()
    shown = [client, trainer, sampler, rest, config, client.holder, client.holder.connection, client.holder.session]
    shown += [client.holder.connection.auth, client.holder.connection.limits, trainer.optim_step(STEP)]
    for thing in shown:
        assert server.key not in repr(thing)
        assert server.key not in str(thing)
    assert server.key.encode() not in pickle.dumps(sampler)


def test_no_key_in_the_repr_of_a_config_with_secrets() -> None:
    config = ClientConfig(
        base_url="http://someone:tml-password-in-url@127.0.0.1:1",
        api_key="tml-secret-key",
        credential_cmd="echo tml-secret-command",
        default_headers={"CF-Access-Client-Secret": "tml-secret-header"},
    )
    for secret in ("tml-secret-key", "tml-secret-command", "tml-secret-header"):
        assert secret not in repr(config)


def test_no_key_in_errors(connect: Any, server: TinkerServer) -> None:
    client = connect(server, first_contact_s=0.2, retry_deadline_s=0.2)
    trainer = client.create_lora_training_client("stub/model", rank=4)
    server.stop()
    error = trainer.optim_step(STEP).exception(10)
    assert error is not None
    seen: BaseException | None = error
    while seen is not None:
        assert server.key not in f"{seen} {seen!r} {seen.__dict__} {seen.args}"
        seen = seen.__cause__ or seen.__context__
    assert server.key.encode() not in pickle.dumps(error)


def test_figures_of_what_was_done(client: ServiceClient, server: TinkerServer, datum: Any) -> None:
    trainer = client.create_lora_training_client("stub/model", rank=4)
    sampler = client.create_sampling_client(base_model="stub/model")
    for future in [sampler.sample(PROMPT, 1, PARAMS) for _ in range(50)]:
        future.result(10)
    trainer.forward_backward([datum(1)], "cross_entropy").result(10)
    server.script("optim_step", [Status(400)])
    trainer.optim_step(STEP).exception(10)

    figures = client.metrics()
    assert figures["sample"].count == 50
    assert figures["sample"].errors == 0
    assert 0 < figures["sample"].p50_s <= figures["sample"].p95_s <= figures["sample"].p99_s < 20
    assert (figures["optim_step"].count, figures["optim_step"].errors) == (1, 1)
    assert figures["forward_backward"].count == 1


def test_figures_are_a_snapshot_and_each_client_has_its_own(connect: Any, server: TinkerServer) -> None:
    one, other = connect(server), connect(server)
    one.get_server_capabilities()
    before = one.metrics()
    one.get_server_capabilities()
    assert before["get_server_capabilities"].count == 1
    assert one.metrics()["get_server_capabilities"].count == 2
    assert other.metrics() == {}


def test_a_rest_client_sends_its_events_without_a_session(server: TinkerServer) -> None:
    with RestClient(base_url=server.url, api_key=server.key) as rest:
        assert isinstance(rest.get_training_run("nothing").exception(10), NotFoundError)
    bodies = [request.body for request in server.find("telemetry")]
    assert bodies
    assert bodies[0]["session_id"].startswith("sessionless-")

"""Retries: when, how often, after which delay, with which idempotency key, and how much is logged."""

from __future__ import annotations

import itertools
import logging
from datetime import UTC, datetime, timedelta
from email.utils import format_datetime
from typing import Any

import pytest
from support.tinker_server import Drop, DropMidBody, Recorded, Status, TinkerServer

from tinsmith import (
    AdamParams,
    APIConnectionError,
    AuthenticationError,
    BadRequestError,
    ConflictError,
    InternalServerError,
    ModelInput,
    NotFoundError,
    PermissionDeniedError,
    RateLimitError,
    SamplingClient,
    SamplingParams,
    ServiceClient,
    TrainingClient,
)

pytestmark = pytest.mark.usefixtures("hard_limit", "clean_environment")

STEP = AdamParams(learning_rate=1e-3)
PROMPT = ModelInput.from_ints([1, 2, 3])
PARAMS = SamplingParams(max_tokens=2)


def gaps(requests: list[Recorded]) -> list[float]:
    return [later.time - earlier.time for earlier, later in itertools.pairwise(requests)]


def warnings_in(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]


def test_a_busy_server_is_asked_again_when_it_wants_under_the_same_key(
    trainer: TrainingClient, server: TinkerServer
) -> None:
    server.script("optim_step", [Status(503, {"retry-after-ms": "700"})] * 2)
    assert trainer.optim_step(STEP).result(10).metrics == {"step": 1.0}

    sent = server.find("optim_step")
    assert [request.headers["x-stainless-retry-count"] for request in sent] == ["0", "1", "2"]
    assert len({request.headers["x-idempotency-key"] for request in sent}) == 1
    assert len({request.raw_body for request in sent}) == 1
    assert min(gaps(sent)) > 0.65
    assert max(gaps(sent)) < 3


def test_two_operations_have_two_keys(trainer: TrainingClient, server: TinkerServer) -> None:
    trainer.optim_step(STEP).result(10)
    trainer.optim_step(STEP).result(10)

    assert len({request.headers["x-idempotency-key"] for request in server.find("optim_step")}) == 2


def test_retry_after_as_an_http_date_is_followed(trainer: TrainingClient, server: TinkerServer) -> None:
    moment = datetime.now(UTC) + timedelta(seconds=3)
    server.script("optim_step", [Status(429, {"Retry-After": format_datetime(moment, usegmt=True)})])
    assert trainer.optim_step(STEP).result(10).metrics == {"step": 1.0}

    # The date has whole seconds, and by itself the client would wait half a second at most.
    assert 1.0 < gaps(server.find("optim_step"))[0] < 6


def test_retry_after_in_seconds_is_followed(trainer: TrainingClient, server: TinkerServer) -> None:
    server.script("optim_step", [Status(503, {"Retry-After": "1"})])
    trainer.optim_step(STEP).result(10)

    assert 0.95 < gaps(server.find("optim_step"))[0] < 5


@pytest.mark.parametrize("fault", [Status(500), Status(502), Status(429), Status(408), Drop(), DropMidBody()], ids=str)
def test_passing_faults_of_a_submit_are_retried(trainer: TrainingClient, server: TinkerServer, fault: Any) -> None:
    server.script("optim_step", [fault])
    assert trainer.optim_step(STEP).result(10).metrics == {"step": 1.0}

    assert len(server.find("optim_step")) == 2
    assert [number for _, number, _ in server.executed] == [1]


@pytest.mark.parametrize(
    ("status", "error_type"),
    [(400, BadRequestError), (401, AuthenticationError), (403, PermissionDeniedError), (404, NotFoundError)],
)
def test_refusals_are_not_retried(
    trainer: TrainingClient, server: TinkerServer, status: int, error_type: type[Exception]
) -> None:
    server.script("optim_step", [Status(status)])
    error = trainer.optim_step(STEP).exception(10)

    assert type(error) is error_type
    assert f"{server.url}/api/v1/optim_step" in str(error)
    assert len(server.find("optim_step")) == 1


def test_an_empty_400_comes_from_a_proxy_and_is_retried(trainer: TrainingClient, server: TinkerServer) -> None:
    server.script("optim_step", [Status(400, body=b"")])
    assert trainer.optim_step(STEP).result(10).metrics == {"step": 1.0}


def test_the_servers_word_on_retrying_goes_first(trainer: TrainingClient, server: TinkerServer) -> None:
    server.script("optim_step", [Status(503, {"x-should-retry": "false"})])
    assert isinstance(trainer.optim_step(STEP).exception(10), InternalServerError)
    assert len(server.find("optim_step")) == 1

    server.clear_requests()
    server.script("get_info", [Status(400, {"x-should-retry": "true"})])
    assert trainer.get_info().model_id == trainer.model_id
    assert len(server.find("get_info")) == 2


def test_conflicts_are_retried_a_few_times_only(client: ServiceClient, server: TinkerServer) -> None:
    path = "tinker://run/weights/a"
    server.script(".*/publish", [Status(409)] * 50)
    error = client.create_rest_client().publish_checkpoint_from_tinker_path(path).exception(15)

    assert isinstance(error, ConflictError)
    assert 2 <= len(server.find(".*/publish")) <= 5


def test_a_conflict_that_a_retry_cannot_cure_is_not_retried(client: ServiceClient, server: TinkerServer) -> None:
    server.script(".*/publish", [Status(409, {"x-should-retry": "false"})] * 50)
    future = client.create_rest_client().publish_checkpoint_from_tinker_path("tinker://run/weights/a")

    assert isinstance(future.exception(10), ConflictError)
    assert len(server.find(".*/publish")) == 1


def test_one_line_tells_of_an_incident(
    trainer: TrainingClient, server: TinkerServer, caplog: pytest.LogCaptureFixture
) -> None:
    server.script("optim_step", [Status(503, {"retry-after-ms": "20"}, {"detail": "no room"})] * 5)
    trainer.optim_step(STEP).result(10)

    lines = warnings_in(caplog)
    assert len(lines) == 1, lines
    assert "no room" in lines[0]
    assert f"{server.url}/api/v1/optim_step" in lines[0]


def test_a_second_incident_is_told_of_again(
    trainer: TrainingClient, server: TinkerServer, caplog: pytest.LogCaptureFixture
) -> None:
    for _ in range(2):
        server.script("optim_step", [Status(503, {"retry-after-ms": "20"})] * 2)
        trainer.optim_step(STEP).result(10)

    assert len(warnings_in(caplog)) == 2


def test_a_full_sampler_is_told_of_once(
    sampler: SamplingClient, server: TinkerServer, caplog: pytest.LogCaptureFixture
) -> None:
    server.script("asample", [Status(429, {"retry-after-ms": "50"}, {"detail": "too many samples"})] * 4)
    sampler.sample(PROMPT, 1, PARAMS).result(10)

    lines = warnings_in(caplog)
    assert len(lines) == 1, lines
    assert "too many samples" in lines[0]


def test_a_sample_that_cannot_be_submitted_is_told_of_once(
    sampler: SamplingClient, server: TinkerServer, caplog: pytest.LogCaptureFixture
) -> None:
    server.script("asample", [Drop(), Drop(), Status(503)])
    assert sampler.sample(PROMPT, 1, PARAMS).result(15).sequences[0].tokens == [6, 7]

    lines = warnings_in(caplog)
    assert len(lines) == 1, lines
    assert server.url in lines[0]


def test_quiet_when_all_is_well(
    trainer: TrainingClient, sampler: SamplingClient, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    trainer.optim_step(STEP).result(10)
    sampler.sample(PROMPT, 1, PARAMS).result(10)

    assert [record.getMessage() for record in caplog.records if record.name.startswith("tinsmith")] == []


def test_a_handshake_is_retried_like_any_call(connect: Any, server: TinkerServer) -> None:
    server.script("client/config", [Status(503, {"retry-after-ms": "10"}), Drop()])
    server.script("client/dynamic_config", [Status(500, {"retry-after-ms": "10"})])
    server.script("create_session", [Status(502, {"retry-after-ms": "10"})])
    assert connect(server).create_lora_training_client("stub/model", rank=4).model_id


def test_the_error_says_how_often_and_how_long_was_tried(connect: Any, server: TinkerServer) -> None:
    client = connect(server, retry_deadline_s=0.6)
    trainer = client.create_lora_training_client("stub/model", rank=4)
    server.script("optim_step", [Status(503, {"retry-after-ms": "100"})] * 100)
    error = trainer.optim_step(STEP).exception(10)

    assert isinstance(error, InternalServerError)
    assert "attempts" in "".join(error.__notes__)
    assert 3 <= len(server.find("optim_step")) <= 8


def test_a_wish_to_wait_beyond_the_deadline_is_an_error_at_once(connect: Any, server: TinkerServer) -> None:
    trainer = connect(server, retry_deadline_s=2.0).create_lora_training_client("stub/model", rank=4)
    server.script("optim_step", [Status(503, {"Retry-After": "30"})])

    assert isinstance(trainer.optim_step(STEP).exception(3), InternalServerError)


CALLS: dict[str, Any] = {
    "sessions": lambda client, _: client.create_rest_client().list_sessions(),
    "optim_step": lambda client, _: client.create_lora_training_client("stub/model", rank=4).optim_step(STEP),
    "forward_backward": lambda client, datum: client.create_lora_training_client("stub/model", rank=4).forward_backward(
        [datum(1)], "cross_entropy"
    ),
    "asample": lambda client, _: client.create_sampling_client(base_model="stub/model").sample(PROMPT, 1, PARAMS),
    "retrieve_future": lambda client, _: client.create_sampling_client(base_model="stub/model").sample(
        PROMPT, 1, PARAMS
    ),
}
"""For each endpoint: an operation that asks it."""


@pytest.mark.parametrize(
    ("endpoint", "settings", "wait_s"),
    [
        *[(endpoint, {}, "29742") for endpoint in CALLS],
        *[(endpoint, {"result_deadline_s": 80.0}, "90") for endpoint in CALLS if endpoint != "sessions"],
    ],
)
def test_a_limit_that_lasts_longer_than_the_deadline_is_said_at_once_with_its_end(
    connect: Any, server: TinkerServer, datum: Any, endpoint: str, settings: dict[str, float], wait_s: str
) -> None:
    client = connect(server, **{"retry_deadline_s": 300.0, **settings})
    client.get_server_capabilities()
    spent = Status(429, {"Retry-After": wait_s}, {"detail": "no tokens left today"})
    before = len(server.find(endpoint))
    server.script(endpoint, [spent])
    error = CALLS[endpoint](client, datum).exception(10)

    assert isinstance(error, RateLimitError)
    assert "no tokens left today" in str(error)
    assert "The server asks to wait until 2" in str(error)
    assert len(server.find(endpoint)) == before + 1


def test_a_failed_handshake_is_tried_anew_by_the_next_call(connect: Any, server: TinkerServer) -> None:
    client = connect(server, first_contact_s=0.3)
    server.stop()
    with pytest.raises(APIConnectionError):
        client.get_server_capabilities()
    server.start()
    assert client.get_server_capabilities().supported_models

"""Polling for results: pending responses, large results, lost promises, failing servers, one poll for many samples."""

from __future__ import annotations

import itertools
import logging
from typing import Any, Literal

import pytest
from support.tinker_server import Drop, Recorded, Status, TinkerServer

from tinsmith import (
    AdamParams,
    InternalServerError,
    ModelInput,
    RequestFailedError,
    RetryConfig,
    SamplingClient,
    SamplingParams,
    ServiceClient,
    TinkerError,
    TrainingClient,
)
from tinsmith.client.connection.polling import QueueState
from tinsmith.errors import RetryableException

pytestmark = pytest.mark.usefixtures("hard_limit", "clean_environment")

STEP = AdamParams(learning_rate=1e-3)
LOSS = "cross_entropy"
PROMPT = ModelInput.from_ints([1, 2, 3])
PARAMS = SamplingParams(max_tokens=2)
BATCH = {"sample_use_retrieve_futures": True}


def polls_of(server: TinkerServer, request_id: str) -> list[Recorded]:
    return [request for request in server.find("retrieve_future") if request.body["request_id"] == request_id]


@pytest.mark.parametrize("form", ["408", "try_again"])
def test_both_forms_of_a_pending_answer_are_polled_again(
    trainer: TrainingClient,
    sampler: SamplingClient,
    server: TinkerServer,
    datum: Any,
    form: Literal["408", "try_again"],
) -> None:
    server.pending_first(3, form=form)
    futures: list[Any] = [trainer.forward_backward([datum(1)], LOSS), trainer.optim_step(STEP)]
    futures.append(sampler.sample(PROMPT, 1, PARAMS))
    for future in futures:
        future.result(10)

    polls = polls_of(server, f"{trainer.model_id}:2")
    assert len(polls) == 4
    assert [poll.headers["x-tinker-request-iteration"] for poll in polls] == ["0", "1", "2", "3"]
    assert {poll.headers["x-tinker-request-type"] for poll in polls} == {"OptimStep"}


@pytest.mark.parametrize("form", ["408", "try_again"])
def test_a_server_that_does_not_hold_its_polls_is_asked_five_times_a_second_at_most(
    trainer: TrainingClient, server: TinkerServer, form: Literal["408", "try_again"]
) -> None:
    server.pending_first(10, form=form)
    trainer.optim_step(STEP).result(15)

    times = [poll.time for poll in polls_of(server, f"{trainer.model_id}:1")]
    gaps = [later - earlier for earlier, later in itertools.pairwise(times)]
    assert min(gaps[4:]) > 0.15
    assert max(gaps) < 3


def test_a_storm_of_errors_is_polled_five_times_a_second_at_most(trainer: TrainingClient, server: TinkerServer) -> None:
    server.script("retrieve_future", [Status(500), Status(503), Status(502), Status(500)])
    trainer.optim_step(STEP).result(18)

    times = [poll.time for poll in polls_of(server, f"{trainer.model_id}:1")]
    assert len(times) == 5
    assert min(later - earlier for earlier, later in itertools.pairwise(times)) > 0.19


def test_a_storm_of_immediate_errors_on_many_futures_stays_bounded(connect: Any, server: TinkerServer) -> None:
    client = connect(server, retry_deadline_s=2.0)
    sampler = client.create_sampling_client(base_model="stub/model", retry_config=RetryConfig(enable_retry_logic=False))
    server.script("retrieve_future", [Status(500)] * 5000)
    futures = [sampler.sample(PROMPT, 1, PARAMS) for _ in range(5)]
    for future in futures:
        assert isinstance(future.exception(10), TinkerError)

    polls = server.find("retrieve_future")
    for i in range(5):
        own = [poll.time for poll in polls if poll.body["request_id"] == f"{sampler.sampling_session_id}:{i}"]
        assert 2 <= len(own) <= 5 * 2 + 1


def test_one_error_after_a_long_wait_costs_seconds_not_half_a_minute(
    trainer: TrainingClient, server: TinkerServer
) -> None:
    pending = [Status(408, body={"type": "try_again", "request_id": "x", "queue_state": "active"})]
    server.script("retrieve_future", [*pending * 9, Status(500), *pending, Status(500)])
    stepped = trainer.optim_step(STEP)

    assert stepped.result(12).metrics == {"step": 1.0}


def test_errors_that_do_not_end_reach_the_caller_by_the_deadline(connect: Any, server: TinkerServer) -> None:
    trainer = connect(server, retry_deadline_s=1.0).create_lora_training_client("stub/model", rank=4)
    server.script("retrieve_future", [Status(500, body={"detail": "disk full"})] * 100)
    error = trainer.optim_step(STEP).exception(8)

    assert isinstance(error, InternalServerError)
    assert "disk full" in str(error)
    assert f"{server.url}/api/v1/retrieve_future" in str(error)


def test_dropped_polls_are_repeated(trainer: TrainingClient, server: TinkerServer) -> None:
    server.script("retrieve_future", [Drop(), Drop()])
    assert trainer.optim_step(STEP).result(15).metrics == {"step": 1.0}


def test_a_server_that_fails_while_we_wait_is_told_of_once(
    trainer: TrainingClient, server: TinkerServer, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING, "tinsmith")
    server.script("retrieve_future", [Status(503, body={"detail": "engine restarts"})] * 4)
    trainer.optim_step(STEP).result(18)

    lines = [record.getMessage() for record in caplog.records if record.name.startswith("tinsmith")]
    assert len(lines) == 1, lines
    assert "engine restarts" in lines[0]
    assert server.url in lines[0]


def test_large_results_are_announced_and_then_fetched(
    trainer: TrainingClient, sampler: SamplingClient, server: TinkerServer, datum: Any, loss_of: Any
) -> None:
    server.settings.metadata_above_bytes = 0
    data = [datum(1, 2, 3)]
    passed = trainer.forward_backward(data, LOSS)
    sampled = sampler.sample(PROMPT, 1, PARAMS)

    assert passed.result(10).metrics["loss:sum"] == pytest.approx(loss_of(*data), rel=1e-6)
    assert sampled.result(10).sequences[0].tokens == [6, 7]
    polls = polls_of(server, f"{trainer.model_id}:1")
    assert [poll.body["allow_metadata_only"] for poll in polls] == [True, False]


def test_a_sample_whose_promise_is_lost_is_submitted_again_under_a_new_number(
    sampler: SamplingClient, server: TinkerServer
) -> None:
    server.lose_promises(2)
    assert sampler.sample(PROMPT, 1, PARAMS).result(10).sequences[0].tokens == [6, 7]

    sent = server.find("asample")
    assert [request.body["seq_id"] for request in sent] == [0, 1, 2]
    assert len({request.headers["x-idempotency-key"] for request in sent}) == 3
    without_number = [{**request.body, "seq_id": None} for request in sent]
    assert without_number == [without_number[0]] * 3
    assert server.violations == []


def test_a_lost_promise_is_left_to_the_caller_who_wants_no_retries(client: ServiceClient, server: TinkerServer) -> None:
    sampler = client.create_sampling_client(base_model="stub/model", retry_config=RetryConfig(enable_retry_logic=False))
    server.lose_promises(1)
    assert isinstance(sampler.sample(PROMPT, 1, PARAMS).exception(10), RetryableException)
    assert len(server.find("asample")) == 1


def test_a_restart_that_loses_all_promises_loses_no_sample(client: ServiceClient, server: TinkerServer) -> None:
    retry = RetryConfig(retry_delay_base=0.05)
    sampler = client.create_sampling_client(base_model="stub/model", retry_config=retry)
    server.pause_work()
    futures = [sampler.sample(ModelInput.from_ints([i]), 1, PARAMS) for i in range(20)]
    server.wait_for("retrieve_future", 20, timeout_s=10)
    server.restart(forget_promises=True)
    server.resume_work()

    assert [future.result(15).sequences[0].tokens for future in futures] == [[i, i + 1] for i in range(20)]
    assert server.violations == []


def test_a_failed_operation_is_no_reason_to_poll_again(sampler: SamplingClient, server: TinkerServer) -> None:
    server.fail_next("asample", "the prompt is too long", "User")
    error = sampler.sample(PROMPT, 1, PARAMS).exception(10)

    assert isinstance(error, RequestFailedError)
    assert (error.category, error.request_id) == ("user", f"{sampler.sampling_session_id}:0")
    assert len(server.find("retrieve_future")) == 1
    assert len(server.find("asample")) == 1


class Told:
    """A queue observer that keeps what it is told."""

    def __init__(self) -> None:
        self.operations: list[str] = []
        self.states: list[tuple[QueueState, str | None]] = []

    def make(self, operation: str) -> Told:
        self.operations.append(operation)
        return self

    def on_queue_state_change(self, queue_state: QueueState, queue_state_reason: str | None) -> None:
        self.states.append((queue_state, queue_state_reason))


@pytest.mark.parametrize("form", ["408", "try_again"])
def test_an_observer_is_told_state_and_reason(
    client: ServiceClient, trainer: TrainingClient, server: TinkerServer, form: Literal["408", "try_again"]
) -> None:
    told = Told()
    client.set_queue_observer(told.make)
    server.pending_first(2, form=form, queue_state="paused_capacity", reason="3 jobs before yours")
    trainer.optim_step(STEP).result(10)

    assert told.states == [(QueueState.PAUSED_CAPACITY, "3 jobs before yours")] * 2
    assert told.operations == [f"optim_step of {trainer.model_id}"]


def test_an_unknown_queue_state_does_not_stop_the_wait(
    client: ServiceClient, sampler: SamplingClient, server: TinkerServer
) -> None:
    told = Told()
    client.set_queue_observer(told.make)
    server.pending_first(1, queue_state="paused_for_lunch")
    sampler.sample(PROMPT, 1, PARAMS).result(10)

    assert told.states == [(QueueState.UNKNOWN, None)]


def test_a_paused_queue_is_logged_once_with_its_reason(
    trainer: TrainingClient, server: TinkerServer, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "tinsmith")
    server.pending_first(4, queue_state="paused_rate_limit", reason="12 tokens over the limit")
    trainer.optim_step(STEP).result(10)

    lines = [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]
    assert len(lines) == 1, lines
    assert "12 tokens over the limit" in lines[0]
    assert f"optim_step of {trainer.model_id}" in lines[0]


def test_an_active_queue_is_not_worth_a_line_in_the_first_minute(
    trainer: TrainingClient, server: TinkerServer, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "tinsmith")
    server.pending_first(3, queue_state="active")
    trainer.optim_step(STEP).result(10)

    assert [record.getMessage() for record in caplog.records] == []


def test_one_poll_waits_for_all_samples_where_the_server_offers_it(make_server: Any, connect: Any) -> None:
    server = make_server(flags=BATCH)
    sampler = connect(server).create_sampling_client(base_model="stub/model")
    server.pause_work()
    futures = [sampler.sample(ModelInput.from_ints([i]), 1, PARAMS) for i in range(10)]
    server.wait_for("asample", 10, timeout_s=10)
    server.wait_for("retrieve_futures", timeout_s=10)
    assert server.find("retrieve_future") == [], "no sample is polled on its own while it is pending"
    server.resume_work()

    assert [future.result(10).sequences[0].tokens for future in futures] == [[i, i + 1] for i in range(10)]
    fetched = server.find("retrieve_future")
    assert len(fetched) == 10
    assert not any(request.body["allow_metadata_only"] for request in fetched)
    target = {
        "type": "sampling_session",
        "sampling_session_id": sampler.sampling_session_id,
        "cloned_sampler_id": 0,
    }
    assert all(request.body["target"] == target for request in server.find("retrieve_futures"))
    assert len(server.find("retrieve_futures")) <= 10
    assert server.violations == []


def test_the_shared_poll_goes_on_from_its_cursor_and_reports_what_was_fetched(make_server: Any, connect: Any) -> None:
    server = make_server(flags=BATCH)
    sampler = connect(server).create_sampling_client(base_model="stub/model")
    for i in range(3):
        assert sampler.sample(ModelInput.from_ints([i]), 1, PARAMS).result(10).sequences[0].tokens == [i, i + 1]

    polls = [request.body for request in server.find("retrieve_futures")][:3]
    assert [poll["prev_cursor"] for poll in polls] == [0, 1, 2]
    name = sampler.sampling_session_id
    assert [poll["retrieved_request_ids"] for poll in polls] == [[], [f"{name}:0"], [f"{name}:1"]]


def test_failed_samples_come_through_the_shared_poll(make_server: Any, connect: Any) -> None:
    server = make_server(flags=BATCH)
    sampler = connect(server).create_sampling_client(base_model="stub/model")
    server.fail_next("asample", "out of memory", "server")
    failed, fine = sampler.sample(PROMPT, 1, PARAMS), sampler.sample(PROMPT, 1, PARAMS)

    assert isinstance(failed.exception(10), RequestFailedError)
    assert fine.result(10).sequences[0].tokens == [6, 7]


def test_the_shared_poll_ends_with_the_client_and_says_nothing(
    make_server: Any, connect: Any, caplog: pytest.LogCaptureFixture
) -> None:
    server = make_server(flags=BATCH)
    client = connect(server)
    sampler = client.create_sampling_client(base_model="stub/model")
    for _ in range(3):
        sampler.sample(PROMPT, 1, PARAMS).result(10)
    client.close()

    assert [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING] == []


def test_a_broken_shared_poll_falls_back_to_single_polls(make_server: Any, connect: Any) -> None:
    server = make_server(flags=BATCH)
    sampler = connect(server).create_sampling_client(base_model="stub/model")
    server.script("retrieve_futures", [Status(404)])
    futures = [sampler.sample(ModelInput.from_ints([i]), 1, PARAMS) for i in range(4)]

    assert [future.result(10).sequences[0].tokens for future in futures] == [[i, i + 1] for i in range(4)]

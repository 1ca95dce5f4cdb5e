"""A run that the server lost resumes from its last checkpoint, and the program learns how many steps were lost."""

from __future__ import annotations

from typing import Any

import pytest
from support.tinker_server import Status, TinkerServer

from tinsmith import AdamParams, APIStatusError, NotFoundError, RunRecoveredError, ServiceClient
from tinsmith.client.recovery import RecoveringTrainingClient, RecoveryEvent

pytestmark = pytest.mark.usefixtures("hard_limit", "clean_environment")

STEP = AdamParams(learning_rate=1e-3)
LOSS = "cross_entropy"
LOST = Status(404, {}, {"detail": "no such model"})


@pytest.fixture
def told() -> list[RecoveryEvent]:
    return []


@pytest.fixture
def run(client: ServiceClient, told: list[RecoveryEvent]) -> RecoveringTrainingClient:
    return client.with_recovery(client.create_lora_training_client("stub/model", rank=4), told.append)


def test_a_lost_run_goes_on_from_its_checkpoint_with_the_same_client(
    run: RecoveringTrainingClient, server: TinkerServer, told: list[RecoveryEvent], datum: Any
) -> None:
    lost = run.model_id
    path = run.save_state("before").result(10).path
    for _ in range(2):
        run.forward_backward([datum(1, 2)], LOSS).result(10)
        run.optim_step(STEP).result(10)
    server.script("forward_backward", [LOST])
    with pytest.raises(RunRecoveredError, match=f"run {lost} was lost .* repeat the last 2 optimizer steps"):
        run.forward_backward([datum(1, 2)], LOSS).result(10)

    [event] = told
    assert (event.lost_model_id, event.new_model_id) == (lost, run.model_id)
    assert (event.checkpoint, event.steps_lost) == (path, 2)
    assert isinstance(event.cause, NotFoundError)
    [loaded] = server.find("load_weights")
    assert (loaded.body["path"], loaded.body["optimizer"]) == (path, True)
    assert run.forward_backward([datum(1, 2)], LOSS).result(10).metrics["loss:sum"] > 0
    run.optim_step(STEP).result(10)
    assert [model for model, _, name in server.executed if name == "optim_step"] == [lost, lost, run.model_id]
    assert server.violations == []


def test_operations_that_were_under_way_are_told_too_and_the_run_is_made_once(
    run: RecoveringTrainingClient, server: TinkerServer, told: list[RecoveryEvent], datum: Any
) -> None:
    run.save_state("before").result(10)
    server.script("forward_backward", [LOST] * 3)
    server.script("optim_step", [LOST] * 3)
    futures: list[Any] = []
    for _ in range(3):
        futures += [run.forward_backward([datum(1)], LOSS), run.optim_step(STEP)]

    assert {type(future.exception(10)) for future in futures} == {RunRecoveredError}
    assert len(told) == 1
    assert len(server.find("load_weights")) == 1


def test_a_lost_promise_counts_as_a_lost_run(
    run: RecoveringTrainingClient, server: TinkerServer, told: list[RecoveryEvent]
) -> None:
    run.save_state("before").result(10)
    server.lose_promises(1)
    assert isinstance(run.optim_step(STEP).exception(10), RunRecoveredError)
    assert len(told) == 1


def test_without_a_checkpoint_the_loss_is_told_as_it_is(
    run: RecoveringTrainingClient, server: TinkerServer, told: list[RecoveryEvent]
) -> None:
    server.script("optim_step", [LOST])
    error = run.optim_step(STEP).exception(10)

    assert isinstance(error, NotFoundError)
    assert "has no checkpoint. Call save_state from time to time." in "".join(error.__notes__)
    assert told == []


def test_a_checkpoint_of_before_can_be_named_and_recoveries_come_to_an_end(
    client: ServiceClient, server: TinkerServer
) -> None:
    trainer = client.create_lora_training_client("stub/model", rank=4)
    path = trainer.save_state("before").result(10).path
    run = client.with_recovery(trainer, checkpoint=path, max_recoveries=1)
    for kind in (RunRecoveredError, NotFoundError):
        server.script("optim_step", [LOST])
        error = run.optim_step(STEP).exception(10)
        assert type(error) is kind
    assert "max_recoveries has been reached" in "".join(error.__notes__)  # type: ignore[union-attr]


def test_other_failures_are_no_loss(
    run: RecoveringTrainingClient, server: TinkerServer, told: list[RecoveryEvent]
) -> None:
    run.save_state("before").result(10)
    server.script("optim_step", [Status(400, {}, {"detail": "no"})])
    error = run.optim_step(STEP).exception(10)

    assert isinstance(error, APIStatusError)
    assert error.status_code == 400
    assert told == []
    run.optim_step(STEP).result(10)

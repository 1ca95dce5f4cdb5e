"""The optimizer's metrics have a prefix; rows and results stored without it are still read."""

from __future__ import annotations

from tinsmith.wire.rules import optim_metrics
from tinsmith.wire.rules.optim_metrics import OPTIM_METRICS, body_with_former_names, with_current_names


def test_no_name_collides_with_one_of_a_training_loop() -> None:
    assert OPTIM_METRICS == ("optim/grad_norm", "optim/update_norm", "optim/learning_rate", "optim/step")


def test_former_names_are_translated() -> None:
    former = {"loss:sum": 3.0, "grad_norm": 0.5, "update_norm": 0.25, "learning_rate": 0.1, "step": 7.0}
    assert with_current_names(former) == {
        "loss:sum": 3.0,
        optim_metrics.GRAD_NORM: 0.5,
        optim_metrics.UPDATE_NORM: 0.25,
        optim_metrics.LEARNING_RATE: 0.1,
        optim_metrics.STEP: 7.0,
    }


def test_a_users_own_step_beside_ours_is_left_alone() -> None:
    current = {"step": 40.0, optim_metrics.STEP: 7.0}
    assert with_current_names(current) == current


def test_the_body_that_a_former_version_wrote() -> None:
    body = b'{"metrics":{"optim/grad_norm":0.1,"optim/update_norm":1e-9,"optim/learning_rate":0.0,"optim/step":1.0}}'
    former = b'{"metrics":{"grad_norm":0.1,"update_norm":1e-9,"learning_rate":0.0,"step":1.0}}'
    assert body_with_former_names(body) == former

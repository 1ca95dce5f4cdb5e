"""The choice of a number format: the fastest that is right, with what it survived."""

from __future__ import annotations

from collections.abc import Mapping

import pytest

from tinsmith.engine.dtype_choice import CAREFUL, FORMATS, Choice, Trial, decide, run_trial

FAST_BF16 = [Trial("float32", 2e-3, 1e-6), Trial("bfloat16", 1e-3, 5e-3)]
SLOW_BF16 = [Trial("float32", 2e-3, 1e-6), Trial("bfloat16", 3e-3, 5e-3)]
WRONG_BF16 = [Trial("float32", 2e-3, 1e-6), Trial("bfloat16", 1e-3, 0.4)]


def choice(plain: list[Trial], careful: list[Trial]) -> Choice:
    def run(environment: Mapping[str, str]) -> list[Trial]:
        return careful if environment else plain

    return decide(run)


@pytest.mark.parametrize(
    ("plain", "careful", "dtype", "environment"),
    [
        (FAST_BF16, [], "bfloat16", {}),
        (SLOW_BF16, [], "float32", {}),
        (WRONG_BF16, [], "float32", {}),
        (FAST_BF16[:1], FAST_BF16, "bfloat16", dict(CAREFUL)),
        (FAST_BF16[:1], SLOW_BF16, "float32", {}),
        ([], [], "float32", {}),
    ],
    ids=["fast", "slow", "wrong", "dies-then-fast", "dies-then-slow", "dies-twice"],
)
def test_the_fastest_that_is_right_and_survived(
    plain: list[Trial], careful: list[Trial], dtype: str, environment: dict[str, str]
) -> None:
    made = choice(plain, careful)
    assert (made.dtype, made.environment) == (dtype, environment)
    assert made.reason


def test_this_machine_survives_the_careful_trial() -> None:
    trials = run_trial(CAREFUL)
    assert [trial.format for trial in trials] == list(FORMATS)
    assert trials[0].is_right

"""When a snapshot is worth its cost: decisions without I/O."""

from __future__ import annotations

import random

import pytest

from tinsmith.server.runs.snapshot_policy import OVERHEAD_S, ReplayCost, SnapshotPolicy

POLICY = SnapshotPolicy(max_replay_s=30.0, max_share=0.05)


def step(cost: ReplayCost, name: str, seconds: float, size_bytes: int = 0) -> None:
    cost.begin(name, "step", size_bytes)
    cost.end(name, seconds - OVERHEAD_S)


@pytest.mark.parametrize(
    ("replay_s", "journal_bytes", "snapshot_s", "is_due"),
    [
        (14.9, 0, 0.0, False),
        (15.0, 0, 0.0, True),
        (15.0, 0, 0.75, True),
        (15.0, 0, 0.76, False),  # would take more than a twentieth
        (16.0, 0, 0.76, True),
        (1.0, POLICY.max_journal_bytes, 0.01, True),
        (1.0, POLICY.max_journal_bytes, 0.06, False),
        (0.0, 0, 0.0, False),
    ],
)
def test_the_policy(replay_s: float, journal_bytes: int, snapshot_s: float, is_due: bool) -> None:
    assert POLICY.is_due(replay_s=replay_s, journal_bytes=journal_bytes, snapshot_s=snapshot_s) is is_due


def test_what_is_under_way_counts_as_its_kind_usually_takes() -> None:
    cost = ReplayCost()
    cost.begin("a", "pass", 10)
    assert (cost.replay_s, cost.journal_bytes) == (0.0, 10)
    cost.end("a", 2.0)
    cost.begin("b", "pass", 10)
    cost.begin("c", "step", 1)
    assert cost.replay_s == pytest.approx(2 * (2.0 + OVERHEAD_S))
    cost.end("b", None)  # it failed, and a replay leaves it out
    cost.end("nobody", 5.0)
    assert cost.replay_s == pytest.approx(2.0 + OVERHEAD_S)


def test_a_snapshot_takes_away_what_it_contains_and_only_once_it_counts() -> None:
    cost = ReplayCost()
    step(cost, "a", 20.0, 7)
    cost.begin("b", "step", 7)
    cost.cut()
    cost.end("b", 20.0 - OVERHEAD_S)
    step(cost, "c", 1.0, 3)
    assert (cost.replay_s, cost.journal_bytes) == (pytest.approx(41.0), 17)
    cost.kept(0.5)
    assert (cost.replay_s, cost.journal_bytes, cost.snapshot_s) == (pytest.approx(1.0), 3, 0.5)


def test_after_a_failed_snapshot_the_next_is_not_tried_at_once() -> None:
    cost = ReplayCost()
    step(cost, "a", 20.0, 5)
    assert cost.is_due(POLICY)
    cost.cut()
    cost.failed()
    assert (cost.replay_s, cost.journal_bytes) == (pytest.approx(20.0), 5)
    step(cost, "b", 19.0)
    assert not cost.is_due(POLICY)
    step(cost, "c", 2.0)
    assert cost.is_due(POLICY)
    cost.cut()
    cost.kept(0.0)
    step(cost, "d", 15.0)
    assert cost.is_due(POLICY)


def test_a_loss_forgets_what_was_counted() -> None:
    cost = ReplayCost()
    step(cost, "a", 100.0, 9)
    cost.begin("b", "step", 9)
    cost.restart()
    assert (cost.replay_s, cost.journal_bytes) == (0.0, 0)


@pytest.mark.parametrize("seed", range(20))
def test_replays_stay_short_and_snapshots_cheap(seed: int) -> None:
    """Steps of up to 15 s, snapshots of up to 0.5 s: never more than 30 s to replay, never more than a twentieth."""
    drawn = random.Random(seed)
    cost, trained, spent, longest = ReplayCost(), 0.0, 0.0, 0.0
    for number in range(2000):
        seconds = drawn.choice([0.01, 0.5, drawn.uniform(0, 15)])
        step(cost, str(number), seconds)
        trained += seconds
        longest = max(longest, cost.replay_s)
        if cost.is_due(POLICY):
            took = drawn.uniform(0.0, 0.5)
            cost.cut()
            cost.kept(took)
            spent += took
    assert longest <= 30.0
    assert 0 < spent <= 0.05 * trained

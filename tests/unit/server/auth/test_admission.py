"""How much of the server one tenant may hold."""

from __future__ import annotations

import math
from typing import Any

import pytest
from support.in_process import Clock

from tinsmith.server.auth.admission import DAY_S, Admission, Bucket
from tinsmith.server.auth.identity import Caller
from tinsmith.server.refusals import OverBudgetError, OverLimitError


def caller(**fields: Any) -> Caller:
    return Caller(**{"org_id": "acme", "user_id": "ann", "key_id": 1, **fields})


def admission(clock: Clock, **options: Any) -> Admission:
    return Admission(**{"max_queued": 3, "max_queued_bytes": 100, "clock": clock, "wall_clock": clock, **options})


def test_a_bucket_fills_with_time_up_to_its_size() -> None:
    bucket = Bucket(rate=2.0, size=4.0, level=4.0, at=0.0)
    assert [bucket.take(0.0) for _ in range(5)] == [0, 0, 0, 0, 0.5]
    assert bucket.take(0.5) == 0
    assert [bucket.take(100.0) for _ in range(5)] == [0, 0, 0, 0, 0.5]


def test_the_rate_of_a_key() -> None:
    clock = Clock()
    made = admission(clock)
    ann, bob = caller(requests_per_minute=2), caller(key_id=2, requests_per_minute=1)
    for _ in range(2):
        made.check_rate(ann)
    with pytest.raises(OverLimitError, match="a limit of 2 requests per minute") as caught:
        made.check_rate(ann)
    assert caught.value.retry_after_s == pytest.approx(30)
    made.check_rate(bob)
    clock.advance(30)
    made.check_rate(ann)


def test_the_servers_rate_holds_where_a_key_has_none_and_a_changed_limit_counts_from_new() -> None:
    clock = Clock()
    made = admission(clock, requests_per_minute=1)
    made.check_rate(caller())
    with pytest.raises(OverLimitError):
        made.check_rate(caller())
    made.check_rate(caller(requests_per_minute=5))
    without = admission(clock)
    for _ in range(100):
        without.check_rate(caller())


def test_the_queue_of_an_organisation() -> None:
    made = admission(Clock())
    made.check_queue(caller(), 2)
    with pytest.raises(OverLimitError, match="your organisation has 3 queued requests; the limit is 3") as caught:
        made.check_queue(caller(), 3)
    assert caught.value.retry_after_s > 0


def test_tokens_of_a_day() -> None:
    clock = Clock(DAY_S * 100 + 3600.0)
    made = admission(clock)
    ann = caller(tokens_per_day=100)
    made.check_tokens(ann, 60)
    with pytest.raises(OverBudgetError, match="100 tokens per day has 40 left; this needs 41") as caught:
        made.check_tokens(ann, 41)
    assert str(caught.value).endswith("; the budget resets at 1970-04-12 00:00 UTC (in 23 h 0 min)")
    assert caught.value.remaining == 40
    assert caught.value.retry_after_s == DAY_S - 3600
    made.check_tokens(ann, 40)
    assert made.remaining(ann, 1) == {
        "queued": 1,
        "queue_limit": 3,
        "requests_per_minute": None,
        "tokens_per_day": 100,
        "tokens_left_today": 0,
    }
    made.check_tokens(caller(), 10**9)  # a key without a budget
    clock.advance(DAY_S)
    assert made.remaining(ann, 0)["tokens_left_today"] == 100
    made.check_tokens(ann, 100)


@pytest.mark.parametrize(
    ("before_reset_s", "tokens", "kind"),
    [(60.0, 41, OverLimitError), (61.0, 41, OverBudgetError), (1.0, 100, OverLimitError), (1.0, 101, OverBudgetError)],
)
def test_a_budget_is_worth_waiting_for_if_it_resets_soon_and_suffices_then(
    before_reset_s: float, tokens: int, kind: type[OverLimitError]
) -> None:
    made = admission(Clock(DAY_S * 100 - before_reset_s))
    ann = caller(tokens_per_day=100)
    made.check_tokens(ann, 60)
    with pytest.raises(OverLimitError) as caught:
        made.check_tokens(ann, tokens)
    assert type(caught.value) is kind
    assert caught.value.retryable == (kind is OverLimitError)
    assert ("more than a whole day's: send less at once" in str(caught.value)) == (tokens > 100)
    assert caught.value.retry_after_s == (before_reset_s if tokens <= 100 else math.inf)


def test_tokens_that_were_not_used_come_back() -> None:
    clock = Clock()
    made = admission(clock)
    ann = caller(tokens_per_day=100)
    made.check_tokens(ann, 100)
    made.give_back(ann, 30)
    made.check_tokens(ann, 30)
    made.give_back(caller(user_id="bob", tokens_per_day=1), 10)
    clock.advance(DAY_S)
    made.give_back(ann, 50)  # used yesterday: today's budget is whole already
    assert made.remaining(ann, 0)["tokens_left_today"] == 100


def test_what_was_used_before_a_restart_counts() -> None:
    made = admission(Clock())
    made.remember_tokens("acme", "ann", 90)
    ann = caller(tokens_per_day=100)
    with pytest.raises(OverLimitError):
        made.check_tokens(ann, 11)
    assert made.remaining(ann, 0)["tokens_left_today"] == 10
    assert made.remaining(caller(), 0)["tokens_left_today"] is None

"""The order of one model's requests."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tinsmith.server.runs.order import Lane


def lane(*settled: int, first: int = 1) -> Lane[str]:
    return Lane(settled, first)


@given(st.data())
def test_any_order_of_arrival_leaves_in_order_and_closed_numbers_are_skipped(data: st.DataObject) -> None:
    count = data.draw(st.integers(1, 30))
    closed = data.draw(st.sets(st.integers(1, count)))
    arrivals = data.draw(st.permutations(range(1, count + 1)))
    made: Lane[int] = Lane()
    left: list[int] = []
    for number in arrivals:
        if number in closed:
            made.close(number)
        else:
            made.put(number, number)
        if data.draw(st.booleans()):
            left += made.ready()
    left += made.ready()
    assert left == [number for number in range(1, count + 1) if number not in closed]
    assert made.next == count + 1
    assert len(made) == 0
    assert made.missing() is None


@given(st.data())
def test_nothing_leaves_before_everything_below_it_is_there(data: st.DataObject) -> None:
    arrivals = data.draw(st.permutations(range(1, 13)))
    made: Lane[int] = Lane()
    seen: set[int] = set()
    for number in arrivals:
        made.put(number, number)
        seen.add(number)
        for item in made.ready():
            assert set(range(1, item + 1)) <= seen


@given(settled=st.sets(st.integers(1, 20)), number=st.integers(1, 21))
def test_after_a_restart_settled_numbers_are_not_waited_for(settled: set[int], number: int) -> None:
    made: Lane[int] = Lane(settled)
    assert made.next == min(set(range(1, 22)) - settled)
    assert made.knows(number) == (number in settled)
    assert made.has_passed(number) == (number < made.next)


def test_a_snapshot_stands_for_all_numbers_below_it() -> None:
    made = lane(1, 2, 5, first=4)
    assert made.next == 4
    assert made.knows(3)
    assert not made.knows(4)
    assert made.knows(5)
    made.put(4, "four")
    assert made.ready() == ["four"]
    assert made.next == 6


def test_numbers_for_requests_that_bring_none_are_behind_everything_seen() -> None:
    made = lane(3)
    assert made.allot() == 4
    made.put(9, "nine")
    assert made.allot() == 10
    made.close(20)
    assert made.allot() == 21


def test_a_missing_number_is_named() -> None:
    made = lane()
    assert made.missing() is None
    made.put(3, "three")
    made.put(2, "two")
    assert made.missing() == 1
    assert made.waiting() == ["two", "three"]
    assert made.ready() == []
    assert len(made) == 2


def test_a_request_taken_back_counts_as_closed() -> None:
    made = lane()
    made.put(1, "one")
    made.put(2, "two")
    assert made.remove(1) == "one"
    assert made.remove(1) is None
    assert made.remove(7) is None
    assert made.ready() == ["two"]


def test_a_number_that_waits_cannot_be_closed_and_one_that_passed_cannot_be_put() -> None:
    made = lane()
    made.put(1, "one")
    made.close(1)
    assert made.ready() == ["one"]
    made.close(1)
    assert made.next == 2
    with pytest.raises(AssertionError):
        made.put(1, "again")

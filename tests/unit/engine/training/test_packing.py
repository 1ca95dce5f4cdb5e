"""Packing depends on the request alone and keeps its order."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from tinsmith.engine.training.trainer import pack


def test_neighbours_share_the_budget_and_a_long_datum_stands_alone() -> None:
    assert pack([3, 4, 5, 20, 1, 1], 8) == [range(2), range(2, 3), range(3, 4), range(4, 6)]
    assert pack([3, 5, 8, 1], 8) == [range(2), range(2, 3), range(3, 4)], "a batch that fits exactly is one run"
    assert pack([8, 3, 5, 8], 8) == [range(1), range(1, 3), range(3, 4)], "and so is one behind another"
    assert pack([], 8) == []
    assert pack([1, 1, 1], 8, ["a", "b", "b"]) == [range(1), range(1, 3)]


def test_a_batch_may_fill_the_budget_to_the_last_token() -> None:
    assert pack([4, 4, 8, 7, 1, 1], 8) == [range(2), range(2, 3), range(3, 5), range(5, 6)]


@given(
    st.lists(st.tuples(st.integers(1, 50), st.integers(0, 1)), max_size=40),
    st.integers(1, 100),
)
def test_every_datum_is_in_one_run_in_order(datums: list[tuple[int, int]], budget: int) -> None:
    lengths, kinds = [length for length, _ in datums], [kind for _, kind in datums]
    runs = pack(lengths, budget, kinds)
    assert [index for run in runs for index in run] == list(range(len(datums)))
    for run in runs:
        assert len(run) == 1 or sum(lengths[index] for index in run) <= budget
        assert len({kinds[index] for index in run}) == 1

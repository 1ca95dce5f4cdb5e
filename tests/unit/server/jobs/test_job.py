"""Request ids begin with the time and use every random byte once."""

from __future__ import annotations

from tinsmith.server.jobs.job import FETCHED, RANDOM_BYTES, TIME_BYTES, RequestIds


def test_ids_end_with_the_fetched_bytes_in_order_and_more_are_fetched_when_they_are_used_up() -> None:
    fetched: list[int] = []

    def fetch(count: int) -> bytes:
        fetched.append(count)
        return bytes([len(fetched)]) + bytes(count - 1)

    make = RequestIds(fetch, clock=lambda: 0.258)
    ids = [make() for _ in range(FETCHED + 1)]
    time = "00" * (TIME_BYTES - 2) + "0102"
    assert fetched == [FETCHED * RANDOM_BYTES] * 2
    assert ids[0] == time + "01" + "00" * (RANDOM_BYTES - 1)
    assert ids[1] == time + "00" * RANDOM_BYTES
    assert ids[-1] == time + "02" + "00" * (RANDOM_BYTES - 1)


def test_ids_differ_and_later_ones_sort_behind() -> None:
    now = [1_800_000_000.0]
    make = RequestIds(clock=lambda: now[0])
    assert len({make() for _ in range(1000)}) == 1000
    early = make()
    now[0] += 0.001
    assert early < make()
    assert len(early) == 2 * (TIME_BYTES + RANDOM_BYTES)

"""Ids of requests use every random byte once."""

from __future__ import annotations

from tinsmith.server.request_ids import FETCHED, ID_BYTES, RequestIds


def test_ids_are_the_fetched_bytes_in_order_and_fetched_again_when_used_up() -> None:
    fetched: list[int] = []

    def fetch(count: int) -> bytes:
        fetched.append(count)
        return bytes([len(fetched)]) + bytes(count - 1)

    make = RequestIds(fetch)
    ids = [make() for _ in range(FETCHED + 1)]
    assert fetched == [FETCHED * ID_BYTES] * 2
    assert ids[0] == "01" + "00" * (ID_BYTES - 1)
    assert ids[1] == "00" * ID_BYTES
    assert ids[-1] == "02" + "00" * (ID_BYTES - 1)


def test_ids_differ() -> None:
    make = RequestIds()
    assert len({make() for _ in range(1000)}) == 1000

"""Random numbers: the published algorithm, and independence from the batch."""

from __future__ import annotations

import numpy as np
import pytest

from tinsmith.engine.sampling.draw import PROMPT_ALTERNATIVES, philox, uniforms


def words(*values: int) -> tuple[np.ndarray, ...]:
    return tuple(np.array([value], np.uint64) for value in values)


@pytest.mark.parametrize(
    ("counter", "key", "expected"),
    [
        ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
        ((0xFFFFFFFF,) * 4, (0xFFFFFFFF,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
        (
            (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
            (0xA4093822, 0x299F31D0),
            (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
        ),
    ],
)
def test_the_generator_gives_the_published_answers(counter, key, expected) -> None:
    assert tuple(int(word[0]) for word in philox(words(*counter), words(*key))) == expected


def test_a_number_does_not_depend_on_its_batch() -> None:
    seeds, indices, positions = [1, 1, 2**63 + 5, -7], [0, 1, 3, 0], [0, 9, 4, 2**31]
    together = uniforms(seeds, indices, positions)
    alone = [uniforms([s], [i], [p])[0] for s, i, p in zip(seeds, indices, positions, strict=True)]
    assert together.tolist() == alone


def test_seed_index_position_purpose_and_draw_all_matter() -> None:
    base = uniforms([5], [0], [0])[0]
    others = [
        uniforms([6], [0], [0]),
        uniforms([5 + 2**32], [0], [0]),
        uniforms([5], [1], [0]),
        uniforms([5], [0], [1]),
        uniforms([5], [0], [0], PROMPT_ALTERNATIVES),
        uniforms([5], [0], [0], 0, 1),
    ]
    assert len({base, *(other[0] for other in others)}) == 7


def test_numbers_are_uniform() -> None:
    numbers = uniforms([3] * 20000, [0] * 20000, range(20000))
    assert numbers.min() >= 0
    assert numbers.max() < 1
    counts, _ = np.histogram(numbers, 20, (0, 1))
    assert ((counts - 1000) ** 2 / 1000).sum() < 50  # chi-square with 19 degrees of freedom, far in the tail


def test_negative_and_huge_seeds_count_modulo_2_to_the_64() -> None:
    assert uniforms([-1], [0], [0]) == uniforms([2**64 - 1], [0], [0])
    assert uniforms([2**64 + 3], [0], [0]) == uniforms([3], [0], [0])

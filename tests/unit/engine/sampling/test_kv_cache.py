"""Blocks and prefixes: counts, sharing, eviction; random use compared with a simple model."""

from __future__ import annotations

import random

import pytest

from tinsmith.engine.sampling.kv_cache import BlockPool, PrefixIndex, Weights
from tinsmith.engine.sampling.sequence import SampleTokens


def test_the_lowest_free_block_comes_first() -> None:
    pool = BlockPool(3)
    assert [pool.allocate(), pool.allocate(), pool.allocate(), pool.allocate()] == [0, 1, 2, None]
    pool.release(2)
    pool.release(0)
    assert [pool.allocate(), pool.allocate()] == [0, 2]


def test_a_shared_block_is_free_when_the_last_holder_leaves() -> None:
    pool = BlockPool(1)
    pool.allocate()
    pool.hold(0)
    pool.release(0)
    assert pool.allocate() is None
    pool.release(0)
    assert pool.allocate() == 0
    pool.release(0)
    with pytest.raises(AssertionError):
        pool.release(0)


A, B, BASE = ("t", "a"), ("t", "b"), ("t", None)


def found(index: PrefixIndex, weights: Weights, tokens: list[int], limit: int) -> list[int]:
    return index.find(weights, SampleTokens(tuple(tokens)).part, limit)


def filled(index: PrefixIndex, adapter: Weights, tokens: list[int]) -> list[int]:
    """What a sequence does: find, allocate the rest, name the full blocks."""
    blocks = index.find(adapter, SampleTokens(tuple(tokens)).part, len(tokens))
    found = len(blocks)
    while len(blocks) * index.block_size < len(tokens):
        block = index.pool.allocate()
        assert block is not None
        blocks.append(block)
    index.insert(adapter, SampleTokens(tuple(tokens)).part, blocks[: len(tokens) // index.block_size], found)
    return blocks


def test_full_blocks_of_the_same_weights_are_found_again() -> None:
    index = PrefixIndex(8, 2)
    first = filled(index, A, [1, 2, 3, 4, 5])
    assert found(index, A, [1, 2, 3, 4, 9, 9], 6) == first[:2]
    assert found(index, A, [1, 2, 3, 4], 3) == first[:1]
    assert found(index, A, [2, 1, 3, 4], 4) == []
    assert found(index, B, [1, 2, 3, 4], 4) == []


def test_the_longest_unused_is_given_up_and_its_followers_before_it() -> None:
    index = PrefixIndex(4, 1)
    old, new = filled(index, BASE, [1, 2]), filled(index, BASE, [7, 8])
    for block in (*old, *new):
        index.pool.release(block)
    again = found(index, BASE, [1, 2], 2)
    assert again == old
    for block in reversed(again):
        index.pool.release(block)
    assert index.pool.available == 4
    index.pool.allocate()
    assert found(index, BASE, [7, 8], 2) == []
    assert len(found(index, BASE, [1, 2], 2)) == 2


def test_what_follows_an_evicted_block_is_freed_with_it() -> None:
    index = PrefixIndex(3, 1)
    for block in filled(index, BASE, [1, 2, 3]):  # released front first: the front is the oldest
        index.pool.release(block)
    assert index.pool.allocate() is not None
    assert index.pool.idle == 0
    assert index.pool.available == 2


def test_dropped_weights_are_forgotten_but_holders_keep_their_blocks() -> None:
    index = PrefixIndex(4, 1)
    held = filled(index, A, [1, 2])
    index.drop_adapter("a")
    assert found(index, A, [1, 2], 2) == []
    assert index.pool.available == 2
    for block in held:
        index.pool.release(block)
    assert index.pool.available == 4


def test_random_use_never_gives_a_held_block_twice() -> None:
    chance = random.Random(5)
    index = PrefixIndex(24, 2)
    content: dict[int, tuple[object, tuple[int, ...]]] = {}
    running: list[list[int]] = []
    for _ in range(4000):
        if running and (chance.random() < 0.5 or index.pool.available < 6):
            for block in reversed(running.pop(chance.randrange(len(running)))):
                index.pool.release(block)
            continue
        if index.pool.available < 6:
            continue
        adapter, tokens = (
            ("ab"[chance.randrange(2)], None),
            [chance.randrange(2) for _ in range(chance.randrange(1, 11))],
        )
        blocks = index.find(adapter, SampleTokens(tuple(tokens)).part, len(tokens))
        found = len(blocks)
        for i in range(found):
            assert content[blocks[i]] == (adapter, tuple(tokens[: 2 * i + 2]))
        while len(blocks) * 2 < len(tokens):
            block = index.pool.allocate()
            assert block is not None
            assert all(block not in other for other in running)
            blocks.append(block)
            content[block] = (adapter, tuple(tokens[: 2 * len(blocks)]))
        index.insert(adapter, SampleTokens(tuple(tokens)).part, blocks[: len(tokens) // 2], found)
        running.append(blocks)
    for blocks in running:
        for block in blocks:
            index.pool.release(block)
    assert index.pool.available == 24

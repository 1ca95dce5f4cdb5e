"""Bookkeeping of the key/value cache: who uses which block, and which blocks can be reused for a common prefix.

The trick is paging, as in an operating system. Keys and values of a sequence grow by one token per step, to a length
that nobody knows beforehand. Reserving the longest possible stretch for each would waste most of the memory, so the
cache is cut into blocks of a few tokens, and a sequence has a list of blocks, which may lie anywhere. Blocks have
reference counts, so several sequences can share one: the samples of a prompt share the prompt's blocks.

`PrefixIndex` makes blocks outlive their sequences. It is a tree whose edges are the tokens of a full block; a path from
the root is a prefix. A block's place in it is determined by its tenant, its adapter and all tokens up to its end. Equal
places therefore hold equal keys and values, and a new request that begins with the same tokens reuses them instead of
computing them. Since the tenant is part of the place, nobody can learn from a hit, or from its speed, what another
tenant has asked.

A block is free (unused), held (by as many sequences as its count says) or idle: no sequence holds it, but it is in the
index, so it can be reused until its memory is needed. Memory is then taken from the tenant with the most idle blocks,
so that a tenant with many requests only evicts its own prefixes. Only bookkeeping happens here; the tensors are in
`block_attention`.
"""

from __future__ import annotations

import heapq
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias


class BlockPool:
    """A fixed number of blocks, counted from 0. The lowest free one is used first, to keep the used ones together."""

    def __init__(self, count: int, on_evict: Callable[[int], Iterable[int]] | None = None) -> None:
        """`on_evict(block)` is called when an idle block is evicted; it returns other blocks that lose their name."""
        self.count = count
        self._free = list(range(count))
        self._holders = [0] * count
        self._idle: dict[str, OrderedDict[int, None]] = {}
        """By owner; the most recently used block last."""
        self._idle_count = 0
        self._owners: list[str | None] = [None] * count
        """Of named blocks."""
        self._on_evict = on_evict

    @property
    def available(self) -> int:
        """Blocks that can be allocated without taking one from a sequence."""
        return len(self._free) + self._idle_count

    @property
    def idle(self) -> int:
        return self._idle_count

    def holders(self, block: int) -> int:
        return self._holders[block]

    def allocate(self) -> int | None:
        """Return a block with one holder, or None. If no block is free, an idle one is evicted."""
        if not self._free and not self._give_up_one():
            return None
        block = heapq.heappop(self._free)
        self._holders[block] = 1
        return block

    def hold(self, block: int) -> None:
        """Add a holder to a held or idle block."""
        assert self._holders[block] > 0 or self._is_idle(block)
        if self._holders[block] == 0:
            self._wake(block)
        self._holders[block] += 1

    def release(self, block: int) -> None:
        """Remove a holder. A block without holders becomes idle if it is named, else free."""
        assert self._holders[block] > 0
        self._holders[block] -= 1
        if self._holders[block] == 0:
            owner = self._owners[block]
            if owner is not None:
                self._idle.setdefault(owner, OrderedDict())[block] = None
                self._idle_count += 1
            else:
                heapq.heappush(self._free, block)

    def name(self, block: int, owner: str = "") -> None:
        """The prefix index refers to this held block from now on, for its owner."""
        assert self._holders[block] > 0
        self._owners[block] = owner

    def unname(self, block: int) -> None:
        """The prefix index no longer refers to this block."""
        if self._is_idle(block):
            self._wake(block)
            heapq.heappush(self._free, block)
        self._owners[block] = None

    def _is_idle(self, block: int) -> bool:
        return self._holders[block] == 0 and self._owners[block] is not None

    def _wake(self, block: int) -> None:
        """Take a block out of the idle ones."""
        owner = self._owners[block]
        assert owner is not None
        del self._idle[owner][block]
        self._idle_count -= 1
        if not self._idle[owner]:
            del self._idle[owner]

    def _give_up_one(self) -> bool:
        if not self._idle:
            return False
        owner = max(self._idle, key=lambda name: len(self._idle[name]))
        block = next(iter(self._idle[owner]))
        lost = self._on_evict(block) if self._on_evict else ()
        for gone in {block, *lost}:
            self.unname(gone)
        return True


Weights: TypeAlias = tuple[str, Hashable]
"""A tenant, and the name of its adapter; None: the base model."""
Part: TypeAlias = Callable[[int, int], tuple[int, ...]]
"""Returns the tokens of a sequence in a range of positions."""


@dataclass(slots=True, eq=False)
class _Node:
    block: int
    parent: _Node | None
    key: tuple[int, ...]
    weights: Weights
    children: dict[tuple[int, ...], _Node] = field(default_factory=dict)


class PrefixIndex:
    """The tree of reusable blocks, with their pool."""

    def __init__(self, block_count: int, block_size: int) -> None:
        self.block_size = block_size
        self.pool = BlockPool(block_count, self._forget)
        self._roots: dict[Weights, _Node] = {}
        self._by_block: dict[int, _Node] = {}

    def find(self, weights: Weights, part: Part, limit: int) -> list[int]:
        """Hold and return the blocks with which a sequence begins, of at most `limit` tokens in all."""
        node = self._roots.get(weights)
        blocks: list[int] = []
        while node is not None and (len(blocks) + 1) * self.block_size <= limit:
            start = len(blocks) * self.block_size
            node = node.children.get(part(start, start + self.block_size))
            if node is not None:
                blocks.append(node.block)
        for block in reversed(blocks):  # so that the deepest block is evicted first
            self.pool.hold(block)
        return blocks

    def insert(self, weights: Weights, part: Part, blocks: Sequence[int], first: int) -> None:
        """Name a sequence's full blocks from number `first` on. A place that is taken keeps its block."""
        node = self._roots.setdefault(weights, _Node(-1, None, (), weights))
        for number in range(len(blocks)):
            key = part(number * self.block_size, (number + 1) * self.block_size)
            child = node.children.get(key)
            if child is None:
                if number < first or blocks[number] in self._by_block:
                    return
                child = _Node(blocks[number], node, key, weights)
                node.children[key] = child
                self._by_block[child.block] = child
                self.pool.name(child.block, weights[0])
            node = child

    def drop_adapter(self, adapter: Hashable) -> None:
        """Remove everything computed with these weights; held blocks stay with their holders."""
        for weights in [weights for weights in self._roots if weights[1] == adapter]:
            for block in self._forget_below(self._roots.pop(weights)):
                self.pool.unname(block)

    def _forget(self, block: int) -> list[int]:
        """Unname an evicted block and all blocks below it, which cannot be reached without it."""
        node = self._by_block[block]
        assert node.parent is not None
        del node.parent.children[node.key]
        if node.parent.parent is None and not node.parent.children:
            self._roots.pop(node.weights, None)
        del self._by_block[block]
        return self._forget_below(node)

    def _forget_below(self, top: _Node) -> list[int]:
        lost, pending = [], list(top.children.values())
        while pending:
            node = pending.pop()
            pending.extend(node.children.values())
            del self._by_block[node.block]
            lost.append(node.block)
        return lost

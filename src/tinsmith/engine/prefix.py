"""Prefix index: which full blocks of tokens are in the cache already, and under which weights.

Owns: the tree of named blocks. A block's place is its adapter and all tokens up to its end, so equal places hold equal
keys and values. Does not know: tensors, or when a sequence runs.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field

from tinsmith.engine.kv_blocks import BlockPool


@dataclass(slots=True, eq=False)
class _Node:
    block: int
    parent: _Node | None
    key: tuple[int, ...]
    children: dict[tuple[int, ...], _Node] = field(default_factory=dict)
    adapter: Hashable = None


class PrefixIndex:
    """Blocks that can be used again, in a pool of its own."""

    def __init__(self, block_count: int, block_size: int) -> None:
        self.block_size = block_size
        self.pool = BlockPool(block_count, self._forget)
        self._roots: dict[Hashable, _Node] = {}
        self._by_block: dict[int, _Node] = {}

    def find(self, adapter: Hashable, tokens: Sequence[int], limit: int) -> list[int]:
        """Hold and return the blocks whose tokens `tokens` begins with, at most `limit` tokens in all."""
        node = self._roots.get(adapter)
        blocks: list[int] = []
        while node is not None and (len(blocks) + 1) * self.block_size <= limit:
            start = len(blocks) * self.block_size
            node = node.children.get(tuple(tokens[start : start + self.block_size]))
            if node is not None:
                blocks.append(node.block)
        for block in reversed(blocks):  # the deepest is given up first
            self.pool.hold(block)
        return blocks

    def insert(self, adapter: Hashable, tokens: Sequence[int], blocks: Sequence[int], first: int) -> None:
        """Name a sequence's full blocks from number `first` on; places that are named already keep their block."""
        node = self._roots.setdefault(adapter, _Node(-1, None, (), adapter=adapter))
        for number in range(len(tokens) // self.block_size):
            key = tuple(tokens[number * self.block_size : (number + 1) * self.block_size])
            child = node.children.get(key)
            if child is None:
                if number < first or blocks[number] in self._by_block:
                    return
                child = _Node(blocks[number], node, key, adapter=adapter)
                node.children[key] = child
                self._by_block[child.block] = child
                self.pool.name(child.block)
            node = child

    def drop_adapter(self, adapter: Hashable) -> None:
        """Forget what was computed under these weights; blocks that are held stay with their holders."""
        root = self._roots.pop(adapter, None)
        if root is not None:
            for block in self._forget_below(root):
                self.pool.unname(block)

    def _forget(self, block: int) -> list[int]:
        """Unname an evicted block and all that follows it: without it they cannot be reached."""
        node = self._by_block[block]
        assert node.parent is not None
        del node.parent.children[node.key]
        if node.parent.parent is None and not node.parent.children:
            self._roots.pop(node.adapter, None)
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

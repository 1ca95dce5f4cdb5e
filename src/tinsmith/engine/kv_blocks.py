"""Bookkeeping of the key/value cache: which block belongs to whom.

Owns: reference counts, the free list, and the order in which idle cached blocks are given up.
Does not know: tensors, tokens, requests. Pure.

A block is free (nobody holds it), held (its count says by how many sequences), or idle: nobody holds it but its
content is named in the prefix index, so it can be taken up again until its room is needed.
"""

from __future__ import annotations

import heapq
from collections import OrderedDict
from collections.abc import Callable, Iterable


class BlockPool:
    """A fixed number of blocks, counted from 0. The lowest free one is given first, so that use stays compact."""

    def __init__(self, count: int, on_evict: Callable[[int], Iterable[int]] | None = None) -> None:
        """`on_evict(block)` is told of an idle block that is given up; it returns blocks that lost their name by it."""
        self.count = count
        self._free = list(range(count))
        self._holders = [0] * count
        self._idle: OrderedDict[int, None] = OrderedDict()
        self._is_named = [False] * count
        self._on_evict = on_evict

    @property
    def available(self) -> int:
        """Blocks that can be had without taking one from a holder."""
        return len(self._free) + len(self._idle)

    @property
    def idle(self) -> int:
        return len(self._idle)

    def holders(self, block: int) -> int:
        return self._holders[block]

    def allocate(self) -> int | None:
        """A block with one holder; the idle block unused for longest is given up when none is free."""
        if not self._free and not self._give_up_one():
            return None
        block = heapq.heappop(self._free)
        self._holders[block] = 1
        return block

    def hold(self, block: int) -> None:
        """One more holder of a held or idle block."""
        assert self._holders[block] > 0 or block in self._idle
        self._idle.pop(block, None)
        self._holders[block] += 1

    def release(self, block: int) -> None:
        """One holder fewer; without any the block is idle if it is named, else free."""
        assert self._holders[block] > 0
        self._holders[block] -= 1
        if self._holders[block] == 0:
            if self._is_named[block]:
                self._idle[block] = None
            else:
                heapq.heappush(self._free, block)

    def name(self, block: int) -> None:
        """The prefix index refers to this held block from now on."""
        assert self._holders[block] > 0
        self._is_named[block] = True

    def unname(self, block: int) -> None:
        """The prefix index no longer refers to this block."""
        self._is_named[block] = False
        if block in self._idle:
            del self._idle[block]
            heapq.heappush(self._free, block)

    def _give_up_one(self) -> bool:
        if not self._idle:
            return False
        block = next(iter(self._idle))
        lost = self._on_evict(block) if self._on_evict else ()
        for gone in {block, *lost}:
            self.unname(gone)
        return True

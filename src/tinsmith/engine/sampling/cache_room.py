"""Cache blocks for running sequences: allocate, share, copy before a write, release.

This connects the bookkeeping (`kv_cache`) with the tensors (`block_attention`). The life of a sequence here: when it
starts, `take_prefix` reuses the blocks that the cache already has of its tokens; before each step, `reserve` allocates
blocks for the next tokens; after it, `advance` publishes the blocks that became full, so that others can reuse them.
The samples of one prompt `share` its blocks. The last, partly filled block is shared too, and is copied when the first
of the samples is about to write its own token into it (copy on write, `_own_last_block`).

Deciding who runs, and who is preempted when there is no room, is up to `sampler`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Iterable

from tinsmith.engine.sampling.block_attention import BlockCache
from tinsmith.engine.sampling.kv_cache import PrefixIndex
from tinsmith.engine.sampling.sequence import Sequence


class CacheRoom:
    """Allocates the cache's blocks to sequences."""

    def __init__(self, cache: BlockCache, index: PrefixIndex) -> None:
        self._cache = cache
        self.index = index
        self._pool = index.pool
        self._size = cache.block_size

    @property
    def available(self) -> int:
        """Blocks that can be allocated without preempting a sequence."""
        return self._pool.available

    @property
    def blocks(self) -> int:
        """The number of all blocks."""
        return self._pool.count

    def held_by_tenant(self, sequences: Iterable[Sequence]) -> Counter[str]:
        """Return how many blocks the sequences of each tenant hold; a shared block counts once."""
        held: dict[str, set[int]] = {}
        for sequence in sequences:
            held.setdefault(sequence.tenant, set()).update(sequence.blocks)
        return Counter({tenant: len(blocks) for tenant, blocks in held.items()})

    def blocks_for(self, tokens: int) -> int:
        return -(-tokens // self._size)

    def take_prefix(self, sequence: Sequence) -> None:
        """Reuse what the cache already has of a sequence that is about to start."""
        assert not sequence.blocks
        sequence.blocks = self.index.find(sequence.state.job.weights, sequence.tokens.part, sequence.reusable())
        sequence.computed = len(sequence.blocks) * self._size

    def is_ahead(self, running: Sequence, waiting: Sequence) -> bool:
        """Return whether a running prompt is about to compute a block that a waiting one needs next.

        Then the waiting one should wait for it: reusing the block costs less than computing it twice.
        """
        if running.index is not None or running.state.job.weights != waiting.state.job.weights:
            return False
        start = running.computed // self._size * self._size
        stop = start + self._size
        if stop > min(len(running.tokens), waiting.reusable()):
            return False
        ours, theirs = running.tokens.part, waiting.tokens.part
        return ours(start, stop) == theirs(start, stop) and ours(0, start) == theirs(0, start)

    def reserve(self, sequence: Sequence, count: int) -> bool:
        """Allocate blocks for the next `count` tokens; return False if there are not enough (those allocated stay)."""
        if not self._own_last_block(sequence):
            return False
        while len(sequence.blocks) < self.blocks_for(sequence.computed + count):
            block = self._pool.allocate()
            if block is None:
                return False
            self._cache.clear(block)
            sequence.blocks.append(block)
        return True

    def advance(self, sequence: Sequence, count: int) -> None:
        """Record that the next `count` tokens are in the cache; publish the blocks that became full."""
        before = sequence.computed // self._size
        sequence.computed += count
        full = sequence.computed // self._size
        if full > before:
            self.index.insert(sequence.state.job.weights, sequence.tokens.part, sequence.blocks[:full], before)

    def share(self, source: Sequence, target: Sequence) -> None:
        """Let `target` continue from everything that `source` has computed."""
        target.blocks = source.blocks[: self.blocks_for(source.computed)]
        target.computed = source.computed
        for block in target.blocks:
            self._pool.hold(block)

    def release(self, sequence: Sequence) -> None:
        """Release all blocks, the deepest first, so that it is also evicted first."""
        for block in reversed(sequence.blocks):
            self._pool.release(block)
        sequence.blocks = []
        sequence.computed = 0

    def drop_adapter(self, name: Hashable) -> None:
        """Forget what is cached for an adapter."""
        self.index.drop_adapter(name)

    def _own_last_block(self, sequence: Sequence) -> bool:
        """Copy a partly filled block that other sequences hold too, before writing to it."""
        number = sequence.computed // self._size
        if number >= len(sequence.blocks) or self._pool.holders(sequence.blocks[number]) == 1:
            return True
        block = self._pool.allocate()
        if block is None:
            return False
        self._cache.copy(sequence.blocks[number], block)
        self._pool.release(sequence.blocks[number])
        sequence.blocks[number] = block
        return True

"""Room in the cache for running sequences: blocks taken, shared, copied before a write, and given back.

Owns: the link between bookkeeping (`prefix`, `kv_blocks`) and the tensors (`block_attention`).
Does not know: which sequence should run; it says when there is no room.
"""

from __future__ import annotations

from tinsmith.engine.block_attention import BlockCache
from tinsmith.engine.prefix import PrefixIndex
from tinsmith.engine.sample_state import Sequence


class CacheRoom:
    """The blocks of all sequences."""

    def __init__(self, cache: BlockCache, index: PrefixIndex) -> None:
        self._cache = cache
        self.index = index
        self._pool = index.pool
        self._size = cache.block_size

    @property
    def available(self) -> int:
        """Blocks to be had without pre-empting anyone."""
        return self._pool.available

    def blocks_for(self, tokens: int) -> int:
        return -(-tokens // self._size)

    def take_prefix(self, sequence: Sequence) -> None:
        """Take up what the cache already holds of a sequence that begins."""
        assert not sequence.blocks
        sequence.blocks = self.index.find(sequence.state.job.adapter, sequence.tokens, sequence.reusable())
        sequence.computed = len(sequence.blocks) * self._size

    def is_ahead(self, running: Sequence, waiting: Sequence) -> bool:
        """Whether a prompt being computed will give a waiting one its next block: waiting costs less than computing."""
        if running.index is not None or running.state.job.adapter != waiting.state.job.adapter:
            return False
        start = running.computed // self._size * self._size
        stop = start + self._size
        if stop > min(len(running.tokens), waiting.reusable()):
            return False
        return running.tokens[:stop] == waiting.tokens[:stop]

    def reserve(self, sequence: Sequence, count: int) -> bool:
        """Make room for the next `count` tokens; False when there is none (what was got stays)."""
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
        """The next `count` tokens are in the cache now; blocks that became full can be found by others."""
        before = sequence.computed // self._size
        sequence.computed += count
        full = sequence.computed // self._size
        if full > before:
            tokens = sequence.tokens[: full * self._size]
            self.index.insert(sequence.state.job.adapter, tokens, sequence.blocks, before)

    def share(self, source: Sequence, target: Sequence) -> None:
        """Let `target` go on from all that `source` has computed."""
        target.blocks = source.blocks[: self.blocks_for(source.computed)]
        target.computed = source.computed
        for block in target.blocks:
            self._pool.hold(block)

    def release(self, sequence: Sequence) -> None:
        """Give all blocks back; the deepest becomes the first to be given up."""
        for block in reversed(sequence.blocks):
            self._pool.release(block)
        sequence.blocks = []
        sequence.computed = 0

    def _own_last_block(self, sequence: Sequence) -> bool:
        """Copy a partly filled block that others hold too, before it is written."""
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

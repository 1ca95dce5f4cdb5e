"""Which datums of a request run together. Pure: the answer depends on the request alone, so a replay packs the same."""

from __future__ import annotations

from collections.abc import Hashable, Sequence


def pack(lengths: Sequence[int], budget: int, kinds: Sequence[Hashable] | None = None) -> list[range]:
    """Runs of neighbouring datums of one kind, at most `budget` tokens together; a longer datum stands alone."""
    runs: list[range] = []
    start, tokens = 0, 0
    for index, length in enumerate(lengths):
        is_other = kinds is not None and kinds[index] != kinds[start]
        if index > start and (is_other or tokens + length > budget):
            runs.append(range(start, index))
            start, tokens = index, 0
        tokens += length
    if start < len(lengths):
        runs.append(range(start, len(lengths)))
    return runs

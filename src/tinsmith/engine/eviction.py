"""Which adapters to evict when their memory is full: those of the tenant that holds most, least recently used first.

This only decides; `training/adapter_pool` and `sampling/adapters` evict.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Mapping
from dataclasses import dataclass
from typing import TypeVar

K = TypeVar("K", bound=Hashable)


@dataclass(slots=True)
class Held:
    """An item in memory. It can be evicted while nobody uses it."""

    tenant: str
    size_bytes: int
    users: int = 0


def to_evict(held: Mapping[K, Held], tenant: str, needed: int, max_bytes: int) -> list[K]:
    """Return what to evict, in order, so that a tenant's `needed` bytes fit; everything idle if that is not enough.

    `held` is in order of use, the most recently used item last.
    """
    totals = Counter({tenant: needed})
    for item in held.values():
        totals[item.tenant] += item.size_bytes
    idle: dict[str, list[K]] = {}
    for key, item in reversed(list(held.items())):
        if not item.users:
            idle.setdefault(item.tenant, []).append(key)
    going: list[K] = []
    while totals.total() > max_bytes and idle:
        most = max(idle, key=lambda name: totals[name])
        key = idle[most].pop()
        if not idle[most]:
            del idle[most]
        totals[most] -= held[key].size_bytes
        going.append(key)
    return going

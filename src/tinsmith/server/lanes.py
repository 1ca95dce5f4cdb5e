"""The order of one model's requests: pure bookkeeping of numbers.

Numbers begin at 1 and each is used once. Requests may arrive in any order; they leave in the order of their numbers.
A missing number is waited for; a closed one (refused) is skipped.

Does not know: jobs, time, the store.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Generic, TypeVar

ItemT = TypeVar("ItemT")

FIRST = 1


class Lane(Generic[ItemT]):
    """Items by number, given out in order."""

    def __init__(self, settled: Iterable[int] = (), first: int = FIRST) -> None:
        """`settled` are the numbers that need not be waited for: done or refused before; all below `first` are."""
        self._settled = {number for number in settled if number >= first}
        self._waiting: dict[int, ItemT] = {}
        self._highest = max(self._settled, default=first - 1)
        self.next = first
        self._skip()

    def allot(self) -> int:
        """A number for a request that brings none: behind everything seen so far."""
        self._highest += 1
        return self._highest

    def knows(self, number: int) -> bool:
        """Whether the number was used, waits, or is closed."""
        return number < self.next or number in self._waiting or number in self._settled

    def has_passed(self, number: int) -> bool:
        """Whether the number's turn is over."""
        return number < self.next

    def put(self, number: int, item: ItemT) -> None:
        """Add a request whose turn has not passed."""
        assert not self.has_passed(number)
        self._highest = max(self._highest, number)
        self._waiting[number] = item

    def close(self, number: int) -> None:
        """Nothing will come under this number."""
        self._highest = max(self._highest, number)
        if number >= self.next and number not in self._waiting:
            self._settled.add(number)
            self._skip()

    def take(self) -> ItemT | None:
        """The request whose turn it is, if it is there; it leaves the lane."""
        item = self._waiting.pop(self.next, None)
        if item is not None:
            self.next += 1
            self._skip()
        return item

    def ready(self) -> list[ItemT]:
        """Everything that may run now, in order; it leaves the lane."""
        items = []
        while (item := self.take()) is not None:
            items.append(item)
        return items

    def missing(self) -> int | None:
        """The number that others wait for; None: nobody waits, or the next one is there."""
        return self.next if self._waiting and self.next not in self._waiting else None

    def waiting(self) -> list[ItemT]:
        """Those who wait for their turn, in order."""
        return [self._waiting[number] for number in sorted(self._waiting)]

    def remove(self, number: int) -> ItemT | None:
        """Take back a waiting request; its number counts as closed."""
        item = self._waiting.pop(number, None)
        if item is not None:
            self.close(number)
        return item

    def __len__(self) -> int:
        return len(self._waiting)

    def _skip(self) -> None:
        while self.next in self._settled:
            self._settled.discard(self.next)
            self.next += 1

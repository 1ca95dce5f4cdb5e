"""The order of one model's requests: bookkeeping of numbers, without I/O.

Clients send several requests of a run at once, over several connections, so they arrive in any order. `Lane` puts them
back into the order of their numbers: it waits for a missing number, and skips one that was refused. `Arrivals` is for
old clients that send no numbers: theirs are numbered in the order of arrival, though decoding a large body takes longer
than decoding a small one that arrived after it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from typing import Generic, TypeVar

ItemT = TypeVar("ItemT")

FIRST = 1


class Lane(Generic[ItemT]):
    """Requests by number, released in order. Numbers begin at 1, and each is used once."""

    def __init__(self, settled: Iterable[int] = (), first: int = FIRST) -> None:
        """`settled` are the numbers that are done or refused; so are all below `first`."""
        self._settled = {number for number in settled if number >= first}
        self._waiting: dict[int, ItemT] = {}
        self._highest = max(self._settled, default=first - 1)
        self.next = first
        self._skip()

    def allot(self) -> int:
        """Return a number for a request that has none: one after the highest seen so far."""
        self._highest += 1
        return self._highest

    def knows(self, number: int) -> bool:
        """Whether the number was used, is waiting, or is closed."""
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
        """Close a number: nothing will come under it."""
        self._highest = max(self._highest, number)
        if number >= self.next and number not in self._waiting:
            self._settled.add(number)
            self._skip()

    def take(self) -> ItemT | None:
        """Remove and return the request whose turn it is, if it has arrived."""
        item = self._waiting.pop(self.next, None)
        if item is not None:
            self.next += 1
            self._skip()
        return item

    def ready(self) -> list[ItemT]:
        """Remove and return everything that may run now, in order."""
        items = []
        while (item := self.take()) is not None:
            items.append(item)
        return items

    def missing(self) -> int | None:
        """Return the missing number that others wait for; None if nothing waits for one."""
        return self.next if self._waiting and self.next not in self._waiting else None

    def waiting(self) -> list[ItemT]:
        """Return the requests that wait for their turn, in order."""
        return [self._waiting[number] for number in sorted(self._waiting)]

    def remove(self, number: int) -> ItemT | None:
        """Remove a waiting request and close its number."""
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


class Arrival:
    """A request whose body is being decoded: its model and number are not known yet."""

    def __init__(self, before: asyncio.Future[None] | None) -> None:
        self._before = before
        self.passed: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        """Done when this request, and all that arrived before it, have their numbers."""

    async def turn(self) -> None:
        """Wait until all that arrived before have their numbers."""
        if self._before is not None and not self._before.done():
            await asyncio.wait([self._before])

    def leave(self) -> None:
        """Let the next one pass: this one has its number, or needs none."""
        if self._before is None or self._before.done():
            self._pass()
        else:
            self._before.add_done_callback(self._pass)

    def _pass(self, _: object = None) -> None:
        if not self.passed.done():
            self.passed.set_result(None)


class Arrivals:
    """Gives requests without numbers their numbers in the order of arrival, for each organisation."""

    def __init__(self) -> None:
        self._last: dict[str, Arrival] = {}

    def enter(self, tenant: str) -> Arrival:
        before = self._last.get(tenant)
        arrival = self._last[tenant] = Arrival(before.passed if before is not None else None)
        arrival.passed.add_done_callback(lambda _: self._forget(tenant, arrival))
        return arrival

    def _forget(self, tenant: str, arrival: Arrival) -> None:
        if self._last.get(tenant) is arrival:
            del self._last[tenant]

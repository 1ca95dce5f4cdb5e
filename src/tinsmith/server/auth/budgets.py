"""How much of the server's memory one organisation may hold: bodies being received, answers its clients have not read,
and calls held open.

An organisation over a limit is refused with a time to retry; others are not affected.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol

from tinsmith.server.refusals import OverLimitError

SMALL_BYTES = 64 * 1024
"""Smaller ones are not counted; other limits bound how many there are."""
RETRY_S = 1.0


class Outlet(Protocol):
    """A connection's write buffer."""

    def get_write_buffer_size(self) -> int:
        """Return the bytes that were written and not sent yet."""

    def is_closing(self) -> bool:
        """Whether nothing more will be sent."""


class Budgets:
    """Counts for each organisation."""

    def __init__(self, *, max_held_bytes: int, max_waits: int) -> None:
        self._max_held_bytes = max_held_bytes
        self._max_waits = max_waits
        self._bodies: dict[str, int] = {}
        self._waits: dict[str, int] = {}
        self._outlets: dict[str, list[Outlet]] = {}
        """Connections that large answers were written to."""

    @contextmanager
    def body(self, tenant: str, size: int) -> Iterator[None]:
        """Count a body while it is received and handled."""
        if size < SMALL_BYTES:
            yield
            return
        held = self.held_bytes(tenant)
        if held and held + size > self._max_held_bytes:
            raise OverLimitError(
                f"your organisation's requests and unread answers hold {held} bytes of the server's memory; with this "
                f"one they would exceed the limit of {self._max_held_bytes} (max_held_bytes): send fewer at once, and "
                "read the answers",
                retry_after_s=RETRY_S,
            )
        self._bodies[tenant] = self._bodies.get(tenant, 0) + size
        try:
            yield
        finally:
            _take(self._bodies, tenant, size)

    @contextmanager
    def wait(self, tenant: str) -> Iterator[None]:
        """Count a call while it is held open."""
        waits = self._waits.get(tenant, 0)
        if waits >= self._max_waits:
            raise OverLimitError(
                f"your organisation has {waits} open calls; the limit is {self._max_waits} (max_waits)",
                retry_after_s=RETRY_S,
            )
        self._waits[tenant] = waits + 1
        try:
            yield
        finally:
            _take(self._waits, tenant, 1)

    def answer(self, tenant: str, size: int, outlet: Outlet | None) -> None:
        """Count an answer that is about to be written to a connection, or refuse it."""
        if size < SMALL_BYTES or outlet is None:
            return
        held = self.held_bytes(tenant)
        if held and held + size > self._max_held_bytes:
            raise OverLimitError(
                f"your clients have not read {held} bytes of earlier answers; the limit is {self._max_held_bytes} "
                "(max_held_bytes); read those first",
                retry_after_s=RETRY_S,
            )
        outlets = self._outlets.setdefault(tenant, [])
        if outlet not in outlets:
            outlets.append(outlet)

    def held_bytes(self, tenant: str) -> int:
        """Return how many bytes an organisation holds now."""
        held = self._bodies.get(tenant, 0)
        outlets = [one for one in self._outlets.get(tenant, ()) if one.get_write_buffer_size() and not one.is_closing()]
        if outlets:
            self._outlets[tenant] = outlets
        else:
            self._outlets.pop(tenant, None)
        return held + sum(one.get_write_buffer_size() for one in outlets)


def _take(counts: dict[str, int], tenant: str, amount: int) -> None:
    left = counts[tenant] - amount
    if left:
        counts[tenant] = left
    else:
        del counts[tenant]

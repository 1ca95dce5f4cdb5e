"""Saying once that a server is in trouble, however many operations of a client wait for it.

Owns: which trouble has been told. Does not know: what is waited for, or when to give up.
"""

from __future__ import annotations


class Outage:
    """The trouble of one client with its server: begins with the first operation that notices, ends when none of them
    is in trouble any more. Used in the client's loop only."""

    def __init__(self) -> None:
        self.affected = 0


class Affected:
    """One operation's part in an outage."""

    def __init__(self, outage: Outage) -> None:
        self._outage = outage
        self._is_affected = False

    def begin(self) -> bool:
        """The operation is in trouble; True if no other one is, so that it has to be told."""
        if self._is_affected:
            return False
        self._is_affected = True
        self._outage.affected += 1
        return self._outage.affected == 1

    def over(self) -> None:
        """The operation goes on, or is given up."""
        if self._is_affected:
            self._is_affected = False
            self._outage.affected -= 1

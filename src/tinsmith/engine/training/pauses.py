"""Long work as generators: how one job shares the device with others without threads.

A forward or backward pass can take seconds, and other tenants should not wait that long. So everything in `training`
that takes long is a generator function (by convention its name ends in `steps`): it yields wherever other work may run,
and returns its result at the end. The worker advances one generator at a time and asks its scheduler after each step
whose turn it is. Dropping a generator between two steps cancels the work.
"""

from __future__ import annotations

from collections.abc import Generator
from typing import TypeVar

T = TypeVar("T")


def advanced(steps: Generator[None, None, T]) -> T | None:
    """Run one step; return the result, or None if there are more steps."""
    try:
        next(steps)
    except StopIteration as end:
        result: T = end.value
        return result
    return None


def finished(steps: Generator[None, None, T]) -> T:
    """Run all steps without a pause and return the result."""
    while True:
        try:
            next(steps)
        except StopIteration as end:
            result: T = end.value
            return result

"""Whose turn it is in an engine process: training and sampling share it, tenants share the training.

Pure: no clock, no executor. Time is what the caller reports.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Generator
from dataclasses import dataclass

from tinsmith.engine.base import Done
from tinsmith.engine.executor import TrainingJob


@dataclass(eq=False, slots=True)
class Operation:
    """A training job at the engine; `steps` is there once it has begun."""

    job: TrainingJob
    steps: Generator[None, None, Done] | None = None
    device_s: float = 0.0


class Turns:
    """The training jobs that wait or run, per model in order; the tenant that had the least time goes next."""

    def __init__(self) -> None:
        self._models: dict[str, deque[Operation]] = {}
        self._spent_s: dict[str, float] = {}
        self._is_training_next = True

    def add(self, operation: Operation) -> None:
        tenant = operation.job.tenant
        if tenant not in self._spent_s:  # a newcomer does not make up for the time before it came
            self._spent_s[tenant] = min(self._spent_s.values(), default=0.0)
        self._models.setdefault(operation.job.model_id, deque()).append(operation)

    def __bool__(self) -> bool:
        return bool(self._models)

    def takes_training(self, has_samples: bool) -> bool:
        """Whether the next unit of work is a training step; a sampling step otherwise. They alternate."""
        if not self._models or not has_samples:
            return bool(self._models)
        self._is_training_next = not self._is_training_next
        return not self._is_training_next

    def next(self) -> Operation:
        """The operation whose turn it is: of the tenant with the least time, what has begun before what has not."""
        heads = [queue[0] for queue in self._models.values()]
        return min(heads, key=lambda head: (self._spent_s[head.job.tenant], head.steps is None))

    def spend(self, operation: Operation, seconds: float) -> None:
        operation.device_s += seconds
        self._spent_s[operation.job.tenant] += seconds

    def end(self, operation: Operation) -> None:
        """The operation is over; its model's next one may begin."""
        queue = self._models[operation.job.model_id]
        queue.remove(operation)
        if not queue:
            del self._models[operation.job.model_id]
        tenant = operation.job.tenant
        if not any(other.job.tenant == tenant for queue in self._models.values() for other in queue):
            del self._spent_s[tenant]

    def drop(self, keep: Callable[[Operation], bool]) -> list[Operation]:
        """Take out the operations that are not to be kept."""
        dropped = [op for queue in self._models.values() for op in queue if not keep(op)]
        for operation in dropped:
            self.end(operation)
        return dropped

"""Supervised fine-tuning as a loop over four verbs. What is shown of it is the caller's affair.

Batches are drawn by a seed, so that a run that is resumed sees the same ones.
Does not know: terminals, files.
"""

from __future__ import annotations

import random
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from tinsmith.cli.chat_data import Example
from tinsmith.types import AdamParams

AHEAD = 2
"""Steps on their way at once: the next is there when the last one is done."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What is to be done."""

    epochs: int = 4
    batch_size: int = 8
    learning_rate: float = 5e-4
    seed: int = 0

    def batches(self, examples: Sequence[Example]) -> list[list[Example]]:
        """Every batch of every epoch, in order."""
        chosen = random.Random(self.seed)
        batches = []
        for _ in range(self.epochs):
            order = list(examples)
            chosen.shuffle(order)
            batches += [order[start : start + self.batch_size] for start in range(0, len(order), self.batch_size)]
        return batches


@dataclass(frozen=True, slots=True)
class Progress:
    """One step that is done."""

    step: int
    total: int
    loss: float
    """Mean over the tokens that count."""
    tokens: int
    tokens_per_s: float
    left_s: float


@dataclass(slots=True)
class Curve:
    """The steps so far."""

    steps: list[Progress] = field(default_factory=list)

    @property
    def losses(self) -> list[float]:
        return [step.loss for step in self.steps]


def fine_tune(
    training: Any, examples: Sequence[Example], plan: Plan, show: Callable[[Progress], None], *, first: int = 0
) -> Curve:
    """Train from step `first` on. The next step is on its way before the last one has answered."""
    batches = plan.batches(examples)
    curve, began, tokens = Curve(), time.monotonic(), 0
    under_way: deque[tuple[Any, Any]] = deque()
    for index in range(first, len(batches)):
        while len(under_way) < AHEAD and index + len(under_way) < len(batches):
            under_way.append(_submit(training, batches, index + len(under_way), plan))
        passed, stepped = under_way.popleft()
        counted = sum(example.counted for example in batches[index])
        loss = passed.result().metrics["loss:sum"] / max(1.0, counted)
        stepped.result()
        tokens += sum(len(example.tokens) for example in batches[index])
        spent = time.monotonic() - began
        left = spent / (index + 1 - first) * (len(batches) - index - 1)
        curve.steps.append(Progress(index + 1, len(batches), loss, tokens, tokens / spent, left))
        show(curve.steps[-1])
    return curve


def _submit(training: Any, batches: list[list[Example]], index: int, plan: Plan) -> tuple[Any, Any]:
    rate = plan.learning_rate * (1 - index / len(batches))
    passed = training.forward_backward([example.datum() for example in batches[index]], "cross_entropy")
    return passed, training.optim_step(AdamParams(learning_rate=rate, grad_clip_norm=1.0))

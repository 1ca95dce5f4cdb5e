"""Supervised fine-tuning as a loop over four verbs. What is shown of it is the caller's affair.

Batches are drawn by a seed, so that a run that is resumed sees the same ones.
Does not know: terminals, files.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from tinsmith.cli.chat_data import Example
from tinsmith.types import AdamParams


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
    waiting: list[tuple[int, list[Example], Any, Any]] = []
    for index in range(first, len(batches) + 1):
        if index < len(batches):
            rate = plan.learning_rate * (1 - index / len(batches))
            datums = [example.datum() for example in batches[index]]
            passed = training.forward_backward(datums, "cross_entropy")
            stepped = training.optim_step(AdamParams(learning_rate=rate, grad_clip_norm=1.0))
            waiting.append((index, batches[index], passed, stepped))
        if len(waiting) < 2 and index < len(batches):
            continue
        done, batch, passed, stepped = waiting.pop(0) if waiting else (0, [], None, None)
        if passed is None:
            break
        loss = passed.result().metrics["loss:sum"] / max(1.0, sum(example.counted for example in batch))
        stepped.result()
        tokens += sum(len(example.tokens) for example in batch)
        spent = time.monotonic() - began
        left = spent / (done + 1 - first) * (len(batches) - done - 1)
        curve.steps.append(Progress(done + 1, len(batches), loss, tokens, tokens / spent, left))
        show(curve.steps[-1])
    return curve

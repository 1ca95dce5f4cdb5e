"""The fine-tuning loop: `forward_backward`, `optim_step`, and now and then `save_state`.

Batches are drawn with a seed, so that a resumed run sees the same ones. What is minimized is an `Objective`; progress
goes to a `Watcher`.
"""

from __future__ import annotations

import random
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeVar

from tinsmith.types import AdamParams

T = TypeVar("T")

Measured = tuple[float, Mapping[str, float]]
"""A loss, and other metrics by name."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """Settings of the loop."""

    epochs: int = 4
    batch_size: int = 8
    learning_rate: float = 5e-4
    seed: int = 0

    def batches(self, items: Sequence[T]) -> list[list[T]]:
        """Return every batch of every epoch, in order."""
        chosen = random.Random(self.seed)
        batches = []
        for _ in range(self.epochs):
            order = list(items)
            chosen.shuffle(order)
            batches += [order[start : start + self.batch_size] for start in range(0, len(order), self.batch_size)]
        return batches


def held_count(total: int, share: float) -> int:
    """Return how many of `total` items are held out: at least one, and never all."""
    return min(total - 1, max(1, round(share * total))) if share else 0


def split(items: Sequence[T], share: float, seed: int) -> tuple[list[T], list[T]]:
    """Split items into a training and a held-out part, the same ones for the same seed."""
    held = set(random.Random(f"held out {seed}").sample(range(len(items)), held_count(len(items), share)))
    return [x for i, x in enumerate(items) if i not in held], [x for i, x in enumerate(items) if i in held]


class Objective(Protocol):
    """What the loop minimizes. `step` and `score` send their requests and return a function that waits for results."""

    ahead: int
    """Steps that may be in flight at once."""

    def step(self, training: Any, batch: Sequence[Any], params: AdamParams) -> Callable[[], Measured]: ...

    def score(self, training: Any, items: Sequence[Any]) -> Callable[[], Measured]: ...

    def tokens(self, batch: Sequence[Any]) -> int: ...


@dataclass(frozen=True, slots=True)
class TrainStep:
    """The result of one step."""

    step: int
    total: int
    loss: float
    """Mean over the tokens with a weight, or over pairs."""
    tokens: int
    tokens_per_s: float
    left_s: float
    metrics: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Saved:
    """A checkpoint to resume from, and the held-out loss at that step."""

    step: int
    path: str
    held_out: Measured | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Watcher:
    """Callbacks of the loop: a finished step, the held-out part scored, a saved checkpoint, and whether to stop."""

    step: Callable[[TrainStep], None] = lambda _: None
    scored: Callable[[int, Measured], None] = lambda _step, _measured: None
    saved: Callable[[Saved], None] = lambda _: None
    is_stopping: Callable[[], bool] = lambda: False


def checkpoint_name(step: int) -> str:
    return f"step-{step:06d}"


@dataclass(slots=True)
class _UnderWay:
    number: int
    finish: Callable[[], Measured]
    saving: Any = None
    scoring: Callable[[], Measured] | None = None


def fine_tune(
    training: Any,
    objective: Objective,
    batches: Sequence[Sequence[Any]],
    plan: Plan,
    watcher: Watcher,
    *,
    first: int = 0,
    save_every: int = 0,
    score_every: int = 0,
    held_out: Sequence[Any] = (),
) -> int:
    """Train from step `first`, and return the number of the last finished step.

    The next step is sent before the previous one has finished, so that the server never waits for the network. Every
    `save_every` steps, except after the last, the state is saved and the held-out part scored; every `score_every`
    steps it is only scored. The server runs requests in order, so that both fall between two steps. When the watcher
    asks to stop, steps in flight are finished and no new one is sent.
    """
    under_way: deque[_UnderWay] = deque()
    begun, began, tokens = first, time.monotonic(), 0
    while True:
        while begun < len(batches) and len(under_way) < objective.ahead and not watcher.is_stopping():
            rate = plan.learning_rate * (1 - begun / len(batches))
            params = AdamParams(learning_rate=rate, grad_clip_norm=1.0)
            step = _UnderWay(begun + 1, objective.step(training, batches[begun], params))
            begun += 1
            is_saved, is_scored = (every and begun % every == 0 for every in (save_every, score_every))
            if is_saved and begun < len(batches):
                step.saving = training.save_state(checkpoint_name(begun))
            if held_out and (is_saved or is_scored) and begun < len(batches):
                step.scoring = objective.score(training, held_out)
            under_way.append(step)
        if not under_way:
            return begun
        step = under_way.popleft()
        loss, metrics = step.finish()
        tokens += objective.tokens(batches[step.number - 1])
        spent = time.monotonic() - began
        left = spent / (step.number - first) * (len(batches) - step.number)
        watcher.step(TrainStep(step.number, len(batches), loss, tokens, tokens / spent, left, metrics))
        measured = step.scoring() if step.scoring is not None else None
        if step.saving is not None:
            watcher.saved(Saved(step.number, step.saving.result().path, measured))
        elif measured is not None:
            watcher.scored(step.number, measured)

"""What a run minimizes: cross-entropy on examples, or DPO on preference pairs."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from tinsmith.cli.dataset import Example
from tinsmith.cli.dpo import DpoLoss, Pair, answer_logprobs, dpo_loss, texts_of
from tinsmith.cli.train.sft import Measured
from tinsmith.types import AdamParams, Datum


class Supervised:
    """Supervised fine-tuning: the mean cross-entropy over a batch's tokens that have a weight."""

    ahead = 2

    def step(self, training: Any, batch: Sequence[Example], params: AdamParams) -> Callable[[], Measured]:
        passed = training.forward_backward(_mean(batch), "cross_entropy")
        stepped = training.optim_step(params)

        def finish() -> Measured:
            loss = passed.result().metrics["loss:sum"]
            stepped.result()
            return loss, {}

        return finish

    def score(self, training: Any, items: Sequence[Example]) -> Callable[[], Measured]:
        passed = training.forward(_mean(items), "cross_entropy")
        return lambda: (passed.result().metrics["loss:sum"], {})

    def tokens(self, batch: Sequence[Example]) -> int:
        return sum(len(example.tokens) for example in batch)


def _mean(examples: Sequence[Example]) -> list[Datum]:
    """Scale the weights so that the sum that the server computes is a mean."""
    scale = 1.0 / max(1.0, sum(example.counted for example in examples))
    return [example.datum(scale) for example in examples]


class Preferring:
    """DPO against the model before training, whose logprobs are `reference`, by line of the data."""

    ahead = 1

    def __init__(self, reference: Mapping[int, Sequence[float]], beta: float) -> None:
        self._reference = reference
        self._beta = beta

    def step(self, training: Any, batch: Sequence[Pair], params: AdamParams) -> Callable[[], Measured]:
        from tinsmith.client.losses.custom_loss import backward_data

        data = [text.datum() for text in texts_of(batch)]
        passed = training.forward(data, "cross_entropy").result()
        found = self._loss(batch, passed)
        backward = training.forward_backward(backward_data(data, found.gradients), "cross_entropy")
        stepped = training.optim_step(params)

        def finish() -> Measured:
            backward.result()
            stepped.result()
            return found.loss, {"accuracy": found.accuracy, "margin": found.margin}

        return finish

    def score(self, training: Any, items: Sequence[Pair]) -> Callable[[], Measured]:
        passed = training.forward([text.datum() for text in texts_of(items)], "cross_entropy")

        def finish() -> Measured:
            found = self._loss(items, passed.result())
            return found.loss, {"accuracy": found.accuracy, "margin": found.margin}

        return finish

    def tokens(self, batch: Sequence[Pair]) -> int:
        return sum(len(text.tokens) for text in texts_of(batch))

    def _loss(self, pairs: Sequence[Pair], passed: Any) -> DpoLoss:
        texts = texts_of(pairs)
        reference = [logprob for pair in pairs for logprob in self._reference[pair.line]]
        return dpo_loss(texts, answer_logprobs(texts, passed.loss_fn_outputs), reference, self._beta)


def reference_logprobs(training: Any, pairs: Sequence[Pair], batch_size: int) -> dict[int, tuple[float, float]]:
    """Return the logprobs of both answers of every pair before training, by line of the data."""
    known: dict[int, tuple[float, float]] = {}
    for start in range(0, len(pairs), batch_size):
        some = pairs[start : start + batch_size]
        texts = texts_of(some)
        passed = training.forward([text.datum() for text in texts], "cross_entropy").result()
        logprobs = answer_logprobs(texts, passed.loss_fn_outputs)
        for i, pair in enumerate(some):
            known[pair.line] = (logprobs[2 * i], logprobs[2 * i + 1])
    return known

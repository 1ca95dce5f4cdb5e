"""Reinforcement learning as a loop: sample a group of answers per question, reward them, and train on each answer with
its advantage over the group's mean reward."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from tinsmith.types import AdamParams, Datum, ModelInput, SamplingParams


@dataclass(frozen=True, slots=True)
class Question:
    """A prompt as tokens, and a reward function of an answer's text and of whether the model ended it by itself."""

    tokens: tuple[int, ...]
    reward: Callable[[str, bool], float]


@dataclass(frozen=True, slots=True, kw_only=True)
class RlPlan:
    """Settings of a run."""

    steps: int = 18
    questions: int = 6
    """Questions per step."""
    samples: int = 8
    """Answers per question: the group."""
    max_tokens: int = 12
    learning_rate: float = 1e-3
    seed: int = 0

    def batches(self, questions: Sequence[Question]) -> Iterator[list[Question]]:
        """Yield the questions of each step; every pass over all questions has a new order."""
        chosen, left = random.Random(self.seed), list[Question]()
        for _ in range(self.steps):
            while len(left) < self.questions:
                order = list(questions)
                chosen.shuffle(order)
                left += order
            batch, left = left[: self.questions], left[self.questions :]
            yield batch


@dataclass(frozen=True, slots=True)
class RlStep:
    """The result of one step."""

    step: int
    reward: float
    """Mean over all samples."""
    best: str
    """The answer with the highest reward."""
    used: int
    """Samples whose reward differed from their group's mean; only these are trained on."""


def reinforce(
    training: Any, tokenizer: Any, questions: Sequence[Question], plan: RlPlan, show: Callable[[RlStep], None]
) -> list[RlStep]:
    """Run the loop: in each step sample with the latest weights, reward, and train."""
    steps = []
    for number, batch in enumerate(plan.batches(questions), start=1):
        sampler = training.save_weights_and_get_sampling_client()
        futures = [
            sampler.sample(
                ModelInput.from_ints(list(question.tokens)),
                plan.samples,
                SamplingParams(max_tokens=plan.max_tokens, temperature=1.0, seed=_seed(plan, number, index)),
            )
            for index, question in enumerate(batch)
        ]
        data: list[Datum] = []
        rewards: list[tuple[float, str]] = []
        for question, future in zip(batch, futures, strict=True):
            sequences = future.result().sequences
            texts = [tokenizer.decode(s.tokens, skip_special_tokens=True).strip() for s in sequences]
            group = [question.reward(t, s.stop_reason == "stop") for t, s in zip(texts, sequences, strict=True)]
            rewards += zip(group, texts, strict=True)
            data += _group_data(question, sequences, group)
        if data:
            passed = training.forward_backward(_mean(data), "importance_sampling")
            rate = plan.learning_rate * (1 - (number - 1) / plan.steps)
            training.optim_step(AdamParams(learning_rate=rate, grad_clip_norm=1.0)).result()
            passed.result()
        mean = sum(reward for reward, _ in rewards) / len(rewards)
        steps.append(RlStep(number, mean, max(rewards)[1], len(data)))
        show(steps[-1])
    return steps


def _seed(plan: RlPlan, step: int, index: int) -> int:
    return (plan.seed * 1000 + step) * 1000 + index


def _group_data(question: Question, sequences: Sequence[Any], rewards: Sequence[float]) -> list[Datum]:
    """Return the samples of one group that were better or worse than its mean; prompt tokens get advantage 0."""
    mean = sum(rewards) / len(rewards)
    data = []
    for sequence, reward in zip(sequences, rewards, strict=True):
        if abs(reward - mean) < 1e-9:
            continue
        tokens = [*question.tokens, *sequence.tokens]
        before = [0.0] * (len(question.tokens) - 1)
        data.append(
            Datum(
                model_input=ModelInput.from_ints(tokens[:-1]),
                loss_fn_inputs={
                    "target_tokens": tokens[1:],
                    "logprobs": before + list(sequence.logprobs),
                    "advantages": before + [reward - mean] * len(sequence.tokens),
                },
            )
        )
    return data


def _mean(data: list[Datum]) -> list[Datum]:
    """Scale the advantages so that the sum that the server computes is a mean over samples."""
    import numpy as np

    return [
        datum.replace(
            loss_fn_inputs=datum.loss_fn_inputs
            | {"advantages": np.asarray(datum.loss_fn_inputs["advantages"].to_numpy(), np.float32) / len(data)}
        )
        for datum in data
    ]

"""Penalties, bias and masks against a plain reference in float64, and independent of the batch."""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np
import pytest
import torch
from support.draw_reference import reference_probs

from tinsmith.engine.sampling.draw import DrawRule, draw_from
from tinsmith.engine.sampling.logit_changes import DrawnTokens, RowChanges, logit_rule
from tinsmith.wire.messages.sampling import SamplingParams

VOCABULARY = 300
PROMPT = [5, 7, 7, 9, 250, 5]
DRAWN = [9, 11, 11, 11, 299, 5, *range(20, 60), 11]
OPTIONS: list[dict[str, Any]] = [
    {"frequency_penalty": 0.7},
    {"frequency_penalty": -1.5},
    {"presence_penalty": 1.2},
    {"presence_penalty": -2.0},
    {"repetition_penalty": 1.3},
    {"repetition_penalty": 0.6},
    {"logit_bias": {3: 2.5, 11: -4.0, 250: 100.0, 7: -100.0}},
    {
        "frequency_penalty": 0.4,
        "presence_penalty": 0.9,
        "repetition_penalty": 1.8,
        "logit_bias": {3: 1.5, 11: 3.0, 7: -2.0},
    },
]


def reference(logits: np.ndarray, options: dict[str, Any], drawn: list[int]) -> np.ndarray:
    """What the options mean, one token after another."""
    changed = logits.astype(np.float64)
    counts = Counter(drawn)
    for token in range(len(changed)):
        if token in PROMPT or token in counts:
            penalty = options.get("repetition_penalty", 1.0)
            changed[token] = changed[token] / penalty if changed[token] > 0 else changed[token] * penalty
        changed[token] -= options.get("frequency_penalty", 0.0) * counts[token]
        changed[token] -= options.get("presence_penalty", 0.0) * (counts[token] > 0)
        changed[token] += options.get("logit_bias", {}).get(token, 0.0)
    return changed


def changes(options: dict[str, Any], drawn: list[int], mask: np.ndarray | None = None) -> RowChanges:
    rule = logit_rule(SamplingParams(**options), PROMPT)
    return RowChanges(rule, DrawnTokens(rule, drawn) if rule is not None and drawn else None, mask)


@pytest.fixture
def logits() -> torch.Tensor:
    return torch.randn(4, VOCABULARY, generator=torch.Generator().manual_seed(3)) * 2


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("drawn", [[], DRAWN], ids=["first token", "later"])
def test_logits_are_those_of_the_reference(logits: torch.Tensor, options: dict[str, Any], drawn: list[int]) -> None:
    row = logits[0].clone()
    changes(options, drawn).apply(row)
    assert np.abs(row.numpy() - reference(logits[0].numpy(), options, drawn)).max() < 1e-5


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("rule", [DrawRule(), DrawRule(0.7, 20, 0.9, 0.1), DrawRule(0.0)], ids=str)
def test_what_is_drawn_follows_the_changed_row(logits: torch.Tensor, options: dict[str, Any], rule: DrawRule) -> None:
    count = 1000
    mask = np.arange(VOCABULARY) % 3 != 0
    numbers = (np.arange(count) + 0.5) / count
    change = changes(options, DRAWN, mask)
    tokens, logprobs, _ = draw_from(logits, [0] * count, [rule] * count, numbers, dict.fromkeys(range(count), change))
    expected = reference_probs(np.where(mask, reference(logits[0].numpy(), options, DRAWN), -np.inf), rule)
    assert np.abs(np.bincount(tokens.numpy(), minlength=VOCABULARY) / count - expected).max() <= 1.5 / count
    own = logits[0].double().log_softmax(0)[tokens]
    assert (logprobs.double() - own).abs().max() < 1e-5


def test_a_changed_row_does_not_depend_on_the_others_nor_change_them(logits: torch.Tensor) -> None:
    rules = [DrawRule(), DrawRule(0.8, -1, 0.9), DrawRule(1.0, -1, 1.0, 0.05), DrawRule(0.0)]
    numbers = np.random.default_rng(0).random(4)
    before = logits.clone()
    some = {1: changes(OPTIONS[-1], DRAWN), 3: changes(OPTIONS[4], DRAWN)}
    tokens, logprobs, _ = draw_from(logits, range(4), rules, numbers, some)
    assert torch.equal(logits, before)
    plain = draw_from(logits, range(4), rules, numbers)[:2]
    for i in range(4):
        alone = {0: some[i]} if i in some else {}
        token, logprob, _ = draw_from(logits[i : i + 1], [0], [rules[i]], numbers[i : i + 1], alone)
        assert (token[0], logprob[0]) == (tokens[i], logprobs[i])
        if i not in some:
            assert (plain[0][i], plain[1][i]) == (tokens[i], logprobs[i])


def test_options_without_effect_change_nothing() -> None:
    params = SamplingParams(frequency_penalty=0.0, presence_penalty=0.0, repetition_penalty=1.0, logit_bias={})
    assert logit_rule(params, PROMPT) is None


def test_the_smallest_repetition_penalty_leaves_a_distribution(logits: torch.Tensor) -> None:
    change = changes({"repetition_penalty": 5e-324}, DRAWN)
    tokens, logprobs, _ = draw_from(logits, [0], [DrawRule()], np.array([0.5]), {0: change})
    assert int(tokens[0]) in {*PROMPT, *DRAWN}
    assert np.isfinite(float(logprobs[0]))


def test_counts_grow_with_the_sample() -> None:
    rule = logit_rule(SamplingParams(repetition_penalty=1.1), PROMPT)
    assert rule is not None
    counted = DrawnTokens(rule, [*range(100), *range(50)])
    found = dict(zip(counted.tokens().tolist(), counted.counts().tolist(), strict=True))
    assert found == Counter([*range(100), *range(50)])
    assert set(counted.beyond_prompt().tolist()) == set(range(100)) - set(PROMPT)

"""Drawing tokens: compared with a simple reference, and independent of the batch."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

import numpy as np
import pytest
import torch
from support.draw_reference import reference_probs

from tinsmith.engine.sampling.draw import DrawRule, draw, draw_from, topk

VOCABULARY = 700
RULES = [
    DrawRule(),
    DrawRule(0.0),
    DrawRule(0.7),
    DrawRule(1.0, 5),
    DrawRule(1.3, -1, 0.8),
    DrawRule(1.0, 40, 0.5),
    DrawRule(2.0, -1, 0.999),
    DrawRule(0.5, VOCABULARY + 9, 1.0),
    DrawRule(1.0, 1, 1.0),
    DrawRule(1.0, -1, 1e-9),
    DrawRule(1.0, -1, 1.0, 0.1),
    DrawRule(1.5, -1, 1.0, 1.0),
    DrawRule(0.8, 30, 1.0, 0.2),
    DrawRule(2.0, -1, 0.9, 0.3),
    DrawRule(2.0, 300, 0.95, 0.05),
    DrawRule(3.0, -1, 0.999, 1e-6),
]


Draws: TypeAlias = Callable[[torch.Tensor, list[DrawRule], np.ndarray], tuple[torch.Tensor, torch.Tensor]]


def by_torch(logits: torch.Tensor, rules: list[DrawRule], numbers: np.ndarray) -> tuple[torch.Tensor, torch.Tensor]:
    return draw(logits, logits.log_softmax(1), rules, numbers)


def by_the_sampler(
    logits: torch.Tensor, rules: list[DrawRule], numbers: np.ndarray
) -> tuple[torch.Tensor, torch.Tensor]:
    return draw_from(logits, range(len(logits)), rules, numbers)[:2]


@pytest.fixture(params=[by_torch, by_the_sampler])
def drawn(request: pytest.FixtureRequest) -> Draws:
    form: Draws = request.param
    return form


@pytest.fixture
def logits() -> torch.Tensor:
    return torch.randn(len(RULES), VOCABULARY, generator=torch.Generator().manual_seed(3)) * 2


@pytest.mark.parametrize("rule", RULES, ids=str)
def test_frequencies_are_those_of_the_distribution(drawn: Draws, rule: DrawRule, logits: torch.Tensor) -> None:
    count = 4000
    numbers = (np.arange(count) + 0.5) / count  # every quantile once: no chance in the test
    tokens, _ = drawn(logits[:1].repeat(count, 1), [rule] * count, numbers)
    found = np.bincount(tokens.numpy(), minlength=VOCABULARY) / count
    expected = reference_probs(logits[0].numpy(), rule)
    assert np.abs(found - expected).max() <= 1.5 / count
    assert set(np.flatnonzero(found)) <= set(np.flatnonzero(expected))


def test_logprobs_are_the_models_own(drawn: Draws, logits: torch.Tensor) -> None:
    tokens, logprobs = drawn(logits, RULES, np.linspace(0, 0.99, len(RULES)))
    expected = logits.double().log_softmax(1).gather(1, tokens.unsqueeze(1)).squeeze(1)
    assert (logprobs.double() - expected).abs().max() < 1e-5


def test_a_row_does_not_depend_on_the_others(drawn: Draws, logits: torch.Tensor) -> None:
    numbers = np.random.default_rng(0).random(len(RULES))
    tokens, logprobs = drawn(logits, RULES, numbers)
    for i, rule in enumerate(RULES):
        token, logprob = drawn(logits[i : i + 1], [rule], numbers[i : i + 1])
        assert token[0] == tokens[i]
        assert logprob[0] == logprobs[i]
    swapped, _ = drawn(logits.flip(0), RULES[::-1], numbers[::-1].copy())
    assert torch.equal(swapped.flip(0), tokens)


def test_a_row_of_a_real_vocabulary_does_not_depend_on_the_others(drawn: Draws) -> None:
    logits = torch.randn(16, 49152, generator=torch.Generator().manual_seed(1)) * 3
    rules = [DrawRule(), DrawRule(0.9), DrawRule(1.0, 50), DrawRule(1.0, -1, 0.95)] * 4
    numbers = np.random.default_rng(0).random(16)
    tokens, logprobs = drawn(logits, rules, numbers)
    for i in range(16):
        token, logprob = drawn(logits[i : i + 1], [rules[i]], numbers[i : i + 1])
        assert (token[0], logprob[0]) == (tokens[i], logprobs[i])


@pytest.mark.parametrize("number", [0.0, 1 - 2.0**-53])
@pytest.mark.parametrize("temperature", [1e-45, 1e-6, 1.0, 1e6])
def test_extremes_stay_inside_the_support(drawn: Draws, number: float, temperature: float) -> None:
    logits = torch.full((1, 300), -torch.inf)
    logits[0, [7, 290]] = torch.tensor([1.0, 2.0])
    for rule in (DrawRule(temperature), DrawRule(temperature, 5), DrawRule(temperature, -1, 0.9999)):
        tokens, logprobs = drawn(logits, [rule], np.array([number]))
        assert tokens.item() in (7, 290)
        assert torch.isfinite(logprobs).all()


def test_temperature_zero_takes_the_first_of_equals(drawn: Draws) -> None:
    logits = torch.zeros(1, 50)
    logits[0, [11, 31]] = 5.0
    tokens, _ = drawn(logits, [DrawRule(0.0)], np.array([0.99]))
    assert tokens.item() == 11


def test_flat_distributions_use_the_whole_nucleus(drawn: Draws) -> None:
    numbers = (np.arange(2000) + 0.5) / 2000
    tokens, _ = drawn(torch.zeros(2000, 1000), [DrawRule(1.0, -1, 0.9)] * 2000, numbers)
    assert len(set(tokens.tolist())) == 900


@pytest.mark.parametrize(("top_p", "kept"), [(0.25, 1), (0.5, 2), (0.75, 3), (0.5 + 1e-9, 3)])
def test_a_nucleus_that_is_reached_exactly_has_no_token_more(drawn: Draws, top_p: float, kept: int) -> None:
    numbers = (np.arange(400) + 0.5) / 400
    tokens, _ = drawn(torch.zeros(400, 4), [DrawRule(1.0, -1, top_p)] * 400, numbers)  # each has a quarter
    assert len(set(tokens.tolist())) == kept


def test_topk_lists_the_likeliest_first(logits: torch.Tensor) -> None:
    tokens, values = topk(logits.log_softmax(1), 4)
    assert tokens[0].tolist() == logits[0].argsort(descending=True)[:4].tolist()
    assert (values.diff(dim=1) <= 0).all()
    assert topk(torch.zeros(1, 3), 9)[0].shape == (1, 3)


def test_rows_can_be_drawn_from_more_than_once(logits: torch.Tensor) -> None:
    rows, rules = [3, 0, 3, 7, 0], [DrawRule(), DrawRule(0.0), DrawRule(1.0, 5), DrawRule(0.7), DrawRule()]
    numbers = np.random.default_rng(0).random(len(rows))
    tokens, logprobs, _ = draw_from(logits, rows, rules, numbers)
    alone, scores = by_torch(logits[rows], rules, numbers)
    assert torch.equal(tokens, alone)
    assert (logprobs - scores).abs().max() < 1e-5


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_what_is_not_finite_gives_no_finite_logprob(drawn: Draws, value: float) -> None:
    logits = torch.zeros(2, 600)
    logits[1, 300] = value
    tokens, logprobs = drawn(logits, [DrawRule(), DrawRule()], np.array([0.5, 0.5]))
    assert logprobs.isfinite().tolist() == [True, False]
    assert ((tokens >= 0) & (tokens < 600)).all()


@pytest.mark.parametrize(("top_p", "kept"), [(0.25, 1), (0.5, 2), (0.75, 3), (0.5 + 1e-9, 3)])
@pytest.mark.parametrize("top_k", [-1, 4])
def test_a_nucleus_that_reaches_the_limit_exactly_ends_there(drawn: Draws, top_p: float, kept: int, top_k: int) -> None:
    """Four tokens of a quarter each: the second brings the sum to one half, and top-p 0.5 needs no third."""
    count = 64
    numbers = (np.arange(count) + 0.5) / count
    tokens, _ = drawn(torch.zeros(count, 4), [DrawRule(1.0, top_k, top_p)] * count, numbers)
    assert len(set(tokens.tolist())) == kept

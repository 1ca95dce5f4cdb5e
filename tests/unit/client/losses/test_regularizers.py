"""Terms on logprobs: values by hand, gradients by finite differences, estimates against whole distributions."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tinsmith.client.losses.custom_loss import gradients
from tinsmith.client.losses.regularizers import KL, L1, L2, Entropy, Regularizer, compose
from tinsmith.errors import InvalidInputError
from tinsmith.wire.values.inputs import Datum, ModelInput
from tinsmith.wire.values.tensors import TensorData

P, Q = [-1.0, -0.5, -2.0], [-1.5, -0.25, -2.0]
BASE = "base_logprobs"  # a reference that the tokens were not sampled from


def datum(length: int = 3, **inputs: list[float]) -> Datum:
    tensors = {key: np.array(values, np.float32) for key, values in inputs.items()}
    return Datum(ModelInput.from_ints(list(range(length))), {"target_tokens": list(range(length)), **tensors})


def logprobs_of(values: Any) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64, requires_grad=True)


def gradient_of(term: Regularizer, item: Datum, values: Any) -> list[float]:
    logprobs = logprobs_of(values)
    return list(torch.autograd.grad(term.measure(item, logprobs), logprobs)[0].tolist())


def by_hand(formula: Any) -> tuple[float, list[float]]:
    """The sum of a function of (p, q) over the tokens, and its derivative by central differences."""
    pairs = list(zip(P, Q, strict=True))
    slopes = [(formula(p + 1e-6, q) - formula(p - 1e-6, q)) / 2e-6 for p, q in pairs]
    return sum(formula(p, q) for p, q in pairs), slopes


def k2(p: float, q: float) -> float:
    return (p - q) ** 2 / 2


def k3(p: float, q: float) -> float:
    return math.exp(q - p) - 1 - (q - p)


def weighted(log_weight: float) -> float:
    """w log w - w + 1, for w = exp(log_weight)."""
    return math.exp(log_weight) * log_weight - math.exp(log_weight) + 1


def symmetric(p: float, q: float) -> float:
    return (k3(q, p) + weighted(p - q)) / 2


@pytest.mark.parametrize(
    ("term", "value", "gradient"),
    [
        (L1(1.0), lambda p, q: abs(p), lambda p, q: abs(p)),
        (L2(1.0), lambda p, q: p * p, lambda p, q: p * p),
        (Entropy(1.0), lambda p, q: -p, lambda p, q: -p * p / 2),
        (KL(1.0), lambda p, q: k3(q, p), lambda p, q: k3(q, p)),
        (KL(1.0, "reverse"), lambda p, q: weighted(p - q), lambda p, q: weighted(p - q)),
        (KL(1.0, "reverse", BASE), k3, k2),
        (KL(1.0, "forward", BASE), lambda p, q: weighted(q - p), k3),
        (KL(1.0, "symmetric"), symmetric, symmetric),
    ],
    ids=lambda value: getattr(value, "__name__", type(value).__name__),
)
def test_values_and_gradients_follow_their_formulas(term: Regularizer, value: Any, gradient: Any) -> None:
    item = datum(logprobs=Q, **{BASE: Q})
    assert term.measure(item, logprobs_of(P)).item() == pytest.approx(by_hand(value)[0], rel=1e-12)
    assert gradient_of(term, item, P) == pytest.approx(by_hand(gradient)[1], rel=1e-6, abs=1e-9)


@pytest.mark.parametrize(
    ("term", "value", "gradient"),
    [
        (L1(1.0), 3.5, [-1, -1, -1]),
        (L2(1.0), 5.25, [-2, -1, -4]),
        (Entropy(1.0), 3.5, [1, 0.5, 2]),
        (KL(1.0), math.e**0.5 - 1.5 + math.e**-0.25 - 0.75, [math.e**0.5 - 1, math.e**-0.25 - 1, 0]),
        (KL(1.0, "reverse", BASE), math.e**-0.5 - 0.5 + math.e**0.25 - 1.25, [0.5, -0.25, 0]),
    ],
    ids=lambda value: getattr(value, "__name__", type(value).__name__),
)
def test_values_by_hand(term: Regularizer, value: float, gradient: list[float]) -> None:
    item = datum(logprobs=Q, **{BASE: Q})
    assert term.measure(item, logprobs_of(P)).item() == pytest.approx(value, rel=1e-12)
    assert gradient_of(term, item, P) == pytest.approx(gradient, rel=1e-12, abs=1e-12)


@pytest.mark.parametrize(
    "term",
    [L1(1.0), L2(1.0), KL(1.0), KL(1.0, "reverse"), KL(1.0, "symmetric")],
    ids=lambda value: getattr(value, "__name__", type(value).__name__),
)
@given(st.lists(st.tuples(st.floats(-9, -0.01), st.floats(-9, 0, width=32)), min_size=1, max_size=5))
@settings(deadline=None, max_examples=25)
def test_plain_terms_have_the_gradient_of_their_value(term: Regularizer, pairs: list[tuple[float, float]]) -> None:
    item = datum(len(pairs), logprobs=[q for _, q in pairs])
    assert torch.autograd.gradcheck(lambda p: term.measure(item, p), logprobs_of([p for p, _ in pairs]), atol=1e-4)


LOGITS, REFERENCE_LOGITS = [0.3, -1.2, 0.9, 0.1, -0.4], [-0.5, 0.2, 0.4, 1.0, -2.0]


def exact(kind: str, model: torch.Tensor, reference: torch.Tensor) -> torch.Tensor:
    """The quantity itself, from whole distributions given as logprobs."""
    reverse = (model.exp() * (model - reference)).sum()
    forward = (reference.exp() * (reference - model)).sum()
    entropy = -(model.exp() * model).sum()
    return {"entropy": entropy, "reverse": reverse, "forward": forward, "symmetric": (forward + reverse) / 2}[kind]


@pytest.mark.parametrize(
    ("term", "kind", "sampled_from"),
    [
        (Entropy(1.0), "entropy", "model"),
        *((KL(1.0, kind), kind, "reference") for kind in ("forward", "reverse", "symmetric")),
        *((KL(1.0, kind, BASE), kind, "model") for kind in ("forward", "reverse", "symmetric")),
    ],
    ids=lambda value: getattr(value, "__name__", type(value).__name__),
)
def test_value_and_gradient_are_unbiased(term: Regularizer, kind: str, sampled_from: str) -> None:
    """The average over every token of a vocabulary, as probable as its sampling makes it, is the exact quantity."""
    logits = logprobs_of(LOGITS)
    reference = torch.tensor(REFERENCE_LOGITS, dtype=torch.float64).log_softmax(0)
    model = logits.log_softmax(0)
    probabilities = (model if sampled_from == "model" else reference).detach().exp()
    data = [datum(1, **{"logprobs": [q], BASE: [q]}) for q in reference.tolist()]
    estimates = torch.stack([term.measure(item, p.reshape(1)) for item, p in zip(data, model, strict=True)])
    average = (estimates * probabilities).sum()
    wanted = exact(kind, model, reference)
    (gradient,) = torch.autograd.grad(average, logits, retain_graph=True)
    (wanted_gradient,) = torch.autograd.grad(wanted, logits)
    # The wire holds references as float32, hence not more digits.
    assert average.item() == pytest.approx(wanted.item(), abs=1e-6)
    torch.testing.assert_close(gradient, wanted_gradient, rtol=0, atol=1e-6)
    assert wanted_gradient.abs().max() > 0.01


def test_the_naive_gradients_would_be_wrong() -> None:
    """Why value and gradient are kept apart: k1's own gradient is zero on average, k3's that of the other direction."""
    logits = logprobs_of(LOGITS)
    reference = torch.tensor(REFERENCE_LOGITS, dtype=torch.float64).log_softmax(0)
    model = logits.log_softmax(0)
    probabilities = model.detach().exp()
    averages = {"k1": model - reference, "k3": (reference - model).expm1() - (reference - model)}
    slopes = {
        name: torch.autograd.grad((value * probabilities).sum(), logits, retain_graph=True)[0]
        for name, value in averages.items()
    }
    (forward,) = torch.autograd.grad(exact("forward", model, reference), logits)
    torch.testing.assert_close(slopes["k1"], torch.zeros(5, dtype=torch.float64))
    torch.testing.assert_close(slopes["k3"], forward)


@pytest.mark.parametrize("kind", ["forward", "reverse", "symmetric"])
@pytest.mark.parametrize("reference", ["logprobs", BASE])
def test_kl_keeps_its_digits_near_the_reference(kind: Any, reference: str) -> None:
    difference = float(np.float32(-1.0) - np.float32(-1.0001))
    item = datum(1, **{reference: [-1.0001]})
    value = KL(1.0, kind, reference).measure(item, torch.tensor([-1.0]))
    assert value.item() == pytest.approx(difference**2 / 2, rel=5e-3)


TERMS = [
    L1(1.0),
    L2(1.0),
    Entropy(1.0),
    KL(1.0),
    KL(1.0, "reverse"),
    KL(1.0, "reverse", BASE),
    KL(1.0, "forward", BASE),
]


@pytest.mark.parametrize("term", TERMS, ids=lambda value: getattr(value, "__name__", type(value).__name__))
def test_tokens_of_no_weight_do_not_count(term: Regularizer) -> None:
    item = datum(4, weights=[1, 0, 2.5, 0], logprobs=[-1, -9, -1, -9], **{BASE: [-1, -9, -1, -9]})
    short = datum(2, logprobs=[-1, -1], **{BASE: [-1, -1]})
    value = term.measure(item, logprobs_of([-0.5, -3.0, -2.0, -math.inf]))
    assert value.item() == pytest.approx(term.measure(short, logprobs_of([-0.5, -2.0])).item(), rel=1e-12)
    gradient = gradient_of(term, item, [-0.5, -3.0, -2.0, -math.inf])
    assert gradient[1] == gradient[3] == 0
    assert gradient[::2] == pytest.approx(gradient_of(term, short, [-0.5, -2.0]), rel=1e-12)


def test_the_mask_can_have_another_name() -> None:
    item = datum(2, weights=[0, 1], mask=[1, 0])
    assert L1(1.0, mask="mask").measure(item, logprobs_of([-1, -4])).item() == 1
    assert L1(1.0).measure(item, logprobs_of([-1, -4])).item() == 4


@pytest.mark.parametrize(
    "term", [KL(1.0), KL(1.0, "symmetric", BASE)], ids=lambda value: getattr(value, "__name__", type(value).__name__)
)
def test_tokens_without_a_reference_do_not_count(term: KL) -> None:
    item = datum(3, **{term.reference: [math.nan, -1.0, math.nan]})
    only = datum(1, **{term.reference: [-1.0]})
    values = [-3.0, -0.5, -math.inf]
    assert term.measure(item, logprobs_of(values)).item() == term.measure(only, logprobs_of([-0.5])).item()
    assert gradient_of(term, item, values) == [0, *gradient_of(term, only, [-0.5]), 0]


def plain_loss(data: list[Datum], logprobs: list[torch.Tensor]) -> Any:
    return -torch.stack([tensor.sum() for tensor in logprobs]).sum(), {"mine": 1.0}


def test_a_datum_without_the_reference_adds_nothing() -> None:
    data = [datum(1, logprobs=[-1.0]), datum(1)]
    loss, metrics = compose(plain_loss, KL(2.0))(data, [logprobs_of([-0.5]), logprobs_of([-0.5])])
    alone = KL(2.0).measure(data[0], logprobs_of([-0.5])).item()
    assert (loss.item(), metrics["kl_forward/value:sum"]) == pytest.approx((1.0 + 2 * alone, alone))


def test_a_reference_that_no_datum_has_is_an_error() -> None:
    with pytest.raises(InvalidInputError, match=r"kl_forward_typo: no datum has loss_fn_inputs\['typo'\]"):
        compose(plain_loss, KL(1.0, reference="typo"))([datum(1, logprobs=[-1.0])], [logprobs_of([-1.0])])


def test_compose_adds_the_terms_and_reports_each() -> None:
    data = [datum(logprobs=Q), datum(2, logprobs=[-1.0, -1.0])]
    terms = [L1(0.5), L2(0.25), Entropy(0.1), KL(2.0, "reverse")]
    tensors = [logprobs_of(P), logprobs_of([-0.5, -3.0])]
    loss, metrics = compose(plain_loss, *terms)(data, tensors)
    expected = 3.5 + 3.5
    for term in terms:
        fresh = [logprobs_of(P), logprobs_of([-0.5, -3.0])]
        value = torch.stack([term.measure(item, p) for item, p in zip(data, fresh, strict=True)]).sum()
        slopes = torch.cat(torch.autograd.grad(value, fresh))
        expected += term.scale * value.item()
        assert metrics[f"{term.name}/value:sum"] == pytest.approx(value.item(), rel=1e-12)
        norm = abs(term.scale) * slopes.norm().item()
        assert metrics[f"{term.name}/grad_norm:mean"] == pytest.approx(norm, rel=1e-12)
    assert loss.item() == pytest.approx(expected, rel=1e-12)
    assert (metrics["mine"], len(metrics), Entropy(0.1).scale) == (1.0, 1 + 2 * len(terms), -0.1)


def test_a_composed_loss_trains() -> None:
    data = [datum(logprobs=Q), datum(1, logprobs=[-1.0])]
    outputs = [{"logprobs": TensorData.from_numpy(np.array(row, np.float32))} for row in (P, [-1.0])]
    custom = gradients(compose(plain_loss, L2(0.5), KL(2.0)), data, outputs)
    expected = -1 + np.array(P) + 2 * np.expm1(np.array(P) - np.array(Q))
    assert custom.gradients[0] == pytest.approx(expected, rel=1e-5)
    assert custom.gradients[1].tolist() == [-2.0]


def test_composed_losses_compose() -> None:
    composed, call = compose(compose(plain_loss, L1(1.0)), L2(1.0)), ([datum()], [logprobs_of(P)])
    assert composed(*call) == compose(plain_loss, L1(1.0), L2(1.0))(*call)
    assert compose(plain_loss)(*call) == plain_loss(*call)


def test_each_name_is_used_once() -> None:
    with pytest.raises(InvalidInputError, match="two are named 'l1'"):
        compose(plain_loss, L1(1.0), L1(2.0))
    twice = compose(compose(plain_loss, L1(1.0)), L1(2.0))
    with pytest.raises(InvalidInputError, match="two metrics are named 'l1/grad_norm:mean'"):
        twice([datum()], [logprobs_of(P)])
    names = [KL(1.0, kind, reference).name for kind in ("forward", "reverse") for reference in ("logprobs", BASE)]
    assert len(set(names)) == 4


@dataclass(frozen=True)
class Largest:
    scale: float
    name: str = "largest"

    def measure(self, datum: Datum, logprobs: torch.Tensor) -> torch.Tensor:
        return logprobs.max()


def test_terms_of_ones_own_compose_too() -> None:
    loss, metrics = compose(plain_loss, Largest(4.0))([datum()], [logprobs_of(P)])
    assert loss.item() == 3.5 + 4 * -0.5
    assert (metrics["largest/value:sum"], metrics["largest/grad_norm:mean"]) == (-0.5, 4.0)
    _, metrics = compose(plain_loss, Largest(4.0))([datum()], [torch.tensor(P)])
    assert metrics["largest/grad_norm:mean"] == 0.0


def test_rows_of_candidates_have_norms_but_no_entropy() -> None:
    item = Datum(ModelInput.from_ints([1]), {"target_tokens": np.array([[1, 2]])})
    assert L2(1.0).measure(item, logprobs_of([[-1.0, -2.0]])).item() == 5
    for term in (Entropy(1.0), KL(1.0)):
        with pytest.raises(InvalidInputError, match=r"needs one sampled token per position, got .* shape \(1, 2\)"):
            term.measure(item, logprobs_of([[-1.0, -2.0]]))


def test_wrong_arguments_are_explained() -> None:
    for wrong in (math.nan, math.inf, "1", None):
        for term in (L1, KL):
            with pytest.raises(InvalidInputError, match=f"{term.__name__}: coefficient must be a finite number"):
                term(wrong)  # type: ignore[arg-type]
    with pytest.raises(InvalidInputError, match="kind is 'backward'; allowed are"):
        KL(1.0, "backward")  # type: ignore[arg-type]
    with pytest.raises(InvalidInputError, match=r"loss_fn_inputs\['base'\]: has shape \(2,\) for logprobs \(3,\)"):
        KL(1.0, reference="base").measure(datum(3, base=[1, 2]), logprobs_of(P))

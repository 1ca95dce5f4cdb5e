"""Terms to add to your own loss: L1, L2, entropy and KL on the logprobs of the tokens, and `compose`.

    loss_fn = compose(my_loss, KL(0.1), Entropy(0.01))
    training_client.forward_backward_custom(data, loss_fn)

Notation: x is a token of the data, p its logprob under the model in training, q its logprob under a reference. Sums run
over the tokens that count: those whose entry in the loss input `mask` ("weights" by default) is not zero, or
all where a datum has no such input.

The distributions themselves are not here, only the logprobs of tokens that were sampled. Entropy and KL are therefore
estimated, and an estimator with the right value need not have the right gradient: its gradient leaves out how the
sampling depends on the model. Each term below says what its value and its gradient estimate, and under which sampling;
both are unbiased then, which tests/unit/client/losses/test_regularizers.py checks by summing over a whole vocabulary.

`custom_loss` runs the composed loss.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Protocol, TypeAlias, get_args

from tinsmith.client.losses.custom_loss import LossFn
from tinsmith.errors import InvalidInputError
from tinsmith.text.optional_packages import import_torch
from tinsmith.wire.values.inputs import Datum

if TYPE_CHECKING:
    import torch

Kind: TypeAlias = Literal["forward", "reverse", "symmetric"]

SAMPLER_LOGPROBS = "logprobs"
"""The loss input that holds the logprobs of the tokens under the policy that they were sampled from."""


class Regularizer(Protocol):
    """A term of a loss: `scale` times the sum of what `measure` gives for each datum."""

    @property
    def name(self) -> str:
        """What its metrics are named after."""

    @property
    def scale(self) -> float:
        """What its sum is multiplied with in the loss."""

    def measure(self, datum: Datum, logprobs: torch.Tensor) -> torch.Tensor:
        """Its value for one datum: one number that can be differentiated."""


@dataclass(frozen=True, slots=True)
class _Term:
    coefficient: float
    mask: str = field(default="weights", kw_only=True)

    default_name: ClassVar[str]

    def __post_init__(self) -> None:
        if not isinstance(self.coefficient, (int, float)) or not math.isfinite(self.coefficient):
            text = f"{type(self).__name__}: coefficient must be a finite number, got {self.coefficient!r}"
            raise InvalidInputError(text, field="coefficient")

    @property
    def name(self) -> str:
        return self.default_name

    @property
    def scale(self) -> float:
        return self.coefficient


@dataclass(frozen=True, slots=True)
class L1(_Term):
    """coefficient * sum |p|. A logprob is never positive, so this is sum(-p), their cross-entropy."""

    default_name: ClassVar[str] = "l1"

    def measure(self, datum: Datum, logprobs: torch.Tensor) -> torch.Tensor:
        return _counted(datum, logprobs, self.mask).abs().sum()


@dataclass(frozen=True, slots=True)
class L2(_Term):
    """coefficient * sum p^2. Pulls unlikely tokens up hardest: the gradient 2p grows with their distance."""

    default_name: ClassVar[str] = "l2"

    def measure(self, datum: Datum, logprobs: torch.Tensor) -> torch.Tensor:
        return _counted(datum, logprobs, self.mask).square().sum()


@dataclass(frozen=True, slots=True)
class Entropy(_Term):
    """-coefficient * entropy: a positive coefficient keeps the model's distribution broad.

    For tokens sampled from the model. The value is sum(-p), the estimator k1 of the entropy E[-p]. Its own gradient,
    sum(-dp), is zero on average and would teach nothing, because the average of dp over the model's own tokens is zero.
    The gradient is that of sum(-p^2 / 2) instead, which is sum(-p dp), whose average is the gradient of the entropy.
    """

    default_name: ClassVar[str] = "entropy"

    @property
    def scale(self) -> float:
        return -self.coefficient

    def measure(self, datum: Datum, logprobs: torch.Tensor) -> torch.Tensor:
        p = _counted(datum, _one_per_token(logprobs, self.name), self.mask)
        return _with_gradient_of(-p.square() / 2, -p).sum()


@dataclass(frozen=True, slots=True)
class KL(_Term):
    """coefficient * the divergence from a reference: `forward` is KL(reference || model), `reverse` is
    KL(model || reference), `symmetric` the mean of the two.

    `reference` names the loss input that holds q. Tokens without a reference (NaN there, or a datum without that input)
    do not count; that no datum has the input is an error.

    `reference="logprobs"`, the policy that the tokens were sampled from. With r = exp(p - q):

        forward   sum r - 1 - log r      the estimator k3; its gradient is sum (r - 1) dp
        reverse   sum r log r - r + 1    k1 with importance weights; its gradient is sum r (p - q) dp

    Where the tokens come from does not depend on the model here, so that value and gradient are right together. Each
    term is 0 at p = q and positive elsewhere: r - 1, which is zero on average, takes nothing from the mean and much
    from the variance.

    Any other reference, say a base model, for tokens sampled from the model in training. With w = exp(q - p):

        reverse   sum w - 1 - log w      the estimator k3; gradient of k2 = (p - q)^2 / 2, which is sum (p - q) dp
        forward   sum w log w - w + 1    gradient of k3, which is sum (1 - w) dp

    Here the gradient is not that of the value: that of k1 is zero on average, and that of k3 is the gradient of the
    forward divergence, not of the reverse one that k3 estimates.
    """

    kind: Kind = "forward"
    reference: str = SAMPLER_LOGPROBS

    def __post_init__(self) -> None:
        # Not super(): slots create a second class, and the implicit one refers to the first.
        _Term.__post_init__(self)
        if self.kind not in get_args(Kind):
            raise InvalidInputError(f"KL: kind is {self.kind!r}; allowed are {get_args(Kind)}", field="kind")

    @property
    def name(self) -> str:
        return f"kl_{self.kind}" if self.reference == SAMPLER_LOGPROBS else f"kl_{self.kind}_{self.reference}"

    def measure(self, datum: Datum, logprobs: torch.Tensor) -> torch.Tensor:
        log_ratio = _counted(datum, _one_per_token(logprobs, self.name), self.mask, self.reference)
        estimate = _kl_of_reference_tokens if self.reference == SAMPLER_LOGPROBS else _kl_of_model_tokens
        if self.kind == "symmetric":
            return (estimate(log_ratio, "forward") + estimate(log_ratio, "reverse")).sum() / 2
        return estimate(log_ratio, self.kind).sum()


def compose(loss_fn: LossFn, *regularizers: Regularizer) -> LossFn:
    """Return a loss with these terms added, for `forward_backward_custom`.

    Per term two metrics: `<name>/value:sum`, its sum before the scale, and `<name>/grad_norm:mean`, the Euclidean norm
    of the gradient of the scaled term with respect to all logprobs.
    """
    names = [term.name for term in regularizers]
    for name in names:
        if names.count(name) > 1:
            raise InvalidInputError(f"regularizers: two are named {name!r}; add their coefficients up", field=name)

    def composed(data: list[Datum], logprobs: list[torch.Tensor]) -> tuple[torch.Tensor, dict[str, Any]]:
        loss, given = loss_fn(data, logprobs)
        metrics = dict(given)
        for term in regularizers:
            _check_reference(term, data)
            value = _summed([term.measure(datum, logprobs[i]) for i, datum in enumerate(data)])
            loss = loss + term.scale * value
            added = {
                f"{term.name}/value:sum": float(value.detach()),
                f"{term.name}/grad_norm:mean": _gradient_norm(term.scale * value, logprobs),
            }
            if clash := added.keys() & metrics.keys():
                raise InvalidInputError(f"two metrics are named {min(clash)!r}: the loss has one of its own")
            metrics |= added
        return loss, metrics

    return composed


def _counted(datum: Datum, logprobs: torch.Tensor, mask: str, reference: str | None = None) -> torch.Tensor:
    """Return p, or p - q, of the tokens that count. The others are zero: no value and no gradient, even where they are
    -inf or NaN, because they are masked before any function is applied to them."""
    torch = import_torch("a regularizer")
    counts = torch.ones_like(logprobs, dtype=torch.bool)
    if mask in datum.loss_fn_inputs:
        counts &= _input(datum, mask, logprobs) != 0
    if reference is None:
        return torch.where(counts, logprobs, 0.0)  # type: ignore[no-any-return]
    if reference not in datum.loss_fn_inputs:
        return torch.zeros_like(logprobs)  # type: ignore[no-any-return]
    q = _input(datum, reference, logprobs)
    counts &= ~torch.isnan(q)
    return torch.where(counts, logprobs - q, 0.0)  # type: ignore[no-any-return]


def _input(datum: Datum, key: str, logprobs: torch.Tensor) -> torch.Tensor:
    tensor = datum.loss_fn_inputs[key].to_torch().to(logprobs)
    if tensor.shape != logprobs.shape:
        where, shapes = f"loss_fn_inputs[{key!r}]", f"{tuple(tensor.shape)} for logprobs {tuple(logprobs.shape)}"
        raise InvalidInputError(f"{where}: has shape {shapes}", field=where)
    return tensor


def _kl_of_reference_tokens(log_ratio: torch.Tensor, kind: Literal["forward", "reverse"]) -> torch.Tensor:
    """Per token, for tokens from the reference; see `KL`. expm1 keeps the digits that r - 1 loses near p = q."""
    excess = log_ratio.expm1()
    return excess - log_ratio if kind == "forward" else (excess + 1) * log_ratio - excess


def _kl_of_model_tokens(log_ratio: torch.Tensor, kind: Literal["forward", "reverse"]) -> torch.Tensor:
    """Per token, for tokens from the model; see `KL`."""
    excess = (-log_ratio).expm1()
    k3 = excess + log_ratio
    if kind == "reverse":
        return _with_gradient_of(log_ratio.square() / 2, k3)
    return _with_gradient_of(k3, -(excess + 1) * log_ratio - excess)


def _with_gradient_of(surrogate: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    """Return a tensor with the value of `value` and the gradient of `surrogate`."""
    return value.detach() + (surrogate - surrogate.detach())


def _one_per_token(logprobs: torch.Tensor, name: str) -> torch.Tensor:
    if logprobs.dim() != 1:
        shape = tuple(logprobs.shape)
        raise InvalidInputError(f"{name}: needs one sampled token per position, got logprobs of shape {shape}")
    return logprobs


def _check_reference(term: Regularizer, data: Sequence[Datum]) -> None:
    if isinstance(term, KL) and not any(term.reference in datum.loss_fn_inputs for datum in data):
        where = f"loss_fn_inputs[{term.reference!r}]"
        raise InvalidInputError(f"{term.name}: no datum has {where}, the reference to measure from", field=where)


def _summed(values: Sequence[torch.Tensor]) -> torch.Tensor:
    total = values[0]
    for value in values[1:]:
        total = total + value
    return total


def _gradient_norm(term: torch.Tensor, logprobs: Sequence[torch.Tensor]) -> float:
    if not term.requires_grad:
        return 0.0
    torch = import_torch("a regularizer")
    found = torch.autograd.grad(term, list(logprobs), retain_graph=True, allow_unused=True)
    return math.sqrt(sum(float(gradient.square().sum()) for gradient in found if gradient is not None))

"""Which optimizer steps are valid: the one rule set that server and engine apply.

Within these ranges no factor of a step overflows float32, the format of weights and optimizer state: the learning rate
times the weight decay is at most 1e30, and the bias correction divides the learning rate by no less than 2**-53.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from tinsmith.errors import InvalidInputError
from tinsmith.wire.messages.training import AdamParams, OptimStepRequest

MOST = 1e15
"""The largest learning rate, weight decay and eps."""
LEAST_EPS = 2.0**-149
"""The smallest positive float32. An eps below it rounds to 0, and a parameter without a gradient becomes 0 / 0."""

_NOT_NEGATIVE: tuple[Callable[[float], bool], str] = (
    lambda value: 0 <= value <= MOST,
    f"0 or more and at most {MOST:g}",
)
_BETA: tuple[Callable[[float], bool], str] = (lambda value: 0 <= value < 1, "at least 0 and below 1")
RANGES: Mapping[str, tuple[Callable[[float], bool], str]] = {
    "learning_rate": _NOT_NEGATIVE,
    "beta1": _BETA,
    "beta2": _BETA,
    "eps": (lambda value: LEAST_EPS <= value <= MOST, f"above 0, large enough for float32 and at most {MOST:g}"),
    "weight_decay": _NOT_NEGATIVE,
    "grad_clip_norm": (lambda value: 0 <= value < float("inf"), "0 (no clipping) or more"),
}
"""For each field: whether a value is allowed, and the allowed range in words."""


def adam_params(request: OptimStepRequest) -> AdamParams:
    """Return a step's AdamW parameters, checked; refuse a step of another optimizer."""
    if request.adam_params is None:
        raise InvalidInputError(
            "optimizer_params: this server has no Dimuon, because its definition is not public; send adam_params",
            field="optimizer_params",
        )
    check_adam(request.adam_params)
    return request.adam_params


def check_adam(params: AdamParams) -> None:
    """Refuse parameters that are out of range, naming the field, the value and what is allowed."""
    for name, (is_allowed, allowed) in RANGES.items():
        value = getattr(params, name)
        if not is_allowed(value):
            field = f"adam_params.{name}"
            raise InvalidInputError(f"{field}: {value!r} is not allowed; it must be {allowed}", field=field)

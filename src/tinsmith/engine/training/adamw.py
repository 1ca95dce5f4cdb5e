"""AdamW for one adapter: decoupled weight decay, clipping by the global norm, state in float32.

The arithmetic is that of `torch.optim.AdamW`, one tensor at a time. A step is planned first, on copies, and committed
only if all of its results are finite: a step that overflows changes nothing.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import NoReturn

import torch
from torch import Tensor

from tinsmith.engine.lora import is_finite
from tinsmith.errors import InvalidInputError, NonFiniteError
from tinsmith.wire.messages.training import AdamParams
from tinsmith.wire.rules import optim_metrics
from tinsmith.wire.rules.adam_rules import check_adam

MOMENTS = ("m", "v")
MAX_STEPS = 2**53
"""The largest step count that is accepted: whole numbers up to here are exact as a float metric."""


@dataclass(frozen=True, slots=True)
class PlannedStep:
    """A step that can be committed, as long as nothing else changes the parameters, gradients or state."""

    params: Mapping[str, Tensor]
    grads: Mapping[str, Tensor]
    settings: AdamParams
    scale: float
    metrics: dict[str, float]

    def gradient(self, name: str) -> Tensor:
        """Return a parameter's gradient, clipped."""
        grad = self.grads[name].to(torch.float32)
        return grad * self.scale if self.scale != 1.0 else grad


class AdamW:
    """The optimizer of one adapter. The names and order of the parameters are fixed when it is created."""

    def __init__(self, params: Mapping[str, Tensor]) -> None:
        self.steps = 0
        self._m = {name: torch.zeros_like(param, dtype=torch.float32) for name, param in params.items()}
        self._v = {name: torch.zeros_like(param, dtype=torch.float32) for name, param in params.items()}

    def step(self, params: Mapping[str, Tensor], grads: Mapping[str, Tensor], settings: AdamParams) -> dict[str, float]:
        """Update the parameters in place and return the metrics (`optim_metrics`). If this raises, nothing changes."""
        planned = self.plan(params, grads, settings)
        self.commit(planned)
        return planned.metrics

    @torch.no_grad()
    def plan(self, params: Mapping[str, Tensor], grads: Mapping[str, Tensor], settings: AdamParams) -> PlannedStep:
        """Return a step whose results are known to be finite, with its metrics. Nothing is changed yet.

        Every tensor's update is computed on a copy and discarded: keeping them would take three times the adapter's
        memory.
        """
        check_adam(settings)
        self._check_names(params, "params")
        self._check_names(grads, "grads")
        norm = global_norm(grads)
        if not math.isfinite(norm):
            _refuse_gradient(grads)
        limit = settings.grad_clip_norm
        scale = limit / norm if 0 < limit < norm else 1.0
        planned = PlannedStep(params, grads, settings, scale, {})
        changes = []
        for name, param in params.items():
            after, m, v = param.clone(), self._m[name].clone(), self._v[name].clone()
            _update(after, m, v, planned.gradient(name), settings, self.steps + 1)
            change = _square_sum(param.sub(after))
            if not (math.isfinite(change) and is_finite(after) and is_finite(m) and is_finite(v)):
                _refuse_update(name, norm, settings)
            changes.append(change)
        planned.metrics.update(
            {
                optim_metrics.GRAD_NORM: norm,
                optim_metrics.UPDATE_NORM: math.sqrt(math.fsum(changes)),
                optim_metrics.LEARNING_RATE: settings.learning_rate,
                optim_metrics.STEP: float(self.steps + 1),
            }
        )
        return planned

    @torch.no_grad()
    def commit(self, planned: PlannedStep) -> None:
        """Apply a planned step in place. If this raises, the parameters may be half changed."""
        self.steps += 1
        for name, param in planned.params.items():
            gradient = planned.gradient(name)
            _update(param, self._m[name], self._v[name], gradient, planned.settings, self.steps)

    def state(self) -> dict[str, Tensor]:
        """Return the state to resume from: `m.<parameter>`, `v.<parameter>`, `step`. The tensors are not copied."""
        moments = {f"{kind}.{name}": value for kind in MOMENTS for name, value in self._moment(kind).items()}
        return moments | {"step": torch.tensor(self.steps, dtype=torch.int64)}

    def load_state(self, state: Mapping[str, Tensor]) -> None:
        """Load what `state` returned. Raise, and change nothing, if it belongs to other parameters."""
        expected = {key: value.shape for key, value in self.state().items()}
        if set(state) != set(expected):
            names = sorted(set(state) ^ set(expected))
            raise InvalidInputError(
                f"optimizer state: {names[0][:200]!r} is unknown or missing ({len(names)} such entries in all)"
            )
        for key, shape in expected.items():
            dtype = torch.int64 if key == "step" else torch.float32
            if state[key].shape != shape or state[key].dtype != dtype:
                found = f"{state[key].dtype} {list(state[key].shape)}"
                raise InvalidInputError(f"optimizer state: {key!r} is {found}, expected {dtype} {list(shape)}")
        self._check_values(state)
        for kind in MOMENTS:
            for name, value in self._moment(kind).items():
                value.copy_(state[f"{kind}.{name}"])
        self.steps = int(state["step"])

    def _check_values(self, state: Mapping[str, Tensor]) -> None:
        """Reject a state that no step can produce: the next step would overflow."""
        if not 0 <= int(state["step"]) <= MAX_STEPS:
            raise InvalidInputError(f"optimizer state: step is {int(state['step'])}; it must be 0 to {MAX_STEPS}")
        for name in self._m:
            for kind in MOMENTS:
                if not is_finite(state[f"{kind}.{name}"]):
                    raise InvalidInputError(f"optimizer state: '{kind}.{name}' has numbers that are not finite")
            if bool((state[f"v.{name}"] < 0).any()):
                raise InvalidInputError(
                    f"optimizer state: 'v.{name}' has numbers below 0, but it holds averages of squares"
                )

    def _moment(self, kind: str) -> dict[str, Tensor]:
        return self._m if kind == "m" else self._v

    def _check_names(self, tensors: Mapping[str, Tensor], what: str) -> None:
        if tensors.keys() != self._m.keys():
            names = sorted(tensors.keys() ^ self._m.keys())
            raise InvalidInputError(f"{what}: {names[0]!r} is unknown or missing ({len(names)} such entries in all)")


def _update(param: Tensor, m: Tensor, v: Tensor, grad: Tensor, settings: AdamParams, steps: int) -> None:
    """Apply step number `steps` to one parameter, in place."""
    rate = settings.learning_rate
    param.mul_(1 - rate * settings.weight_decay)
    m.lerp_(grad, 1 - settings.beta1)
    v.mul_(settings.beta2).addcmul_(grad, grad, value=1 - settings.beta2)
    step_size = rate / (1 - settings.beta1**steps)
    correction = (1 - settings.beta2**steps) ** 0.5
    param.addcdiv_(m, (v.sqrt() / correction).add_(settings.eps), value=-step_size)


def global_norm(tensors: Mapping[str, Tensor]) -> float:
    """Return the norm of all tensors together, in double precision and always in the same order."""
    return math.sqrt(math.fsum(_square_sum(tensor) for tensor in tensors.values()))


def _square_sum(tensor: Tensor) -> float:
    return float(torch.linalg.vector_norm(tensor, dtype=torch.float64)) ** 2


def _refuse_gradient(grads: Mapping[str, Tensor]) -> NoReturn:
    bad = [name for name, grad in grads.items() if not bool(torch.isfinite(grad).all())]
    raise NonFiniteError(
        f"the gradient of {bad[0]} is NaN or infinite ({len(bad)} of {len(grads)} tensors are), so the step was not "
        "applied and nothing was changed; look for extreme logprobs, weights or advantages in the data"
    )


def _refuse_update(name: str, norm: float, settings: AdamParams) -> NoReturn:
    raise NonFiniteError(
        f"the step would make {name} or its moments larger than float32 can hold (gradient norm {norm:g}, learning "
        f"rate {settings.learning_rate:g}, weight decay {settings.weight_decay:g}), so it was not applied and nothing "
        "was changed; lower the learning_rate or weight_decay, raise eps, or clip the gradient with grad_clip_norm"
    )

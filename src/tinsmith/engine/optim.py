"""AdamW for one adapter: decoupled decay, clipping by the global norm, state in float32.

Owns: the moments and the step count, and the arithmetic, which is that of `torch.optim.AdamW` (one tensor at a time).
Does not know: where gradients come from, or checkpoints (`state` and `load_state` are what they use).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import NoReturn

import numpy as np
import torch
from torch import Tensor

from tinsmith.errors import InvalidInputError, NonFiniteError
from tinsmith.wire.training import AdamOptimizerConfig, AdamParams, DimuonOptimizerConfig, DimuonParams

MOMENTS = ("m", "v")


class AdamW:
    """The optimizer of one adapter. Names and order of the parameters are fixed when it is made."""

    def __init__(self, params: Mapping[str, Tensor]) -> None:
        self.steps = 0
        self._m = {name: torch.zeros_like(param, dtype=torch.float32) for name, param in params.items()}
        self._v = {name: torch.zeros_like(param, dtype=torch.float32) for name, param in params.items()}

    @torch.no_grad()
    def step(self, params: Mapping[str, Tensor], grads: Mapping[str, Tensor], settings: AdamParams) -> dict[str, float]:
        """Change the parameters in place; the gradients stay as they are. Nothing changes if this raises.

        The metrics are the norm of the gradient before clipping and of the change, the learning rate, and the number
        of steps done.
        """
        check_adam(settings)
        self._check_names(params, "params")
        self._check_names(grads, "grads")
        norm = global_norm(grads)
        if not math.isfinite(norm):
            _refuse_gradient(grads)
        limit = settings.grad_clip_norm
        scale = limit / norm if 0 < limit < norm else 1.0
        self.steps += 1
        changes = []
        for name, param in params.items():
            grad = grads[name].to(torch.float32)
            before = param.clone()
            self._update(name, param, grad * scale if scale != 1.0 else grad, settings)
            changes.append(_square_sum(before.sub_(param)))
        return {
            "grad_norm": norm,
            "update_norm": math.sqrt(math.fsum(changes)),
            "learning_rate": settings.learning_rate,
            "step": float(self.steps),
        }

    def _update(self, name: str, param: Tensor, grad: Tensor, settings: AdamParams) -> None:
        m, v, rate = self._m[name], self._v[name], settings.learning_rate
        param.mul_(1 - rate * settings.weight_decay)
        m.lerp_(grad, 1 - settings.beta1)
        v.mul_(settings.beta2).addcmul_(grad, grad, value=1 - settings.beta2)
        step_size = rate / (1 - settings.beta1**self.steps)
        correction = (1 - settings.beta2**self.steps) ** 0.5
        param.addcdiv_(m, (v.sqrt() / correction).add_(settings.eps), value=-step_size)

    def state(self) -> dict[str, Tensor]:
        """Everything to go on from: `m.<parameter>`, `v.<parameter>`, `step`. The tensors are the live ones."""
        moments = {f"{kind}.{name}": value for kind in MOMENTS for name, value in self._moment(kind).items()}
        return moments | {"step": torch.tensor(self.steps, dtype=torch.int64)}

    def load_state(self, state: Mapping[str, Tensor]) -> None:
        """Take over what `state` gave; refuses one of other parameters, and then changes nothing."""
        expected = {key: value.shape for key, value in self.state().items()}
        if set(state) != set(expected):
            names = sorted(set(state) ^ set(expected))
            raise InvalidInputError(f"optimizer state: {names[0]!r} is on one side only ({len(names)} such in all)")
        for key, shape in expected.items():
            dtype = torch.int64 if key == "step" else torch.float32
            if state[key].shape != shape or state[key].dtype != dtype:
                found = f"{state[key].dtype} {list(state[key].shape)}"
                raise InvalidInputError(f"optimizer state: {key!r} is {found}, expected {dtype} {list(shape)}")
        for kind in MOMENTS:
            for name, value in self._moment(kind).items():
                value.copy_(state[f"{kind}.{name}"])
        self.steps = int(state["step"])

    def _moment(self, kind: str) -> dict[str, Tensor]:
        return self._m if kind == "m" else self._v

    def _check_names(self, tensors: Mapping[str, Tensor], what: str) -> None:
        if tensors.keys() != self._m.keys():
            names = sorted(tensors.keys() ^ self._m.keys())
            raise InvalidInputError(f"{what}: {names[0]!r} is unknown or missing ({len(names)} such in all)")


def check_adam(settings: AdamParams) -> None:
    """Refuse settings that make no step; the message itself sees to it that they are finite."""
    for name in ("learning_rate", "weight_decay"):
        if getattr(settings, name) < 0:
            _refuse_setting(name, getattr(settings, name), "0 or more")
    for name in ("beta1", "beta2"):
        if not 0 <= getattr(settings, name) < 1:
            _refuse_setting(name, getattr(settings, name), "at least 0 and below 1")
    # The state is float32: a smaller eps would vanish, and 0 / 0 is what parameters without a gradient would get.
    if not np.float32(settings.eps) > 0:
        _refuse_setting("eps", settings.eps, "above 0 and large enough for float32")


def check_optimizer(config: AdamOptimizerConfig | DimuonOptimizerConfig | AdamParams | DimuonParams) -> None:
    """Refuse Dimuon, whose definition is not public (docs/decisions/0014-losses.md)."""
    if isinstance(config, (DimuonOptimizerConfig, DimuonParams)):
        raise InvalidInputError(
            "optimizer: dimuon is not computed by this server, its definition is not public; use adamw",
            field="optimizer_config",
        )


def global_norm(tensors: Mapping[str, Tensor]) -> float:
    """The norm over all tensors together, in double precision and always in the same order."""
    return math.sqrt(math.fsum(_square_sum(tensor) for tensor in tensors.values()))


def _square_sum(tensor: Tensor) -> float:
    return float(torch.linalg.vector_norm(tensor, dtype=torch.float64)) ** 2


def _refuse_gradient(grads: Mapping[str, Tensor]) -> NoReturn:
    bad = [name for name, grad in grads.items() if not bool(torch.isfinite(grad).all())]
    raise NonFiniteError(
        f"the gradient of {bad[0]} is NaN or infinite ({len(bad)} of {len(grads)} tensors are), so no step was made "
        "and nothing was changed; look for extreme logprobs, weights or advantages in the data"
    )


def _refuse_setting(name: str, value: float, allowed: str) -> NoReturn:
    raise InvalidInputError(f"adam_params.{name}: {value!r} is not allowed; it must be {allowed}", field=name)

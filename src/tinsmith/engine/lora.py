"""LoRA: the trainable low-rank parameters of one model.

Each linear gets two matrices A and B, which add `scale * (x A^T) B^T` to its output. Modules that read the same input
(q, k, v; gate, up) keep their A in one matrix, so that one product serves them all; the parameters that `parameters`
returns are views of it and are changed in place.

Shapes: T tokens, D inputs, E outputs, R rank, G modules of a group.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import linear

from tinsmith.engine.models.config import FUSED_GROUPS, GROUPS, LM_HEAD, ModelConfig
from tinsmith.errors import InvalidInputError

DEFAULT_ALPHA = 32.0
MAX_RANK = 512
ATTENTION, MLP = ("qkv", "output"), ("gate_up", "down")
"""The groups of linears (`models/config`) that `train_attn` and `train_mlp` mean."""


@dataclass(frozen=True, slots=True)
class LoraGroup:
    """A and B of the modules that share an input: one A, stacked by rows, and a B per module."""

    modules: tuple[str, ...]
    A_GRD: torch.Tensor
    Bs_ER: tuple[torch.Tensor, ...]

    def A_RD(self, index: int) -> torch.Tensor:
        """Return a view of one module's A."""
        return self.A_GRD.chunk(len(self.modules))[index]

    def zeros_like(self) -> LoraGroup:
        """Return a group of the same shapes with zeros."""
        zeros = (torch.zeros_like(B_ER) for B_ER in self.Bs_ER)
        return LoraGroup(self.modules, torch.zeros_like(self.A_GRD), tuple(zeros))


LoraGroups = dict[tuple[int | None, str], LoraGroup]
"""Groups by layer and name; the unembedding's is (None, 'lm_head')."""


class LoraAdapter:
    """Adds scale * (x A^T) B^T to the output of the linears that it covers.

    A starts uniform in [-1/sqrt(D), 1/sqrt(D)], as in PEFT (Kaiming uniform with a = sqrt(5)), drawn on the CPU from
    the seed in the order of `parameters`; B starts at zero.
    """

    def __init__(
        self,
        config: ModelConfig,
        rank: int,
        seed: int,
        train_attn: bool = True,
        train_mlp: bool = True,
        train_unembed: bool = True,
        alpha: float = DEFAULT_ALPHA,
        device: torch.device | str = "cpu",
    ) -> None:
        if isinstance(rank, bool) or not isinstance(rank, int) or not 1 <= rank <= MAX_RANK:
            raise InvalidInputError(f"rank: must be 1 to {MAX_RANK}, got {rank!r}", field="rank")
        if not (train_attn or train_mlp or train_unembed):
            raise InvalidInputError(
                "train_attn, train_mlp and train_unembed are all off: there is nothing to train", field="train_attn"
            )
        self.config = config
        self.rank = rank
        self.seed = seed
        self.train_attn, self.train_mlp, self.train_unembed = train_attn, train_mlp, train_unembed
        self.alpha = alpha
        self.groups = self._initial(torch.Generator().manual_seed(seed % 2**64), torch.device(device))
        self.grads: LoraGroups | None = None
        self._index()

    @property
    def scale(self) -> float:
        return self.alpha / self.rank

    def apply(self, layer: int | None, module: str, x_TD: torch.Tensor, y_TE: torch.Tensor) -> torch.Tensor:
        """Return y_TE plus this adapter's part; computed in place unless autograd needs y_TE."""
        pair = self._pairs.get((layer, module))
        if pair is None:
            return y_TE
        A_RD, B_ER = pair
        dtype = y_TE.dtype
        low_TR = linear(x_TD.to(dtype), A_RD.to(dtype))
        if torch.is_grad_enabled() and (low_TR.requires_grad or B_ER.requires_grad or y_TE.requires_grad):
            return torch.addmm(y_TE, low_TR, B_ER.t().to(dtype), alpha=self.scale)
        return y_TE.addmm_(low_TR, B_ER.t().to(dtype), alpha=self.scale)

    def parameters(self) -> dict[str, torch.Tensor]:
        """Return all parameters by their PEFT names, always in the same order, as views to change in place."""
        return _named(self.groups)

    def gradients(self) -> dict[str, torch.Tensor]:
        """Return the accumulated gradients under the same names; zeros before the first backward pass."""
        return _named(self._grad_buffers())

    def accumulate(self, grads: LoraGroups) -> None:
        """Add a finished request's gradients."""
        buffers = self._grad_buffers()
        for key, group in buffers.items():
            group.A_GRD.add_(grads[key].A_GRD)
            for B_ER, more_ER in zip(group.Bs_ER, grads[key].Bs_ER, strict=True):
                B_ER.add_(more_ER)

    def zero_gradients(self) -> None:
        """Reset the accumulated gradients."""
        self.grads = None

    def empty_gradients(self) -> LoraGroups:
        """Return zeros in the shape of the parameters, for one request to add to."""
        return {key: group.zeros_like() for key, group in self.groups.items()}

    def load(self, values: Mapping[str, torch.Tensor]) -> None:
        """Set all parameters, by their PEFT names; nothing changes unless every one fits."""
        parameters = self.parameters()
        if set(values) != set(parameters):
            wrong = sorted(set(values) ^ set(parameters))
            side = "is missing" if wrong[0] in parameters else "is not a weight of this adapter"
            shown = wrong[0][:200]
            raise InvalidInputError(f"adapter weight {shown} {side} ({len(wrong)} such weights in all)", field=shown)
        for name, parameter in parameters.items():
            if values[name].shape != parameter.shape:
                raise InvalidInputError(
                    f"adapter weight {name} has shape {list(values[name].shape)}, expected {list(parameter.shape)}",
                    field=name,
                )
        for name, parameter in parameters.items():
            parameter.copy_(values[name])

    def parameter_count(self) -> int:
        return sum(parameter.numel() for parameter in self.parameters().values())

    def _initial(self, generator: torch.Generator, device: torch.device) -> LoraGroups:
        keys = group_keys(self.config, self.train_attn, self.train_mlp, self.train_unembed)
        return {key: self._new_group(self.config.modules(key[1]), generator, device) for key in keys}

    def _new_group(self, modules: tuple[str, ...], generator: torch.Generator, device: torch.device) -> LoraGroup:
        inputs = self.config.module_shape(modules[0])[1]
        A_GRD = torch.empty(len(modules) * self.rank, inputs)
        A_GRD.uniform_(-1 / math.sqrt(inputs), 1 / math.sqrt(inputs), generator=generator)
        outputs = [self.config.module_shape(module)[0] for module in modules]
        return LoraGroup(
            modules, A_GRD.to(device), tuple(torch.zeros(rows, self.rank, device=device) for rows in outputs)
        )

    def _grad_buffers(self) -> LoraGroups:
        if self.grads is None:
            self.grads = self.empty_gradients()
        return self.grads

    def _index(self) -> None:
        self._pairs = {
            (layer, module): (group.A_RD(i), group.Bs_ER[i])
            for (layer, _), group in self.groups.items()
            for i, module in enumerate(group.modules)
        }


def group_keys(
    config: ModelConfig, train_attn: bool, train_mlp: bool, train_unembed: bool
) -> list[tuple[int | None, str]]:
    """Return the groups of an adapter, in the order of its parameters."""
    names = (ATTENTION if train_attn else ()) + (MLP if train_mlp else ())
    keys: list[tuple[int | None, str]] = [(layer, name) for layer in range(config.num_layers) for name in names]
    return [*keys, (None, LM_HEAD)] if train_unembed else keys


def _named(groups: LoraGroups) -> dict[str, torch.Tensor]:
    named = {}
    for (layer, _), group in groups.items():
        for i, module in enumerate(group.modules):
            prefix = peft_name(layer, module)
            named[f"{prefix}.lora_A.weight"] = group.A_RD(i)
            named[f"{prefix}.lora_B.weight"] = group.Bs_ER[i]
    return named


_MLP_MODULES = frozenset(module for groups in (GROUPS, FUSED_GROUPS) for group in MLP for module in groups[group])


def peft_name(layer: int | None, module: str) -> str:
    """Return the module's path in a PEFT checkpoint."""
    if layer is None:
        return f"base_model.model.{module}"
    block = "mlp" if module in _MLP_MODULES else "self_attn"
    return f"base_model.model.model.layers.{layer}.{block}.{module}"


def is_finite(tensor: Tensor) -> bool:
    """Return whether all numbers of a tensor are finite. Min and max suffice, and need no tensor of booleans."""
    if not tensor.numel():
        return True
    low, high = tensor.aminmax()
    return math.isfinite(float(low)) and math.isfinite(float(high))

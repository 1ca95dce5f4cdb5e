"""LoRA: the trainable low-rank parameters of one model.

Each linear gets two matrices A and B, which add `scale * (x A^T) B^T` to its output. Modules that read the same input
(q, k, v; gate, up) keep their A in one matrix, so that one product serves them all; the parameters that `parameters`
returns are views of it and are changed in place.

Shapes: T tokens, D inputs, E outputs, R rank, G modules of a group.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeAlias

import torch
from torch import Tensor
from torch.nn.functional import linear

from tinsmith.engine.models.config import FUSED_GROUPS, GROUPS, LM_HEAD, ModelConfig
from tinsmith.errors import InvalidInputError

DEFAULT_ALPHA = 32.0
MAX_RANK = 512
ATTENTION, MLP = ("qkv", "output"), ("gate_up", "down")
"""The groups of linears (`models/config`) that `train_attn` and `train_mlp` mean."""
PEFT_PREFIX = "base_model.model."
"""What PEFT puts before the paths of modules."""


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


GroupKey: TypeAlias = tuple[int | None, str]
LoraGroups = dict[GroupKey, LoraGroup]
"""Groups by layer and name; the unembedding's is (None, 'lm_head')."""


@dataclass(frozen=True, slots=True)
class GroupSpec:
    """A group before it has numbers: its modules, their names in PEFT, and their shapes."""

    key: GroupKey
    modules: tuple[str, ...]
    names: tuple[str, ...]
    inputs: int
    outputs: tuple[int, ...]


class ModuleLayout(Protocol):
    """Which linears of a base model an adapter covers, for models that no `ModelConfig` describes."""

    def group_specs(self, train_attn: bool, train_mlp: bool, train_unembed: bool) -> Sequence[GroupSpec]:
        """Return the groups in the order of the parameters; raise InvalidInputError if a switch covers nothing."""
        ...


class LoraAdapter:
    """Adds scale * (x A^T) B^T to the output of the linears that it covers.

    A starts uniform in [-1/sqrt(D), 1/sqrt(D)], as in PEFT (Kaiming uniform with a = sqrt(5)), drawn on the CPU from
    the seed in the order of `parameters`; B starts at zero.
    """

    def __init__(
        self,
        config: ModelConfig | ModuleLayout,
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
        self._specs = group_specs(config, train_attn, train_mlp, train_unembed)
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
        return with_lora(pair, self.scale, x_TD, y_TE)

    def parameters(self) -> dict[str, torch.Tensor]:
        """Return all parameters by their PEFT names, always in the same order, as views to change in place."""
        return self._named(self.groups)

    def gradients(self) -> dict[str, torch.Tensor]:
        """Return the accumulated gradients under the same names; zeros before the first backward pass."""
        return self._named(self._grad_buffers())

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
        return {spec.key: self._new_group(spec, generator, device) for spec in self._specs}

    def _new_group(self, spec: GroupSpec, generator: torch.Generator, device: torch.device) -> LoraGroup:
        A_GRD = torch.empty(len(spec.modules) * self.rank, spec.inputs)
        A_GRD.uniform_(-1 / math.sqrt(spec.inputs), 1 / math.sqrt(spec.inputs), generator=generator)
        return LoraGroup(
            spec.modules, A_GRD.to(device), tuple(torch.zeros(rows, self.rank, device=device) for rows in spec.outputs)
        )

    def _named(self, groups: LoraGroups) -> dict[str, torch.Tensor]:
        named = {}
        for spec in self._specs:
            for i, name in enumerate(spec.names):
                named[f"{name}.lora_A.weight"] = groups[spec.key].A_RD(i)
                named[f"{name}.lora_B.weight"] = groups[spec.key].Bs_ER[i]
        return named

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


def group_keys(config: ModelConfig, train_attn: bool, train_mlp: bool, train_unembed: bool) -> list[GroupKey]:
    """Return the groups of an adapter, in the order of its parameters."""
    names = (ATTENTION if train_attn else ()) + (MLP if train_mlp else ())
    keys: list[GroupKey] = [(layer, name) for layer in range(config.num_layers) for name in names]
    return [*keys, (None, LM_HEAD)] if train_unembed else keys


def group_specs(
    model: ModelConfig | ModuleLayout, train_attn: bool, train_mlp: bool, train_unembed: bool
) -> tuple[GroupSpec, ...]:
    """Return the groups of an adapter with these switches."""
    if not isinstance(model, ModelConfig):
        return tuple(model.group_specs(train_attn, train_mlp, train_unembed))
    return tuple(_spec(model, key) for key in group_keys(model, train_attn, train_mlp, train_unembed))


def _spec(config: ModelConfig, key: GroupKey) -> GroupSpec:
    modules = config.modules(key[1])
    shapes = [config.module_shape(module) for module in modules]
    names = tuple(peft_name(key[0], module) for module in modules)
    return GroupSpec(key, modules, names, shapes[0][1], tuple(outputs for outputs, _ in shapes))


_MLP_MODULES = frozenset(module for groups in (GROUPS, FUSED_GROUPS) for group in MLP for module in groups[group])


def peft_name(layer: int | None, module: str) -> str:
    """Return the module's path in a PEFT checkpoint."""
    if layer is None:
        return f"{PEFT_PREFIX}{module}"
    block = "mlp" if module in _MLP_MODULES else "self_attn"
    return f"{PEFT_PREFIX}model.layers.{layer}.{block}.{module}"


def with_lora(
    pair: tuple[torch.Tensor, torch.Tensor], scale: float, x_TD: torch.Tensor, y_TE: torch.Tensor
) -> torch.Tensor:
    """Return y_TE + scale * (x_TD A^T) B^T for one A and B; computed in place unless autograd needs y_TE."""
    A_RD, B_ER = pair
    dtype = y_TE.dtype
    low_TR = linear(x_TD.to(dtype), A_RD.to(dtype))
    if torch.is_grad_enabled() and (low_TR.requires_grad or B_ER.requires_grad or y_TE.requires_grad):
        return torch.addmm(y_TE, low_TR, B_ER.t().to(dtype), alpha=scale)
    return y_TE.addmm_(low_TR, B_ER.t().to(dtype), alpha=scale)


def is_finite(tensor: Tensor) -> bool:
    """Return whether all numbers of a tensor are finite. Min and max suffice, and need no tensor of booleans."""
    if not tensor.numel():
        return True
    low, high = tensor.aminmax()
    return math.isfinite(float(low)) and math.isfinite(float(high))

"""LoRA: the trainable low-rank parts of one tenant's model.

Owns: parameters A and B per linear, their names, their initial values, and what they add to a linear's output.
Does not know: the base weights, gradients' origin, optimizers, files.

Modules that read the same input lie in one matrix (q, k, v; gate, up), so that one product serves them all; the
parameters that others see are views of it and are changed in place.

Shapes: T tokens, D inputs, E outputs, R rank, G modules of a group.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch.nn.functional import linear

from tinsmith.engine.models.config import ModelConfig
from tinsmith.errors import InvalidInputError

DEFAULT_ALPHA = 32.0
MAX_RANK = 512
GROUPS: Mapping[str, tuple[str, ...]] = {
    "qkv": ("q_proj", "k_proj", "v_proj"),
    "output": ("o_proj",),
    "gate_up": ("gate_proj", "up_proj"),
    "down": ("down_proj",),
}
ATTENTION, MLP = ("qkv", "output"), ("gate_up", "down")
LM_HEAD = "lm_head"


@dataclass(frozen=True, slots=True)
class LoraGroup:
    """A and B of the modules that share an input: A stacked by rows, B one per module."""

    modules: tuple[str, ...]
    A_GRD: torch.Tensor
    Bs_ER: tuple[torch.Tensor, ...]

    def A_RD(self, index: int) -> torch.Tensor:
        """A of one module, a view."""
        return self.A_GRD.chunk(len(self.modules))[index]

    def map(self, change: str) -> LoraGroup:
        """The group with each tensor's `clone` or `zeros_like`."""
        make = {"clone": torch.clone, "zeros_like": torch.zeros_like}[change]
        return LoraGroup(self.modules, make(self.A_GRD), tuple(make(B_ER) for B_ER in self.Bs_ER))


LoraGroups = dict[tuple[int | None, str], LoraGroup]
"""Groups by layer and name; the unembedding's is (None, 'lm_head')."""


class LoraAdapter:
    """Adds scale * (x A^T) B^T to the output of the linears that it covers.

    A is uniform in [-1/sqrt(D), 1/sqrt(D)], as PEFT does it (Kaiming uniform with a = sqrt(5)), drawn on the CPU from
    the seed in the order of `parameters`; B is zero.
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
        """y_TE with this adapter's part added; written into y_TE unless autograd is at work."""
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
        """All parameters by their PEFT names, always in the same order; views, to be changed in place."""
        return _named(self.groups)

    def gradients(self) -> dict[str, torch.Tensor]:
        """Accumulated gradients under the same names; zeros before the first backward pass."""
        return _named(self._grad_buffers())

    def accumulate(self, grads: LoraGroups) -> None:
        """Add a finished request's gradients."""
        buffers = self._grad_buffers()
        for key, group in buffers.items():
            group.A_GRD.add_(grads[key].A_GRD)
            for B_ER, more_ER in zip(group.Bs_ER, grads[key].Bs_ER, strict=True):
                B_ER.add_(more_ER)

    def zero_gradients(self) -> None:
        """Forget what was accumulated."""
        self.grads = None

    def empty_gradients(self) -> LoraGroups:
        """Zeros in the shape of the parameters, for one request to add to."""
        return {key: group.map("zeros_like") for key, group in self.groups.items()}

    def load(self, values: Mapping[str, torch.Tensor]) -> None:
        """Set all parameters, by their PEFT names; nothing changes unless every one fits."""
        parameters = self.parameters()
        if set(values) != set(parameters):
            wrong = sorted(set(values) ^ set(parameters))
            side = "is missing" if wrong[0] in parameters else "does not belong to this adapter"
            raise InvalidInputError(f"adapter weight {wrong[0]} {side} ({len(wrong)} such in all)", field=wrong[0])
        for name, parameter in parameters.items():
            if values[name].shape != parameter.shape:
                raise InvalidInputError(
                    f"adapter weight {name} has shape {list(values[name].shape)}, needed: {list(parameter.shape)}",
                    field=name,
                )
        for name, parameter in parameters.items():
            parameter.copy_(values[name])

    def copy_frozen(self) -> LoraAdapter:
        """The adapter as it is now, for samplers: later training does not change it. It has no gradients."""
        copy = object.__new__(LoraAdapter)
        copy.__dict__.update(self.__dict__)
        copy.groups = {key: group.map("clone") for key, group in self.groups.items()}
        copy.grads = None
        copy._index()
        return copy

    def parameter_count(self) -> int:
        return sum(parameter.numel() for parameter in self.parameters().values())

    def _initial(self, generator: torch.Generator, device: torch.device) -> LoraGroups:
        names = (ATTENTION if self.train_attn else ()) + (MLP if self.train_mlp else ())
        keys: list[tuple[int | None, str]] = [
            (layer, name) for layer in range(self.config.num_layers) for name in names
        ]
        if self.train_unembed:
            keys.append((None, LM_HEAD))
        return {key: self._new_group(GROUPS.get(key[1], (LM_HEAD,)), generator, device) for key in keys}

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


def _named(groups: LoraGroups) -> dict[str, torch.Tensor]:
    named = {}
    for (layer, _), group in groups.items():
        for i, module in enumerate(group.modules):
            prefix = peft_name(layer, module)
            named[f"{prefix}.lora_A.weight"] = group.A_RD(i)
            named[f"{prefix}.lora_B.weight"] = group.Bs_ER[i]
    return named


def peft_name(layer: int | None, module: str) -> str:
    """The module's path in a PEFT checkpoint."""
    if layer is None:
        return f"base_model.model.{module}"
    block = "mlp" if module in ("gate_proj", "up_proj", "down_proj") else "self_attn"
    return f"base_model.model.model.layers.{layer}.{block}.{module}"

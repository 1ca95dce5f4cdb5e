"""Which linears of a model an adapter changes, by structure and name: attention, MLP and unembedding.

All linears inside the layers count, as with PEFT's `all-linear`. A module belongs to the MLP if its path inside its
layer says so, else to the attention if that does; what mixes tokens in other ways (state spaces, convolutions) is the
attention of its model. Linears that the forward pass reads past (it uses their weights without calling them) and
experts that are stored as one tensor cannot be changed from outside.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn

from tinsmith.engine.lora import PEFT_PREFIX, GroupSpec
from tinsmith.engine.models.config import LM_HEAD
from tinsmith.errors import InvalidInputError

MLP_PARTS = re.compile(r"mlp|ffn|feed_?forward|expert|moe|\Aff\Z|\Afc\d?\Z|\Afc_|channel_mix", re.IGNORECASE)
ATTENTION_PARTS = re.compile(
    r"attn|attention|mixer|mamba|ssm|temporal|conv|recurrent|time_mix|retention", re.IGNORECASE
)
FUSED_WITH_WEIGHTS = {
    kind: frozenset({"out_proj"}) for kind in ("falcon_h1", "falcon_mamba", "mamba", "mamba2", "nemotron_h")
}
"""By model type: modules whose weights fused kernels read. PEFT refuses adapters on them."""


@dataclass(frozen=True, slots=True)
class AdaptedModule:
    """A linear that an adapter can change; the unembedding's key is `lm_head`, others have their path."""

    key: str
    path: str
    inputs: int
    outputs: int

    def spec(self) -> GroupSpec:
        return GroupSpec((None, self.key), (self.key,), (f"{PEFT_PREFIX}{self.path}",), self.inputs, (self.outputs,))


@dataclass(frozen=True, slots=True, kw_only=True)
class AdaptedModules:
    """The modules of a model that an adapter can change, and those that it cannot."""

    architecture: str
    attention: tuple[AdaptedModule, ...]
    mlp: tuple[AdaptedModule, ...]
    unembedding: AdaptedModule
    unadapted: tuple[str, ...] = ()
    """Paths of linears that stay as they are."""
    experts: tuple[str, ...] = ()
    """Paths of experts that are stored as one tensor."""

    def group_specs(self, train_attn: bool, train_mlp: bool, train_unembed: bool) -> Sequence[GroupSpec]:
        """Return the groups of an adapter. A switch for a part that the model does not have covers nothing."""
        if train_mlp and self.experts:
            raise InvalidInputError(
                f"train_mlp: {self.architecture} runs through transformers, which stores its experts "
                f"({self.experts[0]}, {len(self.experts)} such modules in all) as one tensor that adapters cannot "
                "change; create the model with train_mlp=False",
                field="train_mlp",
            )
        parts = (self.attention if train_attn else ()) + (self.mlp if train_mlp else ())
        specs = [module.spec() for module in (*parts, *((self.unembedding,) if train_unembed else ()))]
        if not specs:
            raise InvalidInputError(
                f"train_attn, train_mlp: {self.architecture} has no linear modules in this part; there is nothing to "
                "train",
                field="train_mlp" if train_mlp else "train_attn",
            )
        return specs

    def all(self) -> tuple[AdaptedModule, ...]:
        return (*self.attention, *self.mlp, self.unembedding)


def is_linear(module: Any) -> bool:
    """Return whether a module is a product with a matrix: `nn.Linear`, or `Conv1D` of GPT-2."""
    from transformers.pytorch_utils import Conv1D

    return isinstance(module, (nn.Linear, Conv1D))


def shape_of(module: Any) -> tuple[int, int]:
    """Return (outputs, inputs)."""
    rows, columns = module.weight.shape
    return (rows, columns) if isinstance(module, nn.Linear) else (columns, rows)


def find_modules(model: Any, architecture: str, called: frozenset[str]) -> AdaptedModules:
    """Return what an adapter can change; `called` are the linears that a forward pass called."""
    head = model.get_output_embeddings()
    attention: list[AdaptedModule] = []
    mlp: list[AdaptedModule] = []
    unadapted: list[str] = []
    unembedding: AdaptedModule | None = None
    fused = FUSED_WITH_WEIGHTS.get(model.config.model_type, frozenset())
    for path, module in linears(model):
        outputs, inputs = shape_of(module)
        if module is head:
            unembedding = AdaptedModule(LM_HEAD, path, inputs, outputs)
            continue
        part = part_of(path)
        is_expert = any("expert" in name for name in path.split("."))
        if part is None or path.rpartition(".")[2] in fused or (path not in called and not is_expert):
            unadapted.append(path)
        else:
            (mlp if part == "mlp" else attention).append(AdaptedModule(path, path, inputs, outputs))
    if unembedding is None or not (attention or mlp):
        lacking = "a linear unembedding" if unembedding is None else "linear modules in its layers"
        raise InvalidInputError(
            f"architecture {architecture} has no {lacking} that an adapter could change, so it cannot be trained here",
            field="architectures",
        )
    return AdaptedModules(
        architecture=architecture,
        attention=tuple(attention),
        mlp=tuple(mlp),
        unembedding=unembedding,
        unadapted=tuple(unadapted),
        experts=tuple(_experts(model)),
    )


def linears(model: Any) -> Iterator[tuple[str, Any]]:
    return ((path, module) for path, module in model.named_modules() if is_linear(module))


def part_of(path: str) -> str | None:
    """Return `mlp` or `attention` for a module inside a layer; None for others."""
    parts = path.split(".")
    layer = next((place for place, name in enumerate(parts) if name.isdigit()), None)
    if layer is None:
        return None
    inside = [*parts[max(layer - 1, 0) : layer], *parts[layer + 1 :]]  # with what numbers the layers, such as `ffns`
    if any(MLP_PARTS.search(name) for name in inside):
        return "mlp"
    return "attention" if any(ATTENTION_PARTS.search(name) for name in inside) else None


def _experts(model: Any) -> Iterator[str]:
    """Yield the modules that hold the matrices of several experts in one parameter."""
    for path, module in model.named_modules():
        own = (tuple(value.shape) for value in module.parameters(recurse=False))
        is_stacked = any(len(shape) == 3 and min(shape) > 1 for shape in own)
        if part_of(path) == "mlp" and is_stacked and not isinstance(module, nn.Conv1d):
            yield path

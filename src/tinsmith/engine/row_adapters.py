"""Adapters at work in one batch: each changes the rows that belong to it.

Owns: the frozen, inference-only form of an adapter, and which rows of a batch it covers.
Does not know: how rows are chosen, caches, sampling.

Shapes: T rows, D inputs, E outputs of a group of modules, R rank, G modules of a group.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from tinsmith.engine.lora import LM_HEAD, LoraAdapter, LoraGroup
from tinsmith.engine.packed_linear import Product, weight_product


class FrozenAdapter:
    """A copy of an adapter as it is now. Later training of the original does not reach it.

    The modules of a group are one pair of products: their A stacked, their B as one block-diagonal matrix.
    """

    def __init__(self, adapter: LoraAdapter, device: torch.device, dtype: torch.dtype) -> None:
        self._groups: dict[tuple[int | None, str], tuple[Product, Product]] = {}
        for key, group in adapter.groups.items():
            down_GRD = group.A_GRD.detach().clone().to(device, dtype)
            up_EGR = (_block_diagonal(group) * adapter.scale).to(device, dtype)
            self._groups[key] = weight_product(down_GRD), weight_product(up_EGR)

    def add_to(self, layer: int | None, group: str, x_TD: torch.Tensor, y_TE: torch.Tensor) -> None:
        """Add this adapter's part for x_TD to y_TE, in place."""
        pair = self._groups.get((layer, group))
        if pair is not None:
            down, up = pair
            y_TE.add_(up(down(x_TD)))


def _block_diagonal(group: LoraGroup) -> torch.Tensor:
    joined: torch.Tensor = torch.block_diag(*(B_ER.detach() for B_ER in group.Bs_ER))  # type: ignore[no-untyped-call]
    return joined


@dataclass(frozen=True, slots=True)
class RowAdapters:
    """Adapters and the rows of each, as (first row, row after the last, adapter); other rows are the base model's."""

    parts: Sequence[tuple[int, int, FrozenAdapter]]

    def apply(self, layer: int | None, group: str, x_TD: torch.Tensor, y_TE: torch.Tensor) -> None:
        """Change y_TE in place."""
        for start, stop, adapter in self.parts:
            adapter.add_to(layer, group, x_TD[start:stop], y_TE[start:stop])


NO_ADAPTERS = RowAdapters(())
__all__ = ["LM_HEAD", "NO_ADAPTERS", "FrozenAdapter", "RowAdapters"]

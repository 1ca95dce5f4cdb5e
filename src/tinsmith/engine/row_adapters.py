"""Adapters at work in one batch: each changes the rows that belong to it.

Owns: the frozen, inference-only form of an adapter, and which rows of a batch it covers.
Does not know: how rows are chosen, caches, sampling.

Shapes: T rows, D inputs, E outputs of a group of modules, R rank, G modules of a group.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch.nn.functional import pad

from tinsmith.engine.lora import LM_HEAD, LoraAdapter, LoraGroup
from tinsmith.engine.packed_linear import Product, panel_width, weight_product


class FrozenAdapter:
    """A copy of an adapter as it is now. Later training of the original does not reach it.

    The modules of a group are one pair of products: their A stacked, their B as one block-diagonal matrix.
    """

    def __init__(self, adapter: LoraAdapter, device: torch.device, dtype: torch.dtype) -> None:
        self._groups: dict[tuple[int | None, str], tuple[Product, Product]] = {}
        self._places: npt.NDArray[np.int64] | None = None
        unit = panel_width(device, dtype)
        for key, group in adapter.groups.items():
            missing = (
                -len(group.A_GRD) % unit
            )  # rows of zeros, so that the second product takes whole panels of the first
            down_GRD = pad(group.A_GRD.detach(), (0, 0, 0, missing)).to(device, dtype, copy=True)
            up_EGR = pad(_block_diagonal(group) * adapter.scale, (0, missing)).to(device, dtype)
            self._groups[key] = weight_product(down_GRD), weight_product(up_EGR)

    def places(self, layers: int, groups: Sequence[str]) -> npt.NDArray[np.int64]:
        """Addresses of both products and the width between them, [3, layers, groups]; zeros where there are none."""
        if self._places is None:
            from tinsmith.engine.cpu_product import PackedWeights

            self._places = np.zeros((3, layers, len(groups)), np.int64)
            for (layer, group), (down, up) in self._groups.items():
                if layer is not None:
                    assert isinstance(down, PackedWeights)
                    assert isinstance(up, PackedWeights)
                    self._places[:, layer, groups.index(group)] = down.address, up.address, down.width
        return self._places

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

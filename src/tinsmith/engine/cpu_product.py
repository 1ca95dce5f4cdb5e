"""Matrix products on a CPU in float32 over weights that were laid out for them: few rows or many, always the same sums.

Owns: the layout of the weights, and the product (of `cpu_tile`'s inner loop), compiled by numba at its first use and
kept on disk; measured on two cores it is 1.3 to 1.8 times as fast as oneDNN's product for 1 to 32 rows, and level for
256 (`bench/engine_products.py`).
Does not know: torch's autograd, models.

Every output is one chain of fused multiply-adds over the inputs in order, whatever the number of rows, columns or
threads: a row's result does not depend on the others.

Shapes: T rows, D inputs, E outputs, N panels of P outputs.
"""

from __future__ import annotations

import contextlib
import functools
import math
import mmap

import numpy as np
import numpy.typing as npt
import torch
from llvmlite import binding
from numba import njit, prange

from tinsmith.engine.cpu_kernels import use_threads
from tinsmith.engine.cpu_tile import BYTES, make_product

Floats = npt.NDArray[np.float32]


@functools.cache
def can_multiply() -> bool:
    """Whether this processor multiplies and adds in one instruction; without, the product would be slow."""
    found = binding.get_host_cpu_features()
    return bool(found.get("fma") or found.get("neon"))


LANES = 16 if binding.get_host_cpu_features().get("avx512f") else 8
"""Numbers of a vector register."""
_VECTORS = 2
PANEL = LANES * _VECTORS
_STREAMED = 4
"""With so few rows a panel is left too soon for the next to be asked for in time; the processor does that by itself."""

_PAGE = 2**21
"""Bytes of a large page."""

_product = make_product(LANES, _VECTORS)


@njit(cache=True, parallel=True)
def multiply(x_TD: Floats, packed: int, out_TE: Floats, begins: int) -> None:
    """out = x W^T for the weights at an address, or where not `begins` out += x W^T; as many panels as out is wide.

    While one panel is used, the next is read.
    """
    rows, depth, out_row = x_TD.shape[0], x_TD.shape[1], out_TE.shape[1]
    x, out = x_TD.ctypes.data, out_TE.ctypes.data
    pace = 0 if rows <= _STREAMED else PANEL * BYTES // (rows // 6 + 1) + 1
    for n in prange(out_row // PANEL):
        w = packed + n * depth * PANEL * BYTES
        ahead = w + depth * PANEL * BYTES
        _product(rows, x, depth, w, PANEL, out + n * PANEL * BYTES, out_row, depth, begins, ahead, pace)


def _room(*shape: int) -> torch.Tensor:
    """Memory for numbers, in large pages where the system has them: weights from memory come some percent faster."""
    size = BYTES * math.prod(shape)
    if size < _PAGE or not hasattr(mmap, "MADV_HUGEPAGE"):
        return torch.empty(shape)
    region = mmap.mmap(-1, size + _PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    room = torch.frombuffer(region, dtype=torch.uint8)
    start = -room.data_ptr() % _PAGE
    with contextlib.suppress(OSError):  # a system that was built without
        region.madvise(mmap.MADV_HUGEPAGE, start, size - size % _PAGE)
    return room[start : start + size].view(torch.float32).view(shape)


class PackedWeights:
    """Weights in panels: for each input the numbers of P outputs side by side. Called, it is x W^T + b."""

    def __init__(self, weight_ED: torch.Tensor, bias_E: torch.Tensor | None = None) -> None:
        self.outputs, self.depth = weight_ED.shape
        panels = -(-self.outputs // PANEL)
        padded = torch.zeros(panels * PANEL, self.depth)
        padded[: self.outputs] = weight_ED.detach()
        self._packed_NDP = _room(panels, self.depth, PANEL).copy_(padded.view(panels, PANEL, -1).transpose(1, 2))
        self.address = self._packed_NDP.data_ptr()
        self.width = panels * PANEL
        """Outputs, filled up to whole panels."""
        self.bias_E = bias_E

    def __call__(self, x_TD: torch.Tensor) -> torch.Tensor:
        """y_TE"""
        if x_TD.shape[1] != self.depth:
            raise ValueError(f"rows of {x_TD.shape[1]} numbers times weights for {self.depth}")
        use_threads(self._packed_NDP.numel())
        out_TE = torch.empty(len(x_TD), self.width)
        multiply(x_TD.contiguous().numpy(), self.address, out_TE.numpy(), 1)
        out_TE = out_TE if self.width == self.outputs else out_TE[:, : self.outputs]
        return out_TE if self.bias_E is None else out_TE.add_(self.bias_E)

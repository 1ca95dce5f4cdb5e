"""Products of a few or many float32 rows with frozen weights, on a CPU.

The trick. A product with few rows is as fast as the weights can be read from memory, so they are stored in the order in
which the inner loop (`tile`) reads them. W is cut into panels of P outputs; within a panel, the P numbers that belong
to one input lie side by side, then those of the next input, and so on. A panel is then one contiguous stream, each step
of the tile reads two full vectors of it, and threads take different panels. While one panel is multiplied, the
next is prefetched.

Every output is one chain of fused multiply-adds over the inputs, in order, whatever the number of rows, columns or
threads: a row's result does not depend on the other rows.

The kernel is compiled by numba on first use and cached on disk. Measured on two cores, it is 1.3 to 1.8 times as fast
as oneDNN's product for 1 to 32 rows, and as fast for 256 (`bench/engine_products.py`).

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

from tinsmith.engine.cpu.elementwise import use_threads
from tinsmith.engine.cpu.tile import BYTES, make_product

Floats = npt.NDArray[np.float32]


@functools.cache
def can_multiply() -> bool:
    """Return whether this processor multiplies and adds in one instruction; otherwise the product would be slow."""
    found = binding.get_host_cpu_features()
    return bool(found.get("fma") or found.get("neon"))


LANES = 16 if binding.get_host_cpu_features().get("avx512f") else 8
"""Numbers in a vector register."""
_VECTORS = 2
PANEL = LANES * _VECTORS
_STREAMED = 4
"""Up to this many rows, a panel is finished too soon for prefetching; the processor's own prefetcher is enough."""

_PAGE = 2**21
"""Bytes of a huge page."""

_product = make_product(LANES, _VECTORS)


@njit(cache=True, parallel=True)
def multiply(x_TD: Floats, packed: int, out_TE: Floats, begins: int) -> None:
    """Compute out = x W^T for the packed weights at an address, or out += x W^T if not `begins`.

    `out_TE` is as wide as all panels. `pace` spreads the prefetches for the next panel over the tiles of this one.
    """
    rows, depth, out_row = x_TD.shape[0], x_TD.shape[1], out_TE.shape[1]
    x, out = x_TD.ctypes.data, out_TE.ctypes.data
    pace = 0 if rows <= _STREAMED else PANEL * BYTES // (rows // 6 + 1) + 1
    for n in prange(out_row // PANEL):
        w = packed + n * depth * PANEL * BYTES
        ahead = w + depth * PANEL * BYTES
        _product(rows, x, depth, w, PANEL, out + n * PANEL * BYTES, out_row, depth, begins, ahead, pace)


def _room(*shape: int) -> torch.Tensor:
    """Return uninitialised memory, in huge pages where the system has them: reading weights is a few percent faster."""
    size = BYTES * math.prod(shape)
    if size < _PAGE or not hasattr(mmap, "MADV_HUGEPAGE"):
        return torch.empty(shape)
    region = mmap.mmap(-1, size + _PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    room = torch.frombuffer(region, dtype=torch.uint8)
    start = -room.data_ptr() % _PAGE
    with contextlib.suppress(OSError):  # the system may not support it
        region.madvise(mmap.MADV_HUGEPAGE, start, size - size % _PAGE)
    return room[start : start + size].view(torch.float32).view(shape)


class PackedWeights:
    """Weights in panels: for each input, the numbers of P outputs side by side. Calling it computes x W^T + b."""

    def __init__(self, weight_ED: torch.Tensor, bias_E: torch.Tensor | None = None) -> None:
        self.outputs, self.depth = weight_ED.shape
        panels = -(-self.outputs // PANEL)
        padded = torch.zeros(panels * PANEL, self.depth)
        padded[: self.outputs] = weight_ED.detach()
        self._packed_NDP = _room(panels, self.depth, PANEL).copy_(padded.view(panels, PANEL, -1).transpose(1, 2))
        self.address = self._packed_NDP.data_ptr()
        self.width = panels * PANEL
        """Outputs, rounded up to whole panels."""
        self.bias_E = bias_E

    @property
    def size_bytes(self) -> int:
        """Memory used by the panels."""
        return int(self._packed_NDP.untyped_storage().nbytes())

    def __call__(self, x_TD: torch.Tensor) -> torch.Tensor:
        """Return y_TE = x W^T + b."""
        if x_TD.shape[1] != self.depth:
            raise ValueError(f"x_TD has {x_TD.shape[1]} columns, the weights have {self.depth} inputs")
        use_threads(self._packed_NDP.numel())
        out_TE = torch.empty(len(x_TD), self.width)
        multiply(x_TD.contiguous().numpy(), self.address, out_TE.numpy(), 1)
        out_TE = out_TE if self.width == self.outputs else out_TE[:, : self.outputs]
        return out_TE if self.bias_E is None else out_TE.add_(self.bias_E)

"""Chooses the kernel for products with frozen weights.

A sample is independent of its batch only if a row's product has the same bits whatever the number of rows. On a CPU
in float32 the weights are therefore laid out for `product`, in the format of their file. Without numba, oneDNN is
used if a trial shows that its kernels for this processor have the same property. Everywhere else the plain torch
product is used, and results from different batches agree only up to rounding.

Shapes: T rows, D inputs, E outputs.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol, TypeAlias

import torch
from torch.nn.functional import embedding, linear

from tinsmith.engine.cpu.formats import Weights, widened

logger = logging.getLogger(__name__)

Product: TypeAlias = Callable[[torch.Tensor], torch.Tensor]
"""Maps x_TD to y_TE = x_TD W^T + b."""


class StoredProduct(Protocol):
    """The products with one frozen matrix of a base model, forward and backward; it holds the weights."""

    @property
    def weight_ED(self) -> torch.Tensor:
        """The weights in the number format of the products; it may be a copy."""
        ...

    @property
    def bytes_by_format(self) -> Mapping[str, int]:
        """Memory that the weights use, by the format in which they are kept."""
        ...

    def __call__(self, x_TD: torch.Tensor) -> torch.Tensor:
        """Return y_TE = x W^T + b."""
        ...

    def back(self, g_TE: torch.Tensor) -> torch.Tensor:
        """Return g W, the gradient of x for the gradient g of x W^T."""
        ...

    def rows(self, outputs_T: torch.Tensor) -> torch.Tensor:
        """Return weights_TD of some outputs."""
        ...


_ROWS_HINT = 8
"""Number of rows that oneDNN chooses its layout for; with 1, a single row's result would differ from that of many."""
_TRIAL_SHAPES = ((576, 1536), (960, 576), (96, 4096), (2048, 64), (3, 33))
_TRIAL_ROWS = 130
_TRIAL_COUNTS = (1, 2, 3, 5, 8, 13, 32, 64, 127)

_ONEDNN_BLOCK = 64
"""oneDNN's layouts round rows and columns up to at most a multiple of this."""


def can_pack(device: torch.device, dtype: torch.dtype) -> bool:
    """Return whether products of this device and dtype have the fast, batch-independent form."""
    return device.type == "cpu" and dtype == torch.float32 and (can_compile() or is_onednn_exact())


@functools.cache
def can_compile() -> bool:
    """Return whether kernels can be compiled for this processor."""
    try:
        from tinsmith.engine.cpu.product import can_multiply
    except ImportError as error:
        logger.warning("kernels cannot be compiled, so the engine is slower than it could be: %s", error)
        return False
    return can_multiply()


@functools.cache
def is_onednn_exact() -> bool:
    """Return whether oneDNN's product of a row is independent of the other rows.

    Its kernels for some processors (AMD's with AVX-512, for example) split long sums by the number of rows. This is not
    documented, so it is tried out.
    """
    if not torch.backends.mkldnn.is_available():  # type: ignore[no-untyped-call]
        return False
    drawn = torch.Generator().manual_seed(0)
    for outputs, inputs in _TRIAL_SHAPES:
        product = onednn_linear(torch.randn(outputs, inputs, generator=drawn))
        x_TD = torch.randn(_TRIAL_ROWS, inputs, generator=drawn)
        all_rows = product(x_TD)
        if any(not torch.equal(product(x_TD[-count:]), all_rows[-count:]) for count in _TRIAL_COUNTS):
            return False
    return True


def product_kind(device: torch.device, dtype: torch.dtype) -> str:
    """Return which kernel `weight_product` uses."""
    if not can_pack(device, dtype):
        return "torch"
    return "compiled" if can_compile() else "onednn"


def panel_width(device: torch.device, dtype: torch.dtype) -> int:
    """Return how many outputs `weight_product` computes together."""
    if product_kind(device, dtype) != "compiled":
        return 1
    from tinsmith.engine.cpu.product import PANEL

    return int(PANEL)


def weight_product(weight_ED: torch.Tensor, bias_E: torch.Tensor | None = None) -> Product:
    """Return the product with these weights; on a CPU it holds its own copy of them."""
    if not can_pack(weight_ED.device, weight_ED.dtype):
        return lambda x_TD: linear(x_TD, weight_ED, bias_E)
    if not can_compile():
        return onednn_linear(weight_ED, bias_E)
    from tinsmith.engine.cpu.product import PackedWeights

    return PackedWeights(weight_ED, bias_E)


def kept_bytes(product: Product, weight_ED: torch.Tensor) -> int:
    """Return the memory that a product with these weights holds."""
    if hasattr(product, "size_bytes"):
        return int(product.size_bytes)
    rows, columns = (-(-size // _ONEDNN_BLOCK) * _ONEDNN_BLOCK for size in weight_ED.shape)
    is_packed = can_pack(weight_ED.device, weight_ED.dtype)
    return (rows * columns if is_packed else weight_ED.numel()) * weight_ED.element_size()


def stored_product(
    parts: Sequence[Weights], bias_E: torch.Tensor | None, device: torch.device, dtype: torch.dtype
) -> StoredProduct:
    """Return the products, on this device and in this number format, with matrices that stand below each other.

    Compiled kernels keep weights in the format of their file; everything else converts them.
    """
    if product_kind(device, dtype) != "compiled":
        weights = [widened(part).to(device, dtype) for part in parts]
        return PlainProduct(weights[0] if len(weights) == 1 else torch.cat(weights), bias_E)
    from tinsmith.engine.cpu.product import PackedWeights

    return PackedWeights(parts, bias_E)


class PlainProduct:
    """Products with weights that torch or oneDNN multiplies."""

    def __init__(self, weight_ED: torch.Tensor, bias_E: torch.Tensor | None) -> None:
        self.weight_ED = weight_ED
        self._bias_E = bias_E

    @functools.cached_property
    def _forward(self) -> Product:
        return weight_product(self.weight_ED, self._bias_E)

    @property
    def bytes_by_format(self) -> dict[str, int]:
        """Memory that the weights use, with oneDNN's copy."""
        copies = 2 if can_pack(self.weight_ED.device, self.weight_ED.dtype) else 1
        return {str(self.weight_ED.dtype).removeprefix("torch."): copies * self.weight_ED.nbytes}

    def __call__(self, x_TD: torch.Tensor) -> torch.Tensor:
        return self._forward(x_TD)

    def back(self, g_TE: torch.Tensor) -> torch.Tensor:
        return g_TE @ self.weight_ED

    def rows(self, outputs_T: torch.Tensor) -> torch.Tensor:
        return embedding(outputs_T, self.weight_ED)


def onednn_linear(weight_ED: torch.Tensor, bias_E: torch.Tensor | None = None) -> Product:
    """Return the product with these weights by oneDNN."""
    packed = torch.ops.mkldnn._reorder_linear_weight(weight_ED.detach().contiguous(), _ROWS_HINT)
    product = torch.ops.mkldnn._linear_pointwise.default
    return lambda x_TD: product(x_TD, packed, bias_E, "none", [], "")

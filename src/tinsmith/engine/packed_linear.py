"""Matrix products with frozen weights: laid out once, and a row's result that does not depend on the others.

Owns: the choice of kernel. On a CPU in float32 the weights are copied into the layout of `cpu_product`, or, where numba
is missing, of oneDNN: both give a row the same bits whatever the number of rows, which is what makes a sample
independent of its batch. Elsewhere the plain product is used, and rows of different batches agree to rounding only.
Does not know: models, autograd.

Shapes: T rows, D inputs, E outputs.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from typing import TypeAlias

import torch
from torch.nn.functional import linear

logger = logging.getLogger(__name__)

Product: TypeAlias = Callable[[torch.Tensor], torch.Tensor]
"""x_TD -> x_TD W^T + b, as y_TE."""

_ROWS_HINT = 8
"""Rows that oneDNN's layout is made for; with a hint of 1 a single row's result would differ from that of many."""


def can_pack(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether products of this device and dtype have the fast, batch-independent form."""
    return device.type == "cpu" and dtype == torch.float32 and (can_compile() or _has_onednn())


@functools.cache
def can_compile() -> bool:
    """Whether kernels can be compiled for this processor."""
    try:
        from tinsmith.engine.cpu_product import can_multiply
    except ImportError as error:
        logger.warning("no kernels can be compiled, so the engine is slower than it could be: %s", error)
        return False
    return can_multiply()


def _has_onednn() -> bool:
    found: bool = torch.backends.mkldnn.is_available()  # type: ignore[no-untyped-call]
    return found


def product_kind(device: torch.device, dtype: torch.dtype) -> str:
    """Which kernel `weight_product` takes."""
    if not can_pack(device, dtype):
        return "torch"
    return "compiled" if can_compile() else "onednn"


def panel_width(device: torch.device, dtype: torch.dtype) -> int:
    """Outputs that `weight_product` computes together."""
    if product_kind(device, dtype) != "compiled":
        return 1
    from tinsmith.engine.cpu_product import PANEL

    return int(PANEL)


def weight_product(weight_ED: torch.Tensor, bias_E: torch.Tensor | None = None) -> Product:
    """The product with these weights; on a CPU it holds its own copy of them."""
    if not can_pack(weight_ED.device, weight_ED.dtype):
        return lambda x_TD: linear(x_TD, weight_ED, bias_E)
    if not can_compile():
        return onednn_linear(weight_ED, bias_E)
    from tinsmith.engine.cpu_product import PackedWeights

    return PackedWeights(weight_ED, bias_E)


def transposed_product(weight_ED: torch.Tensor) -> Product:
    """g_TE -> g_TE W; on a CPU it holds its own copy of the weights."""
    if not can_pack(weight_ED.device, weight_ED.dtype) or not can_compile():
        return lambda g_TE: g_TE @ weight_ED
    from tinsmith.engine.cpu_product import PackedWeights

    return PackedWeights(weight_ED.t())


def onednn_linear(weight_ED: torch.Tensor, bias_E: torch.Tensor | None = None) -> Product:
    """The same by oneDNN."""
    packed = torch.ops.mkldnn._reorder_linear_weight(weight_ED.detach().contiguous(), _ROWS_HINT)
    product = torch.ops.mkldnn._linear_pointwise.default
    return lambda x_TD: product(x_TD, packed, bias_E, "none", [], "")

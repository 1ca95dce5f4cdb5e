"""Matrix products for inference: weights laid out once for few rows at a time.

Owns: the choice of kernel. On a CPU in float32 the weights are copied into oneDNN's blocked layout, which is up to
twice as fast as a plain product for 4 to 32 rows, and whose result for a row does not depend on the number of rows:
that is what makes a sample independent of its batch. Elsewhere the plain product is used, and rows of different batches
agree to rounding only.
Does not know: models, autograd (these weights are never trained).

Shapes: T rows, D inputs, E outputs.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

import torch
from torch.nn.functional import linear

InferenceLinear: TypeAlias = Callable[[torch.Tensor], torch.Tensor]
"""x_TD -> x_TD W^T + b, as y_TE."""

_ROWS_HINT = 8
"""Rows that the layout is made for; with a hint of 1 the result for a single row would differ from that of many."""


def can_pack(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether products of this device and dtype have the fast, batch-independent form."""
    return device.type == "cpu" and dtype == torch.float32 and _has_onednn()


def _has_onednn() -> bool:
    found: bool = torch.backends.mkldnn.is_available()  # type: ignore[no-untyped-call]
    return found


def inference_linear(weight_ED: torch.Tensor, bias_E: torch.Tensor | None = None) -> InferenceLinear:
    """The product with these weights; on a CPU it holds its own copy of them."""
    if not can_pack(weight_ED.device, weight_ED.dtype):
        return lambda x_TD: linear(x_TD, weight_ED, bias_E)
    packed = torch.ops.mkldnn._reorder_linear_weight(weight_ED.detach().contiguous(), _ROWS_HINT)
    product = torch.ops.mkldnn._linear_pointwise.default
    return lambda x_TD: product(x_TD, packed, bias_E, "none", [], "")

"""The operations that an uploaded loss may use, by the names that a graph gives them.

Owns: the allow-list. A name that is not in these tables does not run; nothing is looked up by an uploaded name anywhere
else. Left out on purpose: whatever writes in place or into `out`, draws random numbers, leaves torch, shows memory that
was not set, or has a cost that the size of its arguments and its result does not bound.
Does not know: graphs (`custom_graph.py` runs them), or how a size is worked out (`graph_sizes.py`).
"""

from __future__ import annotations

import enum
import math
import operator
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from torch.fx.node import _get_qualified_name
from torch.nn import functional


class Size(enum.Enum):
    """What bounds the number of cells in an operation's result."""

    NUMBER = "it is a Python number"
    BROADCAST = "its tensors, broadcast to one shape"
    LARGEST = "the largest of its tensors; indices that come beside values are not counted"
    JOINED = "its tensors together"
    OUTER = "its tensors multiplied"
    POSITIONS = "cells times dimensions of its tensor"
    ITEM = "its tensor, if there is no tensor in the index or only a mask"
    MEASURED = "the same operation on tensors without memory says"
    PRODUCT = "the same, and the cost is that times an inner dimension"


class Operation(NamedTuple):
    run: Callable[..., Any]
    size: Size


_BOTH: Mapping[Size, str] = {
    Size.BROADCAST: """
        abs add addcdiv addcmul atan bitwise_and bitwise_not bitwise_or bitwise_xor ceil clamp clamp_max clamp_min clip
        cos cosh div divide eq erf erfc exp exp2 expm1 floor floor_divide fmax fmin fmod frac ge gt heaviside hypot
        isfinite isinf isnan le lerp log log10 log1p log2 logaddexp logaddexp2 logical_and logical_not logical_or
        logical_xor logit lt masked_fill masked_select maximum minimum mul multiply nan_to_num ne neg negative pow
        reciprocal relu remainder round rsqrt sgn sigmoid sign sin sinh sqrt square sub subtract tan tanh true_divide
        trunc xlogy
    """,
    Size.LARGEST: """
        all amax amin any argmax argmin argsort count_nonzero cummax cummin cumprod cumsum kthvalue log_softmax
        logcumsumexp logsumexp max mean median min nanmean nansum norm prod softmax sort std sum topk var
        clone detach diagonal flatten flip gather index_add movedim narrow permute reshape roll scatter scatter_add
        select squeeze t transpose tril triu unflatten unsqueeze
    """,
    Size.NUMBER: "numel",
    Size.OUTER: "outer",
    Size.POSITIONS: "nonzero where",
    Size.MEASURED: "broadcast_to diag index_select take_along_dim tile",
    Size.PRODUCT: "dot matmul mm mv",
}
_METHODS: Mapping[Size, str] = {
    Size.NUMBER: "dim ndimension nelement size",
    Size.LARGEST: "bool contiguous double expand_as float int long reshape_as to type_as view view_as",
    Size.MEASURED: "expand new_full new_ones new_zeros repeat",
}
_FUNCTIONS: Mapping[Size, str] = {
    Size.LARGEST: "full_like ones_like zeros_like",
    Size.JOINED: "cat concat hstack stack vstack",
}
_FUNCTIONAL: Mapping[Size, str] = {
    Size.BROADCAST: """
        binary_cross_entropy binary_cross_entropy_with_logits cosine_similarity elu gelu hardtanh huber_loss kl_div
        l1_loss leaky_relu log_softmax logsigmoid mse_loss normalize relu sigmoid silu smooth_l1_loss softmax softplus
        softsign tanh
    """,
    Size.LARGEST: "cross_entropy nll_loss",
    Size.MEASURED: "one_hot pad",
}
_OPERATORS: Mapping[Size, str] = {
    Size.BROADCAST: "abs add and_ eq floordiv ge gt invert le lt mod mul ne neg or_ pos pow sub truediv xor",
    Size.ITEM: "getitem",
    Size.PRODUCT: "matmul",
}
_MATH: Mapping[Size, str] = {Size.NUMBER: "ceil cos exp expm1 fabs floor log log10 log1p log2 pow sin sqrt tanh"}


def _table(prefix: str, owner: Any, *groups: Mapping[Size, str]) -> dict[str, Operation]:
    return {
        f"{prefix}{name}": Operation(getattr(owner, name), size)
        for group in groups
        for size, names in group.items()
        for name in names.split()
    }


METHODS: Mapping[str, Operation] = _table("", torch.Tensor, _BOTH, _METHODS)
"""Methods of a tensor."""

FUNCTIONS: Mapping[str, Operation] = (
    _table("torch.", torch, _BOTH, _FUNCTIONS)
    | _table("torch.Tensor.", torch.Tensor, _BOTH, _METHODS)
    | _table("torch.nn.functional.", functional, _FUNCTIONAL)
    | {_get_qualified_name(item.run): item for item in _table("", functional, _FUNCTIONAL).values()}
    | _table("operator.", operator, _OPERATORS)
    | _table("math.", math, _MATH)
    | {"getattr": Operation(getattr, Size.LARGEST)}
)
"""Functions by qualified name, which for some is a private one (`torch._C._nn.softplus`).

`getattr` reads what `ATTRIBUTES` lists and nothing else.
"""

ATTRIBUTES = frozenset({"shape", "ndim", "dtype", "device", "T", "mT"})
"""What may be read from a tensor."""
RESULT_ATTRIBUTES = frozenset({"values", "indices"})
"""What may be read from the result of an operation that returns two tensors."""

_KEYWORDS = """
_stacklevel alpha approximate beta condition copy correction delta descending device diagonal dim dim0 dim1 dims dtype
end end_dim eps exponent fill_value index indices inplace input k keepdim keepdims largest layout length log_target
mask max memory_format min mode n nan negative_slope neginf num_classes offset ord other p pos_weight posinf reduce
reduction repeats requires_grad rounding_mode self shape shifts side size size_average sizes sorted source src stable
start start_dim step steps target tensor1 tensor2 tensors threshold unbiased value weight x1 x2
"""
KEYWORDS = frozenset(_KEYWORDS.split())
"""Names of arguments that may be given; there is no `out` and no `generator`."""
INERT: Mapping[str, tuple[Any, ...]] = {
    "inplace": (False,),
    "requires_grad": (False,),
    "size_average": (None,),
    "reduce": (None,),
    "layout": (None, {"layout": "strided"}),
}
"""Arguments that functions record by themselves, and the only values, as they are encoded, that they may have."""
TEXTS = frozenset({"mean", "sum", "none", "batchmean", "floor", "trunc", "tanh", "constant", "left", "right"})
"""Texts that may be an argument: reductions, rounding modes, approximations, ways to pad."""
_DTYPES = "float32 float64 float16 bfloat16 int64 int32 int16 int8 uint8 bool"
DTYPES: Mapping[str, torch.dtype] = {name: getattr(torch, name) for name in _DTYPES.split()}

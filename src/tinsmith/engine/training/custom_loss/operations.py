"""The allow list: the operations that an uploaded loss may use, and how large the result of each can get.

A name that is not in these tables does not run, and nothing is looked up by an uploaded name anywhere else. Left out on
purpose: whatever writes in place or into `out`, draws random numbers, leaves torch, exposes uninitialised memory, or
has a cost that the sizes of its arguments and result do not bound.

`most_cells` bounds the size of a result before it is computed. For most operations the bound follows from the shapes of
the arguments; the others are run on torch's `meta` device first, where tensors have a shape but no memory.
"""

from __future__ import annotations

import enum
import itertools
import math
import operator
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
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


class GraphOperation(NamedTuple):
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


def _table(prefix: str, owner: Any, *groups: Mapping[Size, str]) -> dict[str, GraphOperation]:
    return {
        f"{prefix}{name}": GraphOperation(getattr(owner, name), size)
        for group in groups
        for size, names in group.items()
        for name in names.split()
    }


METHODS: Mapping[str, GraphOperation] = _table("", torch.Tensor, _BOTH, _METHODS)
"""Methods of a tensor."""

FUNCTIONS: Mapping[str, GraphOperation] = (
    _table("torch.", torch, _BOTH, _FUNCTIONS)
    | _table("torch.Tensor.", torch.Tensor, _BOTH, _METHODS)
    | _table("torch.nn.functional.", functional, _FUNCTIONAL)
    | {_get_qualified_name(item.run): item for item in _table("", functional, _FUNCTIONAL).values()}
    | _table("operator.", operator, _OPERATORS)
    | _table("math.", math, _MATH)
    | {"getattr": GraphOperation(getattr, Size.LARGEST)}
)
"""Functions by qualified name, which for some is a private one (`torch._C._nn.softplus`).

`getattr` reads what `ATTRIBUTES` lists and nothing else.
"""

ATTRIBUTES = frozenset({"shape", "ndim", "dtype", "device", "T", "mT"})
"""Attributes of a tensor that may be read."""
RESULT_ATTRIBUTES = frozenset({"values", "indices"})
"""Attributes that may be read from the result of an operation that returns two tensors."""

_KEYWORDS = """
_stacklevel alpha approximate beta condition copy correction delta descending device diagonal dim dim0 dim1 dims dtype
end end_dim eps exponent fill_value index indices inplace input k keepdim keepdims largest layout length log_target
mask max memory_format min mode n nan negative_slope neginf num_classes offset ord other p pos_weight posinf reduce
reduction repeats requires_grad rounding_mode self shape shifts side size size_average sizes sorted source src stable
start start_dim step steps target tensor1 tensor2 tensors threshold unbiased value weight x1 x2
"""
KEYWORDS = frozenset(_KEYWORDS.split())
"""Keyword arguments that may be given; `out` and `generator` are not among them."""
INERT: Mapping[str, tuple[Any, ...]] = {
    "inplace": (False,),
    "requires_grad": (False,),
    "size_average": (None,),
    "reduce": (None,),
    "layout": (None, {"layout": "strided"}),
}
"""Arguments that tracing records by itself, and the only (encoded) values that they may have."""
TEXTS = frozenset({"mean", "sum", "none", "batchmean", "floor", "trunc", "tanh", "constant", "left", "right"})
"""Strings that may be an argument: reductions, rounding modes, approximations, padding modes."""
_DTYPES = "float32 float64 float16 bfloat16 int64 int32 int16 int8 uint8 bool"
DTYPES: Mapping[str, torch.dtype] = {name: getattr(torch, name) for name in _DTYPES.split()}


def most_cells(operation: GraphOperation, args: Sequence[Any], kwargs: Mapping[str, Any]) -> int:
    """Return the most cells that the result can have. For invalid arguments, raise what the operation would raise."""
    tensors = [item for item in leaves([*args, *kwargs.values()]) if isinstance(item, Tensor)]
    counts = [tensor.numel() for tensor in tensors]
    size = operation.size
    if size is Size.ITEM:
        size = _size_of_item(args)
    if size is Size.POSITIONS and len(tensors) > 1:
        size = Size.BROADCAST  # `where` with three arguments
    if size is Size.BROADCAST:
        return math.prod(np.broadcast_shapes(*(tensor.shape for tensor in tensors)))
    if size is Size.LARGEST:
        return max(counts, default=0)
    if size is Size.JOINED:
        return sum(counts)
    if size is Size.OUTER:
        return math.prod(counts)
    if size is Size.POSITIONS:
        return sum(tensor.numel() * max(1, tensor.ndim) for tensor in tensors)
    return 0 if size is Size.NUMBER else _measured(operation, args, kwargs)


def leaves(value: Any) -> Iterable[Any]:
    """Yield all values inside nested lists and tuples."""
    if isinstance(value, (tuple, list)):
        return itertools.chain.from_iterable(leaves(item) for item in value)
    return (value,)


def _size_of_item(args: Sequence[Any]) -> Size:
    """Return what bounds an indexing result: numbers, slices and a mask only select; other index tensors do not."""
    if len(args) != 2 or not isinstance(args[0], Tensor):
        return Size.NUMBER
    index = args[1] if isinstance(args[1], (tuple, list)) else [args[1]]
    arrays = [item for item in index if isinstance(item, (Tensor, list))]
    masks = [item for item in arrays if isinstance(item, Tensor) and item.dtype in (torch.bool, torch.uint8)]
    if masks and len(arrays) > 1:
        raise ValueError("a mask must be the only tensor of an index")
    return Size.MEASURED if arrays and not masks else Size.LARGEST


def _measured(operation: GraphOperation, args: Sequence[Any], kwargs: Mapping[str, Any]) -> int:
    with torch.no_grad():
        result = operation.run(*(_twin(item) for item in args), **{key: _twin(item) for key, item in kwargs.items()})
    return sum(item.numel() for item in leaves(result) if isinstance(item, Tensor))


def _twin(value: Any) -> Any:
    """Return a tensor's twin on the `meta` device; return anything else unchanged."""
    if isinstance(value, Tensor):
        return value.detach().to("meta")
    if isinstance(value, torch.device):
        return torch.device("meta")
    if type(value) in (list, tuple):
        return type(value)(_twin(item) for item in value)
    return value

"""The operations that an uploaded loss may use, by the names that a graph gives them.

Owns: the allow-list. A name that is not in these tables does not run; nothing is looked up by an uploaded name anywhere
else. Left out on purpose: whatever writes in place or into `out`, draws random numbers, leaves torch, shows memory that
was not set, or has a cost that its output's size does not bound.
Does not know: graphs (`custom_graph.py` runs them and bounds sizes).
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch.fx.node import _get_qualified_name
from torch.nn import functional

_ELEMENTWISE = """
abs add addcdiv addcmul atan bitwise_and bitwise_not bitwise_or bitwise_xor ceil clamp clamp_max clamp_min clip cos
cosh div divide eq erf erfc exp exp2 expm1 floor floor_divide fmax fmin fmod frac ge gt heaviside hypot isfinite isinf
isnan le lerp log log10 log1p log2 logaddexp logaddexp2 logical_and logical_not logical_or logical_xor logit lt maximum
minimum mul multiply nan_to_num ne neg negative pow reciprocal relu remainder round rsqrt sgn sigmoid sign sin sinh
sqrt square sub subtract tan tanh true_divide trunc where xlogy
"""
_REDUCTIONS = """
all amax amin any argmax argmin argsort count_nonzero cummax cummin cumprod cumsum kthvalue log_softmax logcumsumexp
logsumexp max mean median min nanmean nansum norm prod softmax sort std sum topk var
"""
_SHAPES = """
broadcast_to clone detach diag diagonal flatten flip gather index_add index_select masked_fill masked_select movedim
narrow nonzero outer permute reshape roll scatter scatter_add select squeeze t take_along_dim tile transpose tril triu
unflatten unsqueeze
"""
_PRODUCTS = "dot matmul mm mv"
_BOTH = f"{_ELEMENTWISE} {_REDUCTIONS} {_SHAPES} {_PRODUCTS}"
_METHODS = """
bool contiguous dim double expand expand_as float int long ndimension nelement new_full new_ones new_zeros numel repeat
reshape_as size to type_as view view_as
"""
_FUNCTIONS = "cat concat full_like hstack numel ones_like stack vstack zeros_like"
_FUNCTIONAL = """
binary_cross_entropy binary_cross_entropy_with_logits cosine_similarity cross_entropy elu gelu hardtanh huber_loss
kl_div l1_loss leaky_relu log_softmax logsigmoid mse_loss nll_loss normalize one_hot pad relu sigmoid silu
smooth_l1_loss softmax softplus softsign tanh
"""
_OPERATORS = "abs add and_ eq floordiv ge getitem gt invert le lt matmul mod mul ne neg or_ pos pow sub truediv xor"
_MATH = "ceil cos exp expm1 fabs floor log log10 log1p log2 pow sin sqrt tanh"
_KEYWORDS = """
_stacklevel alpha approximate beta condition copy correction delta descending device diagonal dim dim0 dim1 dims dtype
end end_dim eps exponent fill_value index indices inplace input k keepdim keepdims largest layout length log_target
mask max memory_format min mode n nan negative_slope neginf num_classes offset ord other p pos_weight posinf reduce
reduction repeats requires_grad rounding_mode self shape shifts side size size_average sizes sorted source src stable
start start_dim step steps target tensor1 tensor2 tensors threshold unbiased value weight x1 x2
"""

METHODS: Mapping[str, Callable[..., Any]] = {
    name: getattr(torch.Tensor, name) for name in f"{_BOTH} {_METHODS}".split()
}
"""Methods of a tensor."""

FUNCTIONS: Mapping[str, Callable[..., Any]] = (
    {f"torch.{name}": getattr(torch, name) for name in f"{_BOTH} {_FUNCTIONS}".split()}
    | {f"torch.nn.functional.{name}": getattr(functional, name) for name in _FUNCTIONAL.split()}
    | {_get_qualified_name(getattr(functional, name)): getattr(functional, name) for name in _FUNCTIONAL.split()}
    | {f"operator.{name}": getattr(operator, name) for name in _OPERATORS.split()}
    | {f"math.{name}": getattr(math, name) for name in _MATH.split()}
    | {f"torch.Tensor.{name}": method for name, method in METHODS.items()}
    | {"getattr": getattr}
)
"""Functions by qualified name, which for some is a private one (`torch._C._nn.softplus`).

`getattr` reads what `ATTRIBUTES` lists and nothing else.
"""

ATTRIBUTES = frozenset({"shape", "ndim", "dtype", "device", "T", "mT"})
"""What may be read from a tensor."""
RESULT_ATTRIBUTES = frozenset({"values", "indices"})
"""What may be read from the result of an operation that returns two tensors."""

PRODUCTS = frozenset(
    {"operator.matmul"} | {f"{kind}{name}" for kind in ("", "torch.", "torch.Tensor.") for name in _PRODUCTS.split()}
)
"""Operations whose cost is their output times the last dimension of their first argument."""
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
DTYPES: Mapping[str, torch.dtype] = {
    name: getattr(torch, name)
    for name in ("float32", "float64", "float16", "bfloat16", "int64", "int32", "int16", "int8", "uint8", "bool")
}

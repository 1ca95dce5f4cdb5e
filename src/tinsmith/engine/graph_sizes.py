"""How large an operation's result can get, worked out before it is made.

Owns: the bound for each way of sizing in `graph_operations.Size`. For most operations it follows from the shapes of the
arguments; the rest are carried out on `meta`, where tensors have a size and no memory.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from tinsmith.engine.graph_operations import Operation, Size


def most_cells(operation: Operation, args: Sequence[Any], kwargs: Mapping[str, Any]) -> int:
    """The most cells that the result can have. Raises what the operation itself would for arguments that do not fit."""
    tensors = [item for item in leaves([*args, *kwargs.values()]) if isinstance(item, Tensor)]
    counts = [tensor.numel() for tensor in tensors]
    size = operation.size
    if size is Size.ITEM:
        size = _size_of_item(args)
    if size is Size.POSITIONS and len(tensors) > 1:
        size = Size.BROADCAST  # where with its three arguments
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
    """All values inside lists and tuples."""
    if isinstance(value, (tuple, list)):
        return itertools.chain.from_iterable(leaves(item) for item in value)
    return (value,)


def _size_of_item(args: Sequence[Any]) -> Size:
    """Numbers and slices select; a mask does too; other tensors in an index make a shape of their own."""
    if len(args) != 2 or not isinstance(args[0], Tensor):
        return Size.NUMBER
    index = args[1] if isinstance(args[1], (tuple, list)) else [args[1]]
    arrays = [item for item in index if isinstance(item, (Tensor, list))]
    masks = [item for item in arrays if isinstance(item, Tensor) and item.dtype in (torch.bool, torch.uint8)]
    if masks and len(arrays) > 1:
        raise ValueError("a mask must be the only tensor of an index")
    return Size.MEASURED if arrays and not masks else Size.LARGEST


def _measured(operation: Operation, args: Sequence[Any], kwargs: Mapping[str, Any]) -> int:
    with torch.no_grad():
        result = operation.run(*(_twin(item) for item in args), **{key: _twin(item) for key, item in kwargs.items()})
    return sum(item.numel() for item in leaves(result) if isinstance(item, Tensor))


def _twin(value: Any) -> Any:
    """The value without memory; numbers, and everything else that is no tensor, stand for themselves."""
    if isinstance(value, Tensor):
        return value.detach().to("meta")
    if isinstance(value, torch.device):
        return torch.device("meta")
    if type(value) in (list, tuple):
        return type(value)(_twin(item) for item in value)
    return value

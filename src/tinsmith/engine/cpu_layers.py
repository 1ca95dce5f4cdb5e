"""A step's way through the layers on a CPU, compiled as a whole: between the kernels no time is spent in Python.

Owns: the order of the kernels, and how many threads each gets. A layer is four parts, each of which ends with a
product, to whose rows their adapters add.
Does not know: tensors, what the kernels do.

Shapes: as in `cpu_kernels` and `cpu_attention`; A is 2: angles that turn nothing, and those of the positions. L layers,
P parts, M runs of rows that have an adapter, R columns of all its modules in a part.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from llvmlite import ir
from numba import njit, types
from numba.core import cgutils
from numba.extending import intrinsic

from tinsmith.engine.cpu_attention import attend
from tinsmith.engine.cpu_kernels import GRAIN, Floats, Integers, add_norm, gate, turn_and_keep
from tinsmith.engine.cpu_product import multiply

GROUPS = ("qkv", "output", "gate_up", "down")
"""Whose product a part ends with: norm to queries, keys and values; attention to its output; norm to gate and up; gate
to down."""


class Weights(NamedTuple):
    """What does not change from step to step."""

    products_LP: Integers
    """Addresses of packed weights, one for each part."""
    biases_LE: tuple[Floats, Floats, Floats, Floats]
    """Added to the results of each part; without rows where there is none."""
    input_norm_LD: Floats
    mlp_norm_LD: Floats
    head_norm_LHC: Floats
    eps: np.float32
    window_L: Integers
    """Positions that a layer looks back, 0 for all."""
    turns_L: Integers
    """0 or 1: the angles that a layer's queries and keys are turned by."""


class Step(NamedTuple):
    """Where a step's rows belong."""

    cos_ATF: Floats
    sin_ATF: Floats
    block_T: Integers
    slot_T: Integers
    row_I: Integers
    count_I: Integers
    position_I: Integers
    owner_I: Integers
    table_SW: Integers
    looked_at: int
    """Numbers of keys and values that all rows together look at."""
    threads: int


class Adapted(NamedTuple):
    """Which rows have adapters, and where those are."""

    first_M: Integers
    end_M: Integers
    """The row after the last."""
    down_MLP: Integers
    """Addresses of packed weights; 0: the adapter does not change this part."""
    up_MLP: Integers
    width_MLP: Integers
    """R, filled up to whole panels."""


class Buffers(NamedTuple):
    """What the kernels write to. Results of products are as wide as their panels."""

    keys_LNKCB: Floats
    values_LNKBC: Floats
    x_TD: Floats
    normed_TD: Floats
    qkv_TE: Floats
    attended_TE: Floats
    gate_up_TE: Floats
    active_TI: Floats
    y_TD: Floats
    """What is to be added to x_TD next."""


@intrinsic
def _set_threads(context: Any, count: Any) -> Any:
    """numba's own `set_num_threads`, which looks up an address and so keeps its callers from being kept on disk."""

    def codegen(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        kind = ir.FunctionType(ir.VoidType(), [ir.IntType(32)])
        function = cgutils.get_or_insert_function(builder.module, kind, "set_num_threads")
        builder.call(function, [builder.trunc(arguments[0], ir.IntType(32))])
        return context.get_dummy_value()

    return types.void(types.int64), codegen


@njit(cache=True)
def _share(numbers: int, threads: int) -> None:
    """As `cpu_kernels.use_threads`."""
    _set_threads(threads if numbers >= GRAIN else 1)


@njit(cache=True)
def _product(
    x_TD: Floats,
    layer: int,
    part: int,
    weights: Weights,
    adapted: Adapted,
    bias_LE: Floats,
    out_TE: Floats,
    threads: int,
) -> None:
    _share(x_TD.shape[1] * out_TE.shape[1], threads)
    multiply(x_TD, weights.products_LP[layer, part], out_TE, 1)
    if len(bias_LE):
        for t in range(len(out_TE)):
            for e in range(bias_LE.shape[1]):
                out_TE[t, e] += bias_LE[layer, e]
    for m in range(len(adapted.first_M)):
        width = adapted.width_MLP[m, layer, part]
        if width:
            first, end = adapted.first_M[m], adapted.end_M[m]
            low_TR = np.empty((end - first, width), np.float32)
            _share(width * x_TD.shape[1], threads)
            multiply(x_TD[first:end], adapted.down_MLP[m, layer, part], low_TR, 1)
            _share(width * out_TE.shape[1], threads)
            multiply(low_TR, adapted.up_MLP[m, layer, part], out_TE[first:end], 0)


@njit(cache=True)
def run_layers(weights: Weights, step: Step, adapted: Adapted, to: Buffers) -> None:
    """Run all layers; what the last adds to x_TD is left in y_TD."""
    threads, eps = step.threads, weights.eps
    for layer in range(len(weights.products_LP)):
        _share(to.x_TD.size, threads)
        add_norm(to.x_TD, to.y_TD, weights.input_norm_LD[layer], eps, to.normed_TD)
        _product(to.normed_TD, layer, 0, weights, adapted, weights.biases_LE[0], to.qkv_TE, threads)
        keys_NKCB, values_NKBC, turns = to.keys_LNKCB[layer], to.values_LNKBC[layer], weights.turns_L[layer]
        heads = to.attended_TE.shape[1] // keys_NKCB.shape[2]
        _share(to.qkv_TE.size, threads)
        turn_and_keep(
            to.qkv_TE,
            heads,
            weights.head_norm_LHC[layer],
            eps,
            step.cos_ATF[turns],
            step.sin_ATF[turns],
            step.block_T,
            step.slot_T,
            keys_NKCB,
            values_NKBC,
        )
        _share(step.looked_at, threads)
        attend(
            to.qkv_TE,
            step.row_I,
            step.count_I,
            step.position_I,
            step.owner_I,
            step.table_SW,
            weights.window_L[layer],
            keys_NKCB,
            values_NKBC,
            to.attended_TE,
        )
        _product(to.attended_TE, layer, 1, weights, adapted, weights.biases_LE[1], to.y_TD, threads)
        _share(to.x_TD.size, threads)
        add_norm(to.x_TD, to.y_TD, weights.mlp_norm_LD[layer], eps, to.normed_TD)
        _product(to.normed_TD, layer, 2, weights, adapted, weights.biases_LE[2], to.gate_up_TE, threads)
        _share(to.active_TI.size, threads)
        gate(to.gate_up_TE, to.active_TI)
        _product(to.active_TI, layer, 3, weights, adapted, weights.biases_LE[3], to.y_TD, threads)

"""A step's way through the layers on a CPU, compiled as a whole: between the kernels no time is spent in Python.

Owns: the order of the kernels, and how many threads each gets. A layer is four parts, each of which ends with a
product; a caller who has something to add to a product's result (adapters) runs them one by one.
Does not know: tensors, adapters, what the kernels do.

Shapes: as in `cpu_kernels` and `cpu_attention`; A is 2: angles that turn nothing, and those of the positions.
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

PARTS = 4
"""Parts of a layer: norm to queries, keys and values; attention to its output; norm to gate and up; gate to down."""


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
def _product(x_TD: Floats, packed: int, bias_LE: Floats, layer: int, out_TE: Floats, threads: int) -> None:
    _share(x_TD.shape[1] * out_TE.shape[1], threads)
    multiply(x_TD, packed, out_TE)
    if len(bias_LE):
        for t in range(len(out_TE)):
            for e in range(bias_LE.shape[1]):
                out_TE[t, e] += bias_LE[layer, e]


@njit(cache=True)
def run_parts(first: int, last: int, weights: Weights, step: Step, to: Buffers) -> None:
    """Run the parts from `first` to `last`, counted through all layers."""
    threads, eps = step.threads, weights.eps
    for number in range(first, last):
        layer, part = number // PARTS, number % PARTS
        packed = weights.products_LP[layer, part]
        if part == 0:
            _share(to.x_TD.size, threads)
            add_norm(to.x_TD, to.y_TD, weights.input_norm_LD[layer], eps, to.normed_TD)
            _product(to.normed_TD, packed, weights.biases_LE[0], layer, to.qkv_TE, threads)
        elif part == 1:
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
            _product(to.attended_TE, packed, weights.biases_LE[1], layer, to.y_TD, threads)
        elif part == 2:
            _share(to.x_TD.size, threads)
            add_norm(to.x_TD, to.y_TD, weights.mlp_norm_LD[layer], eps, to.normed_TD)
            _product(to.normed_TD, packed, weights.biases_LE[2], layer, to.gate_up_TE, threads)
        else:
            _share(to.active_TI.size, threads)
            gate(to.gate_up_TE, to.active_TI)
            _product(to.active_TI, packed, weights.biases_LE[3], layer, to.y_TD, threads)

"""All layers of a sampler step on a CPU as one compiled function, so that no time is spent in Python between kernels.

A step for a few tokens takes a few milliseconds, of which hundreds of calls from Python would be a large part. A layer
is four parts, each of which ends with a product; the adapters add theirs to the rows that they belong to. For each
kernel, `_share` chooses one thread or all of them by the amount of work.

Shapes: as in `elementwise` and `cached_attention`. A kinds of angles: those of no rotation, then the model's. L layers,
P parts, M runs of rows with an adapter, R columns of all its modules in a part.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from llvmlite import ir
from numba import njit, types
from numba.core import cgutils
from numba.extending import intrinsic

from tinsmith.engine.cpu.cached_attention import attend
from tinsmith.engine.cpu.elementwise import (
    GRAIN,
    Floats,
    Integers,
    add_norm,
    add_only,
    gate,
    gate_gelu,
    norm_runs,
    turn_and_keep,
)
from tinsmith.engine.cpu.product import multiply

GROUPS = ("qkv", "output", "gate_up", "down")
"""The product that ends each part: norm, then q, k and v; attention, then its output; norm, then gate and up; gate,
then down."""


class Weights(NamedTuple):
    """What stays the same from step to step."""

    products_LP: Integers
    """Addresses of the packed weights, one per part."""
    biases_LE: tuple[Floats, Floats, Floats, Floats]
    """Added to the results of each part; no rows if there is no bias."""
    input_norm_LD: Floats
    """Here and below, a norm that the model does not have has no columns (or no heads)."""
    output_norm_LD: Floats
    mlp_norm_LD: Floats
    down_norm_LD: Floats
    head_norm_LHC: Floats
    query_norm_LE: Floats
    """Norms over all query heads together; over all key heads together."""
    key_norm_LE: Floats
    eps: np.float32
    residual_scale: np.float32
    score_scale: np.float32
    score_cap: np.float32
    """0: none."""
    has_gelu: int
    window_L: Integers
    """How many positions a layer looks back; 0: all."""
    turns_L: Integers
    """Index of the angles (A) by which a layer's queries and keys are rotated."""


class StepRows(NamedTuple):
    """The positions and cache blocks of a step's rows."""

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
    """How many numbers of keys and values all rows together read."""
    threads: int


class Adapted(NamedTuple):
    """Which rows have adapters, and the addresses of these."""

    first_M: Integers
    end_M: Integers
    """The row after the last."""
    down_MLP: Integers
    """Addresses of packed weights; 0: the adapter does not change this part."""
    up_MLP: Integers
    width_MLP: Integers
    """R, rounded up to whole panels."""


class Buffers(NamedTuple):
    """What the kernels write to. Results of products are as wide as whole panels."""

    keys_LNKCB: Floats
    values_LNKBC: Floats
    x_TD: Floats
    normed_TD: Floats
    qkv_TE: Floats
    attended_TE: Floats
    gate_up_TE: Floats
    active_TI: Floats
    y_TD: Floats
    """Added to x_TD by the next norm."""


@intrinsic
def _set_threads(context: Any, count: Any) -> Any:
    """Call numba's `set_num_threads` by name. The original embeds an address, so numba could not cache its callers."""

    def codegen(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        kind = ir.FunctionType(ir.VoidType(), [ir.IntType(32)])
        function = cgutils.get_or_insert_function(builder.module, kind, "set_num_threads")
        builder.call(function, [builder.trunc(arguments[0], ir.IntType(32))])
        return context.get_dummy_value()

    return types.void(types.int64), codegen


@njit(cache=True)
def _share(numbers: int, threads: int) -> None:
    """Do what `elementwise.use_threads` does, in compiled code."""
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
def _add_norm(to: Buffers, weights: Weights, weight_D: Floats) -> None:
    """Add the last result to the residual, and prepare what the next product reads."""
    if len(weight_D):
        add_norm(to.x_TD, to.y_TD, weights.residual_scale, weight_D, weights.eps, to.normed_TD)
    else:
        add_only(to.x_TD, to.y_TD, weights.residual_scale, to.normed_TD)


@njit(cache=True)
def run_layers(weights: Weights, step: StepRows, adapted: Adapted, to: Buffers) -> None:
    """Run all layers. What the last one adds to x_TD is left in y_TD."""
    threads, eps = step.threads, weights.eps
    for layer in range(len(weights.products_LP)):
        _share(to.x_TD.size, threads)
        _add_norm(to, weights, weights.input_norm_LD[layer])
        _product(to.normed_TD, layer, 0, weights, adapted, weights.biases_LE[0], to.qkv_TE, threads)
        keys_NKCB, values_NKBC, turns = to.keys_LNKCB[layer], to.values_LNKBC[layer], weights.turns_L[layer]
        heads = to.attended_TE.shape[1] // keys_NKCB.shape[2]
        _share(to.qkv_TE.size, threads)
        wide = len(weights.query_norm_LE[layer])
        if wide:
            norm_runs(to.qkv_TE, 0, weights.query_norm_LE[layer], wide, eps)
            norm_runs(to.qkv_TE, wide, weights.key_norm_LE[layer], weights.key_norm_LE.shape[1], eps)
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
            weights.score_scale,
            weights.score_cap,
            keys_NKCB,
            values_NKBC,
            to.attended_TE,
        )
        _product(to.attended_TE, layer, 1, weights, adapted, weights.biases_LE[1], to.y_TD, threads)
        _share(to.x_TD.size, threads)
        if weights.output_norm_LD.shape[1]:
            norm_runs(to.y_TD, 0, weights.output_norm_LD[layer], weights.output_norm_LD.shape[1], eps)
        _add_norm(to, weights, weights.mlp_norm_LD[layer])
        _product(to.normed_TD, layer, 2, weights, adapted, weights.biases_LE[2], to.gate_up_TE, threads)
        _share(to.active_TI.size, threads)
        if weights.has_gelu:
            gate_gelu(to.gate_up_TE, to.active_TI)
        else:
            gate(to.gate_up_TE, to.active_TI)
        _product(to.active_TI, layer, 3, weights, adapted, weights.biases_LE[3], to.y_TD, threads)
        if weights.down_norm_LD.shape[1]:
            _share(to.x_TD.size, threads)
            norm_runs(to.y_TD, 0, weights.down_norm_LD[layer], weights.down_norm_LD.shape[1], eps)

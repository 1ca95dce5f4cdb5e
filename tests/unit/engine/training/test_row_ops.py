"""The operations between products in training: both forms against autograd in float64, and the kernels' exponential."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from typing import Any, get_args

import numpy as np
import pytest
import torch
from torch.nn.functional import gelu, silu

from tinsmith.engine.cpu.linear import can_compile, can_pack, product_kind, stored_product
from tinsmith.engine.models.attention import rotate
from tinsmith.engine.models.config import Activation
from tinsmith.engine.training.row_ops import CompiledRows, TorchRows, row_ops

CPU = torch.device("cpu")
compiles = pytest.mark.skipif(not can_pack(CPU, torch.float32) or not can_compile(), reason="no kernels here")
both = pytest.mark.parametrize("kind", [TorchRows, pytest.param(CompiledRows, marks=compiles)])
EPS = 1e-5


def wide(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape)), dtype=torch.float64)


@both
@pytest.mark.parametrize("rows", [1, 7, 130])
def test_a_norm_and_its_gradient(kind: type[TorchRows], rows: int) -> None:
    x, weight, grad, beside = wide(rows, 48).requires_grad_(), wide(48), wide(rows, 48) * 3, wide(rows, 48) * 5
    expected = x * (x.square().mean(1, keepdim=True) + EPS).rsqrt() * weight
    expected.backward(grad)
    ops = kind()
    plain, weight = x.detach().float(), weight.float()
    normed, scale = ops.norm(plain, weight, EPS)
    assert torch.allclose(normed.double(), expected.detach(), atol=1e-5)
    assert torch.equal(ops.scaled(plain, scale, weight), normed)
    assert x.grad is not None
    before = beside.float()
    for past, total in ((before, x.grad + beside), (None, x.grad)):
        assert torch.allclose(ops.norm_back(grad.float(), plain, scale, weight, past).double(), total, atol=2e-5)
    assert torch.equal(before, beside.float()), "the gradient beside is still needed"


@both
@pytest.mark.parametrize("activation", get_args(Activation))
def test_a_gate_and_its_gradient(kind: type[TorchRows], activation: Activation) -> None:
    both_halves, grad = (wide(9, 80) * 8).requires_grad_(), wide(9, 40)
    gate = both_halves[:, :40]
    expected = (silu(gate) if activation == "silu" else gelu(gate, approximate="tanh")) * both_halves[:, 40:]
    expected.backward(grad)
    ops, plain = kind(activation), both_halves.detach().float()
    assert both_halves.grad is not None
    assert torch.allclose(ops.gate(plain).double(), expected.detach(), atol=1e-4, rtol=1e-6)
    assert torch.allclose(ops.gate_back(grad.float(), plain).double(), both_halves.grad, atol=1e-4, rtol=1e-6)


@both
@pytest.mark.parametrize("pairs", [8, 3])
def test_a_turn_is_the_models(kind: type[TorchRows], pairs: int) -> None:
    x, angles = wide(5, 3, 16).float(), wide(5, 1, pairs).float()
    part = x[:, 1:]  # as queries and keys lie beside values
    turned = kind().turn(part, 1, angles.cos(), angles.sin())
    assert torch.allclose(turned[:, :1], rotate(part[:, :1], angles.cos(), angles.sin()))
    assert torch.equal(turned[:, 1:], part[:, 1:])


def test_kernels_are_taken_on_a_cpu_in_float32_only() -> None:
    assert isinstance(row_ops(CPU, torch.float32), CompiledRows) == (can_pack(CPU, torch.float32) and can_compile())
    assert type(row_ops(CPU, torch.bfloat16)) is TorchRows
    assert type(row_ops(torch.device("meta"), torch.float32)) is TorchRows
    assert product_kind(CPU, torch.bfloat16) == product_kind(torch.device("meta"), torch.float32) == "torch"


@pytest.mark.parametrize("shape", [(96, 40), (33, 17), (1, 5)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_products_forward_and_back(shape: tuple[int, int], dtype: torch.dtype) -> None:
    weight = wide(*shape).to(dtype)
    x, grad = wide(11, shape[1]).to(dtype), wide(11, shape[0]).to(dtype)
    bound = 1e-5 if dtype is torch.float32 else 0.05
    product = stored_product([weight], None, CPU, dtype)
    for found, expected in (
        (product(x), x.double() @ weight.double().t()),
        (product.back(grad), grad.double() @ weight.double()),
    ):
        assert (found - expected).abs().max() <= bound * expected.abs().max()


def computed(function: Callable[..., Any], x: np.ndarray) -> np.ndarray:
    """The function of each number, computed in a compiled loop."""
    from numba import njit

    @njit
    def all_of(x: np.ndarray, out: np.ndarray) -> None:
        for i in range(len(x)):
            out[i] = function(x[i])

    found = np.empty_like(x)
    all_of(x, found)
    return found


@compiles
def test_the_exponential_is_right_everywhere() -> None:
    from tinsmith.engine.cpu.elementwise import exponential

    x = np.concatenate([np.linspace(-87, 88, 100_001), [0.0, -0.0, -200.0, -np.inf, 200.0, np.inf, np.nan]])
    x = x.astype(np.float32)
    found = computed(exponential, x)
    with np.errstate(over="ignore"):
        assert np.abs(found[:-5] / np.exp(x[:-5].astype(np.float64)) - 1).max() < 3e-7
    assert found[-5:-1].tolist() == [0.0, 0.0, np.inf, np.inf]
    assert np.isnan(found[-1])


@compiles
def test_the_hyperbolic_tangent_is_right_everywhere() -> None:
    from tinsmith.engine.cpu.elementwise import hyperbolic_tangent

    x = np.concatenate([np.linspace(-20, 20, 100_001), np.geomspace(1e-30, 1, 1000), [0.0, np.inf, -np.inf, np.nan]])
    x = x.astype(np.float32)
    found = computed(hyperbolic_tangent, x)
    expected = np.tanh(x.astype(np.float64))
    apart = np.abs(found[:-1] - expected[:-1])
    assert (apart <= 3e-7 * np.abs(expected[:-1])).all()
    assert np.isnan(found[-1])


@compiles
@pytest.mark.parametrize("threads", [1, 2])
def test_kernels_leave_torch_its_threads(threads: int) -> None:
    program = f"""
import numpy, torch
torch.set_num_threads({threads})
from tinsmith.engine.cpu.elementwise import GRAIN, gate, get_num_threads, use_threads
gate(numpy.ones((2, 8), numpy.float32), numpy.ones((2, 4), numpy.float32))
use_threads(GRAIN)
print(torch.get_num_threads(), get_num_threads())
use_threads(GRAIN - 1)
print(torch.get_num_threads(), get_num_threads())
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    most = min(threads, os.cpu_count() or 1)
    assert done.stdout.splitlines() == [f"{threads} {most}", f"{threads} 1"]


def test_a_numba_that_cannot_be_loaded_is_done_without(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setitem(sys.modules, "tinsmith.engine.cpu.product", None)
    assert not can_compile.__wrapped__()
    assert "kernels cannot be compiled" in caplog.text

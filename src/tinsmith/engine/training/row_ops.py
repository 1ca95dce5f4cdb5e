"""The row-wise operations between the matrix products of a training pass: norm, gate, rotation, and their gradients.

`TorchRows` works on every device and dtype. `CompiledRows` does the same on a CPU in float32 with one compiled loop per
operation (`cpu/elementwise`), which reads and writes memory only once.

Shapes: T tokens, D hidden, E = 2 I, I intermediate, H heads, C head dim, F rotated pairs.
"""

from __future__ import annotations

import numpy as np
import torch
from torch.nn.functional import gelu, silu

from tinsmith.engine.cpu.linear import can_compile, can_pack
from tinsmith.engine.models.attention import rotate
from tinsmith.engine.models.config import Activation


def row_ops(device: torch.device, dtype: torch.dtype, activation: Activation = "silu") -> TorchRows:
    """Return the fastest form for a device and dtype."""
    return (CompiledRows if can_pack(device, dtype) and can_compile() else TorchRows)(activation)


def compile_rows() -> None:
    """Compile the kernels of training by calling each once."""
    rows, x_TD, one_D, angle_T1F = CompiledRows(), torch.zeros(1, 8), torch.ones(8), torch.zeros(1, 1, 4)
    normed_TD, scale_T1 = rows.norm(x_TD, one_D, 1.0)
    rows.norm_back(normed_TD, x_TD, scale_T1, one_D, rows.scaled(x_TD, scale_T1, one_D))
    for kind in (rows, CompiledRows("gelu_tanh")):
        kind.gate_back(kind.gate(x_TD), x_TD)
    rows.turn(x_TD.view(1, 1, 8), 1, angle_T1F, angle_T1F)


class TorchRows:
    """The operations in torch, with a model's activation."""

    def __init__(self, activation: Activation = "silu") -> None:
        self._has_gelu = activation == "gelu_tanh"

    def norm(self, x_TD: torch.Tensor, weight_D: torch.Tensor, eps: float) -> tuple[torch.Tensor, torch.Tensor]:
        """Return x * scale * weight, and scale_T1 = 1 / rms(x)."""
        scale_T1 = norm_scale(x_TD, eps)
        return x_TD * scale_T1 * weight_D, scale_T1

    def scaled(self, x_TD: torch.Tensor, scale_T1: torch.Tensor, weight_D: torch.Tensor) -> torch.Tensor:
        """Return x * scale * weight, with the bits that `norm` returned."""
        return x_TD * scale_T1 * weight_D

    def norm_back(
        self,
        grad_TD: torch.Tensor,
        x_TD: torch.Tensor,
        scale_T1: torch.Tensor,
        weight_D: torch.Tensor,
        beside_TD: torch.Tensor | None,
    ) -> torch.Tensor:
        """Return the gradient of a norm's input, plus the gradient of the residual that bypassed the norm."""
        through_TD = norm_backward(grad_TD, x_TD, scale_T1, weight_D)
        return through_TD if beside_TD is None else through_TD.add_(beside_TD)

    def gate(self, gate_up_TE: torch.Tensor) -> torch.Tensor:
        """Return active_TI = activation(first half) * second half."""
        gate_TI, up_TI = gate_up_TE.chunk(2, dim=1)
        return self._activated(gate_TI).mul_(up_TI)

    def gate_back(self, active_grad_TI: torch.Tensor, gate_up_TE: torch.Tensor) -> torch.Tensor:
        """Return the gradient of gate_up_TE."""
        gate_TI, up_TI = gate_up_TE.chunk(2, dim=1)
        gate_up_grad_TE = torch.empty_like(gate_up_TE)
        gate_grad_TI, up_grad_TI = gate_up_grad_TE.chunk(2, dim=1)
        torch.mul(active_grad_TI, self._activated(gate_TI), out=up_grad_TI)
        through_TI = active_grad_TI * up_TI
        if self._has_gelu:
            gate_grad_TI.copy_(torch.ops.aten.gelu_backward(through_TI, gate_TI, approximate="tanh"))
        else:
            torch.ops.aten.silu_backward.grad_input(through_TI, gate_TI, grad_input=gate_grad_TI)
        return gate_up_grad_TE

    def _activated(self, gate_TI: torch.Tensor) -> torch.Tensor:
        return gelu(gate_TI, approximate="tanh") if self._has_gelu else silu(gate_TI)

    def turn(self, x_THC: torch.Tensor, heads: int, cos_T1F: torch.Tensor, sin_T1F: torch.Tensor) -> torch.Tensor:
        """Return x with the first F numbers of each of the first `heads` heads rotated against the next F."""
        return torch.cat((rotate(x_THC[:, :heads], cos_T1F, sin_T1F), x_THC[:, heads:]), dim=1)


class CompiledRows(TorchRows):
    """The operations as compiled kernels. Every tensor is float32, on the CPU."""

    def __init__(self, activation: Activation = "silu") -> None:
        from tinsmith.engine.cpu import elementwise
        from tinsmith.engine.cpu.elementwise import use_threads

        super().__init__(activation)
        self._kernels, self._use_threads = elementwise, use_threads
        self._gate = elementwise.gate_gelu if self._has_gelu else elementwise.gate
        self._gate_back = elementwise.gate_gelu_back if self._has_gelu else elementwise.gate_back

    def norm(self, x_TD: torch.Tensor, weight_D: torch.Tensor, eps: float) -> tuple[torch.Tensor, torch.Tensor]:
        x_TD = x_TD.contiguous()
        self._use_threads(x_TD.numel())
        out_TD, scale_T1 = torch.empty_like(x_TD), torch.empty(len(x_TD), 1)
        self._kernels.norm(x_TD.numpy(), weight_D.numpy(), np.float32(eps), scale_T1.numpy(), out_TD.numpy())
        return out_TD, scale_T1

    def scaled(self, x_TD: torch.Tensor, scale_T1: torch.Tensor, weight_D: torch.Tensor) -> torch.Tensor:
        x_TD = x_TD.contiguous()
        self._use_threads(x_TD.numel())
        out_TD = torch.empty_like(x_TD)
        self._kernels.scaled(x_TD.numpy(), scale_T1.numpy(), weight_D.numpy(), out_TD.numpy())
        return out_TD

    def norm_back(
        self,
        grad_TD: torch.Tensor,
        x_TD: torch.Tensor,
        scale_T1: torch.Tensor,
        weight_D: torch.Tensor,
        beside_TD: torch.Tensor | None,
    ) -> torch.Tensor:
        grad_TD, x_TD = grad_TD.contiguous(), x_TD.contiguous()
        self._use_threads(x_TD.numel())
        out_TD = torch.zeros_like(x_TD) if beside_TD is None else beside_TD.clone()
        self._kernels.add_norm_back(grad_TD.numpy(), x_TD.numpy(), scale_T1.numpy(), weight_D.numpy(), out_TD.numpy())
        return out_TD

    def gate(self, gate_up_TE: torch.Tensor) -> torch.Tensor:
        gate_up_TE = gate_up_TE.contiguous()
        self._use_threads(gate_up_TE.numel())
        active_TI = torch.empty(len(gate_up_TE), gate_up_TE.shape[1] // 2)
        self._gate(gate_up_TE.numpy(), active_TI.numpy())
        return active_TI

    def gate_back(self, active_grad_TI: torch.Tensor, gate_up_TE: torch.Tensor) -> torch.Tensor:
        gate_up_TE = gate_up_TE.contiguous()
        self._use_threads(gate_up_TE.numel())
        out_TE = torch.empty_like(gate_up_TE)
        self._gate_back(active_grad_TI.contiguous().numpy(), gate_up_TE.numpy(), out_TE.numpy())
        return out_TE

    def turn(self, x_THC: torch.Tensor, heads: int, cos_T1F: torch.Tensor, sin_T1F: torch.Tensor) -> torch.Tensor:
        x_THC = x_THC.contiguous()
        self._use_threads(x_THC.numel())
        out_THC = torch.empty_like(x_THC)
        self._kernels.turn(x_THC.numpy(), heads, cos_T1F.numpy(), sin_T1F.numpy(), out_THC.numpy())
        return out_THC


def norm_scale(x_TD: torch.Tensor, eps: float) -> torch.Tensor:
    """Return 1 / rms(x) of each row, computed in float32."""
    return x_TD.float().square().mean(-1, keepdim=True).add_(eps).rsqrt_().to(x_TD.dtype)


def norm_backward(
    grad_TD: torch.Tensor, x_TD: torch.Tensor, scale_T1: torch.Tensor, weight_D: torch.Tensor
) -> torch.Tensor:
    """Return the gradient of x, given that of x * scale * weight with scale = 1 / rms(x)."""
    inner_TD = grad_TD * weight_D
    unit_TD = x_TD * scale_T1
    along_T1 = (inner_TD * unit_TD).mean(-1, keepdim=True)
    return inner_TD.sub_(unit_TD.mul_(along_T1)).mul_(scale_T1)

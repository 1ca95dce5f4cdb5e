"""Attention of a training pass, forward and backward, in two forms.

`TorchAttention` works on every device and dtype and leaves the gradient to autograd. `CompiledAttention` does the same
on a CPU in float32 with the kernels of `cpu/packed_attention`, in about half the time.

Shapes: T tokens, H query heads, K key/value heads, C head dim, E = H + 2 K, S sequences.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch

from tinsmith.engine.cpu.linear import can_compile, can_pack
from tinsmith.engine.models.attention import PackedAttention
from tinsmith.engine.models.config import ModelConfig


@dataclass(frozen=True, slots=True)
class Attended:
    """The result of one layer's attention, and what its backward pass needs."""

    layer: int
    out_THC: torch.Tensor
    inputs: tuple[torch.Tensor, ...]
    memo: torch.Tensor
    """What the backward pass needs besides: the output with its graph, or the logarithm of each row's sum."""


class TrainingAttention(Protocol):
    """Attention over concatenated sequences."""

    def forward(self, layer: int, qkv_TEC: torch.Tensor, is_recording: bool) -> Attended:
        """Attend with queries, keys and values side by side in `qkv_TEC`. Only a recorded pass has a backward pass."""
        ...

    def backward(self, attended: Attended, grad_THC: torch.Tensor) -> torch.Tensor:
        """Return the gradient of qkv_TEC; call it once for each `Attended`."""
        ...


def training_attention(
    config: ModelConfig, lengths: Sequence[int], device: torch.device, dtype: torch.dtype
) -> TrainingAttention:
    """Return the fastest form for a model, device and dtype."""
    if can_pack(device, dtype) and can_compile() and CompiledAttention.fits(config):
        return CompiledAttention(config, lengths)
    return TorchAttention(config, lengths)


class TorchAttention:
    """Attention by torch and its autograd."""

    def __init__(self, config: ModelConfig, lengths: Sequence[int]) -> None:
        self._attend = PackedAttention(config, lengths)
        self._heads = config.num_heads, config.num_kv_heads, config.num_kv_heads

    def forward(self, layer: int, qkv_TEC: torch.Tensor, is_recording: bool) -> Attended:
        q_THC, k_TKC, v_TKC = (
            part.detach().requires_grad_(is_recording) for part in torch.split_with_sizes(qkv_TEC, self._heads, dim=1)
        )
        with torch.set_grad_enabled(is_recording):
            out_THC = self._attend(layer, q_THC, k_TKC, v_TKC)
        return Attended(layer, out_THC.detach(), (q_THC, k_TKC, v_TKC), out_THC)

    def backward(self, attended: Attended, grad_THC: torch.Tensor) -> torch.Tensor:
        return torch.cat(torch.autograd.grad(attended.memo, attended.inputs, grad_THC), dim=1)


class CompiledAttention:
    """Attention by compiled kernels. Every tensor is float32, on the CPU."""

    def __init__(self, config: ModelConfig, lengths: Sequence[int]) -> None:
        from tinsmith.engine.cpu import packed_attention
        from tinsmith.engine.cpu.elementwise import use_threads

        self._kernels, self._use_threads, self._config = packed_attention, use_threads, config
        self._length_S = np.array(lengths, np.int64)
        self._start_S = np.cumsum(self._length_S) - self._length_S

    @staticmethod
    def fits(config: ModelConfig) -> bool:
        """Return whether the kernels support this model's head size."""
        from tinsmith.engine.cpu.product import PANEL

        return bool(config.head_dim % PANEL == 0)

    def forward(self, layer: int, qkv_TEC: torch.Tensor, is_recording: bool) -> Attended:
        shape = len(qkv_TEC), self._config.num_heads, self._config.head_dim
        attended = Attended(layer, torch.empty(shape), (qkv_TEC.contiguous(),), torch.empty(shape[:2]))
        self._run(attended, None, torch.empty(0, 0, 0), torch.empty(0, 0, 0, 0))
        return attended

    def backward(self, attended: Attended, grad_THC: torch.Tensor) -> torch.Tensor:
        (qkv_TEC,) = attended.inputs
        (rows, heads, head_dim), kv_heads = grad_THC.shape, self._config.num_kv_heads
        grad_TEC, parts_PTHC = torch.empty_like(qkv_TEC), torch.empty(2, *grad_THC.shape)
        self._run(attended, grad_THC.contiguous(), grad_TEC, parts_PTHC)
        shared_TPKC = grad_TEC[:, heads:].view(rows, 2, kv_heads, head_dim)
        for part, part_THC in enumerate(parts_PTHC):
            torch.sum(part_THC.view(rows, kv_heads, -1, head_dim), dim=2, out=shared_TPKC[:, part])
        return grad_TEC

    def _run(
        self, attended: Attended, grad_THC: torch.Tensor | None, grad_TEC: torch.Tensor, parts_PTHC: torch.Tensor
    ) -> None:
        (qkv_TEC,) = attended.inputs
        self._use_threads(qkv_TEC.numel())
        self._kernels.attend(
            grad_THC is not None,
            qkv_TEC.numpy(),
            self._start_S,
            self._length_S,
            self._config.sliding_window(attended.layer) or 0,
            np.float32(self._config.score_scale),
            np.float32(self._config.attention_softcap),
            attended.out_THC.numpy(),
            attended.memo.numpy(),
            (attended.out_THC if grad_THC is None else grad_THC).numpy(),
            grad_TEC.numpy(),
            parts_PTHC.numpy(),
        )

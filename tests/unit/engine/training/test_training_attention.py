"""Attention in training: both forms against autograd in float64, with the same bits whatever is packed beside."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from tinsmith.engine.cpu.linear import can_compile, can_pack
from tinsmith.engine.models.config import ModelConfig
from tinsmith.engine.training.attention import CompiledAttention, TorchAttention, TrainingAttention, training_attention

CPU = torch.device("cpu")
compiles = pytest.mark.skipif(not can_pack(CPU, torch.float32) or not can_compile(), reason="no kernels here")
both = pytest.mark.parametrize("kind", [TorchAttention, pytest.param(CompiledAttention, marks=compiles)])


def config_of(
    heads: int = 4, kv_heads: int = 2, head_dim: int = 64, window: int | None = None, **scores: float
) -> ModelConfig:
    return ModelConfig(
        architecture="LlamaForCausalLM",
        vocab_size=32,
        hidden_size=heads * head_dim,
        num_layers=1,
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        intermediate_size=32,
        max_context_length=1024,
        sliding_windows=(window,),
        **scores,
    )


def random(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape)), dtype=torch.float64)


def reference(config: ModelConfig, lengths: list[int], qkv: torch.Tensor) -> torch.Tensor:
    """As it is written down in books."""
    window, groups, outs = config.sliding_window(0), config.num_heads // config.num_kv_heads, []
    heads = [config.num_heads, config.num_kv_heads, config.num_kv_heads]
    for part in torch.split_with_sizes(qkv, lengths):
        q, k, v = torch.split_with_sizes(part.transpose(0, 1), heads)
        k, v = k.repeat_interleave(groups, 0), v.repeat_interleave(groups, 0)
        distance = torch.arange(q.shape[1])[:, None] - torch.arange(q.shape[1])
        hidden = (distance < 0) | (distance >= (window or len(part)))
        scores = q @ k.transpose(1, 2) * (config.attention_scale or 1 / math.sqrt(config.head_dim))
        if config.attention_softcap:
            scores = config.attention_softcap * torch.tanh(scores / config.attention_softcap)
        scores = scores.masked_fill(hidden, -math.inf)
        outs.append((scores.softmax(-1) @ v).transpose(0, 1))
    return torch.cat(outs)


def result_of(attention: TrainingAttention, qkv: torch.Tensor, grad: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    attended = attention.forward(0, qkv, is_recording=True)
    return attended.out_THC, attention.backward(attended, grad)


@both
@pytest.mark.parametrize("window", [None, 1, 10, 130])
@pytest.mark.parametrize(("heads", "kv_heads", "head_dim"), [(4, 2, 64), (3, 1, 32), (2, 2, 96)])
def test_results_and_gradients(kind: Any, window: int | None, heads: int, kv_heads: int, head_dim: int) -> None:
    config, lengths = config_of(heads, kv_heads, head_dim, window), [1, 5, 6, 50, 95, 96, 97, 203, 17]
    qkv = (random(sum(lengths), heads + 2 * kv_heads, head_dim) * 2).requires_grad_()
    grad = random(sum(lengths), heads, head_dim)
    wanted = reference(config, lengths, qkv)
    (wanted_grad,) = torch.autograd.grad(wanted, qkv, grad)
    out, qkv_grad = result_of(kind(config, lengths), qkv.detach().float(), grad.float())
    assert torch.allclose(out.double(), wanted.detach(), atol=1e-5)
    assert torch.allclose(qkv_grad.double(), wanted_grad, atol=1e-4, rtol=1e-5)


@both
@pytest.mark.parametrize("window", [None, 10])
@pytest.mark.parametrize("scores", [{"attention_scale": 0.3}, {"attention_scale": 0.3, "attention_softcap": 2.5}])
def test_scores_are_scaled_and_bounded(kind: Any, window: int | None, scores: dict[str, float]) -> None:
    config, lengths = config_of(window=window, **scores), [1, 50, 97, 203]
    qkv = (random(sum(lengths), 8, 64) * 2).requires_grad_()
    grad = random(sum(lengths), 4, 64)
    wanted = reference(config, lengths, qkv)
    (wanted_grad,) = torch.autograd.grad(wanted, qkv, grad)
    out, qkv_grad = result_of(kind(config, lengths), qkv.detach().float(), grad.float())
    assert torch.allclose(out.double(), wanted.detach(), atol=2e-5)
    assert torch.allclose(qkv_grad.double(), wanted_grad, atol=2e-4, rtol=1e-5)


@compiles
def test_a_sequence_has_the_same_bits_alone_and_with_any_number_of_threads() -> None:
    config, lengths = config_of(), [70, 133, 9]
    qkv, grad = random(212, 8, 64).float(), random(212, 4, 64).float()
    together = result_of(CompiledAttention(config, lengths), qkv, grad)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        alone = result_of(CompiledAttention(config, [133]), qkv[70:203], grad[70:203])
    finally:
        torch.set_num_threads(threads)
    for ours, other in zip(together, alone, strict=True):
        assert torch.equal(ours[70:203], other)


@compiles
def test_what_is_not_finite_is_not_hidden() -> None:
    config = config_of()
    qkv, grad = random(40, 8, 64).float(), random(40, 4, 64).float()
    qkv[20, 0, 3] = math.nan
    out, qkv_grad = result_of(CompiledAttention(config, [40]), qkv, grad)
    assert out[20, 0].isnan().all()
    assert out[:20].isfinite().all()
    assert out[21:].isfinite().all(), "a query is nobody else's"
    assert qkv_grad[:20, 4].isnan().any()


@compiles
def test_heads_that_do_not_fit_are_left_to_torch() -> None:
    for head_dim, kind in ((8, TorchAttention), (64, CompiledAttention)):
        found = training_attention(config_of(head_dim=head_dim), [3], CPU, torch.float32)
        assert type(found) is kind
    assert type(training_attention(config_of(), [3], CPU, torch.bfloat16)) is TorchAttention

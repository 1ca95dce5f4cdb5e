"""Compiles the kernels: `python -m tinsmith.engine.worker.use_kernels sampling` (or `training`).

numba compiles a kernel for the types of its first call, so each program creates the smallest possible model and uses
every kernel of its half once. `cpu/compile` starts both.
"""

from __future__ import annotations

import dataclasses
import sys

import numpy as np
import torch

from tinsmith.engine.lora import LoraAdapter
from tinsmith.engine.models.config import ModelConfig
from tinsmith.engine.models.decoder import build_decoder, weight_shapes
from tinsmith.engine.sampling.block_attention import BLOCK_MULTIPLE, BlockCache, NewTokens
from tinsmith.engine.sampling.decoder import FrozenAdapter, RowAdapters
from tinsmith.engine.sampling.draw import DrawRule, draw_from
from tinsmith.engine.sampling.fused_decoder import FusedDecoder
from tinsmith.engine.training.attention import CompiledAttention
from tinsmith.engine.training.row_ops import compile_rows


def use_sampling() -> None:
    """Use each kernel of sampling once. They are the same for all models."""
    config = dataclasses.replace(_smallest(8), logit_softcap=1.0)
    shapes = weight_shapes(config)
    decoder = build_decoder(config, lambda name: torch.zeros(shapes[name]))
    fused = FusedDecoder(decoder)
    cache = BlockCache(config, 1, BLOCK_MULTIPLE, decoder.device, decoder.dtype)
    adapter = FrozenAdapter(LoraAdapter(config, 1, 0), decoder.device, decoder.dtype)
    with torch.inference_mode():
        zero_T, rows = torch.zeros(1, dtype=torch.int64), RowAdapters([(0, 1, adapter)])
        logits_TV = fused.unembed(fused.hidden_cached(zero_T, zero_T, cache, [NewTokens(0, 0, 1, [0])], rows), rows)
        draw_from(logits_TV, [0], [DrawRule()], np.zeros(1))


def use_training() -> None:
    """Use each kernel of training once, except the forward product."""
    from tinsmith.engine.cpu.product import PANEL, PackedWeights

    compile_rows()
    attention = CompiledAttention(_smallest(PANEL), [1])
    attended = attention.forward(0, torch.zeros(1, 3, PANEL), is_recording=True)
    attention.backward(attended, attended.out_THC)
    PackedWeights(torch.zeros(1, 1)).back(torch.zeros(1, 1))


def _smallest(head_dim: int) -> ModelConfig:
    return ModelConfig(
        architecture="LlamaForCausalLM",
        vocab_size=8,
        hidden_size=head_dim,
        num_layers=1,
        num_heads=1,
        num_kv_heads=1,
        head_dim=head_dim,
        intermediate_size=8,
        max_context_length=8,
    )


PROGRAMS = {"sampling": use_sampling, "training": use_training}

if __name__ == "__main__":
    PROGRAMS[sys.argv[1]]()

"""The kernels of this machine: compiled once, by processes of their own, and read from disk by every engine.

An engine does not use code that it has compiled itself: that and what numba reads from disk later can differ in the
last bit, and an engine that comes back must compute what the one before it did.
Does not know: what the kernels do.
"""

from __future__ import annotations

import logging
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import numpy as np
import torch

from tinsmith.engine.block_attention import BLOCK_MULTIPLE, BlockCache, NewTokens
from tinsmith.engine.dtype_choice import processor
from tinsmith.engine.fused_inference import FusedDecoder
from tinsmith.engine.inference import InferenceDecoder
from tinsmith.engine.lora import LoraAdapter
from tinsmith.engine.models.config import ModelConfig
from tinsmith.engine.models.decoder import build_decoder, weight_shapes
from tinsmith.engine.row_adapters import FrozenAdapter, RowAdapters
from tinsmith.engine.row_ops import compile_rows
from tinsmith.engine.sampling_math import DrawRule, draw_from
from tinsmith.engine.training_attention import CompiledAttention

logger = logging.getLogger(__name__)

SOURCES = (
    "attention_kernels.py",
    "cpu_attention.py",
    "cpu_drawing.py",
    "cpu_kernels.py",
    "cpu_layers.py",
    "cpu_product.py",
    "cpu_tile.py",
    "row_kernels.py",
)
"""Files with kernels."""
NOTE = "kernels.txt"
"""In the cache directory: for which machine and versions the kernels were compiled last."""
SHARES = ("compile_sampling", "compile_training")
"""What the processes do, side by side: compiling takes one core."""


def compile_kernels(decoder: InferenceDecoder, cache_dir: Path) -> None:
    """Have all kernels compiled that this decoder and training need, unless that was done on this machine before."""
    if not isinstance(decoder, FusedDecoder):
        return
    note = cache_dir / NOTE
    sources = [Path(__file__).with_name(name).stat().st_mtime_ns for name in SOURCES]
    wanted = f"{processor()}; numba {version('numba')}; {sources}"
    if note.exists() and wanted in note.read_text().splitlines():
        return
    logger.info("compiling kernels for this processor, once", extra={"event": "compiling"})
    programs = [f"from tinsmith.engine import compiling; compiling.{share}()" for share in SHARES]
    processes = [
        subprocess.Popen([sys.executable, "-c", program], stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL)
        for program in programs
    ]
    codes = [process.wait() for process in processes]
    if any(codes):
        logger.warning("kernels could not be compiled beforehand; the first requests will have to wait for them")
        return
    cache_dir.mkdir(parents=True, exist_ok=True)
    with note.open("a") as lines:
        lines.write(f"{wanted}\n")


def compile_sampling() -> None:
    """Use each kernel of sampling once. They are the same for all models."""
    config = _smallest(8)
    shapes = weight_shapes(config)
    decoder = build_decoder(config, lambda name: torch.zeros(shapes[name]))
    fused = FusedDecoder(decoder)
    cache = BlockCache(config, 1, BLOCK_MULTIPLE, decoder.device, decoder.dtype)
    adapter = FrozenAdapter(LoraAdapter(config, 1, 0), decoder.device, decoder.dtype)
    with torch.inference_mode():
        zero_T, rows = torch.zeros(1, dtype=torch.int64), RowAdapters([(0, 1, adapter)])
        logits_TV = fused.unembed(fused.hidden_cached(zero_T, zero_T, cache, [NewTokens(0, 0, 1, [0])], rows), rows)
        draw_from(logits_TV, [0], [DrawRule()], np.zeros(1))


def compile_training() -> None:
    """Use each kernel of training once, but the product."""
    from tinsmith.engine.cpu_product import PANEL

    compile_rows()
    attention = CompiledAttention(_smallest(PANEL), [1])
    attended = attention.forward(0, torch.zeros(1, 3, PANEL), is_recording=True)
    attention.backward(attended, attended.out_THC)


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

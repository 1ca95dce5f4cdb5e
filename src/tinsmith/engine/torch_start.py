"""How a torch engine starts: its options, what must be set before torch is loaded, and the factory for `worker`.

Does not import torch until the environment is set.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import msgspec

from tinsmith.engine import freed_memory
from tinsmith.engine.base import ModelCard
from tinsmith.engine.child import EngineSpec
from tinsmith.engine.dtype_choice import choose, cores
from tinsmith.engine.executor import Executor, StartError
from tinsmith.errors import TinkerError

logger = logging.getLogger(__name__)

EXECUTOR = "tinsmith.engine.torch_start:make"

SHORT_SPINS = {"GOMP_SPINCOUNT": "20000", "KMP_BLOCKTIME": "1"}
"""Threads that wait for the next operation spin for a short while, then sleep. By default GNU's OpenMP spins 300,000
times and LLVM's for 200 ms, and two engines on the same cores, or an engine beside other work, hardly get on at all."""


class TorchOptions(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What the engine of one base model is told."""

    card: ModelCard
    source: str
    """A Hugging Face directory, a GGUF file or a hub id."""
    cache_dir: str
    """Where converted tokenizers and what is known of this machine are kept."""
    device: str = "cpu"
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    threads: int = 0
    """Threads that compute, 0: one per core. Results are the same bits for the same number only."""
    micro_batch_tokens: int = 512
    adapter_bytes: int | None = None
    """Adapters in training that stay in memory; the rest goes to disk. None, here and below: by `memory_caps`."""
    sampler_adapter_bytes: int | None = None
    """Frozen adapters that stay in memory for sampling."""
    cache_bytes: int | None = None
    """Keys and values of the sampler."""
    engines: int = 1
    """Engines that share the machine's memory, this one included."""
    spool_dir: str | None = None
    """Where adapters go that memory has no room for; None: where temporary files go."""


def torch_spec(options: TorchOptions) -> EngineSpec:
    """How to start a torch engine with these options."""
    return EngineSpec(card=options.card, executor=EXECUTOR, options=msgspec.to_builtins(options))


def read_options(values: Mapping[str, Any]) -> TorchOptions:
    try:
        return msgspec.convert(dict(values), TorchOptions)
    except msgspec.ValidationError as error:
        raise StartError(f"the engine's options are wrong: {error}") from None


def prepare(options: TorchOptions) -> str:
    """Set the environment that torch reads when it is loaded; returns the number format to compute in."""
    threads = options.threads or cores()
    for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS"):
        os.environ[name] = str(threads)
    for name, value in SHORT_SPINS.items():
        os.environ.setdefault(name, value)
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # deterministic products on CUDA
    if options.dtype != "auto":
        return options.dtype
    if options.device != "cpu":
        return "bfloat16"
    choice = choose(Path(options.cache_dir))
    logger.info("computing in %s: %s", choice.dtype, choice.reason, extra={"event": "dtype_chosen"})
    os.environ.update(choice.environment)
    return choice.dtype


def make(values: Mapping[str, Any]) -> Executor:
    """Load the model; a StartError says why that cannot be."""
    options = read_options(values)
    dtype = prepare(options)
    freed_memory.keep()
    from tinsmith.engine.torch_executor import TorchExecutor

    try:
        return TorchExecutor(options, dtype)
    except TinkerError as error:
        raise StartError(str(error)) from error

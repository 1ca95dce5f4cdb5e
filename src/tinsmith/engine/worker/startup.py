"""How a torch engine starts: its options, the environment that must be set before torch is loaded, and the factory.

For that reason torch is only imported inside `make`.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from tinsmith.config import SCHEDULER_QUANTUM_S
from tinsmith.engine.ipc import EngineSpec
from tinsmith.engine.machine import choose, cores
from tinsmith.engine.worker import memory
from tinsmith.engine.worker.executor import Executor, StartError, TorchOptions
from tinsmith.errors import TinkerError

logger = logging.getLogger(__name__)

EXECUTOR = "tinsmith.engine.worker.startup:make"

SHORT_SPINS = {"GOMP_SPINCOUNT": "20000", "KMP_BLOCKTIME": "1"}
"""Makes OpenMP threads that wait for the next operation spin only briefly before they sleep. By default GNU's spin
300,000 times and LLVM's for 200 ms, which nearly stops two engines that share cores, or an engine beside other work."""


def torch_spec(options: TorchOptions, quantum_s: float = SCHEDULER_QUANTUM_S) -> EngineSpec:
    """Return how to start a torch engine with these options."""
    values = msgspec.to_builtins(options)
    return EngineSpec(card=options.card, executor=EXECUTOR, options=values, quantum_s=quantum_s)


def read_options(values: Mapping[str, Any]) -> TorchOptions:
    try:
        return msgspec.convert(dict(values), TorchOptions)
    except msgspec.ValidationError as error:
        raise StartError(f"the engine's options are invalid: {error}") from None


def prepare(options: TorchOptions) -> str:
    """Set the environment that torch reads when it is loaded; return the number format to compute in."""
    threads = options.threads or cores()
    for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS"):
        os.environ[name] = str(threads)
    for name, value in SHORT_SPINS.items():
        os.environ.setdefault(name, value)
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # deterministic products on CUDA
    if options.device != "cpu":
        return options.dtype if options.dtype != "auto" else "bfloat16"
    if options.dtype != "bfloat16":
        return "float32"
    choice = choose(Path(options.cache_dir))
    if choice.environment is None:
        raise StartError(f"bfloat16 does not work on this processor ({choice.reason}); set dtype to float32 or auto")
    os.environ.update(choice.environment)
    return "bfloat16"


def make(values: Mapping[str, Any]) -> Executor:
    """Load the model, or raise StartError with the reason."""
    options = read_options(values)
    dtype = prepare(options)
    memory.keep()
    from tinsmith.engine.worker.torch_executor import TorchExecutor

    try:
        return TorchExecutor(options, dtype)
    except TinkerError as error:
        raise StartError(str(error)) from error

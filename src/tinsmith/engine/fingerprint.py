"""What the bits of a result depend on beside the request: two engines with equal fingerprints compute the same.

Owns: the names and values. Does not know: who compares them.
"""

from __future__ import annotations

import os
from pathlib import Path

import torch

from tinsmith.config import instruction_limit
from tinsmith.engine.dtype_choice import processor


def fingerprint(
    device: torch.device, dtype: str, micro_batch_tokens: int, source: Path, products: str
) -> dict[str, str]:
    """Of an engine in this process, once its threads are set. `source` is where its base model was read from,
    `products` the kernels of its matrix products."""
    found = {
        "device": device.type,
        "cpu": processor(),
        "isa": " ".join([torch.backends.cpu.get_cpu_capability(), instruction_limit(os.environ)]).strip(),
        "threads": str(torch.get_num_threads()),
        "torch": str(torch.__version__),
        "dtype": dtype,
        "products": products,
        "micro_batch_tokens": str(micro_batch_tokens),
        "base_bytes": str(_size_bytes(source)),
    }
    if device.type == "cuda":
        found["gpu"] = torch.cuda.get_device_name(device)
    return found


def _size_bytes(source: Path) -> int:
    """Enough to see that a base model was replaced by another; 0 where the source is no path."""
    if source.is_file():
        return source.stat().st_size
    return sum(path.stat().st_size for path in source.glob("*.safetensors")) if source.is_dir() else 0

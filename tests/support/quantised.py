"""Random quantised matrices, in the bytes of GGUF files."""

from __future__ import annotations

import gguf
import numpy as np
import torch
from gguf.constants import GGML_QUANT_SIZES

from tinsmith.engine.cpu.formats import FORMATS, Blocks, Weights, widened

QUANTISED = [name for name, stored in FORMATS.items() if stored.scale is not None]
_SCALES = {"Q8_0": [0], "Q4_0": [0], "Q4_1": [0, 2], "Q4_K": [0, 2], "Q5_K": [0, 2], "Q6_K": [208]}
"""Where in a block the float16 numbers are."""


def random_weights(name: str, shape: tuple[int, int], seed: int = 0) -> Weights:
    """A matrix in the format of this name; all bits of quantised numbers are random, and scales are about 1/100."""
    drawn = np.random.default_rng(seed)
    if name not in QUANTISED:
        return torch.from_numpy(drawn.normal(size=shape) * shape[1] ** -0.5).to(FORMATS[name].dtype)
    inputs, size = GGML_QUANT_SIZES[gguf.GGMLQuantizationType[name]]
    blocks = drawn.integers(0, 256, (shape[0], shape[1] // inputs, size), dtype=np.uint8)
    small = 300 if name.endswith("K") else 10
    for place in _SCALES[name]:
        scales = (drawn.normal(size=blocks.shape[:2]) / small / inputs).astype(np.float16)
        blocks[:, :, place : place + 2] = scales[..., None].view(np.uint8)
    return Blocks(FORMATS[name], torch.from_numpy(blocks.reshape(shape[0], -1)), shape)


def reference(weights: Weights) -> torch.Tensor:
    """The weights in float32, as the gguf package expands them."""
    if isinstance(weights, torch.Tensor):
        return widened(weights).float()
    return torch.from_numpy(gguf.dequantize(weights.rows.numpy(), gguf.GGMLQuantizationType[weights.format.name]))

"""Tries number formats and prints the result of each: `python -m tinsmith.engine.worker.dtype_trial`, run by `machine`.

Each result is printed as soon as it is known, because trying the next format may kill this process.
"""

from __future__ import annotations

import sys
import time

import msgspec
import torch
from torch.nn.functional import linear

from tinsmith.engine.machine import FORMATS, FormatTrial

REPEATS = 5


def main() -> None:
    generator = torch.Generator().manual_seed(0)
    shapes = ((256, 512), (1024, 512), (256, 1024))
    inputs = [torch.randn(shape, generator=generator) for shape in shapes]
    truth = _products(*(tensor.double() for tensor in inputs))
    for name in FORMATS:
        trial = _try(name, [tensor.to(getattr(torch, name)) for tensor in inputs], truth)
        sys.stdout.buffer.write(msgspec.json.encode(trial) + b"\n")
        sys.stdout.flush()


def _try(name: str, inputs: list[torch.Tensor], truth: list[torch.Tensor]) -> FormatTrial:
    results = _products(*inputs)
    errors = [float((a.double() - b).abs().max() / b.abs().max()) for a, b in zip(results, truth, strict=True)]
    times = []
    for _ in range(REPEATS):
        began_at = time.perf_counter()
        _products(*inputs)
        times.append(time.perf_counter() - began_at)
    return FormatTrial(name, min(times), max(errors) if all(error == error for error in errors) else 1e9)


def _products(x_TD: torch.Tensor, weight_ED: torch.Tensor, slope_TE: torch.Tensor) -> list[torch.Tensor]:
    """Return a linear's output and the gradient of its input."""
    leaf_TD = x_TD.detach().requires_grad_()
    y_TE = linear(leaf_TD, weight_ED)
    (slope_TD,) = torch.autograd.grad(y_TE, leaf_TD, slope_TE)
    return [y_TE.detach(), slope_TD]


if __name__ == "__main__":
    main()

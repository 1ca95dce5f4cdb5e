"""Products with all linears of SmolLM2-135M, in the order of a sampler step: ours against oneDNN's and torch's plain
one.

The weights (540 MB) are read from memory each time, not from the processor's cache.

    python bench/engine_products.py [--rows 1,4,8,16,32,64,256] [--rounds 7]
"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Callable

import torch
from torch.nn.functional import linear

from tinsmith.engine.cpu.linear import Product, onednn_linear, weight_product

SHAPES = [(960, 576), (576, 576), (3072, 576), (576, 1536)] * 30 + [(49152, 576)]


def plain(weight_ED: torch.Tensor) -> Product:
    return lambda x_TD: linear(x_TD, weight_ED)


@torch.inference_mode()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", default="1,4,8,16,32,64,256")
    parser.add_argument("--rounds", type=int, default=7)
    options = parser.parse_args()
    print(f"{torch.get_num_threads()} threads, load {os.getloadavg()[0]:.1f}; milliseconds, best of {options.rounds}")
    makers: dict[str, Callable[[torch.Tensor], Product]] = {
        "tinsmith": weight_product,
        "oneDNN": onednn_linear,
        "torch": plain,
    }
    weights = [torch.randn(shape) for shape in SHAPES]
    sides = {name: [make(weight) for weight in weights] for name, make in makers.items()}
    work = 2 * sum(rows * columns for rows, columns in SHAPES)
    for rows in map(int, options.rows.split(",")):
        inputs = {width: torch.randn(rows, width) for width in (576, 1536)}
        times: dict[str, float] = {name: float("inf") for name in sides}
        for _ in range(options.rounds):
            for name, products in sides.items():
                began = time.perf_counter()
                for product, (_, width) in zip(products, SHAPES, strict=True):
                    product(inputs[width])
                times[name] = min(times[name], time.perf_counter() - began)
        told = [f"{name} {took * 1e3:6.1f} ({work * rows / took / 1e9:3.0f} GFLOP/s)" for name, took in times.items()]
        print(f"{rows:4} rows: {', '.join(told)}; ratio to oneDNN {times['oneDNN'] / times['tinsmith']:.2f}x")


if __name__ == "__main__":
    main()

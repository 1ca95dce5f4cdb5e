"""Products with all linears of SmolLM2-135M, in the order of a sampler step: ours against oneDNN's and torch's plain
one, and ours with weights in the formats of files, forward and backward.

The weights (540 MB in float32) are read from memory each time, not from the processor's cache.

    python bench/engine_products.py [--rows 1,4,8,16,32,64,256] [--rounds 7] [--formats BF16,F16,Q8_0,Q4_0,Q4_1]
"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Callable, Sequence

import gguf
import torch
from torch.nn.functional import linear

from tinsmith.engine.cpu.formats import FORMATS, Blocks, Weights
from tinsmith.engine.cpu.linear import Product, onednn_linear, stored_product, weight_product

SHAPES = [(960, 576), (576, 576), (3072, 576), (576, 1536)] * 30 + [(49152, 576)]


def plain(weight_ED: torch.Tensor) -> Product:
    return lambda x_TD: linear(x_TD, weight_ED)


@torch.inference_mode()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", default="1,4,8,16,32,64,256")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--formats", default="BF16,F16,Q8_0,Q4_0,Q4_1", help="compared with float32; empty: none")
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
    names = [name for name in options.formats.split(",") if name]
    if names:
        compare_formats(["F32", *names], [int(rows) for rows in options.rows.split(",")], options.rounds)


def compare_formats(names: list[str], counts: list[int], rounds: int) -> None:
    """Print the wall and CPU time of the products in each format, forward and backward."""
    for name in names:
        products = [
            stored_product([in_format(torch.randn(shape), name)], None, torch.device("cpu"), torch.float32)
            for shape in SHAPES
        ]
        size = sum(sum(product.bytes_by_format.values()) for product in products)
        print(f"{name}: {size / 1e6:.0f} MB")
        for rows in counts:
            forward = [(product, torch.randn(rows, shape[1])) for product, shape in zip(products, SHAPES, strict=True)]
            back = [
                (product.back, torch.randn(rows, shape[0])) for product, shape in zip(products, SHAPES, strict=True)
            ]
            told = [f"{side} {best(calls, rounds)}" for side, calls in (("forward", forward), ("back", back))]
            print(f"{rows:4} rows: {', '.join(told)}")


def best(calls: Sequence[tuple[Product, torch.Tensor]], rounds: int) -> str:
    walls, cpus = [], []
    for _ in range(rounds):
        wall, cpu = time.perf_counter(), time.process_time()
        for call, x in calls:
            call(x)
        walls.append(time.perf_counter() - wall)
        cpus.append(time.process_time() - cpu)
    return f"{min(walls) * 1e3:6.1f} ms ({min(cpus) * 1e3:6.1f} of CPU)"


def in_format(weight_ED: torch.Tensor, name: str) -> Weights:
    stored = FORMATS[name]
    if stored.scale is None:
        return weight_ED.to(stored.dtype)
    rows = gguf.quantize(weight_ED.numpy(), gguf.GGMLQuantizationType[name])
    return Blocks(stored, torch.from_numpy(rows), (weight_ED.shape[0], weight_ED.shape[1]))


if __name__ == "__main__":
    main()

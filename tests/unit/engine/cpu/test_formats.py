"""Weights in the format of their file: every product has the bits of the same product with float32 weights."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from support.quantised import QUANTISED, random_weights, reference

from tinsmith.engine.cpu.formats import FORMATS, PLAIN, Blocks, format_of, joined, packed_bytes
from tinsmith.engine.cpu.linear import can_compile, can_pack, stored_product

CPU = torch.device("cpu")
compiles = pytest.mark.skipif(not can_pack(CPU, torch.float32) or not can_compile(), reason="no kernels here")
ROWS = (1, 2, 3, 4, 6, 17)


def same_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    return one.dtype == other.dtype and torch.equal(one.contiguous().view(torch.int32), other.view(torch.int32))


@pytest.mark.parametrize("name", QUANTISED)
def test_quantised_weights_are_widened_as_the_gguf_package_expands_them(name: str) -> None:
    weights = random_weights(name, (70, 512))
    assert isinstance(weights, Blocks)
    assert same_bits(weights.widened(), reference(weights))
    assert same_bits(weights[torch.tensor([5, 0])].widened(), reference(weights)[[5, 0]])


@compiles
@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("name", FORMATS)
def test_products_have_the_bits_of_float32_weights(name: str, threads: int) -> None:
    torch.set_num_threads(threads)
    try:
        for seed, shape in enumerate([(70, 512), (1, 256), (257, 768)]):
            weights = random_weights(name, shape, seed)
            wide, drawn = reference(weights), torch.Generator().manual_seed(seed)
            bias = torch.randn(shape[0], generator=drawn)
            stored, plain = (stored_product([matrix], bias, CPU, torch.float32) for matrix in (weights, wide))
            turned = stored_product([wide.t()], None, CPU, torch.float32)
            assert same_bits(stored.weight_ED, wide)
            for rows in ROWS:
                x, gradient = (torch.randn(rows, size, generator=drawn) for size in (shape[1], shape[0]))
                assert same_bits(stored(x), plain(x)), (shape, rows)
                assert same_bits(stored.back(gradient), turned(gradient)), (shape, rows)
    finally:
        torch.set_num_threads(1)


@compiles
@pytest.mark.parametrize("shape", [(3, 5), (40, 33), (65, 130), (129, 1)])
@pytest.mark.parametrize("name", ["F32", "BF16", "F16"])
def test_floats_of_any_shape(name: str, shape: tuple[int, int]) -> None:
    weights = random_weights(name, shape)
    stored, x, gradient = stored_product([weights], None, CPU, torch.float32), torch.ones(7, shape[1]), torch.ones(7, 1)
    plain = stored_product([reference(weights)], None, CPU, torch.float32)
    turned = stored_product([reference(weights).t()], None, CPU, torch.float32)
    assert same_bits(stored(x), plain(x))
    assert same_bits(stored.back(gradient.expand(7, shape[0])), turned(gradient.expand(7, shape[0])))


@compiles
@pytest.mark.parametrize("name", FORMATS)
def test_rows_of_an_embedding_are_looked_up(name: str) -> None:
    weights = random_weights(name, (70, 256))
    stored, tokens = stored_product([weights], None, CPU, torch.float32), torch.tensor([69, 0, 17, 16, 31, 32, 17])
    found = stored.rows(tokens)
    assert same_bits(found, reference(weights)[tokens])
    assert found.is_contiguous()


@compiles
@pytest.mark.parametrize("second", [64, 40])
def test_matrices_of_several_formats_are_stacked(second: int) -> None:
    """Whole panels keep their formats; an incomplete one that another follows makes all of them float32."""
    parts = [
        random_weights("Q4_K", (64, 256), 1),
        random_weights("Q4_K", (second, 256), 2),
        random_weights("Q6_K", (48, 256), 3),
    ]
    stored, x, gradient = stored_product(parts, None, CPU, torch.float32), torch.randn(9, 256), None
    wide = torch.cat([reference(part) for part in parts])
    plain, gradient = stored_product([wide], None, CPU, torch.float32), torch.randn(9, len(wide))
    assert same_bits(stored(x), plain(x))
    assert same_bits(stored.back(gradient), plain.back(gradient))
    assert same_bits(stored.weight_ED, wide)
    assert set(stored.bytes_by_format) == ({"Q4_K", "Q6_K"} if second == 64 else {"F32"})


@compiles
@pytest.mark.parametrize(
    ("name", "most"), [("BF16", 2), ("F16", 2), ("Q8_0", 1.07), ("Q4_0", 0.57), ("Q4_1", 0.63), ("Q4_K", 0.76),
                       ("Q5_K", 1.26), ("Q6_K", 1.26)]
)  # fmt: skip
def test_no_float32_copy_is_held(name: str, most: float) -> None:
    weights = random_weights(name, (256, 512))
    product = stored_product([weights], None, CPU, torch.float32)
    product.back(product(torch.randn(3, 512)))
    assert product.bytes_by_format == {name: packed_bytes(FORMATS[name], (256, 512), 32)}
    assert product.bytes_by_format[name] <= most * 256 * 512


@compiles
@pytest.mark.parametrize("has_halves", [True, False])
def test_every_float16_number_is_widened_exactly(has_halves: bool) -> None:
    from numba import njit

    from tinsmith.engine.cpu.product import LANES
    from tinsmith.engine.cpu.widen import HAS_HALVES, make_widening

    if has_halves and not HAS_HALVES:
        pytest.skip("this processor has no such instruction")
    widen = make_widening(FORMATS["F16"], LANES, 2, has_halves)

    @njit
    def widen_all(source: np.ndarray, out: np.ndarray) -> None:
        widen(source.ctypes.data, 0, len(source) // (2 * LANES), out.ctypes.data)

    numbers = np.arange(2**16, dtype=np.uint16).view(np.float16)
    found, expected = np.empty(2**16, np.float32), numbers.astype(np.float32)
    widen_all(numbers.view(np.int16), found)
    is_number = ~np.isnan(expected)
    assert (found.view(np.int32) == expected.view(np.int32))[is_number].all()
    assert np.isnan(found[~is_number]).all()


def test_matrices_are_joined_by_format() -> None:
    one, other = torch.ones(2, 32), torch.ones(3, 32, dtype=torch.bfloat16)
    quantised = random_weights("Q8_0", (4, 32))
    shapes = [tuple(part.shape) for part in joined([one, one, other, quantised, quantised])]
    assert shapes == [(4, 32), (3, 32), (8, 32)]
    assert format_of(torch.ones(1, dtype=torch.float64)) == PLAIN

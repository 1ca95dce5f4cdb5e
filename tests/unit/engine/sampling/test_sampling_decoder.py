"""The sampler's forward pass: compared with the trainer's, and independent of its batch bit for bit."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from tinsmith.engine.cpu import linear
from tinsmith.engine.cpu.compile import compile_kernels
from tinsmith.engine.cpu.linear import Product, can_pack, is_onednn_exact, onednn_linear, weight_product
from tinsmith.engine.lora import LoraAdapter
from tinsmith.engine.models.attention import PackedAttention
from tinsmith.engine.models.decoder import Decoder
from tinsmith.engine.models.load import load_model
from tinsmith.engine.models.tiny import FAMILIES, make_tiny
from tinsmith.engine.sampling.block_attention import BlockCache, NewTokens
from tinsmith.engine.sampling.decoder import NO_ADAPTERS, FrozenAdapter, InferenceDecoder, RowAdapters
from tinsmith.engine.sampling.fused_decoder import FusedDecoder, inference_decoder
from tinsmith.engine.sampling.sampler import Sampler, SamplerLimits

BLOCK = 16
DTYPES = (torch.float32, torch.bfloat16)


def load(tmp_path: Path, family: str = "llama", **sizes: object) -> Decoder:
    return load_model(make_tiny(tmp_path / family, family, **sizes), cache_dir=tmp_path).decoder


def trained(decoder: Decoder, rank: int, seed: int, **switches: bool) -> LoraAdapter:
    """An adapter whose B is not zero."""
    adapter = LoraAdapter(decoder.config, rank, seed, **switches)
    generator = torch.Generator().manual_seed(seed)
    for parameter in adapter.parameters().values():
        parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.2)
    return adapter


class Cached:
    """One sequence fed in pieces, its blocks in a given order."""

    def __init__(self, decoder: InferenceDecoder, cache: BlockCache, blocks: list[int]) -> None:
        self.decoder, self.cache, self.blocks, self.length = decoder, cache, blocks, 0

    def new(self, row: int, count: int) -> NewTokens:
        new = NewTokens(row, self.length, count, self.blocks)
        self.length += count
        return new

    def feed(self, tokens: list[int], adapters: RowAdapters = NO_ADAPTERS) -> torch.Tensor:
        return run(self.decoder, self.cache, [(self, tokens)], adapters)


def run(
    decoder: InferenceDecoder,
    cache: BlockCache,
    parts: list[tuple[Cached, list[int]]],
    adapters: RowAdapters = NO_ADAPTERS,
) -> torch.Tensor:
    """logits_TV of new tokens of several sequences."""
    batch, rows, positions = [], [], []
    for sequence, tokens in parts:
        positions += range(sequence.length, sequence.length + len(tokens))
        batch.append(sequence.new(len(rows), len(tokens)))
        rows += tokens
    with torch.inference_mode():
        hidden = decoder.hidden_cached(torch.tensor(rows), torch.tensor(positions), cache, batch, adapters)
        return decoder.unembed(hidden, adapters)


def make_cache(decoder: Decoder, count: int = 64) -> BlockCache:
    return BlockCache(decoder.config, count, BLOCK, decoder.device, decoder.dtype)


def full_logits(decoder: Decoder, tokens: list[int], adapter: LoraAdapter | None = None) -> torch.Tensor:
    with torch.no_grad():
        attend = PackedAttention(decoder.config, [len(tokens)])
        hidden = decoder.hidden(torch.tensor(tokens), torch.arange(len(tokens)), attend, adapter)
        return decoder.unembed(hidden, adapter)


exact = pytest.mark.skipif(
    not can_pack(torch.device("cpu"), torch.float32), reason="no product of this processor is exact over batches"
)
onednn = pytest.mark.skipif(not is_onednn_exact(), reason="oneDNN is not exact on this processor, nor used")
both = pytest.mark.parametrize("kind", [InferenceDecoder, pytest.param(FusedDecoder, marks=exact)])
TOKENS = [(7 * i * i + 3) % 250 for i in range(150)]


@both
@pytest.mark.parametrize(
    ("family", "sizes"),
    [
        ("llama", {}),
        ("smollm", {"num_attention_heads": 6, "num_key_value_heads": 2}),
        ("qwen2", {}),
        ("qwen3", {"num_attention_heads": 3, "num_key_value_heads": 3}),
        ("mistral", {"sliding_window": 20}),
        ("smollm3", {"num_hidden_layers": 4}),
        ("granite", {"attention_bias": True, "mlp_bias": True}),
        ("olmo2", {"num_attention_heads": 6, "num_key_value_heads": 2}),
        ("phi3", {"partial_rotary_factor": 0.5, "sliding_window": 20}),
        ("gemma2", {}),
        ("gemma3", {"num_hidden_layers": 4}),
    ],
)
def test_chunks_and_single_tokens_give_the_trainers_logits(
    tmp_path: Path, family: str, sizes: dict[str, int], kind: type[InferenceDecoder]
) -> None:
    decoder = load(tmp_path, family, **sizes)
    sequence = Cached(kind(decoder), make_cache(decoder), [(29 * i) % 64 for i in range(64)])
    cuts = [0, 70, 71, 72, 100, 147, 148, 149, 150]
    logits = torch.cat([sequence.feed(TOKENS[a:b]) for a, b in itertools.pairwise(cuts)])
    assert (logits - full_logits(decoder, TOKENS)).abs().max() < 1e-4


@pytest.mark.parametrize("family", FAMILIES)
def test_bfloat16_runs_and_stays_near(tmp_path: Path, family: str) -> None:
    directory = make_tiny(tmp_path / family, family)
    whole, half = (load_model(directory, dtype=kind, cache_dir=tmp_path).decoder for kind in DTYPES)
    adapter = trained(whole, 4, 1)
    for parameter in adapter.parameters().values():
        parameter.mul_(0.3)  # a strong adapter makes tiny models chaotic
    rows = RowAdapters([(0, 60, FrozenAdapter(adapter, half.device, half.dtype))])
    logits = Cached(InferenceDecoder(half), make_cache(half), list(range(10))).feed(TOKENS[:60], rows)
    assert logits.dtype == torch.float32
    wanted = full_logits(whole, TOKENS[:60], adapter)
    assert torch.cosine_similarity(logits.flatten(), wanted.flatten(), dim=0) >= 0.99


@both
@pytest.mark.parametrize(
    ("family", "switches"),
    [
        ("llama", {}),
        ("llama", {"train_mlp": False}),
        ("llama", {"train_attn": False, "train_unembed": False}),
        ("granite", {}),
        ("olmo2", {}),
        ("phi3", {}),
        ("gemma2", {}),
        ("gemma3", {}),
    ],
)
def test_rows_of_several_adapters_are_each_their_own(
    tmp_path: Path, family: str, switches: dict[str, bool], kind: type[InferenceDecoder]
) -> None:
    decoder = load(tmp_path, family)
    inference, cache = kind(decoder), make_cache(decoder)
    adapters = [trained(decoder, rank, rank, **switches) for rank in (1, 8)]
    frozen = [FrozenAdapter(adapter, decoder.device, decoder.dtype) for adapter in adapters]
    sequences = [Cached(inference, cache, list(range(10 * i, 10 * i + 10))) for i in range(3)]
    parts = [(sequences[0], TOKENS[:9]), (sequences[1], TOKENS[:5]), (sequences[2], TOKENS[5:12])]
    logits = run(inference, cache, parts, RowAdapters([(0, 9, frozen[0]), (14, 21, frozen[1])]))
    assert (logits[:9] - full_logits(decoder, TOKENS[:9], adapters[0])).abs().max() < 1e-4
    assert (logits[9:14] - full_logits(decoder, TOKENS[:5])).abs().max() < 1e-4
    assert (logits[14:] - full_logits(decoder, TOKENS[5:12], adapters[1])).abs().max() < 1e-4


def test_a_frozen_adapter_does_not_follow_training(tmp_path: Path) -> None:
    decoder = load(tmp_path)
    adapter = trained(decoder, 4, 1)
    frozen = FrozenAdapter(adapter, decoder.device, decoder.dtype)
    x, before, after = torch.randn(3, 32), torch.zeros(3, 64), torch.zeros(3, 64)
    frozen.add_to(0, "qkv", x, before)
    for parameter in adapter.parameters().values():
        parameter.add_(1.0)
    frozen.add_to(0, "qkv", x, after)
    assert before.any()
    assert torch.equal(before, after)


@exact
@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("make", [weight_product, pytest.param(onednn_linear, marks=onednn)])
@pytest.mark.parametrize("shape", [(960, 576), (576, 1536), (96, 576), (3, 32), (64, 3), (1, 33), (259, 32)])
def test_a_row_of_a_product_does_not_depend_on_the_others(
    threads: int, shape: tuple[int, int], make: Callable[..., Product]
) -> None:
    torch.set_num_threads(threads)
    try:
        weights, bias, x = torch.randn(shape), torch.randn(shape[0]), torch.randn(200, shape[1])
        product = make(weights, bias)
        all_rows = product(x)
        expected = x.double() @ weights.double().t() + bias
        assert (all_rows - expected).abs().max() < 1e-4 * shape[1] ** 0.5
        for count in (1, 2, 3, 5, 8, 13, 32, 64, 127):
            assert torch.equal(product(x[200 - count :]), all_rows[200 - count :])
    finally:
        torch.set_num_threads(1)


@exact
@both
@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize(
    ("family", "heads"),
    [
        ("llama", (6, 2)),
        ("llama", (4, 4)),
        ("llama", (8, 1)),
        ("llama", (3, 3)),
        ("granite", (4, 2)),
        ("olmo2", (6, 2)),
        ("phi3", (4, 2)),
        ("gemma2", (6, 2)),
        ("gemma3", (4, 1)),
    ],
)
def test_logits_do_not_depend_on_batch_chunks_or_blocks(
    tmp_path: Path, threads: int, family: str, heads: tuple[int, int], kind: type[InferenceDecoder]
) -> None:
    decoder = load(tmp_path, family, num_attention_heads=heads[0], num_key_value_heads=heads[1])
    inference = kind(decoder)
    adapter = FrozenAdapter(trained(decoder, 5, 2), decoder.device, decoder.dtype)
    torch.set_num_threads(threads)
    try:
        alone = Cached(inference, make_cache(decoder), list(range(40)))
        plain = alone.feed(TOKENS, RowAdapters([(0, 150, adapter)]))

        cache = make_cache(decoder, 200)
        sequence = Cached(inference, cache, [(77 * i + 5) % 200 for i in range(40)])
        others = [Cached(inference, cache, [(77 * i + 5) % 200 for i in range(40 * j, 40 * j + 40)]) for j in (1, 2, 3)]
        pieces, done = [], 0
        for count in (1, 40, 2, 3, 1, 1, 1, 64, 1, 36):
            companions = [(other, TOKENS[: 1 + (done + i) % 3]) for i, other in enumerate(others)]
            companions = [pair for pair in companions if pair[0].length + len(pair[1]) <= 100]
            own = RowAdapters([(0, count, adapter)])
            logits = run(inference, cache, [(sequence, TOKENS[done : done + count]), *companions], own)
            pieces.append(logits[:count])
            done += count
        assert done == 150
        assert torch.equal(torch.cat(pieces), plain)
    finally:
        torch.set_num_threads(1)


@exact
@both
@pytest.mark.parametrize("family", ["qwen2", "granite", "olmo2", "phi3", "gemma2", "gemma3"])
def test_rows_of_the_base_model_do_not_notice_adapters_beside_them(
    tmp_path: Path, family: str, kind: type[InferenceDecoder]
) -> None:
    decoder = load(tmp_path, family)
    inference, cache = kind(decoder), make_cache(decoder)
    adapter = FrozenAdapter(trained(decoder, 4, 3), decoder.device, decoder.dtype)
    alone, beside, other = (Cached(inference, cache, list(range(10 * i, 10 * i + 10))) for i in range(3))
    for tokens in (TOKENS[:37], TOKENS[37:38]):
        parts = [(other, tokens), (beside, tokens)]
        together = run(inference, cache, parts, RowAdapters([(0, len(tokens), adapter)]))
        assert torch.equal(together[len(tokens) :], alone.feed(tokens))
        assert not torch.equal(together[: len(tokens)], together[len(tokens) :])


@exact
def test_equal_shares_of_attention_are_equal_shares_of_work() -> None:
    from tinsmith.engine.cpu.cached_attention import PIECE_TOKENS, pieces_of

    batch = [NewTokens(i, 10 * i, 1, [0]) for i in range(7)] + [NewTokens(7, 0, 100, [0]), NewTokens(107, 30, 41, [0])]
    pieces = pieces_of([(new.row, new.count, new.start) for new in batch], 2)
    rows = sorted(
        row for first, count in zip(pieces.row_I, pieces.count_I, strict=True) for row in range(first, first + count)
    )
    assert rows == list(range(148))
    assert pieces.count_I.max() == PIECE_TOKENS
    work = pieces.count_I * (pieces.position_I + pieces.count_I)
    half = len(work) // 2 + len(work) % 2
    assert abs(int(work[:half].sum()) - int(work[half:].sum())) <= work.max()


@both
def test_what_is_not_finite_does_not_outlive_its_block(tmp_path: Path, kind: type[InferenceDecoder]) -> None:
    decoder = load(tmp_path)
    cache = make_cache(decoder)
    cache.keys_LNKCB[:] = float("nan")
    cache.values_LNKBC[:] = float("nan")
    for block in range(40):
        cache.clear(block)
    logits = Cached(kind(decoder), cache, list(range(40))).feed(TOKENS[:9])
    assert (logits - full_logits(decoder, TOKENS[:9])).abs().max() < 1e-4


def test_the_fused_decoder_is_taken_where_it_can_be(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fits, odd = load(tmp_path), load(tmp_path / "odd", head_dim=12)
    assert isinstance(inference_decoder(fits), FusedDecoder) == can_pack(fits.device, fits.dtype)
    assert type(inference_decoder(odd)) is InferenceDecoder
    monkeypatch.setattr("tinsmith.engine.sampling.fused_decoder.can_compile", lambda: False)
    assert type(inference_decoder(fits)) is InferenceDecoder


@exact
def test_kernels_are_compiled_before_the_first_sample_and_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    caplog.set_level("INFO")
    for number in (1, 2):
        compile_kernels(tmp_path)
        assert caplog.text.count("compiling kernels") == 1, f"start {number}"
    monkeypatch.setenv("NUMBA_CACHE_DIR", str(tmp_path / "deleted"))
    monkeypatch.setattr("tinsmith.engine.cpu.compile.SHARES", ())
    compile_kernels(tmp_path)
    assert caplog.text.count("compiling kernels") == 2, "somebody deleted them"


def test_a_sampler_without_kernels_compiles_none(tmp_path: Path) -> None:
    decoder = load(tmp_path / "odd", head_dim=12)
    limits = SamplerLimits(cache_bytes=2**20)
    Sampler(decoder, [b""] * decoder.config.vocab_size, limits, cache_dir=tmp_path / "plain")
    assert not (tmp_path / "plain").exists()


@exact
def test_kernels_that_could_not_be_compiled_are_tried_again(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as broken:
        broken.setattr("tinsmith.engine.cpu.compile.SHARES", ("nothing",))
        compile_kernels(tmp_path)
    assert "will have to wait for them" in caplog.text
    assert not (tmp_path / "kernels.txt").exists()
    compile_kernels(tmp_path)
    assert (tmp_path / "kernels.txt").exists()


def test_onednn_is_used_only_where_its_rows_are_exact(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(linear, "can_compile", lambda: False)
    cpu = torch.device("cpu")
    for is_exact, kind in ((True, "onednn"), (False, "torch")):
        monkeypatch.setattr(linear, "is_onednn_exact", lambda is_exact=is_exact: is_exact)
        assert linear.product_kind(cpu, torch.float32) == kind

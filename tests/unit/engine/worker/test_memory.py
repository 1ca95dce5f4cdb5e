"""How much memory an engine keeps for adapters and cache: by the machine, by settings, and logged at the start."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from support.backends import torch_tiny_spec

from tinsmith.config import ServerConfig
from tinsmith.engine.backend.local import engine_options
from tinsmith.engine.models import load
from tinsmith.engine.protocol import ModelCard
from tinsmith.engine.worker import torch_executor
from tinsmith.engine.worker.memory import GB, LEAST, MOST, MemoryCaps, default_caps
from tinsmith.engine.worker.startup import read_options
from tinsmith.engine.worker.torch_executor import TorchExecutor


@pytest.mark.parametrize(
    ("built_in", "weights", "device", "engines", "expected"),
    [
        pytest.param(16 * GB, 0, "cpu", 1, MemoryCaps(2 * GB, GB, GB), id="laptop"),
        pytest.param(48 * GB, 16 * GB, "cpu", 1, MemoryCaps(4 * GB, 2 * GB, 2 * GB), id="beside-a-large-model"),
        pytest.param(64 * GB, 0, "cpu", 4, MemoryCaps(2 * GB, GB, GB), id="four-engines"),
        pytest.param(80 * GB, 16 * GB, "cuda", 1, MemoryCaps(16 * GB, 8 * GB, 16 * GB), id="cuda"),
        pytest.param(2 * GB, GB, "cpu", 1, LEAST, id="small-machine"),
        pytest.param(GB, 3 * GB, "cpu", 1, LEAST, id="weights-mapped-over-all-of-it"),
        pytest.param(4096 * GB, 0, "cpu", 1, MOST, id="large-machine"),
        pytest.param(None, 0, "cpu", 1, MemoryCaps(2 * GB, GB, GB), id="does-not-tell"),
    ],
)
def test_defaults_follow_the_memory(
    built_in: int | None, weights: int, device: str, engines: int, expected: MemoryCaps
) -> None:
    assert default_caps(built_in, weights, device, engines) == expected


def test_the_start_of_an_engine_says_what_was_chosen(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    is_deterministic = torch.are_deterministic_algorithms_enabled()
    monkeypatch.setattr(torch_executor, "built_in_bytes", lambda device: 32 * GB)
    monkeypatch.setattr(load, "memory_needed", lambda weights, device, dtype: 0)
    options = read_options(torch_tiny_spec("tiny", tmp_path, seed=1, threads=0, sampler_adapter_bytes=3 * GB).options)
    caplog.set_level("INFO")
    try:
        engine = TorchExecutor(options, "float32")
    finally:
        torch.use_deterministic_algorithms(is_deterministic)
    assert engine._adapters._max_bytes == 4 * GB
    assert engine._samples.adapters._max_bytes == 3 * GB
    assert engine._samples._sampler.limits.cache_bytes == 1 << 22
    said = "at most 4.00 GB of adapters in training, 3.00 GB of adapters to sample from, 0.00 GB of cache"
    assert said in caplog.text


def test_settings_of_the_server_reach_its_engines(tmp_path: Path) -> None:
    environ = {"TINSMITH_ADAPTER_BYTES": "7", "TINSMITH_SAMPLER_ADAPTER_BYTES": "8", "TINSMITH_CACHE_BYTES": "9"}
    config = ServerConfig.from_env(environ, data_dir=tmp_path)
    card = ModelCard(name="m", vocab_size=8, max_context_length=8, arch="llama", tokenizer_id="m", lora_alpha=32.0)
    options = engine_options(config, card, "source", 3)
    assert (options.adapter_bytes, options.sampler_adapter_bytes, options.cache_bytes) == (7, 8, 9)
    assert options.engines == 3
    unset = engine_options(ServerConfig(data_dir=tmp_path), card, "source", 1)
    assert (unset.adapter_bytes, unset.sampler_adapter_bytes, unset.cache_bytes) == (None, None, None)


def test_batch_sizes_of_the_server_reach_its_engines(tmp_path: Path) -> None:
    environ = {
        "TINSMITH_MICRO_BATCH_TOKENS": "7",
        "TINSMITH_PREFILL_TOKENS": "8",
        "TINSMITH_MAX_BATCH_SEQUENCES": "9",
    }
    config = ServerConfig.from_env(environ, data_dir=tmp_path)
    tiny = read_options(torch_tiny_spec("tiny", tmp_path, seed=1).options)
    options = engine_options(config, tiny.card, tiny.source, 1)
    is_deterministic = torch.are_deterministic_algorithms_enabled()
    try:
        engine = TorchExecutor(options, "float32")
    finally:
        torch.use_deterministic_algorithms(is_deterministic)
    assert engine._trainer._micro_batch_tokens == 7
    assert engine._samples._sampler.limits.prefill_tokens == 8
    assert engine._samples._sampler.limits.max_sequences == 9
    assert engine._fingerprint["micro_batch_tokens"] == "7"
    engine.close()


def test_a_container_has_the_memory_that_it_may_use(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    limits = (tmp_path / "second", tmp_path / "first")
    monkeypatch.setattr(load, "CONTAINER_LIMITS", limits)
    machine = load.built_in_bytes()
    assert machine is not None
    limits[0].write_text("max\n")
    limits[1].write_text("9223372036854771712\n")
    assert load.built_in_bytes() == machine
    limits[0].write_text("1073741824\n")
    assert load.built_in_bytes() == GB

"""Model files: safetensors, whole and in shards, GGUF of each family, and the errors for damaged or unknown ones."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from support.quantised import QUANTISED, random_weights

from tinsmith.engine.cpu.formats import FORMATS, format_of, widened
from tinsmith.engine.cpu.linear import can_compile, can_pack
from tinsmith.engine.models import load, sources
from tinsmith.engine.models.attention import PackedAttention, frequencies
from tinsmith.engine.models.decoder import weight_shapes
from tinsmith.engine.models.gguf_read import GgufFile, gguf_name
from tinsmith.engine.models.gguf_to_hf import ORIGINAL, convert_gguf, is_intact
from tinsmith.engine.models.hf_directory import SafetensorsDirectory, read_config
from tinsmith.engine.models.load import load_model
from tinsmith.engine.models.sources import fetch
from tinsmith.engine.models.tiny import make_tiny
from tinsmith.errors import InvalidInputError, TinkerError

ARCHITECTURES = {"llama": "llama", "smollm": "llama", "qwen2": "qwen2", "qwen3": "qwen3"}


def logits(decoder: Any) -> torch.Tensor:
    attention = PackedAttention(decoder.config, [20])
    with torch.no_grad():
        return decoder.unembed(decoder.hidden(torch.arange(20), attention.positions(decoder.device), attention))


def interleaved(tensor: torch.Tensor, heads: int) -> torch.Tensor:
    """Rows of a query or key matrix in llama.cpp's order."""
    halves = tensor.reshape(heads, 2, tensor.shape[0] // heads // 2, *tensor.shape[1:])
    return halves.swapaxes(1, 2).reshape(tensor.shape)


def write_gguf(
    path: Path,
    directory: Path,
    architecture: str,
    *,
    quantised: bool = False,
    stored: Callable[[torch.Tensor], tuple[np.ndarray, gguf.GGMLQuantizationType]] | None = None,
    rope_factors: list[float] | None = None,
    **changes: Any,
) -> Path:
    """The model of a directory as llama.cpp's converter would write it."""
    config = read_config(directory)
    writer = gguf.GGUFWriter(path, architecture)
    numbers = {
        "block_count": config.num_layers,
        "context_length": config.max_context_length,
        "embedding_length": config.hidden_size,
        "feed_forward_length": config.intermediate_size,
        "attention.head_count": config.num_heads,
        "attention.head_count_kv": config.num_kv_heads,
        "attention.key_length": config.head_dim,
    }
    for key, value in numbers.items():
        writer.add_uint32(f"{architecture}.{key}", changes.pop(key, value))
    writer.add_float32(f"{architecture}.rope.freq_base", config.rope.theta)
    writer.add_float32(f"{architecture}.attention.layer_norm_rms_epsilon", config.norm_eps)
    for key, value in changes.items():
        writer.add_string(f"{architecture}.{key}", value)
    tokenizer = json.loads((directory / "tokenizer.json").read_text())
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(list(tokenizer["model"]["vocab"]))
    writer.add_token_types([3] * 3 + [1] * (len(tokenizer["model"]["vocab"]) - 3))
    writer.add_token_merges([" ".join(pair) for pair in tokenizer["model"]["merges"]])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_chat_template("{{ messages }}")
    for name, tensor in load_file(directory / "model.safetensors").items():
        if architecture == "llama" and (".q_proj." in name or ".k_proj." in name):
            tensor = interleaved(tensor, config.num_heads if ".q_proj." in name else config.num_kv_heads)
        if stored is not None and tensor.ndim == 2:
            packed, kind = stored(tensor)
            writer.add_tensor(gguf_name(name), packed, raw_dtype=kind)
        elif quantised and tensor.ndim == 2:
            packed = gguf.quantize(tensor.numpy(), gguf.GGMLQuantizationType.Q8_0)
            writer.add_tensor(gguf_name(name), packed, raw_dtype=gguf.GGMLQuantizationType.Q8_0)
        else:
            writer.add_tensor(gguf_name(name), tensor.numpy())
    if rope_factors is not None:
        writer.add_tensor("rope_freqs.weight", np.array(rope_factors, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.mark.parametrize("family", ARCHITECTURES)
def test_a_gguf_file_gives_the_logits_of_its_directory(family: str, tiny: Callable[..., Any], tmp_path: Path) -> None:
    made = tiny(family)
    path = write_gguf(tmp_path / "m.gguf", made.directory, ARCHITECTURES[family])
    loaded = load_model(path, cache_dir=tmp_path / "cache")
    assert torch.equal(logits(loaded.decoder), logits(made.decoder))
    assert loaded.chat_template == "{{ messages }}"
    assert loaded.tokenizer_dir.parent == tmp_path / "cache"
    assert loaded.config.eos_token_ids == (2,)


@pytest.mark.parametrize("family", ARCHITECTURES)
def test_a_gguf_file_converts_to_a_directory_that_is_the_same_model(
    family: str, tiny: Callable[..., Any], tmp_path: Path
) -> None:
    made = tiny(family)
    path = write_gguf(tmp_path / "m.gguf", made.directory, ARCHITECTURES[family])
    convert_gguf(path, tmp_path / "converted")
    converted = load_model(tmp_path / "converted", cache_dir=tmp_path)
    assert converted.config == GgufFile(path).config
    assert torch.equal(logits(converted.decoder), logits(made.decoder))
    assert is_intact(tmp_path / "converted")
    with (tmp_path / "converted" / "config.json").open("a") as opened:
        opened.write(" ")
    assert not is_intact(tmp_path / "converted")
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith(".")] == []


def test_quantised_weights_are_expanded(tiny: Callable[..., Any], tmp_path: Path) -> None:
    made = tiny()
    path = write_gguf(tmp_path / "m.gguf", made.directory, "llama", quantised=True)
    weight = GgufFile(path).read("model.layers.0.mlp.up_proj.weight")
    original = load_file(made.directory / "model.safetensors")["model.layers.0.mlp.up_proj.weight"]
    assert weight.dtype == torch.float32
    assert 0 < (weight - original).abs().max() <= original.abs().max() / 127


@pytest.mark.parametrize("name", [*FORMATS, "Q5_0"])
@pytest.mark.parametrize("architecture", ["llama", "qwen2"])
def test_weights_in_the_format_of_the_file_are_those_in_float32(name: str, architecture: str, tmp_path: Path) -> None:
    family = "smollm" if architecture == "llama" else "qwen2"
    directory = make_tiny(tmp_path / "tiny", family, hidden_size=256, intermediate_size=256, head_dim=64)

    def stored(tensor: torch.Tensor) -> tuple[np.ndarray, gguf.GGMLQuantizationType]:
        kind = gguf.GGMLQuantizationType[name]
        if name in QUANTISED:
            weights = random_weights(name, tuple(tensor.shape), len(tensor))
            return weights.rows.numpy(), kind
        return gguf.quantize(tensor.numpy(), kind), kind

    file = GgufFile(write_gguf(tmp_path / "m.gguf", directory, architecture, stored=stored))
    for key, shape in weight_shapes(file.config).items():
        found, expected = file.read_stored(key), file.read(key)
        assert torch.equal(widened(found).float(), expected), key
        kept = name if len(shape) == 2 and name in FORMATS else "F32"
        assert format_of(found).name == file.format_of(key).name == kept


def test_rope_factors_of_a_gguf_file(tiny: Callable[..., Any], tmp_path: Path) -> None:
    scaling = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 64}
    made = tiny(rope_parameters={"rope_type": "llama3", "rope_theta": 10000.0, **scaling})
    scaled, _ = frequencies(made.decoder.config.rope, 8)
    plain, _ = frequencies(tiny().decoder.config.rope, 8)
    path = write_gguf(tmp_path / "m.gguf", made.directory, "llama", rope_factors=(plain / scaled).tolist())
    loaded = load_model(path, cache_dir=tmp_path)
    assert (logits(loaded.decoder) - logits(made.decoder)).abs().max() <= 1e-5


def test_foreign_gguf_files_are_refused_by_name(tiny: Callable[..., Any], tmp_path: Path) -> None:
    directory = tiny().directory
    with pytest.raises(InvalidInputError, match="architecture 'gemma' is not supported"):
        GgufFile(write_gguf(tmp_path / "a.gguf", directory, "gemma"))
    with pytest.raises(InvalidInputError, match="rope type 'longrope' is not supported"):
        GgufFile(write_gguf(tmp_path / "b.gguf", directory, "llama", **{"rope.scaling.type": "longrope"}))
    with pytest.raises(InvalidInputError, match=r"ffn_gate.weight has shape \[64, 32\], expected \[65, 32\]"):
        GgufFile(write_gguf(tmp_path / "c.gguf", directory, "llama", feed_forward_length=65))
    with pytest.raises(InvalidInputError, match=r"tensor blk.1.attn_k.weight is not part of"):
        GgufFile(write_gguf(tmp_path / "d.gguf", directory, "llama", block_count=1))
    (tmp_path / "e.gguf").write_bytes(b"GGUFnonsense")
    with pytest.raises(InvalidInputError, match="cannot be read as GGUF"):
        GgufFile(tmp_path / "e.gguf")


def test_metadata_is_what_the_gguf_package_reads(tiny: Callable[..., Any], tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "m.gguf", tiny("llama").directory, "llama")
    ours, theirs = GgufFile(path), gguf.GGUFReader(path)
    names = [name for name in theirs.fields if not name.startswith("GGUF.")]
    assert "tokenizer.ggml.merges" in names
    assert "tokenizer.ggml.token_type" in names
    for name in names:
        assert ours._value(name) == theirs.fields[name].contents(), name
    merge = b"t" + b" " + b"h"
    damaged = path.read_bytes().replace(
        len(merge).to_bytes(8, "little") + merge, (1 << 60).to_bytes(8, "little") + merge
    )
    (tmp_path / "long.gguf").write_bytes(damaged)
    with pytest.raises(InvalidInputError, match=r"long\.gguf cannot be read as GGUF"):
        GgufFile(tmp_path / "long.gguf")


def test_sharded_safetensors(tiny: Callable[..., Any], tmp_path: Path) -> None:
    made = tiny()
    weights = load_file(made.directory / "model.safetensors")
    names = sorted(weights)
    shards = {"model-1.safetensors": names[::2], "model-2.safetensors": names[1::2]}
    for file, inside in shards.items():
        save_file({name: weights[name] for name in inside}, tmp_path / file)
    index = {"weight_map": {name: file for file, inside in shards.items() for name in inside}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    shutil.copy(made.directory / "config.json", tmp_path)
    shutil.copy(made.directory / "tokenizer.json", tmp_path)
    assert torch.equal(logits(load_model(tmp_path, cache_dir=tmp_path).decoder), logits(made.decoder))
    (tmp_path / "model-2.safetensors").unlink()
    with pytest.raises(InvalidInputError, match=r"names model-2.safetensors, which does not exist"):
        SafetensorsDirectory(tmp_path)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model.norm.weight": None}, "weight model.norm.weight is missing"),
        ({"model.norm.weight": torch.ones(31)}, r"model.norm.weight has shape \[31\], but config.json requires \[32\]"),
        ({"model.layers.0.self_attn.q_norm.weight": torch.ones(8)}, "is not part of LlamaForCausalLM"),
    ],
)
def test_weights_that_do_not_fit_are_refused(
    change: dict[str, torch.Tensor | None], message: str, tiny: Callable[..., Any], tmp_path: Path
) -> None:
    made = tiny()
    weights = {**load_file(made.directory / "model.safetensors"), **change}
    save_file({name: value for name, value in weights.items() if value is not None}, tmp_path / "model.safetensors")
    shutil.copy(made.directory / "config.json", tmp_path)
    with pytest.raises(InvalidInputError, match=message):
        SafetensorsDirectory(tmp_path)


def test_a_directory_without_weights_or_config(tmp_path: Path, tiny: Callable[..., Any]) -> None:
    with pytest.raises(InvalidInputError, match=r"has no config.json: it is not a model"):
        SafetensorsDirectory(tmp_path)
    shutil.copy(tiny().directory / "config.json", tmp_path)
    with pytest.raises(InvalidInputError, match=r"contains neither model.safetensors nor"):
        SafetensorsDirectory(tmp_path)


def test_ends_of_text_of_the_generation_config_count_too(tmp_path: Path, tiny: Callable[..., Any]) -> None:
    shutil.copy(tiny().directory / "config.json", tmp_path)
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [2, 0]}')
    assert read_config(tmp_path).eos_token_ids == (2, 0)


def test_a_model_that_does_not_fit_is_refused_with_figures(
    tiny: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(load, "available_bytes", lambda device: 1000)
    directory = tiny().directory
    with pytest.raises(TinkerError, match=r"needs 0\.0 GB in float32 \([\d,]+ weights\), but only 0\.0 GB are free"):
        load_model(directory, cache_dir=directory)


def test_weights_are_not_views_of_the_file(tiny: Callable[..., Any]) -> None:
    made = tiny()
    files = SafetensorsDirectory(made.directory)
    tensor = files.read("model.norm.weight")
    assert tensor.untyped_storage().nbytes() == 4 * 32


def test_a_name_that_is_no_model_is_refused() -> None:
    with pytest.raises(InvalidInputError, match=r"neither a directory, a \.gguf file nor a hub id"):
        fetch("no such thing")


def test_the_default_model_says_where_it_looked(tmp_path: Path) -> None:
    def nowhere(scratch: Path) -> Path:
        raise TinkerError("the network is down")

    def another_file(scratch: Path) -> Path:
        (scratch / "x.gguf").write_bytes(b"other")
        return scratch / "x.gguf"

    with pytest.raises(TinkerError, match=r"first: the network is down; second: x.gguf has SHA-256 .*damaged"):
        sources.default_model(tmp_path, {"first": nowhere, "second": another_file})


def test_the_default_model_is_converted_once_and_made_anew_when_damaged(
    tmp_path: Path, tiny: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    source = write_gguf(tmp_path / "m.gguf", tiny("smollm").directory, "llama")
    monkeypatch.setattr(sources, "GGUF_DIGEST", sources.file_digest(source))
    fetched = []

    def fetch_file(scratch: Path) -> Path:
        fetched.append(scratch)
        return source

    directory = sources.default_model(tmp_path / "cache", {"here": fetch_file})
    assert sources.default_model(tmp_path / "cache", {"here": fetch_file}) == directory
    assert len(fetched) == 1
    (directory / "model.safetensors").write_bytes(b"damaged")
    sources.default_model(tmp_path / "cache", {"here": fetch_file})
    assert len(fetched) == 2
    assert is_intact(directory)


def test_the_default_model_is_loaded_in_the_format_of_its_file(
    tmp_path: Path, tiny: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its directory has float32 weights for other programs, and the original for engines."""
    made = tiny("smollm", head_dim=32).directory
    source = write_gguf(tmp_path / "m.gguf", made, "llama", quantised=True)
    monkeypatch.setattr(sources, "GGUF_DIGEST", sources.file_digest(source))
    directory = sources.default_model(tmp_path / "cache", {"here": lambda scratch: source})
    small = load_model(directory, cache_dir=tmp_path)
    (directory / ORIGINAL).unlink()
    wide = load_model(directory, cache_dir=tmp_path)
    assert small.config == wide.config
    assert torch.equal(logits(small.decoder), logits(wide.decoder))
    if can_pack(torch.device("cpu"), torch.float32) and can_compile():
        assert set(small.decoder.bytes_by_format) == {"Q8_0"}
        assert set(wide.decoder.bytes_by_format) == {"F32"}
        assert small.memory_bytes < wide.memory_bytes

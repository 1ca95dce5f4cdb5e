"""Commands that load the engine, on a tiny model: exports of a trained checkpoint, and the doctor's trial."""

from __future__ import annotations

import json
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from support.cli_run import Cli

import tinsmith
from tinsmith import AdamParams, Datum, ModelInput
from tinsmith.client.connection import own_endpoints
from tinsmith.engine.models.tiny import make_tiny

TOKENS = [11, 12, 13, 41, 42, 43, 44, 45]
DATUM = Datum(ModelInput.from_ints(TOKENS[:-1]), {"target_tokens": TOKENS[1:], "weights": [1.0] * 7})


@dataclass(frozen=True)
class World:
    cli: Cli
    base: Path
    path: str
    sampler: str
    logprobs: list[float]


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    folder = tmp_path_factory.mktemp("engine")
    base = make_tiny(folder / "tiny", "smollm", seed=1)
    settings = {"dtype": "float32", "threads": 1}
    with tinsmith.local({"tiny": str(base)}, data_dir=folder / "data", settings=settings) as service:
        training = service.create_lora_training_client("tiny", rank=8, seed=0)
        for _ in range(3):
            training.forward_backward([DATUM], "cross_entropy")
            training.optim_step(AdamParams(learning_rate=1e-2)).result()
        path = training.save_state("one").result().path
        sampler = training.save_weights_for_sampler("two").result().path
        output = training.forward([DATUM], "cross_entropy").result()
        config = service.holder.connection.config
        cli = Cli(config.base_url, config.api_key, folder)
        yield World(cli, base, path, sampler, output.loss_fn_outputs[0]["logprobs"].tolist())


def logprobs_of_transformers(directory: Path, adapter: Path | None = None) -> list[float]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from peft import PeftModel
        from transformers import AutoModelForCausalLM

        model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
        if adapter is not None:
            model = PeftModel.from_pretrained(model, adapter)
        with torch.no_grad():
            logprobs = model(torch.tensor([TOKENS[:-1]])).logits[0].log_softmax(-1)
    return [float(row[token]) for row, token in zip(logprobs, TOKENS[1:], strict=True)]


def test_an_adapter_that_peft_loads(world: World, tmp_path: Path) -> None:
    answer = world.cli.json("checkpoint", "export", world.path, "--out", str(tmp_path / "peft"))
    assert (answer["format"], answer["rank"], answer["base_model"]) == ("peft", 8, "tiny")
    assert answer["tensors_compared"] == len(load_file(tmp_path / "peft" / "adapter_model.safetensors"))
    with_adapter = logprobs_of_transformers(world.base, tmp_path / "peft")
    assert with_adapter == pytest.approx(world.logprobs, abs=1e-4)
    assert logprobs_of_transformers(world.base) != pytest.approx(world.logprobs, abs=1e-2)
    problem = world.cli.fails("checkpoint", "export", world.path, "--out", str(tmp_path / "peft"))
    assert "already exists; use --force" in problem
    world.cli("checkpoint", "export", world.sampler, "--out", str(tmp_path / "peft"), "--force")


def test_a_merged_model_that_transformers_loads(world: World, tmp_path: Path) -> None:
    base = ("--base", str(world.base))
    text = world.cli("checkpoint", "export", world.path, "--to", "merged", "--out", str(tmp_path / "m"), *base)
    assert "Max logit difference" in text
    assert logprobs_of_transformers(tmp_path / "m") == pytest.approx(world.logprobs, abs=1e-4)


def test_a_gguf_file_that_the_engine_loads(world: World, tmp_path: Path) -> None:
    base = ("--base", str(world.base))
    file = tmp_path / "model.gguf"
    answer = world.cli.json(
        "checkpoint", "export", world.path, "--to", "gguf", "--dtype", "f32", "--out", str(file), *base
    )
    assert answer["size_bytes"] == file.stat().st_size
    assert answer["max_weight_difference"] == 0
    assert [path.name for path in tmp_path.iterdir()] == ["model.gguf"]


def test_exports_that_cannot_be_made(world: World, tmp_path: Path) -> None:
    out = ("--out", str(tmp_path / "x"))
    unknown = world.cli.fails("checkpoint", "export", world.path, "--to", "merged", *out)
    assert "merging needs the base model: 'tiny' is neither a directory" in unknown
    absent = world.path.replace("/one", "/none")
    assert "does not exist" in world.cli.fails("checkpoint", "export", absent, *out)
    assert "is not one of 'peft', 'merged', 'gguf'" in world.cli.fails(
        "checkpoint", "export", world.path, "--to", "onnx", *out, code=2
    )
    assert list(tmp_path.iterdir()) == []


def test_the_doctor_trains_and_samples(tmp_path: Path) -> None:
    result = Cli(None, None, tmp_path).run("doctor", "--format", "json")
    assert result.exit_code == 0, result.output
    found = {check["check"]: check for check in json.loads(result.stdout)["checks"]}
    for name in ("tokenizer", "training", "sampling"):
        assert found[name]["result"] == "ok", found[name]
    assert "local engine" in found["server"]["detail"]
    assert "tiny model" in found["training"]["detail"]


def test_an_exported_adapter_comes_back(world: World, tmp_path: Path) -> None:
    world.cli("checkpoint", "export", world.path, "--out", str(tmp_path / "peft"))
    path = world.cli("checkpoint", "import", str(tmp_path / "peft"), "--name", "back").strip()
    assert path.endswith("/weights/back")
    assert logprobs_from(world, path) == world.logprobs
    wrong = world.cli.fails("checkpoint", "import", str(tmp_path / "peft"), "--model", "other")
    assert "other" in wrong
    config = tmp_path / "peft" / "adapter_config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"base_model_name_or_path": "/home/me/a-copy"}))
    found = world.cli.run("checkpoint", "import", str(tmp_path / "peft"), "--name", "found")
    assert found.exit_code == 0, found.output
    assert found.stderr == "base model: tiny (the adapter names /home/me/a-copy)\n"
    assert logprobs_from(world, found.stdout.strip()) == world.logprobs


@pytest.mark.parametrize("part_bytes", [own_endpoints.PART_BYTES, 5000], ids=["at once", "in parts"])
def test_a_download_comes_back_with_its_optimizer(
    world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, part_bytes: int
) -> None:
    monkeypatch.setattr(own_endpoints, "PART_BYTES", part_bytes)
    place = world.cli.json("checkpoint", "download", world.path, "-o", str(tmp_path))["destination"]
    answer = world.cli.json("checkpoint", "import", place)
    assert (answer["base_model"], answer["lora_rank"]) == ("tiny", 8)
    assert logprobs_from(world, answer["path"]) == world.logprobs
    (Path(place) / "adapter_config.json").write_text("{}")
    assert "its SHA-256 is not the manifest's" in world.cli.fails("checkpoint", "import", place)


def test_an_adapter_that_does_not_fit_is_deleted_again(world: World, tmp_path: Path) -> None:
    other = make_tiny(tmp_path / "other", hidden_size=16, head_dim=4)
    adapter = tmp_path / "peft"
    adapter.mkdir()
    weights = {
        f"base_model.model.model.layers.{layer}.self_attn.{module}.lora_{side}.weight": torch.ones(
            (2, 16) if side == "A" else (size, 2)
        )
        for layer in range(2)
        for module, size in (("q_proj", 16), ("k_proj", 8), ("v_proj", 8), ("o_proj", 16))
        for side in "AB"
    }
    save_file(weights, adapter / "adapter_model.safetensors")
    config = {"peft_type": "LORA", "r": 2, "lora_alpha": 4, "base_model_name_or_path": "tiny"}
    (adapter / "adapter_config.json").write_text(json.dumps(config))
    before = world.cli.json("checkpoint", "list", "--limit", "0")
    problem = world.cli.fails("checkpoint", "import", str(adapter), "--base", str(other))
    assert "the server cannot load the checkpoint, so it was deleted again" in problem
    assert "has shape" in problem
    assert world.cli.json("checkpoint", "list", "--limit", "0") == before


def logprobs_from(world: World, path: str) -> list[float]:
    with tinsmith.ServiceClient(base_url=world.cli.url, api_key=world.cli.key) as service:
        training = service.create_training_client_from_state(path)
        output = training.forward([DATUM], "cross_entropy").result()
    values: list[float] = output.loss_fn_outputs[0]["logprobs"].tolist()
    return values

"""Faults of a base model are found before an engine starts, and the error names the file."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from support.general_models import make_general, quiet

from tinsmith.engine.backend.prepare_model import prepare
from tinsmith.engine.models.tiny import make_tiny
from tinsmith.errors import TinkerError


def without(name: str) -> Callable[[Path], None]:
    return lambda directory: (directory / name).unlink()


def cut(name: str) -> Callable[[Path], None]:
    return lambda directory: (directory / name).write_bytes((directory / name).read_bytes()[:100])


def other_kind(directory: Path) -> None:
    (directory / "config.json").write_text('{"architectures": ["FooForCausalLM"], "model_type": "foo"}')


def test_a_model_that_runs_through_transformers_is_described_and_its_files_are_checked(tmp_path: Path) -> None:
    model = make_general(tmp_path / "model", "gpt2")
    with quiet():
        prepared = prepare(str(model), tmp_path)
        assert (prepared.arch, prepared.vocab_size, prepared.max_context_length) == ("GPT2LMHeadModel", 264, 128)
        cut("model.safetensors")(model)
        with pytest.raises(TinkerError, match=r"model/model.safetensors cannot be read"):
            prepare(str(model), tmp_path)
        without("model.safetensors")(model)
        with pytest.raises(TinkerError, match=r"/model contains no safetensors files"):
            prepare(str(model), tmp_path)


@pytest.mark.parametrize(
    ("spoil", "says"),
    [
        (without("config.json"), "has no config.json: it is not a model"),
        (without("model.safetensors"), "contains neither model.safetensors nor"),
        (without("tokenizer.json"), "has no tokenizer.json; save the model's tokenizer there"),
        (cut("model.safetensors"), "model.safetensors cannot be read"),
        (cut("config.json"), "config.json"),
        (other_kind, "config.json: architecture FooForCausalLM is not supported \\(supported: Gemma2ForCausalLM, "),
    ],
    ids=["no config", "no weights", "no tokenizer", "cut weights", "cut config", "another architecture"],
)
def test_a_directory_that_is_not_whole_is_refused(tmp_path: Path, spoil: Callable[[Path], None], says: str) -> None:
    model = make_tiny(tmp_path / "model")
    assert prepare(str(model), tmp_path).source == str(model)
    spoil(model)
    with quiet(), pytest.raises(TinkerError, match=f"{tmp_path}/model.*{says}") as caught:
        prepare(str(model), tmp_path)
    assert "\n" not in str(caught.value)

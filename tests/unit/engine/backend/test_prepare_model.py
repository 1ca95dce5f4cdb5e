"""Faults of a base model are found before an engine starts, and the error names the file."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tinsmith.engine.backend.prepare_model import prepare
from tinsmith.engine.models.tiny import make_tiny
from tinsmith.errors import TinkerError


def without(name: str) -> Callable[[Path], None]:
    return lambda directory: (directory / name).unlink()


def cut(name: str) -> Callable[[Path], None]:
    return lambda directory: (directory / name).write_bytes((directory / name).read_bytes()[:100])


def other_kind(directory: Path) -> None:
    (directory / "config.json").write_text('{"architectures": ["FooForCausalLM"], "model_type": "foo"}')


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
    with pytest.raises(TinkerError, match=f"{tmp_path}/model.*{says}") as caught:
        prepare(str(model), tmp_path)
    assert "\n" not in str(caught.value)

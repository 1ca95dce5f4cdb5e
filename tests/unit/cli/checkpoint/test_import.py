"""Which of a server's models an adapter belongs to."""

from __future__ import annotations

import pytest

from tinsmith.cli.checkpoint.import_ import matching_model

TWO = ["HuggingFaceTB/SmolLM2-135M-Instruct", "Qwen/Qwen3-0.6B"]


@pytest.mark.parametrize(
    ("named", "offered", "found"),
    [
        ("Qwen/Qwen3-0.6B", TWO, "Qwen/Qwen3-0.6B"),
        ("unsloth/qwen3-0.6b", TWO, "Qwen/Qwen3-0.6B"),
        ("/home/me/models/SmolLM2-135M-Instruct/", TWO, "HuggingFaceTB/SmolLM2-135M-Instruct"),
        ("b/x", ["a/x", "b/x"], "b/x"),
        ("c/x", ["a/x", "b/x"], None),
        ("Qwen/Qwen3", TWO, None),
        ("", TWO, None),
        ("", ["tiny"], "tiny"),
        ("checkpoint-500", ["tiny"], "tiny"),
        ("tiny", [], None),
    ],
)
def test_the_model_of_an_adapter(named: str, offered: list[str], found: str | None) -> None:
    assert matching_model(named, offered) == found

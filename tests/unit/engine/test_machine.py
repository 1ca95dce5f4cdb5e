"""The number format: float32 on a CPU; bfloat16 on request, where a trial has shown that it works."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from tinsmith.engine.machine import CAREFUL, FORMATS, Choice, FormatTrial, decide, run_trial
from tinsmith.engine.protocol import ModelCard
from tinsmith.engine.worker import startup
from tinsmith.engine.worker.executor import StartError

RIGHT = [FormatTrial("float32", 2e-3, 1e-6), FormatTrial("bfloat16", 1e-3, 5e-3)]
WRONG = [FormatTrial("float32", 2e-3, 1e-6), FormatTrial("bfloat16", 1e-3, 0.4)]
DIES = RIGHT[:1]


def choice(plain: list[FormatTrial], careful: list[FormatTrial]) -> Choice:
    def run(environment: Mapping[str, str]) -> list[FormatTrial]:
        return careful if environment else plain

    return decide(run)


@pytest.mark.parametrize(
    ("plain", "careful", "environment"),
    [
        (RIGHT, [], {}),
        (DIES, RIGHT, dict(CAREFUL)),
        (WRONG, RIGHT, dict(CAREFUL)),
        (WRONG, WRONG, None),
        (DIES, DIES, None),
        ([], [], None),
    ],
    ids=["right", "dies-then-right", "wrong-then-right", "wrong", "dies-twice", "nothing-works"],
)
def test_bfloat16_is_right_and_survived(
    plain: list[FormatTrial], careful: list[FormatTrial], environment: dict[str, str] | None
) -> None:
    made = choice(plain, careful)
    assert made.environment == environment
    assert made.reason


def test_a_cpu_computes_in_float32_unless_it_is_told_otherwise(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(startup.os, "environ", {})
    card = ModelCard(name="m", vocab_size=8, max_context_length=8)

    def chosen(dtype: Any, device: str = "cpu") -> str:
        options = startup.TorchOptions(
            card=card, source="s", cache_dir=str(tmp_path), dtype=dtype, device=device, threads=1
        )
        return startup.prepare(options)

    assert [chosen("auto"), chosen("float32"), chosen("auto", "cuda")] == ["float32", "float32", "bfloat16"]
    monkeypatch.setattr(startup, "choose", lambda _: Choice({"A": "b"}, "tried"))
    assert chosen("bfloat16") == "bfloat16"
    assert startup.os.environ["A"] == "b"
    monkeypatch.setattr(startup, "choose", lambda _: Choice(None, "it died"))
    with pytest.raises(StartError, match="bfloat16 does not work on this processor \\(it died\\)"):
        chosen("bfloat16")


def test_this_machine_survives_the_careful_trial() -> None:
    trials = run_trial(CAREFUL)
    assert [trial.format for trial in trials] == list(FORMATS)
    assert trials[0].is_right

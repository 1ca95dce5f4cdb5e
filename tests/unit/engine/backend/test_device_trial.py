"""The trial of a device: it finds what is right, and notices what is wrong."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import msgspec
import numpy as np
import pytest
from support.tiny_engine import torch_as_it_was

from tinsmith.engine.backend import device_trial
from tinsmith.engine.backend.device_trial import Trial, TrialPlan, findings, resumed
from tinsmith.engine.backend.prepare_model import prepare
from tinsmith.engine.models.tiny import make_tiny

JUDGED = {"logprobs", "training", "determinism", "on-policy gap"}


@pytest.fixture(autouse=True)
def _torch_as_it_was() -> Iterator[None]:
    with torch_as_it_was():
        yield


@pytest.fixture(scope="module")
def plan(tmp_path_factory: pytest.TempPathFactory) -> TrialPlan:
    home = tmp_path_factory.mktemp("trial")
    model = make_tiny(home / "tiny", "qwen3", seed=2)
    sizes = {"rows": 2, "tokens": 16}
    return TrialPlan(source=str(model), cache_dir=str(home), place=str(home), device="cpu", dtype="float32", **sizes)


def test_a_working_device_is_found_right_and_continues_from_its_checkpoint(
    plan: TrialPlan, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(device_trial.importlib.util, "find_spec", lambda _: None)  # type: ignore[attr-defined]
    found = {finding.check: finding for finding in findings(plan)}
    assert {name for name, finding in found.items() if finding.outcome == "ok"} == JUDGED, found
    assert "float64" in found["logprobs"].detail
    assert found["batch and alone"].detail.startswith("3 of 3 ")
    assert {"start", "training speed", "sampling speed, 1 at once", "sampling speed, 8 at once"} <= found.keys()
    assert [finding.outcome for finding in resumed(plan)] == ["ok"]
    digests = Path(plan.place) / "digests.json"
    digests.write_bytes(msgspec.json.encode(["0" * 64] * 6))
    (replay,) = resumed(plan)
    assert (replay.outcome, replay.detail[:6]) == ("wrong", "0 of 6")


def test_logprobs_that_are_off_are_wrong(plan: TrialPlan, monkeypatch: pytest.MonkeyPatch) -> None:
    trial = Trial(plan, prepare(plan.source, Path(plan.cache_dir)))
    trial.create("base")
    assert device_trial._against_reference(trial).outcome == "ok"
    right = trial.logprobs("base", trial.sequences)
    monkeypatch.setattr(trial, "logprobs", lambda *_: [scores - np.float32(0.01) for scores in right])
    assert device_trial._against_reference(trial).outcome == "wrong"


def test_without_a_gpu_the_trial_says_so(plan: TrialPlan) -> None:
    (found,) = findings(msgspec.structs.replace(plan, device="cuda"))
    assert found.outcome == "wrong"
    assert "finds no CUDA device" in found.detail

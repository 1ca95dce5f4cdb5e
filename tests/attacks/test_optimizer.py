"""Optimizer steps that would overflow: each is refused, nothing changes, and the engine and its other models
continue."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from support.jobs import Jobs, datum
from support.tiny_engine import NAME, bodies, refusal, same_bits, state_of, train

from tinsmith.engine.checkpoints.format import OPTIMIZER, read_checkpoint, read_manifest, write_checkpoint
from tinsmith.engine.protocol import JobFailedError
from tinsmith.engine.training.adamw import AdamW
from tinsmith.engine.worker.torch_executor import TorchExecutor
from tinsmith.wire.messages.training import AdamParams, OptimStepResponse

PROBE = [5, 9, 2, 33, 7]
HUGE: list[dict[str, float]] = [
    {"learning_rate": 1e39},
    {"learning_rate": 3e38},
    {"learning_rate": 1e38, "weight_decay": 1e38},
    {"learning_rate": 1e300, "weight_decay": 1e300},
    {"learning_rate": 1e15, "weight_decay": 1e15, "eps": 1e-45},
    {"learning_rate": 1e15, "beta1": 0.9999999999999999, "beta2": 0.9999999999999999, "eps": 2e-45},
    {"eps": 1e39},
    {"eps": 1e-300},
    {"learning_rate": 1.7976931348623157e308, "grad_clip_norm": 5e-324},
]


def trained(engine: TorchExecutor, **fields: Any) -> Jobs:
    """A model with a step behind it and gradients that wait for the next."""
    jobs = Jobs(NAME, **fields)
    bodies(engine, [jobs.create(), *jobs.steps(1), jobs.forward_backward(datum(PROBE))])
    return jobs


@pytest.mark.parametrize("params", HUGE, ids=str)
def test_a_step_that_would_overflow_is_refused_and_changes_nothing(
    engine: TorchExecutor, params: dict[str, float]
) -> None:
    """Each was the end of the shared engine, or a failed step that had changed the weights."""
    jobs = trained(engine)
    before = state_of(engine, jobs.model_id)
    error = refusal(engine, jobs.optim_step(**params))
    if error is None:
        assert all(torch.isfinite(tensor).all() for tensor in state_of(engine, jobs.model_id).values())
    else:
        assert error.category == "user"
        assert same_bits(before, state_of(engine, jobs.model_id))
        bodies(engine, jobs.steps(1))


def test_what_was_refused_leaves_no_trace_in_the_next_steps(engine: TorchExecutor) -> None:
    """As if it had never been asked for: so a replay, which leaves it out, gives the same bits."""
    attacked, alone = trained(engine), trained(engine)
    for params in HUGE[:3]:
        with pytest.raises(JobFailedError, match="learning_rate"):
            train(engine, attacked.optim_step(**params))
    rest = [bodies(engine, [jobs.optim_step(), *jobs.steps(2, seed=5)]) for jobs in (attacked, alone)]
    assert rest[0] == rest[1]
    assert same_bits(state_of(engine, attacked.model_id), state_of(engine, alone.model_id))


def test_weights_beyond_what_a_change_can_span_are_refused_before_they_change() -> None:
    """3e38 and -3e38 are finite, their difference is not: `optim/update_norm` would be infinite."""
    params, grads = {"a": torch.full((4,), 3e38)}, {"a": torch.zeros(4)}
    optimizer = AdamW(params)
    with pytest.raises(Exception, match="larger than float32 can hold"):
        optimizer.step(params, grads, AdamParams(learning_rate=1.0, weight_decay=2.0))
    assert torch.equal(params["a"], torch.full((4,), 3e38))
    assert optimizer.steps == 0


def test_moments_that_would_overflow_are_refused() -> None:
    params, grads = {"a": torch.ones(4)}, {"a": torch.full((4,), 1e25)}
    optimizer = AdamW(params)
    with pytest.raises(Exception, match="larger than float32 can hold"):
        optimizer.step(params, grads, AdamParams())
    assert optimizer.step(params, grads, AdamParams(grad_clip_norm=1.0))["optim/step"] == 1.0


def test_the_answer_is_made_before_the_weights_change(engine: TorchExecutor, monkeypatch: pytest.MonkeyPatch) -> None:
    jobs = trained(engine)
    before = state_of(engine, jobs.model_id)

    def fail(*_: object, **__: object) -> OptimStepResponse:
        raise JobFailedError("no answer")

    with monkeypatch.context() as broken:
        broken.setattr("tinsmith.engine.worker.torch_executor.OptimStepResponse", fail)
        with pytest.raises(JobFailedError, match="no answer"):
            train(engine, jobs.optim_step())
    assert same_bits(before, state_of(engine, jobs.model_id))


def spoiled(directory: Path, out: Path, **changes: torch.Tensor) -> Path:
    """A checkpoint whose optimizer has other tensors; `m` and `v` stand for the first of their kind."""
    manifest, checkpoint = read_manifest(directory), read_checkpoint(directory, with_optimizer=True)
    state = dict(safetensors.torch.load((directory / OPTIMIZER).read_bytes()))
    first = next(name[2:] for name in state if name.startswith("m."))
    for kind, value in changes.items():
        key = kind if kind == "step" else f"{kind}.{first}"
        state[key] = value if value.ndim or kind == "step" else torch.full_like(state[key], float(value))
    write_checkpoint(out, manifest.info, checkpoint.weights, state)
    return out


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"step": torch.tensor(-1)}, "step is -1"),
        ({"step": torch.tensor(2**63 - 1)}, "step is 9223372036854775807"),
        ({"step": torch.tensor([1, 2])}, "'step' is"),
        ({"step": torch.tensor(1.5)}, "'step' is torch.float32"),
        ({"m": torch.tensor(float("nan"))}, "is not finite"),
        ({"m": torch.tensor(float("-inf"))}, "is not finite"),
        ({"v": torch.tensor(float("inf"))}, "is not finite"),
        ({"v": torch.tensor(-1.0)}, "below 0"),
        ({"v": torch.zeros(3, 3)}, "expected torch.float32"),
        ({"m": torch.zeros(3, 3, dtype=torch.int64)}, "expected torch.float32"),
    ],
    ids=str,
)
def test_an_optimizer_that_no_training_left_behind_is_refused(
    engine: TorchExecutor, tmp_path: Path, changes: dict[str, torch.Tensor], text: str
) -> None:
    jobs = trained(engine)
    train(engine, jobs.save(tmp_path / "good"))
    bad = spoiled(tmp_path / "good", tmp_path / "bad", **changes)
    before = state_of(engine, jobs.model_id)
    with pytest.raises(JobFailedError, match=text) as caught:
        train(engine, jobs.load(bad))
    assert caught.value.category == "user"
    assert same_bits(before, state_of(engine, jobs.model_id))
    with pytest.raises(JobFailedError, match=text):
        train(engine, Jobs(NAME).create(directory=bad, optimizer=True))


def test_an_optimizer_with_huge_moments_makes_no_step(engine: TorchExecutor, tmp_path: Path) -> None:
    jobs = trained(engine)
    train(engine, jobs.save(tmp_path / "good"))
    huge = {"m": torch.tensor(3.4e38), "v": torch.tensor(0.0), "step": torch.tensor(0)}
    bad = spoiled(tmp_path / "good", tmp_path / "bad", **huge)
    bodies(engine, [jobs.load(bad), jobs.forward_backward(datum(PROBE))])
    before = state_of(engine, jobs.model_id)
    with pytest.raises(JobFailedError, match="larger than float32 can hold"):
        train(engine, jobs.optim_step(learning_rate=1.0))
    assert same_bits(before, state_of(engine, jobs.model_id))


@pytest.mark.parametrize("weight", [3e38, -3e38, 1e-45])
def test_gradients_of_hostile_data_reach_nobody_else(engine: TorchExecutor, weight: float) -> None:
    mine, yours = trained(engine, tenant="mine"), trained(engine, tenant="yours")
    expected = bodies(engine, [mine.optim_step(), *mine.steps(1, seed=3)])
    error = refusal(engine, yours.forward_backward(*[datum(PROBE, weight)] * 8), yours.optim_step())
    assert error is None or error.category == "user"
    other = trained(engine, tenant="mine")
    assert bodies(engine, [other.optim_step(), *other.steps(1, seed=3)]) == expected

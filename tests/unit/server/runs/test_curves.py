"""Curves of runs: passes are combined to steps, long curves are thinned, and an older database gets its curves."""

from __future__ import annotations

import itertools
import math
from typing import Any

import msgspec
import pytest

from tinsmith.engine.protocol import Done, ForwardBackward, OptimStep
from tinsmith.server.jobs.job import Work
from tinsmith.server.runs.curves import MAX_NAMES, MAX_PASSES, Curve, Measured, read_measured
from tinsmith.store.base import Statement
from tinsmith.store.rows import JobRow
from tinsmith.wire.codecs import json_codec
from tinsmith.wire.codecs.proto_outputs import encode_output
from tinsmith.wire.messages.training import ForwardBackwardOutput


def work(seq: int, kind: str, *, is_forward: bool = False) -> Work:
    common: dict[str, Any] = {"job_id": f"j{seq}", "tenant": "o", "base_model": "b", "model_id": "m", "body": b""}
    job = OptimStep(**common)
    if kind != "optim_step":
        job = ForwardBackward(**common, encoding="json", is_forward=is_forward)  # type: ignore[assignment]
    row = JobRow(
        request_id=f"j{seq}", lane="m", seq=seq, kind=kind, session_id="s", org_id="o", user_id="u", digest="d",
        job=b"", created_at=0.0,
    )  # fmt: skip
    return Work(row=row, job=job, context={})


def passed(datums: int = 1, **metrics: float) -> Done:
    output = ForwardBackwardOutput(
        "", [{}] * datums, {name.replace("_", ":"): value for name, value in metrics.items()}
    )
    return Done(body=json_codec.encode(output), device_s=0.5)


def stepped(**metrics: float) -> Done:
    return Done(body=msgspec.json.encode({"metrics": metrics}), device_s=0.25)


def row_of(statements: tuple[Statement, ...]) -> dict[str, Any]:
    assert statements[0].name == "insert_step"
    values: dict[str, Any] = dict(statements[0].parameters)
    return {**values, "metrics": msgspec.json.decode(values["metrics"])}


def test_a_step_joins_the_passes_before_it() -> None:
    curve = Curve("m")
    assert curve.finished(work(1, "forward_backward"), passed(2, loss_sum=4.0, x_mean=1.0, y_odd=3.0), 10.0) == ()
    assert curve.finished(work(2, "forward_backward"), passed(6, loss_sum=2.0, x_mean=3.0, y_odd=3.0), 11.0) == ()
    evaluated = work(3, "forward_backward", is_forward=True)
    assert curve.finished(evaluated, passed(9, loss_sum=100.0), 12.0) == ()
    row = row_of(curve.finished(work(4, "optim_step"), stepped(grad_norm=0.5), 13.0))
    assert row == {
        "model_id": "m",
        "seq": 4,
        "step": 1,
        "datums": 8,
        "seconds": 1.25,
        "finished_at": 13.0,
        "metrics": {"loss:sum": 6.0, "x:mean": 2.5, "optim/grad_norm": 0.5},
    }
    alone = row_of(curve.finished(work(5, "optim_step"), stepped(), 14.0))
    assert (alone["step"], alone["datums"], alone["metrics"]) == (2, 0, {})


def test_what_is_not_a_number_or_cannot_be_read_is_left_out() -> None:
    curve = Curve("m")
    body = encode_output(ForwardBackwardOutput("", [], {"loss:sum": math.nan, "a:sum": math.inf, "b:sum": 1.0}))
    curve.finished(work(1, "forward_backward"), Done(body=body, encoding="protobuf"), 1.0)
    assert row_of(curve.finished(work(2, "optim_step"), Done(body=b"{}"), 2.0))["metrics"] == {"b:sum": 1.0}
    curve.finished(work(3, "forward_backward"), Done(body=b"\xff\xff", encoding="protobuf"), 3.0)
    broken = row_of(curve.finished(work(4, "optim_step"), Done(body=b"nonsense"), 4.0))
    assert (broken["step"], broken["metrics"]) == (2, {})


def test_either_encoding_is_read() -> None:
    output = ForwardBackwardOutput("", [], {"loss:sum": 2.0})
    for body, encoding in ((encode_output(output), "protobuf"), (json_codec.encode(output), "json")):
        assert read_measured("forward_backward", body, encoding, 1.0).metrics == {"loss:sum": 2.0}


def test_many_passes_and_metrics_of_one_step_are_bounded() -> None:
    curve = Curve("m")
    for seq in range(10 * MAX_PASSES):
        curve.add(seq, "forward_backward", Measured({"loss:sum": 1.0, "x:mean": float(seq % 2)}, 1, 0.5), 1.0)
        assert len(curve._passes) <= MAX_PASSES
    wide = Measured({f"m{number}": 1.0 for number in range(1000)}, 0, 0.0)
    row = row_of(curve.add(999, "optim_step", wide, 2.0))
    assert row["metrics"]["loss:sum"] == 10 * MAX_PASSES == row["datums"]
    assert row["metrics"]["x:mean"] == pytest.approx(0.5)
    assert row["seconds"] == 5 * MAX_PASSES
    assert len(row["metrics"]) == MAX_NAMES


@pytest.mark.parametrize("most", [4, 7, 64])
@pytest.mark.parametrize("restart_every", [0, 5])
def test_a_long_curve_is_thinned_evenly_and_keeps_its_ends(most: int, restart_every: int) -> None:
    """What the table holds, as its statements say; a server that starts anew thins at the same steps."""
    curve = Curve("m", most=most)
    kept: list[int] = []
    for number in range(1, 40 * most):
        if restart_every and number % restart_every == 0:
            curve = Curve("m", curve.steps, most)
        statements = curve.add(number, "optim_step", Measured({}, 0, 0.0), 1.0)
        kept.append(number)
        for thin in statements[1:]:
            stride, last = thin.parameters["stride"], thin.parameters["step"]
            assert isinstance(stride, int)
            kept = [step for step in kept if (step - 1) % stride == 0 or step == last]
            gaps = {after - before for before, after in itertools.pairwise(kept[:-1])}
            assert len(gaps) <= 1, "evenly"
            assert len(kept) >= most // 4
        assert len(kept) <= most + 1
        assert (kept[0], kept[-1]) == (1, number)

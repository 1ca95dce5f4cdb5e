"""A run's metrics, kept after its results: one row for each optim_step, combined from the passes before it.

The row is written with the step's result, under the step's number, so that each step counts once. A curve that grows
too long is thinned: it keeps every n-th step, and all later ones until it is full again.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Mapping
from dataclasses import dataclass

import msgspec

from tinsmith.engine.protocol import Done, ForwardBackward, OptimStep
from tinsmith.errors import WireError
from tinsmith.server.jobs.job import Work
from tinsmith.store.base import Row, Statement, Store, statement
from tinsmith.store.rows import CountRow, StepRow
from tinsmith.wire.codecs import json_codec, proto_outputs
from tinsmith.wire.messages.training import ForwardBackwardOutput
from tinsmith.wire.rules.optim_metrics import with_current_names
from tinsmith.wire.rules.split_join import combine_metrics

logger = logging.getLogger(__name__)

MAX_STEPS = 4096
"""Rows of one run; about 1 MB."""
MAX_NAMES = 64
"""Metrics of one step."""
MAX_PASSES = 64
"""Passes that are kept separately until their step comes; earlier ones are combined."""
REDUCTIONS = ("sum", "mean", "min", "max")
"""Suffixes of metrics that can be combined over several passes; others are dropped."""
PAGE = 16
"""Results read at a time; they hold tensors."""


@dataclass(frozen=True, slots=True)
class Measured:
    """The metrics of one pass or step."""

    metrics: Mapping[str, float]
    datums: int
    seconds: float


class MeasuredRow(Row, frozen=True, kw_only=True):
    """A finished pass or step with its result."""

    seq: int
    kind: str
    context: str
    encoding: str
    started_at: float
    finished_at: float
    body: bytes


class Curve:
    """The curve of one run; gets the run's results in the order of their numbers."""

    def __init__(self, model_id: str, steps: int = 0, most: int = MAX_STEPS) -> None:
        self._model_id = model_id
        self._most = most
        self.steps = steps
        """How many there were."""
        self._passes: list[Measured] = []
        self._full_at, self._stride = most, 1
        while self._full_at <= steps:
            self._thinned()

    def finished(self, work: Work, done: Done, now: float) -> tuple[Statement, ...]:
        """Return what is to be written with a job's result."""
        if isinstance(work.job, OptimStep):
            kind = "optim_step"
        elif isinstance(work.job, ForwardBackward) and not work.job.is_forward:
            kind = "forward_backward"
        else:
            return ()
        try:
            measured = read_measured(kind, done.body, done.encoding, done.device_s)
        except (WireError, msgspec.MsgspecError) as error:
            logger.warning("the metrics of %s cannot be read: %s", work.job.job_id, error, extra={"event": "curve"})
            measured = Measured({}, 0, done.device_s)
        return self.add(work.row.seq, kind, measured, now)

    def add(self, seq: int, kind: str, measured: Measured, finished_at: float) -> tuple[Statement, ...]:
        """Add a pass, or a step that ends those before it."""
        if kind == "forward_backward":
            self._passes = [*(self._passes if len(self._passes) < MAX_PASSES else [joined(self._passes)]), measured]
            return ()
        passes, self._passes = joined(self._passes), []
        self.steps += 1
        metrics = list({**passes.metrics, **measured.metrics}.items())
        row = StepRow(
            model_id=self._model_id,
            seq=seq,
            step=self.steps,
            datums=passes.datums,
            seconds=passes.seconds + measured.seconds,
            finished_at=finished_at,
            metrics=msgspec.json.encode(dict(metrics[:MAX_NAMES])).decode(),
        )
        kept = statement("insert_step", row)
        if self.steps < self._full_at:
            return (kept,)
        self._thinned()
        return (kept, statement("thin_steps", model_id=self._model_id, stride=self._stride, step=self.steps))

    def _thinned(self) -> None:
        """Keep at most half of the rows of a full curve, evenly spaced, and compute when it is full again."""
        while math.ceil(self._full_at / self._stride) > self._most // 2:
            self._stride *= 2
        self._full_at += self._most - math.ceil(self._full_at / self._stride)


def joined(passes: list[Measured]) -> Measured:
    """Combine passes by the protocol's rules for the chunks of a call."""
    if len(passes) == 1:
        return passes[0]
    if not passes:
        return Measured({}, 0, 0.0)
    outputs = [ForwardBackwardOutput("", [{}] * each.datums, _reducible(each.metrics)) for each in passes]
    metrics = {name: value for name, value in combine_metrics(outputs).items() if math.isfinite(value)}
    return Measured(metrics, sum(each.datums for each in passes), sum(each.seconds for each in passes))


def _reducible(metrics: Mapping[str, float]) -> dict[str, float]:
    return {name: value for name, value in metrics.items() if name.rpartition(":")[2] in REDUCTIONS}


def read_measured(kind: str, body: bytes, encoding: str, seconds: float) -> Measured:
    """Read the metrics of a result, without its tensors."""
    metrics: Mapping[str, float]
    if kind == "optim_step":
        metrics, datums = with_current_names(msgspec.json.decode(body, type=_Optimized).metrics or {}), 0
    elif encoding == "protobuf":
        metrics, datums = proto_outputs.decode_metrics(body)
    else:
        output = json_codec.decode(body, ForwardBackwardOutput)
        metrics, datums = output.metrics, len(output.loss_fn_outputs)
    return Measured({name: value for name, value in metrics.items() if math.isfinite(value)}, datums, seconds)


class _Optimized(msgspec.Struct):
    metrics: dict[str, float] | None = None


async def load_curve(store: Store, model_id: str) -> Curve:
    """Load a run's curve, with the passes whose step is still to come.

    Steps that have a result and no row, from a database older than curves, get their rows first.
    """
    last = await store.read(StepRow, "last_step", model_id=model_id)
    curve, after = Curve(model_id, last[0].step if last else 0), last[0].seq if last else -1
    while rows := await store.read(MeasuredRow, "measured_of_lane_after", lane=model_id, after=after, limit=PAGE):
        missing = await asyncio.to_thread(_taken_up, curve, rows)
        if missing:
            await store.write(*missing)
        after = rows[-1].seq
    return curve


async def catch_up(store: Store, model_id: str) -> None:
    """Write the rows of steps that have only results, if there are any."""
    last = await store.read(StepRow, "last_step", model_id=model_id)
    after = last[0].seq if last else -1
    untold = await store.read(CountRow, "count_steps_of_lane_after", lane=model_id, after=after)
    if untold[0].count:
        await load_curve(store, model_id)


def _taken_up(curve: Curve, rows: list[MeasuredRow]) -> list[Statement]:
    statements: list[Statement] = []
    for row in rows:
        if "is_forward" in msgspec.json.decode(row.context):
            continue
        seconds = max(0.0, row.finished_at - row.started_at)
        measured = read_measured(row.kind, row.body, row.encoding, seconds)
        statements += curve.add(row.seq, row.kind, measured, row.finished_at)
    return statements

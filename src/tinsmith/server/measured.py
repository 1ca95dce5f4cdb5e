"""What a run measured, read out of the results that the server keeps, and how the run stands.

Results go some time after their session's end (`result_grace_s`), and the points with them.
Does not know: HTTP; who may see a run is decided in `access`.
"""

from __future__ import annotations

import asyncio
import math
from typing import Any

import msgspec

from tinsmith.server.identity import Caller
from tinsmith.server.services import Services
from tinsmith.store.base import Row
from tinsmith.store.rows import CountRow, SeqRow, SessionRow
from tinsmith.wire import json_codec, proto_outputs
from tinsmith.wire.training import ForwardBackwardOutput

MAX_POINTS = 64
"""Of one page: results carry tensors, and are in memory while their metrics are read."""


class MeasuredRow(Row, frozen=True, kw_only=True):
    """A finished request of a run with its result."""

    seq: int
    kind: str
    encoding: str
    started_at: float
    finished_at: float
    body: bytes


async def measured(services: Services, caller: Caller, model_id: str, *, after: int, limit: int) -> dict[str, Any]:
    """A page of points behind the number `after`; `next_after` goes on from it, None: that was the last."""
    row = await services.access.model(caller, model_id)
    run = services.runs.known(model_id)
    limit = max(0, min(limit, MAX_POINTS))
    rows = await services.store.read(MeasuredRow, "measured_of_lane_after", lane=model_id, after=after, limit=limit)
    points = await asyncio.to_thread(lambda: [_point(found) for found in rows])
    sessions = await services.store.read(SessionRow, "session", session_id=row.session_id)
    highest = await services.store.read(SeqRow, "highest_seq_of_lane", lane=model_id)
    queued = await services.store.read(CountRow, "count_queued_of_lane", lane=model_id)
    return {
        "training_run_id": model_id,
        "session_id": row.session_id,
        "session_status": sessions[0].status if sessions else "gone",
        "base_model": row.base_model,
        "created_at": row.created_at,
        "state": row.state,
        "fault": (run.row if run is not None else row).fault,
        "snapshot_seq": row.snapshot_seq,
        "requests": highest[0].seq + 1,
        "queued": queued[0].count,
        "points": points,
        "next_after": rows[-1].seq if limit and len(rows) == limit else None,
    }


def _point(row: MeasuredRow) -> dict[str, Any]:
    metrics, datums = _metrics(row)
    return {
        "seq": row.seq,
        "kind": row.kind,
        "datums": datums,
        "seconds": max(0.0, row.finished_at - row.started_at),
        "finished_at": row.finished_at,
        "metrics": {name: value for name, value in metrics.items() if math.isfinite(value)},
    }


def _metrics(row: MeasuredRow) -> tuple[dict[str, float], int]:
    if row.kind == "optim_step":
        return msgspec.json.decode(row.body).get("metrics") or {}, 0
    if row.encoding == "protobuf":
        return proto_outputs.decode_metrics(row.body)
    output = json_codec.decode(row.body, ForwardBackwardOutput)
    return output.metrics, len(output.loss_fn_outputs)

"""A run's metrics, page by page, and its state. `curves` stores the metrics."""

from __future__ import annotations

import asyncio
from typing import Any

import msgspec

from tinsmith.server.auth.identity import Caller
from tinsmith.server.call import encoded_items
from tinsmith.server.redaction import redacted_text
from tinsmith.server.runs.curves import catch_up
from tinsmith.server.services import Services
from tinsmith.store.rows import CountRow, SeqRow, SessionRow, StepRow
from tinsmith.wire.routes.own import MAX_POINTS
from tinsmith.wire.rules.optim_metrics import with_current_names


async def measured(services: Services, caller: Caller, model_id: str, *, after: int, limit: int) -> dict[str, Any]:
    """Return a page of points after the number `after`; `next_after` continues it, None on the last page."""
    row = await services.access.model(caller, model_id)
    run = services.runs.known(model_id)
    sessions = await services.store.read(SessionRow, "session", session_id=row.session_id)
    is_pruned = not sessions or sessions[0].pruned
    if run is None and not is_pruned:
        await catch_up(services.store, model_id)
    limit = max(0, min(limit, MAX_POINTS))
    steps = await services.store.read(StepRow, "steps_after", model_id=model_id, after=after, limit=limit)
    last = await services.store.read(StepRow, "last_step", model_id=model_id)
    highest = await services.store.read(SeqRow, "highest_seq_of_lane", lane=model_id)
    queued = await services.store.read(CountRow, "count_queued_of_lane", lane=model_id)
    fault = (run.row if run is not None else row).fault
    return {
        "training_run_id": model_id,
        "session_id": row.session_id,
        "session_status": sessions[0].status if sessions else "gone",
        "base_model": row.base_model,
        "created_at": row.created_at,
        "state": row.state,
        "fault": redacted_text(fault) if fault is not None else None,
        "snapshot_seq": row.snapshot_seq,
        "has_journal": not is_pruned,
        "requests": highest[0].seq + 1,
        "queued": queued[0].count,
        "steps": last[0].step if last else 0,
        "last": _point(last[0]) if last else None,
        "points": await asyncio.to_thread(lambda: encoded_items(map(_point, steps))),  # up to 64,000 numbers
        "next_after": steps[-1].seq if limit and len(steps) == limit else None,
    }


def _point(row: StepRow) -> dict[str, Any]:
    return {
        "seq": row.seq,
        "step": row.step,
        "kind": "optim_step",
        "datums": row.datums,
        "seconds": row.seconds,
        "finished_at": row.finished_at,
        "metrics": with_current_names(msgspec.json.decode(row.metrics)),
    }

"""What work costs, as rows that add up by the hour: one statement for what ended together and belongs together."""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

from tinsmith.engine.base import Done, SaveState
from tinsmith.server.work import Work
from tinsmith.store.base import Statement, statement
from tinsmith.store.rows import UsageRow

HOUR_S = 3600


COUNTED = ("training", "prefill", "prefill_cached", "sampled", "checkpoints", "device_us", "jobs")
"""Columns that add up over jobs."""


def usage_statements(ended: Iterable[tuple[Work, Done]], now: float) -> list[Statement]:
    """The usage of jobs whose results are written together, in as few rows as it needs.

    A row counts while its first job is still queued. All are written in one piece, and a job's state after its usage:
    what was written before, by a write that seemed to fail, is not counted again.
    """
    sums: dict[tuple[object, ...], tuple[str, UsageRow]] = {}
    for work, done in ended:
        row = job_usage(work, done, now)
        key = (row.org_id, row.user_id, row.project_id, row.session_id, row.base_model, row.run_id)
        first, known = sums.get(key, (work.row.request_id, None))
        sums[key] = (first, row if known is None else _sum(known, row))
    return [statement("add_job_usage", row, request_id=first) for first, row in sums.values()]


def _sum(one: UsageRow, other: UsageRow) -> UsageRow:
    totals = {name: getattr(one, name) + getattr(other, name) for name in COUNTED}
    return msgspec.structs.replace(one, **totals)


def job_usage(work: Work, done: Done, now: float) -> UsageRow:
    """The tokens and device time of a finished job, and the checkpoint if it made one."""
    return UsageRow(
        hour=hour_of(now),
        org_id=work.row.org_id,
        user_id=work.row.user_id,
        project_id=work.context.get("project_id") or "",
        session_id=work.row.session_id,
        base_model=work.job.base_model,
        run_id=run_of(work),
        training=done.usage.training,
        prefill=done.usage.prefill,
        prefill_cached=done.usage.prefill_cached,
        sampled=done.usage.sampled,
        checkpoints=int(isinstance(work.job, SaveState) and work.context.get("sampler_id") is None),
        device_us=round(done.device_s * 1e6),
        jobs=1,
    )


def run_of(work: Work) -> str:
    """Whom a job counts for: the run that is made, trained or sampled, or the sampling session on a base model."""
    run_id: str = work.context.get("run_id") or work.context.get("model_id") or work.row.lane
    return run_id


def storage_usage(
    *, now: float, org_id: str, user_id: str, project_id: str | None, size_bytes: int, hours: float
) -> Statement:
    """Checkpoints that lay there for some hours."""
    row = UsageRow(
        hour=hour_of(now),
        org_id=org_id,
        user_id=user_id,
        project_id=project_id or "",
        session_id="",
        base_model="",
        run_id="",
        storage=int(size_bytes * hours),
    )
    return statement("add_usage", row)


def hour_of(now: float) -> int:
    return int(now // HOUR_S)

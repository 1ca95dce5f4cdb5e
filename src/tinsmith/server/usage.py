"""What work costs, as rows that add up by the hour: one statement for each finished job."""

from __future__ import annotations

from tinsmith.engine.base import Done, SaveState
from tinsmith.server.work import Work
from tinsmith.store.base import Statement, statement
from tinsmith.store.rows import UsageRow

HOUR_S = 3600


def job_usage(work: Work, done: Done, now: float) -> Statement:
    """The tokens and device time of a finished job, and the checkpoint if it made one."""
    row = UsageRow(
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
    return statement("add_job_usage", row, request_id=work.row.request_id)


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

"""What work costs, as rows that add up by the hour: one statement for what ended together and belongs together."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from tinsmith.engine.base import Done, SaveState
from tinsmith.server.work import Work
from tinsmith.store.base import Statement, statement
from tinsmith.store.rows import UsageRow

HOUR_S = 3600


@dataclass(slots=True)
class _Total:
    """What jobs of the same kind have used together."""

    request_id: str
    """Of the first of them."""
    training: int = 0
    prefill: int = 0
    prefill_cached: int = 0
    sampled: int = 0
    checkpoints: int = 0
    device_s: float = 0.0
    jobs: int = 0

    def add(self, work: Work, done: Done) -> None:
        usage = done.usage
        self.training += usage.training
        self.prefill += usage.prefill
        self.prefill_cached += usage.prefill_cached
        self.sampled += usage.sampled
        self.checkpoints += isinstance(work.job, SaveState) and work.context.get("sampler_id") is None
        self.device_s += done.device_s
        self.jobs += 1


def usage_statements(ended: Iterable[tuple[Work, Done]], now: float) -> list[Statement]:
    """The tokens, device time and checkpoints of jobs whose results are written together, in as few rows as they need.

    A row counts while its first job is still queued. All are written in one piece, and a job's state after its usage:
    what was written before, by a write that seemed to fail, is not counted again.
    """
    totals: dict[tuple[str, str, str, str, str, str], _Total] = {}
    for work, done in ended:
        row = work.row
        project_id = work.context.get("project_id") or ""
        key = (row.org_id, row.user_id, project_id, row.session_id, work.job.base_model, run_of(work))
        total = totals.get(key)
        if total is None:
            total = totals[key] = _Total(row.request_id)
        total.add(work, done)
    return [_counted(key, total, now) for key, total in totals.items()]


def _counted(key: tuple[str, str, str, str, str, str], total: _Total, now: float) -> Statement:
    org_id, user_id, project_id, session_id, base_model, run_id = key
    row = UsageRow(
        hour=hour_of(now),
        org_id=org_id,
        user_id=user_id,
        project_id=project_id,
        session_id=session_id,
        base_model=base_model,
        run_id=run_id,
        training=total.training,
        prefill=total.prefill,
        prefill_cached=total.prefill_cached,
        sampled=total.sampled,
        checkpoints=total.checkpoints,
        device_us=round(total.device_s * 1e6),
        jobs=total.jobs,
    )
    return statement("add_job_usage", row, request_id=total.request_id)


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

"""Usage of tokens, device time and storage, added up by the hour; jobs that end together share a statement."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from datetime import UTC, datetime

from tinsmith.engine.protocol import Done, SaveState
from tinsmith.errors import InvalidInputError, LimitExceededError
from tinsmith.server.jobs.job import Work
from tinsmith.store.base import Statement, Store, Value, statement
from tinsmith.store.rows import CountRow, UsageRow

HOUR_S = 3600


@dataclass(slots=True)
class _Total:
    """The usage of several jobs of the same kind."""

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
    """Return statements that count the tokens, device time and checkpoints of jobs whose results are written together,
    in as few rows as possible.

    A row only counts while its first job is still queued. Usage and state are written in one transaction, the state
    last. So usage that an earlier write has stored, although it seemed to fail, is not counted again.
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
    """Return what a job counts for: the run that is created, trained or sampled, or a base model's sampling session."""
    run_id: str = work.context.get("run_id") or work.context.get("model_id") or work.row.lane
    return run_id


def storage_usage(
    *, now: float, org_id: str, user_id: str, project_id: str | None, size_bytes: int, hours: float
) -> Statement:
    """Return the usage of checkpoints that were stored for some hours."""
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


MAX_ROWS = 100_000
"""Rows that are read for one answer; about 100 MB."""
MAX_DAYS = 14


GB = 10**9


async def usage_of(
    store: Store, query: str, org_id: str, starting_on: datetime, ending_before: datetime
) -> list[UsageRow]:
    """Return the rows of an organisation that a query finds in a period; refuse more than one answer may be made of."""
    since, until = _period(starting_on, ending_before)
    which: dict[str, Value] = {"org_id": org_id, "since_hour": since, "until_hour": until}
    count = (await store.read(CountRow, "count_usage", **which))[0].count
    if count > MAX_ROWS:
        raise LimitExceededError(
            f"starting_on: your organisation has {count} rows of usage in this period, one for each hour of a run, and "
            f"at most {MAX_ROWS} make one answer; ask for a shorter period",
            field="starting_on",
        )
    return await store.read(UsageRow, query, **which)


def _period(starting_on: datetime, ending_before: datetime) -> tuple[int, int]:
    """Return a period in hours since the epoch; refuse one that is too long for one answer."""
    since, until = _hours(starting_on, "starting_on"), _hours(ending_before, "ending_before")
    if not since < until <= since + MAX_DAYS * 24:
        raise InvalidInputError(
            f"ending_before: must be after starting_on and at most {MAX_DAYS} days later", field="ending_before"
        )
    return since, until


def _hours(moment: datetime, field: str) -> int:
    if moment.tzinfo is None:
        moment = moment.replace(tzinfo=UTC)
    seconds = moment.timestamp()
    if seconds % HOUR_S:
        raise InvalidInputError(f"{field}: {moment.isoformat()} is not a whole hour", field=field)
    return int(seconds // HOUR_S)

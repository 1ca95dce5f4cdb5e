"""What work costs, as rows that add up by the hour."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from tinsmith.engine.base import Done
from tinsmith.server.work import Work
from tinsmith.store.base import Statement, statement
from tinsmith.store.rows import UsageRow

HOUR_S = 3600


def usage_rows(work: Work, done: Done, now: float) -> list[UsageRow]:
    """The tokens of a finished job, by kind."""
    amounts = (
        ("training", done.usage.training),
        ("prefill", done.usage.prefill),
        ("prefill_cached", done.usage.prefill_cached),
        ("sampled", done.usage.sampled),
    )
    return [
        UsageRow(
            hour=int(now // HOUR_S),
            org_id=work.row.org_id,
            user_id=work.row.user_id,
            project_id=work.context.get("project_id") or "",
            session_id=work.row.session_id,
            base_model=work.job.base_model,
            kind=kind,
            amount=amount,
        )
        for kind, amount in amounts
        if amount
    ]


def added_up(rows: Sequence[UsageRow]) -> list[UsageRow]:
    """The same usage in as few rows as it needs."""
    sums: dict[tuple[object, ...], UsageRow] = {}
    for row in rows:
        key = (row.hour, row.org_id, row.user_id, row.project_id, row.session_id, row.base_model, row.kind)
        known = sums.get(key)
        sums[key] = row if known is None else msgspec.structs.replace(known, amount=known.amount + row.amount)
    return list(sums.values())


def add_usage(
    *,
    now: float,
    org_id: str,
    user_id: str,
    project_id: str | None,
    session_id: str,
    base_model: str,
    kind: str,
    amount: int,
) -> Statement:
    row = UsageRow(
        hour=int(now // HOUR_S),
        org_id=org_id,
        user_id=user_id,
        project_id=project_id or "",
        session_id=session_id,
        base_model=base_model,
        kind=kind,
        amount=amount,
    )
    return statement("add_usage", row)

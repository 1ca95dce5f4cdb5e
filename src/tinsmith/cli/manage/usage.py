"""`tinsmith usage`: tokens, device seconds, storage and cost by model, run, project, session, user or day.

A tinsmith server counts by run and reports device time. Other servers report events per hour without these, and the
output notes what is missing. Costs are the server's if it reports them, else computed from the prices in the settings.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from typing import Any

import click

from tinsmith.cli.connection import connected, operations
from tinsmith.cli.manage.billing import flat
from tinsmith.cli.output import echo, formatted, print_json, print_table, wants_json

WINDOW = timedelta(days=14)
"""The longest period of one call."""
HOURS_PER_MONTH = 720
GB = 10**9
EVENT_GROUPS = {
    "model": "base_model",
    "project": "project_id",
    "session": "session_id",
    "user": "user_id",
    "day": "bucket_start",
}
"""For each grouping that works with every server, the field of its events."""
GROUPS = ("model", "run", *(name for name in EVENT_GROUPS if name != "model"))
COUNTED = ("training", "prefill", "prefill_cached", "sampled", "device_s", "checkpoints", "stored_gb", "gigabyte_hours")
HEADINGS = ("Trained", "Prefilled", "From Cache", "Sampled", "Seconds", "Checkpoints", "GB Now", "GB Hours")


@dataclass(frozen=True)
class Sums:
    """Usage grouped by `by`, and notes on what the server does not report."""

    by: str
    groups: list[dict[str, Any]]
    missing: list[str] = field(default_factory=list)


@click.command()
@click.option(
    "--days", type=click.IntRange(1, 366), metavar="N", default=7, show_default=True, help="Number of days to include."
)
@click.option("--by", type=click.Choice(GROUPS), default="model", show_default=True, help="What to group by.")
@formatted
@connected
def usage(days: int, by: str) -> None:
    """Summarize usage: tokens, compute seconds, checkpoints, storage and cost.

    With --by run, usage is counted for the training run whose weights were trained or sampled; sampling a base model is
    counted for its sampling session. Only tinsmith servers count runs and compute seconds: on other servers, --by run
    groups by session, and a note says so.

    If the server has no prices, set them in [prices] of the settings file, or with
    TINSMITH_PRICES=training=0.4,sampled=1.2 (USD per million tokens; storage: USD per gigabyte and month).
    """
    from tinsmith.config import prices_from_env

    prices = prices_from_env(os.environ)
    with operations() as holder:
        periods = list(windows(datetime.now(UTC), days))
        sums = own_sums(holder, periods, by, prices) or event_sums(holder, periods, by, prices)
    groups, by = sums.groups, sums.by
    if wants_json():
        answer = {"days": days, "by": by, "groups": groups, "total": total(groups), "missing": sums.missing}
        print_json(answer)
        return
    period = f"the last {days} days" if days > 1 else "the last day"
    heading = f"Usage of {period}" if groups else f"No usage in {period}"
    shown = [*groups, {by: "total", **total(groups)}] if len(groups) > 1 else groups
    cells = [[row[by] or "(none)", *(_amount(row[name]) for name in COUNTED), _cost(row["cost_usd"])] for row in shown]
    print_table((by.capitalize(), *HEADINGS, "Cost"), cells, title=heading)
    for text in sums.missing:
        echo(f"note: {text}", err=True)


def windows(now: datetime, days: int) -> Iterable[tuple[datetime, datetime]]:
    """Yield the periods to ask for: whole hours up to the current one, at most `WINDOW` each."""
    end = now.replace(minute=0, second=0, microsecond=0) + timedelta(hours=1)
    start = end - timedelta(days=days)
    while start < end:
        until = min(start + WINDOW, end)
        yield start, until
        start = until


def own_sums(
    holder: Any, periods: list[tuple[datetime, datetime]], by: str, prices: Mapping[str, float]
) -> Sums | None:
    """Return the sums of a tinsmith server; None for other servers."""
    from tinsmith.client.connection.own_endpoints import Extensions

    answers = []
    for since, until in periods:
        answer = Extensions(holder).usage(by, since, until)
        if answer is None:
            return None
        answers.append(answer)
    return Sums(by, merged(answers, by, prices))


def merged(answers: list[dict[str, Any]], by: str, prices: Mapping[str, float]) -> list[dict[str, Any]]:
    """Merge the groups of several periods; storage is the current one, the same in all periods."""
    groups: dict[str, dict[str, Any]] = {}
    stored = answers[-1]["stored_bytes"]
    for row in [*(row for answer in answers for row in answer["groups"]), *({by: name} for name in stored)]:
        group = groups.setdefault(row[by], _empty(by, row[by], device_s=0.0))
        for name in COUNTED:
            if name in row:
                group[name] += row[name]
    for name, group in groups.items():
        group["stored_gb"] = None if by == "day" else stored.get(name, 0) / GB
        costs = [_price(kind, group[kind], prices) for kind in COUNTED]
        known = [cost for cost in costs if cost is not None]
        group["cost_usd"] = sum(known) if known else None
    return [groups[name] for name in sorted(groups)]


def event_sums(holder: Any, periods: list[tuple[datetime, datetime]], by: str, prices: Mapping[str, float]) -> Sums:
    """Sum the events that every server reports."""
    from tinsmith.client.admin import AdminClient

    admin = AdminClient(holder)
    rows = [
        row
        for since, until in periods
        for row in admin.get_billing_usage(since, until).result().model_dump(mode="json")["data"]
    ]
    missing = ["this server does not report compute seconds"]
    if by == "run":
        by = "session"
        missing.append("this server does not count by run; grouped by session, which may contain several runs")
    groups = summed(rows, by, prices)
    if by == "project":
        items = admin.get_current_checkpoint_storage_usage().result().model_dump(mode="json")["data"]
        _add_stored(groups, items)
    else:
        missing.append(f"this server reports current storage by project, not by {by}; use --by project")
    return Sums(by, groups, missing)


def _add_stored(groups: list[dict[str, Any]], items: list[dict[str, Any]]) -> None:
    named = {group["project"]: group for group in groups}
    for item in items:
        name = item.get("project_id") or ""
        if name not in named:
            named[name] = _empty("project", name)
            groups.append(named[name])
        named[name]["stored_gb"] = (named[name]["stored_gb"] or 0.0) + item["size_bytes"] / GB
    groups.sort(key=lambda group: str(group["project"]))


def summed(rows: Iterable[dict[str, Any]], by: str, prices: Mapping[str, float]) -> list[dict[str, Any]]:
    """Return one row per group, sorted."""
    groups: dict[str, dict[str, Any]] = {}
    for row in map(flat, rows):
        name = str(row.get(EVENT_GROUPS[by]) or "")
        name = name[:10] if by == "day" else name
        group = groups.setdefault(name, _empty(by, name))
        kind, amount = _counted(row)
        group[kind] += amount
        cost = row.get("estimated_cost_usd")
        if cost is None:
            cost = _price(kind, amount, prices)
        if cost is not None:
            group["cost_usd"] = (group["cost_usd"] or 0.0) + cost
    return [groups[name] for name in sorted(groups)]


def _empty(by: str, name: str, device_s: float | None = None) -> dict[str, Any]:
    """Return an empty group; None marks what the server does not report."""
    return {by: name, **dict.fromkeys(COUNTED, 0), "device_s": device_s, "stored_gb": None, "cost_usd": None}


def _counted(row: dict[str, Any]) -> tuple[str, float]:
    kind = row["type"]
    if kind == "sampling_prefill":
        return ("prefill_cached" if row["cached"] else "prefill"), row["token_count"]
    if kind == "checkpoint":
        return "checkpoints", row["count"]
    if kind == "storage":
        return "gigabyte_hours", row["gigabyte_hours"]
    return {"training": "training", "sampling_sample": "sampled"}[kind], row["token_count"]


def _price(kind: str, amount: float, prices: Mapping[str, float]) -> float | None:
    if kind == "gigabyte_hours":
        return prices["storage"] * amount / HOURS_PER_MONTH if "storage" in prices else None
    return prices[kind] * amount / 1e6 if kind in prices else None


def total(groups: list[dict[str, Any]]) -> dict[str, Any]:
    """Sum all groups; a value that no group has is None."""
    sums: dict[str, Any] = {}
    for name in (*COUNTED, "cost_usd"):
        known = [group[name] for group in groups if group[name] is not None]
        sums[name] = sum(known) if known or name not in ("device_s", "stored_gb", "cost_usd") else None
    return sums


def _amount(value: float | None) -> str:
    if value is None:
        return "-"
    return f"{value:,}" if isinstance(value, int) else f"{value:.4g}"


def _cost(value: float | None) -> str:
    return "-" if value is None else f"${value:.2f}" if value >= 0.01 or value == 0 else f"${value:.2g}"

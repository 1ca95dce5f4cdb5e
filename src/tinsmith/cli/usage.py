"""`tinsmith usage`: tokens, device seconds, storage and cost, summed up by run, project, model, session, user or day.

Our own server counts by run and knows device time; others tell events by the hour, without either, and then what is
missing is said. Costs are the server's where it gives them, else made from the prices in the settings, else absent.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from typing import Any

import click

from tinsmith.cli.billing import flat
from tinsmith.cli.connection import connected, operations
from tinsmith.cli.output import formatted, print_json, print_table, wants_json

WINDOW = timedelta(days=14)
"""What one call may ask for."""
HOURS_PER_MONTH = 720
GB = 10**9
EVENT_GROUPS = {
    "model": "base_model",
    "project": "project_id",
    "session": "session_id",
    "user": "user_id",
    "day": "bucket_start",
}
"""What the events of any server can be summed up by."""
GROUPS = ("model", "run", *(name for name in EVENT_GROUPS if name != "model"))
COUNTED = ("training", "prefill", "prefill_cached", "sampled", "device_s", "checkpoints", "stored_gb", "gigabyte_hours")
HEADINGS = ("Trained", "Prefilled", "From Cache", "Sampled", "Seconds", "Checkpoints", "GB Now", "GB Hours")


@dataclass(frozen=True)
class Sums:
    """What was used, by `by`, and what the server could not say."""

    by: str
    groups: list[dict[str, Any]]
    missing: list[str] = field(default_factory=list)


@click.command()
@click.option("--days", type=click.IntRange(1, 366), default=7, show_default=True, help="How far back.")
@click.option("--by", type=click.Choice(GROUPS), default="model", show_default=True)
@formatted
@connected
def usage(days: int, by: str) -> None:
    """Sum up what was used: tokens, seconds of computing, checkpoints, storage and cost.

    By run: what was trained and sampled with each training run's weights; sampling a base model is counted by
    sampling session. Servers other than tinsmith's count neither by run nor seconds: then sessions take the place of
    runs, and it is said.

    Prices are for servers that know none: [prices] in the settings file, or TINSMITH_PRICES=training=0.4,sampled=1.2
    (USD per million tokens; storage is USD per gigabyte and month).
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
    shown = [*groups, {by: "together", **total(groups)}] if len(groups) > 1 else groups
    cells = [[row[by] or "(none)", *(_amount(row[name]) for name in COUNTED), _cost(row["cost_usd"])] for row in shown]
    print_table((by.capitalize(), *HEADINGS, "Cost"), cells, title=f"The last {days} day{'s' if days > 1 else ''}")
    for text in sums.missing:
        click.echo(f"note: {text}", err=True)


def windows(now: datetime, days: int) -> Iterable[tuple[datetime, datetime]]:
    """Whole hours up to the one that runs, in pieces that a server answers at once."""
    end = now.replace(minute=0, second=0, microsecond=0) + timedelta(hours=1)
    start = end - timedelta(days=days)
    while start < end:
        until = min(start + WINDOW, end)
        yield start, until
        start = until


def own_sums(
    holder: Any, periods: list[tuple[datetime, datetime]], by: str, prices: Mapping[str, float]
) -> Sums | None:
    """As our own server sums up; None where the server is another."""
    from tinsmith.client.extensions import Extensions

    answers = []
    for since, until in periods:
        answer = Extensions(holder).usage(by, since, until)
        if answer is None:
            return None
        answers.append(answer)
    return Sums(by, merged(answers, by, prices))


def merged(answers: list[dict[str, Any]], by: str, prices: Mapping[str, float]) -> list[dict[str, Any]]:
    """The groups of several periods as one; what is stored is stored now, in all of them."""
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
    """From the events that every server tells."""
    from tinsmith.client.administration import AdminClient

    admin = AdminClient(holder)
    rows = [
        row
        for since, until in periods
        for row in admin.get_billing_usage(since, until).result().model_dump(mode="json")["data"]
    ]
    missing = ["this server does not tell the seconds that its devices computed"]
    if by == "run":
        by = "session"
        missing.append("this server does not count by run; these are sessions, which may hold several runs")
    groups = summed(rows, by, prices)
    if by == "project":
        items = admin.get_current_checkpoint_storage_usage().result().model_dump(mode="json")["data"]
        _add_stored(groups, items)
    else:
        missing.append(f"this server tells what is stored now by project, not by {by} (--by project)")
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
    """One row for each value of the group, in their order."""
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
    """A group without anything; None is what the server does not say."""
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
    """All groups together; what no group knows is not known."""
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

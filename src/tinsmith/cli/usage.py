"""`tinsmith usage`: tokens, storage and cost, summed up by model, project, session, user or day.

Costs are the server's where it gives them, else made from the prices in the settings, else absent.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from datetime import UTC, datetime, timedelta
from typing import Any

import click

from tinsmith.cli.billing import flat
from tinsmith.cli.connection import connected, operations
from tinsmith.cli.output import formatted, print_json, print_table, wants_json

WINDOW = timedelta(days=14)
"""What one call may ask for."""
HOURS_PER_MONTH = 720
GROUPS = {
    "model": "base_model",
    "project": "project_id",
    "session": "session_id",
    "user": "user_id",
    "day": "bucket_start",
}
COUNTED = ("training", "prefill", "prefill_cached", "sampled", "checkpoints", "gigabyte_hours")
HEADINGS = ("Trained", "Prefilled", "From Cache", "Sampled", "Checkpoints", "GB Hours")


@click.command()
@click.option("--days", type=click.IntRange(1, 366), default=7, show_default=True, help="How far back.")
@click.option("--by", type=click.Choice(tuple(GROUPS)), default="model", show_default=True)
@formatted
@connected
def usage(days: int, by: str) -> None:
    """Sum up what was used: tokens, checkpoints, storage and cost.

    Prices are for servers that know none: [prices] in the settings file, or TINSMITH_PRICES=training=0.4,sampled=1.2
    (USD per million tokens; storage is USD per gigabyte and month).
    """
    from tinsmith.client.administration import AdminClient
    from tinsmith.config import prices_from_env

    prices = prices_from_env(os.environ)
    now = datetime.now(UTC)
    with operations() as holder:
        admin = AdminClient(holder)
        rows = [
            row
            for since, until in windows(now, days)
            for row in admin.get_billing_usage(since, until).result().model_dump(mode="json")["data"]
        ]
    groups = summed(rows, by, prices)
    if wants_json():
        print_json({"days": days, "by": by, "groups": groups, "total": _total(groups)})
        return
    shown = [*groups, {by: "together", **_total(groups)}] if len(groups) > 1 else groups
    cells = [[row[by] or "(none)", *(_amount(row[name]) for name in COUNTED), _cost(row["cost_usd"])] for row in shown]
    print_table((by.capitalize(), *HEADINGS, "Cost"), cells, title=f"The last {days} day{'s' if days > 1 else ''}")


def windows(now: datetime, days: int) -> Iterable[tuple[datetime, datetime]]:
    """Whole hours up to the one that runs, in pieces that a server answers at once."""
    end = now.replace(minute=0, second=0, microsecond=0) + timedelta(hours=1)
    start = end - timedelta(days=days)
    while start < end:
        until = min(start + WINDOW, end)
        yield start, until
        start = until


def summed(rows: Iterable[dict[str, Any]], by: str, prices: dict[str, float]) -> list[dict[str, Any]]:
    """One row for each value of the group, in their order."""
    groups: dict[str, dict[str, Any]] = {}
    for row in map(flat, rows):
        name = str(row.get(GROUPS[by]) or "")
        name = name[:10] if by == "day" else name
        group = groups.setdefault(name, {by: name, **dict.fromkeys(COUNTED, 0), "cost_usd": None})
        kind, amount = _counted(row)
        group[kind] += amount
        cost = row.get("estimated_cost_usd")
        if cost is None:
            cost = _price(kind, amount, prices)
        if cost is not None:
            group["cost_usd"] = (group["cost_usd"] or 0.0) + cost
    return [groups[name] for name in sorted(groups)]


def _counted(row: dict[str, Any]) -> tuple[str, float]:
    kind = row["type"]
    if kind == "sampling_prefill":
        return ("prefill_cached" if row["cached"] else "prefill"), row["token_count"]
    if kind == "checkpoint":
        return "checkpoints", row["count"]
    if kind == "storage":
        return "gigabyte_hours", row["gigabyte_hours"]
    return {"training": "training", "sampling_sample": "sampled"}[kind], row["token_count"]


def _price(kind: str, amount: float, prices: dict[str, float]) -> float | None:
    if kind == "gigabyte_hours":
        return prices["storage"] * amount / HOURS_PER_MONTH if "storage" in prices else None
    return prices[kind] * amount / 1e6 if kind in prices else None


def _total(groups: list[dict[str, Any]]) -> dict[str, Any]:
    costs = [group["cost_usd"] for group in groups if group["cost_usd"] is not None]
    return {
        **{name: sum(group[name] for group in groups) for name in COUNTED},
        "cost_usd": sum(costs) if costs else None,
    }


def _amount(value: float) -> str:
    return f"{value:,}" if isinstance(value, int) else f"{value:.4g}"


def _cost(value: float | None) -> str:
    return "-" if value is None else f"${value:.2f}" if value >= 0.01 or value == 0 else f"${value:.2g}"

"""`tinsmith status`: whether a server is up, what it is doing, what the caller may use, and how long requests take.

Every Tinker server reports whether it is healthy; a tinsmith server also its sessions, runs, limits and timings. For
the local engine it also shows when it started, when it will end by itself, and what is stored on this machine.
"""

from __future__ import annotations

import json
import os
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

import click

from tinsmith.cli.connection import base_url, connected, explained, operations
from tinsmith.cli.output import (
    ago,
    duration,
    echo,
    formatted,
    print_json,
    print_properties,
    print_table,
    size,
    wants_json,
)
from tinsmith.cli.server.storage import described, stored

if TYPE_CHECKING:
    from tinsmith.client.connection.local_engine import Address
    from tinsmith.client.connection.operations import Operations
    from tinsmith.config import EmbeddedConfig


PERCENTILES = "Timings since the server started"
START = "To start one: tinsmith serve. To use another: --base-url or TINKER_BASE_URL."


@click.command()
@formatted
@connected
def status() -> None:
    """Show whether the server is up and what it is doing.

    Checks the server that clients would use, without starting one. The exit code is 1 if it is down or does not accept
    work.
    """
    from tinsmith.config import LOCAL, ClientConfig

    url = ClientConfig.from_env(base_url=base_url()).base_url
    settings: dict[str, Any] = {}
    local: dict[str, Any] | None = None
    if url == LOCAL:
        from tinsmith.client.connection.local_engine import running_address
        from tinsmith.config import EmbeddedConfig

        embedded = EmbeddedConfig.from_env(os.environ)
        found = running_address(embedded)
        local = _local(embedded, found)
        if found is None:
            _report_down(
                LOCAL,
                f"the local engine is not running (data directory {embedded.data_dir})",
                f"Stored on this machine: {described(local['stored'])}. To delete some of it: tinsmith clean\n"
                "It starts when a client needs it, such as tinsmith chat. To run a server instead: tinsmith serve",
                local,
            )
        else:
            settings = {"base_url": found.url, "api_key": found.key}
    with operations(**settings) as holder:
        answer = {**_collected(holder), "local": local}
    _show(answer)
    if not answer["ready"]:
        click.get_current_context().exit(1)


def _local(config: EmbeddedConfig, found: Address | None) -> dict[str, Any]:
    """Return what is known of the local engine beyond what a server reports of itself."""
    from tinsmith.client.connection.local_engine import LOG_NAME

    return {
        "pid": found.pid if found is not None else None,
        "started_at": found.started_at if found is not None else None,
        "ends_after_idle_s": found.keep_s if found is not None else None,
        "log": str(config.data_dir / LOG_NAME),
        "data_dir": str(config.data_dir),
        "models_dir": str(config.models_dir),
        "stored": stored(config.data_dir, config.models_dir),
    }


def _report_down(url: str, reason: str, step: str, local: dict[str, Any] | None = None) -> None:
    if wants_json():
        print_json({"base_url": url, "up": False, "reason": reason, "local": local})
        click.get_current_context().exit(1)
    raise click.ClickException(f"{reason}\n{step}")


def _collected(holder: Operations) -> dict[str, Any]:
    """Collect everything that the server reports."""
    from tinsmith.client.connection.own_endpoints import Extensions
    from tinsmith.errors import TinkerError
    from tinsmith.wire.routes.own import READYZ, VERSION
    from tinsmith.wire.routes.table import HEALTHZ

    extensions, url = Extensions(holder), holder.connection.config.base_url
    try:
        health = extensions.open_page(HEALTHZ.path)
    except TinkerError as error:
        _report_down(url, f"no server responds at {url}: {error}", START)
        raise
    if health.status >= 500:
        _report_down(url, f"{url} responds, but is not healthy (HTTP {health.status})", "Check its log.")
    ready = extensions.open_page(READYZ.path)
    readiness = _decoded(ready.body) if ready.status in (200, 503) else None
    version = extensions.open_page(VERSION.path)
    answer: dict[str, Any] = {
        "base_url": url,
        "up": True,
        "server": f"tinsmith {_decoded(version.body)['tinsmith']}" if version.status == 200 else None,
        "ready": ready.status == 200 if readiness is not None else True,
        "reason": (readiness or {}).get("reason"),
        "status": None,
        "quota": None,
        "note": None,
        "timings": [],
    }
    try:
        answer["status"] = extensions.status()
    except TinkerError as error:
        answer["note"] = explained(error)
        return answer
    if answer["status"] is None:
        answer["note"] = "This server reports only that it is up. For sessions and runs: tinsmith run list"
    else:
        answer["timings"] = answer["status"].pop("timings", [])
        answer["quota"] = extensions.quota()
    return answer


def _decoded(body: bytes) -> dict[str, Any]:
    try:
        found = json.loads(body)
    except ValueError:
        return {}
    return found if isinstance(found, dict) else {}


def _show(answer: dict[str, Any]) -> None:
    if wants_json():
        print_json(answer)
        return
    stages: list[dict[str, Any]] = answer["timings"]
    known = answer["status"] or {}
    values: dict[str, Any] = {
        "Server": answer["base_url"],
        "Version": answer["server"],
        "Up": True,
        "Accepts Work": True if answer["ready"] else f"no: {answer['reason'] or 'not ready'}",
    }
    if known:
        values["Models"] = ", ".join(known["models"]) or "none"
        values["Requests"] = f"{known['queued']} not finished"
        values["Sessions"] = f"{len(known['sessions'])} active"
        values["Runs"] = f"{len(known['runs'])} loaded"
    values |= _limits(answer["quota"] or {}) | _local_rows(answer["local"])
    print_properties(values)
    if known.get("sessions"):
        print_table(
            ("Session", "Last Heartbeat", "Expires If Idle"),
            [(item["session_id"], _heard(item), _left(item)) for item in known["sessions"]],
        )
    if known.get("runs"):
        print_table(
            ("Run", "Base Model", "Fault"),
            [(item["model_id"], item["base_model"], item["fault"]) for item in known["runs"]],
        )
    rows = _stage_rows(stages)
    if rows:
        columns = ("Request", "Count", *(f"{stage}, p50 / p95" for stage in ("Accept", "Queue", "Run")))
        print_table(columns, rows, title=PERCENTILES)
    if answer["note"]:
        echo(answer["note"], err=True)


def _limits(quota: dict[str, Any]) -> dict[str, str]:
    """Return the limits of the caller's key and organisation, as far as there are any, and what is left of them."""
    rows = {}
    if quota.get("queue_limit") is not None:
        rows["Queue"] = f"{quota['queued']} of {quota['queue_limit']} requests"
    if quota.get("requests_per_minute") is not None:
        rows["Rate Limit"] = f"{quota['requests_per_minute']} requests per minute"
    if quota.get("tokens_per_day") is not None:
        rows["Tokens Today"] = f"{quota['tokens_left_today']} of {quota['tokens_per_day']} left"
    if quota.get("disk_bytes") is not None:
        limit = quota.get("disk_limit_bytes")
        rows["Disk"] = size(quota["disk_bytes"]) + (f" of {size(limit)}" if limit is not None else " used by your runs")
    return rows


def _local_rows(local: dict[str, Any] | None) -> dict[str, str]:
    if local is None:
        return {}
    began = local["started_at"]
    since = f", started {ago(datetime.fromtimestamp(began, UTC))}" if began is not None else ""
    keep_s = local["ends_after_idle_s"]
    ends = f"after {duration(keep_s)} without a client" if keep_s is not None else "only with tinsmith stop"
    return {
        "Local Engine": f"process {local['pid']}{since}",
        "Ends": f"{ends}; now: tinsmith stop" if keep_s is not None else ends,
        "Log": local["log"],
        "Data Directory": local["data_dir"],
        "Stored": f"{described(local['stored'])}; see tinsmith clean",
    }


def _heard(item: dict[str, Any]) -> str:
    return f"{duration(max(0.0, item['heartbeat_age_s']))} ago"


def _left(item: dict[str, Any]) -> str:
    return f"in {duration(max(0.0, item['expires_after_s'] - item['heartbeat_age_s']))}"


def _stage_rows(stages: list[dict[str, Any]]) -> list[tuple[Any, ...]]:
    """Return one row per kind of request, with its three stages."""
    by_name = {(each["stage"], each["name"]): each for each in stages}
    kinds = [each for each in stages if each["stage"] == "running"]
    return [
        (
            each["name"],
            each["count"],
            _span(by_name.get(("answering", {"sample": "asample"}.get(each["name"], each["name"])))),
            _span(by_name.get(("waiting", each["name"]))),
            _span(each),
        )
        for each in kinds
    ]


def _span(timing: dict[str, Any] | None) -> str:
    if timing is None:
        return "-"
    return " / ".join(_bound(value) for value in (timing["p50_s"], timing["p95_s"]))


def _bound(seconds: float | None) -> str:
    """Format a percentile: the server counts times in steps, and reports the upper end of one, None beyond the last."""
    return f"up to {duration(seconds)}" if seconds is not None else "longer"

"""`tinsmith status`: is the server up, what runs, what waits, and how long its stages take.

Every Tinker server can be asked whether it is healthy; the rest is there where a server offers it, ours does.
"""

from __future__ import annotations

import json
import os
from typing import TYPE_CHECKING, Any

import click

from tinsmith.cli.connection import base_url, connected, explained, operations
from tinsmith.cli.output import duration, formatted, print_json, print_properties, print_table, wants_json
from tinsmith.cli.prometheus import ANSWERING, Timing, timings

if TYPE_CHECKING:
    from tinsmith.client.operations import Operations

PERCENTILES = "How long work took since the server started: half of it within / 95 % within"
START = "Start one: tinsmith serve. Or name another with --base-url or TINKER_BASE_URL."


@click.command()
@formatted
@connected
def status() -> None:
    """Is the server up, and what does it do?

    Asks the server that clients would use; none is started. Exit code 1 if it is not up or takes no work.
    """
    from tinsmith.config import LOCAL, ClientConfig

    url = ClientConfig.from_env(base_url=base_url()).base_url
    settings: dict[str, Any] = {}
    if url == LOCAL:
        from tinsmith.client.embedded import running_address
        from tinsmith.config import EmbeddedConfig

        embedded = EmbeddedConfig.from_env(os.environ)
        found = running_address(embedded)
        if found is None:
            _say_down(
                LOCAL,
                f"no local engine runs on {embedded.data_dir}",
                "It starts with the first client that needs it. For a server of its own: tinsmith serve.",
            )
        else:
            settings = {"base_url": found.url, "api_key": found.key}
    with operations(**settings) as holder:
        answer = _asked(holder)
    _show(answer)
    if not answer["ready"]:
        click.get_current_context().exit(1)


def _say_down(url: str, reason: str, step: str) -> None:
    if wants_json():
        print_json({"base_url": url, "up": False, "reason": reason})
        click.get_current_context().exit(1)
    raise click.ClickException(f"{reason}\n{step}")


def _asked(holder: Operations) -> dict[str, Any]:
    """Everything that the server tells."""
    from tinsmith.client.extensions import PREFIX, Extensions
    from tinsmith.errors import TinkerError
    from tinsmith.wire.routes import HEALTHZ

    extensions, url = Extensions(holder), holder.connection.config.base_url
    try:
        health = extensions.open_page(HEALTHZ.path)
    except TinkerError as error:
        _say_down(url, f"no server answers at {url}: {error}", START)
        raise
    if health.status >= 500:
        _say_down(url, f"{url} answers, but it is not well (HTTP {health.status})", "Look into its log.")
    ready = extensions.open_page("/readyz")
    readiness = _decoded(ready.body) if ready.status in (200, 503) else None
    version = extensions.open_page(f"{PREFIX}/version")
    answer: dict[str, Any] = {
        "base_url": url,
        "up": True,
        "server": f"tinsmith {_decoded(version.body)['tinsmith']}" if version.status == 200 else None,
        "ready": ready.status == 200 if readiness is not None else True,
        "reason": (readiness or {}).get("reason"),
        "status": None,
        "note": None,
        "timings": [],
    }
    try:
        answer["status"] = extensions.status()
        metrics = extensions.page("/metrics") if answer["status"] is not None else None
    except TinkerError as error:
        answer["note"] = explained(error)
        return answer
    if answer["status"] is None:
        answer["note"] = "this server tells no more than that it is up; sessions and runs: tinsmith run list"
    if metrics is not None and metrics.status == 200:
        answer["timings"] = timings(metrics.body.decode(errors="replace"))
    return answer


def _decoded(body: bytes) -> dict[str, Any]:
    try:
        found = json.loads(body)
    except ValueError:
        return {}
    return found if isinstance(found, dict) else {}


def _show(answer: dict[str, Any]) -> None:
    stages: list[Timing] = answer["timings"]
    if wants_json():
        print_json({**answer, "timings": [timing.plain() for timing in stages]})
        return
    known = answer["status"] or {}
    values: dict[str, Any] = {
        "Server": answer["base_url"],
        "Version": answer["server"],
        "Up": True,
        "Takes Work": True if answer["ready"] else f"no: {answer['reason'] or 'not ready'}",
    }
    if known:
        values["Models"] = ", ".join(known["models"]) or "none"
        values["Waiting"] = f"{known['queued']} requests without a result"
        values["Sessions"] = f"{len(known['sessions'])} alive"
        values["Runs"] = f"{len(known['runs'])} in memory"
    print_properties(values)
    if known.get("sessions"):
        rows = [(item["session_id"], _heard(item), _left(item)) for item in known["sessions"]]
        print_table(("Session", "Heard Of", "Expires If Silent"), rows)
    if known.get("runs"):
        print_table(
            ("Run", "Base Model", "Fault"),
            [(item["model_id"], item["base_model"], item["fault"]) for item in known["runs"]],
        )
    if stages:
        print_table(("Work", "Count", "Accepted In", "Waited", "Ran"), _stage_rows(stages), title=PERCENTILES)
    if answer["note"]:
        click.echo(answer["note"], err=True)


def _heard(item: dict[str, Any]) -> str:
    return f"{duration(max(0.0, item['heartbeat_age_s']))} ago"


def _left(item: dict[str, Any]) -> str:
    return f"in {duration(max(0.0, item['expires_after_s'] - item['heartbeat_age_s']))}"


def _stage_rows(stages: list[Timing]) -> list[tuple[Any, ...]]:
    """One row for each kind of work, with its three stages."""
    by_name = {(each.stage, each.name): each for each in stages}
    kinds = [each for each in stages if each.stage == "running"]
    return [
        (
            each.name,
            each.count,
            _span(by_name.get((ANSWERING, {"sample": "asample"}.get(each.name, each.name)))),
            _span(by_name.get(("waiting", each.name))),
            _span(each),
        )
        for each in kinds
    ]


def _span(timing: Timing | None) -> str:
    if timing is None:
        return "-"
    return " / ".join("longer" if value is None else duration(value) for value in (timing.p50_s, timing.p95_s))

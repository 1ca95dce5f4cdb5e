"""`tinsmith session`: list, inspect and end sessions, and export their traces."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click

from tinsmith.cli.connection import confirmed, connected, operations
from tinsmith.cli.output import (
    ago,
    duration,
    echo,
    formatted,
    limited,
    plural,
    print_json,
    print_properties,
    print_table,
    size,
    title,
    wants_json,
)

PAGE = 100
COLUMNS = ("Session ID", "Name", "Status", "Expires", "Created", "Project", "Checkpoints", "Size")


@click.group()
def session() -> None:
    """List, inspect and end sessions; export traces."""


@session.command(name="list")
@limited("sessions")
@click.option("--active", is_flag=True, help="Only active sessions.")
@formatted
@connected
def list_sessions(limit: int, active: bool) -> None:
    """List sessions, newest first.

    A session expires when its program stops sending heartbeats. The Expires column shows when, if the server reports
    it.
    """
    with operations() as holder:
        summaries = _summaries(holder, limit, active)
        if summaries is None:
            _print_ids(holder, limit, active)
            return
        expiry = _expiry(holder)
    found = [_plain(summary, expiry) for summary in summaries]
    if wants_json():
        print_json({"sessions": found})
        return
    rows = [
        (
            item["session_id"],
            item["display_name"],
            item["status"],
            _expires(item),
            ago(item["created_at"]),
            item["project_id"] or None,
            item["checkpoints_count"],
            size(item["checkpoint_storage_bytes"]),
        )
        for item in found
    ]
    print_table(COLUMNS, rows, title=title(len(rows), None, "session"))


def _print_ids(holder: Any, limit: int, active: bool) -> None:
    """Print session IDs only, which is what servers before 0.36 return."""
    from tinsmith.cli.output import fetch
    from tinsmith.client.rest import RestClient

    if active:
        raise click.ClickException("this server cannot search sessions; omit --active")
    rest = RestClient(holder)
    ids, _ = fetch(
        lambda count, offset: rest.list_sessions(count, offset).result(), lambda page: page.sessions, limit, PAGE
    )
    if wants_json():
        print_json({"sessions": [{"session_id": session_id} for session_id in ids]})
    else:
        print_table(("Session ID",), [(session_id,) for session_id in ids], title=title(len(ids), None, "session"))


def _summaries(holder: Any, limit: int, active: bool) -> list[Any] | None:
    """Search the server's sessions; None if it has no search."""
    from tinsmith.errors import APIStatusError
    from tinsmith.wire.messages.sessions import ActiveSessionStatusQuery

    statuses = [ActiveSessionStatusQuery()] if active else None
    found: list[Any] = []
    try:
        for summary in _search(holder, statuses=statuses):
            found.append(summary)
            if len(found) == limit:
                break
    except APIStatusError as error:
        if error.status_code not in (404, 405, 501):
            raise
        return None
    return found


def _search(holder: Any, **query: Any) -> Iterator[Any]:
    from tinsmith.client.rest import RestClient
    from tinsmith.wire.messages.sessions import SessionSearchRequest

    rest = RestClient(holder)
    given = {name: value for name, value in query.items() if value is not None}
    cursor: dict[str, Any] = {}
    while True:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the call is experimental
            page = rest.search_sessions(SessionSearchRequest(limit=PAGE, **given, **cursor)).result()
        yield from page.sessions
        if page.next_cursor is None:
            return
        cursor = {"cursor": page.next_cursor}


def _expiry(holder: Any) -> dict[str, float]:
    """Return the seconds until each session expires without another heartbeat, if the server reports them."""
    from tinsmith.client.connection.own_endpoints import Extensions

    known = Extensions(holder).status() or {}
    return {item["session_id"]: item["expires_after_s"] - item["heartbeat_age_s"] for item in known.get("sessions", ())}


def _plain(summary: Any, expiry: dict[str, float]) -> dict[str, Any]:
    values = summary.model_dump()
    left = expiry.get(summary.session_id)
    return {**values, "status": status_text(summary.status), "expires_in_s": None if left is None else round(left, 1)}


def _expires(item: dict[str, Any]) -> str:
    left = item["expires_in_s"]
    return "-" if left is None else f"in {duration(max(0.0, left))} if idle"


def status_text(status: Any) -> str | None:
    """Format a session's status."""
    if status is None:
        return None
    if status.type == "client_finished":
        return f"finished ({status.reason.type})"
    return "expired" if status.type == "cancelled" else str(status.type)


@session.command()
@click.argument("session_id")
@formatted
@connected
def info(session_id: str) -> None:
    """Show a session's runs, samplers and metadata."""
    from tinsmith.client.rest import RestClient
    from tinsmith.errors import APIStatusError

    with operations() as holder:
        found = RestClient(holder).get_session(session_id).result()
        try:
            summary = next(iter(_search(holder, session_id=session_id)), None)
        except APIStatusError:
            summary = None
        expiry = _expiry(holder)
    extra = _plain(summary, expiry) if summary is not None else {}
    if wants_json():
        print_json({"session_id": session_id, **extra, **found.model_dump()})
        return
    values: dict[str, Any] = {"Name": found.display_name}
    if extra:
        values |= {
            "Status": extra["status"],
            "Expires": _expires(extra),
            "Created": ago(extra["created_at"]),
            "Owner": extra["owner"],
            "Project": extra["project_id"] or None,
            "Checkpoints": f"{extra['checkpoints_count']} ({size(extra['checkpoint_storage_bytes'])})",
        }
    values["Training Runs"] = "\n".join(found.training_run_ids) or None
    values["Samplers"] = "\n".join(found.sampler_ids) or None
    values |= {f"Metadata: {key}": value for key, value in (found.user_metadata or {}).items()}
    print_properties(values, title=f"Session {session_id}")


@session.command()
@click.argument("session_id")
@click.option(
    "--reason",
    type=click.Choice(("success", "errored", "interrupted")),
    default="interrupted",
    show_default=True,
    help="Reason to record.",
)
@click.option("--detail", metavar="TEXT", help="Explanation to record.")
@click.option("-y", "--yes", is_flag=True, help="Do not ask for confirmation.")
@formatted
@connected
def finish(session_id: str, reason: str, detail: str | None, yes: bool) -> None:
    """End a session with all its runs and samplers. Checkpoints are kept."""
    from tinsmith.client.connection.session import finish_request
    from tinsmith.client.rest import RestClient
    from tinsmith.wire.routes.table import FINISH_SESSION

    with operations() as holder:
        found = RestClient(holder).get_session(session_id).result()
        runs = plural(len(found.training_run_ids), "training run")
        confirmed(f"End session {session_id} and its {runs}? Unsaved weights are lost.", yes)
        call = holder.connection.call(FINISH_SESSION, finish_request(reason, detail), path={"session_id": session_id})
        holder.submit("finish_session", call).result()
    if wants_json():
        print_json({"session_id": session_id, "reason": reason})
    else:
        echo(f"ended {session_id}")


@session.command(name="export-trace")
@click.argument("session_id")
@click.option(
    "-o",
    "--output",
    type=click.Path(path_type=Path, dir_okay=False),
    help="Output file.  [default: SESSION_ID.pftrace]",
)
@click.option("--url-only", is_flag=True, help="Print a signed URL instead of downloading the file.")
@formatted
@connected
def export_trace(session_id: str, output: Path | None, url_only: bool) -> None:
    """Download a session's timeline, to open in https://ui.perfetto.dev."""
    from tinsmith.client.connection.downloads import download
    from tinsmith.client.rest import RestClient

    with operations() as holder:
        url = RestClient(holder).export_session_trace(session_id).result()
        if url_only:
            if wants_json():
                print_json({"session_id": session_id, "url": url})
            else:
                echo(url)
            return
        place = output or Path(f"{session_id}.pftrace")
        place.parent.mkdir(parents=True, exist_ok=True)
        place.unlink(missing_ok=True)  # an older trace is out of date: do not resume its download
        holder.submit("download", download(holder.connection, url, place)).result()
    written = place.stat().st_size
    if wants_json():
        print_json({"session_id": session_id, "destination": str(place), "file_size_bytes": written})
    else:
        echo(f"{place} ({size(written)}); open it in https://ui.perfetto.dev")

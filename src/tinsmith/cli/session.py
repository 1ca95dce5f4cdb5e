"""`tinsmith session`: sessions of a server, their end, and their traces."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click

from tinsmith.cli.connection import confirmed, connected, operations
from tinsmith.cli.output import ago, duration, formatted, print_json, print_properties, print_table, size, wants_json
from tinsmith.cli.paging import limited, title

PAGE = 100
COLUMNS = ("Session ID", "Name", "Status", "Expires", "Created", "Project", "Checkpoints", "Size")


@click.group()
def session() -> None:
    """Sessions: list, show, finish, export a trace."""


@session.command(name="list")
@limited("sessions")
@click.option("--active", is_flag=True, help="Only those that are alive.")
@formatted
@connected
def list_sessions(limit: int, active: bool) -> None:
    """List sessions, newest first.

    A session whose program has gone silent expires; the column says when, if the server tells.
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
    """What servers before 0.36 can tell."""
    from tinsmith.cli.paging import fetch
    from tinsmith.client.rest import RestClient

    if active:
        raise click.ClickException("this server cannot search sessions, so --active cannot be told; leave it out")
    rest = RestClient(holder)
    ids, _ = fetch(
        lambda count, offset: rest.list_sessions(count, offset).result(), lambda page: page.sessions, limit, PAGE
    )
    if wants_json():
        print_json({"sessions": [{"session_id": session_id} for session_id in ids]})
    else:
        print_table(("Session ID",), [(session_id,) for session_id in ids], title=title(len(ids), None, "session"))


def _summaries(holder: Any, limit: int, active: bool) -> list[Any] | None:
    """What the server's search gives; None where it has no search."""
    from tinsmith.errors import APIStatusError
    from tinsmith.wire.sessions import ActiveSessionStatusQuery

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
    from tinsmith.wire.sessions import SessionSearchRequest

    rest = RestClient(holder)
    given = {name: value for name, value in query.items() if value is not None}
    cursor: dict[str, Any] = {}
    while True:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # that the call is experimental
            page = rest.search_sessions(SessionSearchRequest(limit=PAGE, **given, **cursor)).result()
        yield from page.sessions
        if page.next_cursor is None:
            return
        cursor = {"cursor": page.next_cursor}


def _expiry(holder: Any) -> dict[str, float]:
    """Seconds until sessions expire unless they are heard of again, where the server tells."""
    from tinsmith.client.extensions import Extensions

    known = Extensions(holder).status() or {}
    return {item["session_id"]: item["expires_after_s"] - item["heartbeat_age_s"] for item in known.get("sessions", ())}


def _plain(summary: Any, expiry: dict[str, float]) -> dict[str, Any]:
    values = summary.model_dump()
    left = expiry.get(summary.session_id)
    return {**values, "status": status_text(summary.status), "expires_in_s": None if left is None else round(left, 1)}


def _expires(item: dict[str, Any]) -> str:
    left = item["expires_in_s"]
    return "-" if left is None else f"in {duration(max(0.0, left))} if silent"


def status_text(status: Any) -> str | None:
    """A session's status in a few words."""
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
    """Show a session: its runs, samplers and metadata."""
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
    "--reason", type=click.Choice(("success", "errored", "interrupted")), default="interrupted", show_default=True
)
@click.option("--detail", help="For those who read it later.")
@click.option("-y", "--yes", is_flag=True, help="Do not ask.")
@formatted
@connected
def finish(session_id: str, reason: str, detail: str | None, yes: bool) -> None:
    """End a session, with all its runs and samplers; checkpoints stay."""
    from tinsmith.client.rest import RestClient
    from tinsmith.client.session import finish_request
    from tinsmith.wire.routes import FINISH_SESSION

    with operations() as holder:
        found = RestClient(holder).get_session(session_id).result()
        count = len(found.training_run_ids)
        confirmed(f"End session {session_id} with its {count} training runs? What is not saved is lost.", yes)
        call = holder.connection.call(FINISH_SESSION, finish_request(reason, detail), path={"session_id": session_id})
        holder.submit("finish_session", call).result()
    if wants_json():
        print_json({"session_id": session_id, "reason": reason})
    else:
        click.echo(f"{session_id} has ended")


@session.command(name="export-trace")
@click.argument("session_id")
@click.option(
    "-o", "--output", type=click.Path(path_type=Path, dir_okay=False), help="File to write.  [default: ID.pftrace]"
)
@click.option("--url-only", is_flag=True, help="Print the signed address instead of fetching the file.")
@formatted
@connected
def export_trace(session_id: str, output: Path | None, url_only: bool) -> None:
    """Save a session's timeline, for https://ui.perfetto.dev."""
    from tinsmith.client.downloads import download
    from tinsmith.client.rest import RestClient

    with operations() as holder:
        url = RestClient(holder).export_session_trace(session_id).result()
        if url_only:
            if wants_json():
                print_json({"session_id": session_id, "url": url})
            else:
                click.echo(url)
            return
        place = output or Path(f"{session_id}.pftrace")
        place.parent.mkdir(parents=True, exist_ok=True)
        place.unlink(missing_ok=True)  # a trace is of the moment; what was fetched before is out of date
        holder.submit("download", download(holder.connection.transport(), url, place)).result()
    written = place.stat().st_size
    if wants_json():
        print_json({"session_id": session_id, "destination": str(place), "file_size_bytes": written})
    else:
        click.echo(f"{place} ({size(written)}); open it in https://ui.perfetto.dev")

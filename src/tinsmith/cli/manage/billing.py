"""`tinsmith billing`: usage per hour and storage, row by row, for spreadsheets and programs.

`tinsmith usage` summarizes the same rows.
"""

from __future__ import annotations

import csv
import json
import sys
from typing import IO, Any

import click

from tinsmith.cli.connection import connected, operations
from tinsmith.cli.output import echo, formatted, print_json, print_table, wants_json


@click.group()
def billing() -> None:
    """List usage per hour, and storage, row by row. For a summary: tinsmith usage."""


_csv = click.option("--csv", "csv_path", metavar="PATH", help="Write the rows to a CSV file; - is stdout.")


@billing.command()
@click.argument("starting_on")
@click.argument("ending_before")
@_csv
@click.option(
    "--sessions-csv", "sessions_path", metavar="PATH", help="Write the sessions' metadata to a CSV file; - is stdout."
)
@formatted
@connected
def usage(starting_on: str, ending_before: str, csv_path: str | None, sessions_path: str | None) -> None:
    """List usage by hour, kind, model, session and user.

    Both times are whole UTC hours in ISO 8601 format (2027-01-31T18:00:00Z), at most 14 days apart. Costs are included
    if the server has prices.
    """
    from tinsmith.client.admin import AdminClient

    with operations() as holder:
        answer = AdminClient(holder).get_billing_usage(starting_on, ending_before).result()
    plain = answer.model_dump(mode="json")
    if sessions_path is not None:
        sessions = [
            {"session_id": name, "user_metadata": _text(item["user_metadata"])}
            for name, item in plain["sessions"].items()
        ]
        write_csv(sessions, sessions_path)
    if csv_path is not None:
        write_csv([flat(row) for row in plain["data"]], csv_path)
    if csv_path is not None or sessions_path is not None:
        return
    if wants_json():
        print_json({name: plain[name] for name in ("data", "sessions", "cost_data_through")})
    else:
        _print_rows([flat(row) for row in plain["data"]], f"{len(plain['data'])} rows of usage")


@billing.command(name="checkpoint-storage")
@click.option("--project-id", help="Only this project.")
@_csv
@formatted
@connected
def checkpoint_storage(project_id: str | None, csv_path: str | None) -> None:
    """List the current size of checkpoints, by project and user."""
    from tinsmith.client.admin import AdminClient

    with operations() as holder:
        answer = AdminClient(holder).get_current_checkpoint_storage_usage(project_id).result()
    plain = answer.model_dump(mode="json")
    rate = plain["effective_rate_usd_per_gigabyte_month"]
    rows = [{"effective_rate_usd_per_gigabyte_month": rate, **row} for row in plain["data"]]
    if csv_path is not None:
        write_csv(rows, csv_path)
    elif wants_json():
        print_json({"effective_rate_usd_per_gigabyte_month": rate, "data": plain["data"]})
    else:
        _print_rows(rows, f"{len(rows)} rows of storage")


def flat(row: dict[str, Any]) -> dict[str, Any]:
    """Return a row of usage with its `event_info` merged in."""
    return {**{name: value for name, value in row.items() if name != "event_info"}, **(row.get("event_info") or {})}


def _text(value: Any) -> str | None:
    return None if value is None else json.dumps(value)


def _columns(rows: list[dict[str, Any]]) -> list[str]:
    return list(dict.fromkeys(name for row in rows for name in row))


def _print_rows(rows: list[dict[str, Any]], title: str) -> None:
    """Print rows as a table without empty columns."""
    columns = [name for name in _columns(rows) if any(row.get(name) not in (None, "") for row in rows)]
    print_table(columns, [[row.get(name) for name in columns] for row in rows], title=title)


def write_csv(rows: list[dict[str, Any]], path: str) -> None:
    """Write rows with a header line; `-` is stdout."""

    def write(file: IO[str]) -> None:
        writer = csv.DictWriter(file, fieldnames=_columns(rows), restval="")
        writer.writeheader()
        writer.writerows(rows)

    if path == "-":
        write(sys.stdout)
        return
    try:
        with open(path, "w", newline="", encoding="utf-8") as file:
            write(file)
    except OSError as error:
        raise click.ClickException(f"cannot write {path}: {error.strerror}") from None
    echo(f"wrote {len(rows)} rows to {path}", err=True)

"""`tinsmith run`: list, inspect, end and delete training runs. `run_curves` plots and watches them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from typing import Any

import click

from tinsmith.cli.connection import confirmed, connected, operations, rest_client
from tinsmith.cli.manage.run_curves import Steps, main_metric, plot, watch
from tinsmith.cli.output import (
    ago,
    echo,
    fetch,
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
COLUMNS: Mapping[str, tuple[str, Callable[[Any, str], Any]]] = {
    "id": ("Run ID", lambda run, _: run.training_run_id),
    "model": ("Base Model", lambda run, _: run.base_model),
    "owner": ("Owner", lambda run, _: run.model_owner),
    "lora": ("LoRA", lambda run, _: lora(run)),
    "updated": ("Last Update", lambda run, _: ago(run.last_request_time)),
    "status": ("Status", lambda _, status: status),
    "checkpoint": ("Last Checkpoint", lambda run, _: run.last_checkpoint and run.last_checkpoint.checkpoint_id),
    "checkpoint_time": ("Checkpoint Time", lambda run, _: ago(run.last_checkpoint and run.last_checkpoint.time)),
}
"""For each name in --columns: the heading, and how to get a value from a run and its status."""
DEFAULT_COLUMNS = "id,model,lora,updated,status"


@click.group()
def run() -> None:
    """List, inspect, plot, watch, end and delete training runs."""


def lora(item: Any) -> str:
    if not item.is_lora:
        return "no"
    return f"rank {item.lora_rank}" if item.lora_rank else "yes"


def status_of(run: Any, reported: Any) -> str:
    """Return a run's status: whether it is faulty, else what the server reports beyond the protocol, else OK.

    `reported` is the run as JSON. A tinsmith server reports active, finished or expired.
    """
    more = reported.get("tinsmith") if isinstance(reported, dict) else None
    status = more.get("status") if isinstance(more, dict) else None
    return "failed" if run.corrupted else status if isinstance(status, str) else "OK"


def _columns(_context: click.Context, _parameter: click.Parameter, value: str) -> list[str]:
    names = [name.strip() for name in value.split(",") if name.strip()]
    for name in names:
        if name not in COLUMNS:
            raise click.BadParameter(f"unknown column {name!r} (known: {', '.join(COLUMNS)})")
    if not names:
        raise click.BadParameter(f"no column given (known: {', '.join(COLUMNS)})")
    return names


@run.command(name="list")
@limited("runs")
@click.option(
    "-c",
    "--columns",
    callback=_columns,
    default=DEFAULT_COLUMNS,
    show_default=True,
    metavar="NAMES",
    help=f"Comma-separated columns: {', '.join(COLUMNS)}.",
)
@formatted
@connected
def list_runs(limit: int, columns: list[str]) -> None:
    """List training runs, newest first.

    A run is active, finished, expired (its program stopped without ending it, and may still come back), or failed.
    Servers other than tinsmith report only OK or failed.
    """
    reported: list[Any] = []
    with rest_client() as rest:

        def page(size: int, offset: int) -> Any:
            answer = rest.with_raw_response.list_training_runs(size, offset).result()
            reported.extend(answer.json()["training_runs"])
            return answer.parse()

        runs, total = fetch(page, lambda found: found.training_runs, limit, PAGE)
    if wants_json():
        print_json({"runs": [item.model_dump() for item in runs]})
        return
    statuses = [status_of(item, more) for item, more in zip(runs, reported, strict=False)]
    rows = [[COLUMNS[name][1](item, status) for name in columns] for item, status in zip(runs, statuses, strict=True)]
    print_table([COLUMNS[name][0] for name in columns], rows, title=title(len(runs), total, "training run"))


@run.command()
@click.argument("run_id")
@formatted
@connected
def info(run_id: str) -> None:
    """Show one training run."""
    from tinsmith.client.connection.own_endpoints import Extensions
    from tinsmith.errors import TinkerError

    with operations() as holder:
        from tinsmith.client.rest import RestClient

        answer = RestClient(holder).with_raw_response.get_training_run(run_id).result()
        found = answer.parse()
        try:
            known = Extensions(holder).run_metrics(run_id, limit=0)
        except TinkerError:  # another kind of server, or another user's run
            known = {}
    if wants_json():
        print_json(found.model_dump())
        return
    print_properties(_properties(found, known, status_of(found, answer.json())), title=f"Training run {run_id}")


def _properties(found: Any, known: dict[str, Any], status: str) -> dict[str, Any]:
    values: dict[str, Any] = {
        "Base Model": found.base_model,
        "Owner": found.model_owner,
        "LoRA": lora(found),
        "Last Update": ago(found.last_request_time),
        "Status": status,
    }
    if known:
        values["Session"] = f"{known['session_id']} ({known['session_status']})"
        values.update(_progress(known))
        values.update(_journal(known))
    if known.get("fault"):
        values["Fault"] = known["fault"]
    for name, checkpoint in (("Training", found.last_checkpoint), ("Sampler", found.last_sampler_checkpoint)):
        if checkpoint is not None:
            values[f"Last {name} Checkpoint"] = f"{checkpoint.tinker_path} ({ago(checkpoint.time)})"
    for key, value in (found.user_metadata or {}).items():
        values[f"Metadata: {key}"] = value
    return values


def _progress(known: dict[str, Any]) -> dict[str, str]:
    """Return the run's progress, if the server reports it."""
    last = known.get("last")
    if not last:
        return {}
    steps = Steps()
    (step,) = steps.add([last])
    name = main_metric([step])
    value = f", {name} {step.metrics[name]:.4g}" if name else ""
    finished = ago(datetime.fromtimestamp(last["finished_at"], UTC))
    return {"Steps": f"{known['steps']}{value} ({finished})"}


def _journal(known: dict[str, Any]) -> dict[str, str]:
    if not known.get("has_journal", True):
        return {"Journal": "deleted, with the results, after the session ended"}
    restart = f"from request {known['snapshot_seq']}" if known["snapshot_seq"] >= 0 else "from the beginning"
    return {
        "Requests": f"{known['requests']} accepted, {known['queued']} not finished",
        "Journal": f"after a crash, replays {restart}{' (snapshot)' if known['snapshot_seq'] >= 0 else ''}",
    }


@run.command()
@click.argument("run_id")
@click.option("-y", "--yes", is_flag=True, help="Do not ask for confirmation.")
@formatted
@connected
def kill(run_id: str, yes: bool) -> None:
    """End a training run and unload its weights.

    Requests that the server has already accepted still run; later requests of the run are refused. Checkpoints are
    kept, and new runs can start from them. To end all runs of a program: tinsmith session finish. To delete a run that
    has ended: tinsmith run delete.
    """
    from tinsmith.errors import NotFoundError, TinkerError
    from tinsmith.wire.messages.training import UnloadModelRequest
    from tinsmith.wire.routes.table import UNLOAD_MODEL

    with operations() as holder:
        from tinsmith.client.rest import RestClient

        answer = RestClient(holder).with_raw_response.get_training_run(run_id).result()
        if status_of(answer.parse(), answer.json()) == "finished":
            raise TinkerError(f"{run_id} has already finished; to delete it: tinsmith run delete {run_id}")
        confirmed(f"End training run {run_id}? Unsaved weights are lost.", yes)
        request = UnloadModelRequest(model_id=run_id)
        try:
            holder.submit("unload_model", holder.run(UNLOAD_MODEL, request, what=f"unload_model {run_id}")).result()
        except NotFoundError:
            raise TinkerError(
                "this server cannot end a single run; end its session instead: tinsmith session finish"
            ) from None
    if wants_json():
        print_json({"training_run_id": run_id, "state": "unloaded"})
    else:
        echo(f"ended {run_id}")


@run.command()
@click.argument("run_id")
@click.option("-y", "--yes", is_flag=True, help="Do not ask for confirmation.")
@formatted
@connected
def delete(run_id: str, yes: bool) -> None:
    """Delete a training run permanently: its checkpoints, snapshots and curve.

    The run must have ended (see tinsmith run kill). Its usage stays on record.
    """
    from tinsmith.client.connection.own_endpoints import Extensions
    from tinsmith.errors import TinkerError

    with operations() as holder:
        from tinsmith.client.rest import RestClient

        rest = RestClient(holder)
        answer = rest.with_raw_response.get_training_run(run_id).result()
        if status_of(answer.parse(), answer.json()) == "active":
            raise TinkerError(f"{run_id} is active; end it first: tinsmith run kill {run_id}")
        found = rest.list_checkpoints(run_id).result().checkpoints
        total = sum(item.size_bytes or 0 for item in found)
        what = f"{plural(len(found), 'checkpoint')}, {size(total)}"
        confirmed(f"Delete training run {run_id} ({what}), with its snapshots and its curve, permanently?", yes)
        deleted = Extensions(holder).delete_run(run_id)
    if wants_json():
        print_json({"training_run_id": run_id, "checkpoints": deleted.checkpoints, "size_bytes": deleted.size_bytes})
    else:
        echo(f"deleted {run_id} and {plural(deleted.checkpoints, 'checkpoint')} ({size(deleted.size_bytes)})")


run.add_command(plot)
run.add_command(watch)
